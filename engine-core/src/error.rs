//! The error that a plug-in's methods return; its variants are the codes at the plug-in boundary.

use std::time::Duration;

/// What went wrong in a backend, a tier, a policy or a planner.
///
/// Every variant carries a sentence that names the thing at fault (file, tensor, option, handle) and, where there is
/// something a person can do, says what. The variant itself is what programs decide by. It survives the plug-in
/// boundary: variant and sentence on one side equal those on the other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The device, tier or policy cannot do this at all; asking again will not help.
    #[error("not supported: {detail}")]
    Unsupported {
        /// What, and why not.
        detail: String,
    },
    /// The caller broke the contract: shapes, slots, ranges or lengths that do not fit.
    #[error("invalid argument: {detail}")]
    InvalidArgument {
        /// Which argument, what it was and what was wanted.
        detail: String,
    },
    /// A handle that was never given out, or was freed or released already.
    #[error("unknown {kind} handle {handle}: never given out, or freed already")]
    UnknownHandle {
        /// `buffer`, `executable`, `file` or `timeline value`.
        kind: HandleKind,
        /// The handle's number.
        handle: u64,
    },
    /// Memory could not be had, or the configured budget would be exceeded.
    #[error("out of memory: {detail}")]
    OutOfMemory {
        /// How much was asked for, how much is left, of what.
        detail: String,
    },
    /// The work was cancelled before it was done.
    #[error("cancelled: {detail}")]
    Cancelled {
        /// What was cancelled.
        detail: String,
    },
    /// Work that this submission waited for has failed.
    #[error("not run, because what it waits for failed: {detail}")]
    DependencyFailed {
        /// The value that failed, and its error.
        detail: String,
    },
    /// The device or its driver is gone; nothing on it can be used again.
    #[error("device lost: {detail}")]
    DeviceLost {
        /// The driver's own words and code.
        detail: String,
    },
    /// The operating system refused a file operation.
    #[error("input/output: {detail}")]
    Io {
        /// The path, the operation and the system's message.
        detail: String,
    },
    /// An option of the plug-in's table in the config is wrong.
    #[error("configuration: {detail}")]
    Config {
        /// The key, its value and what is accepted.
        detail: String,
    },
    /// The data holds what the arithmetic cannot go on with (such as NaN where the rule forbids it).
    #[error("data: {detail}")]
    Data {
        /// Tensor and element.
        detail: String,
    },
    /// No placement satisfies the budgets.
    #[error("infeasible: {detail}")]
    Infeasible {
        /// What is short, and the smallest budget that would work.
        detail: String,
    },
    /// The plug-in panicked; the panic was caught at the boundary.
    #[error("the plug-in panicked: {detail}")]
    Panicked {
        /// The panic's message and place.
        detail: String,
    },
    /// Something that should not be possible; a bug in the plug-in.
    #[error("internal error: {detail}")]
    Internal {
        /// What was found.
        detail: String,
    },
}

/// What an [`Error::UnknownHandle`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HandleKind {
    /// A buffer of a backend.
    Buffer,
    /// A prepared list of operations.
    Executable,
    /// A file of a storage tier.
    File,
    /// A value of a timeline that was never submitted.
    TimelineValue,
}

impl HandleKind {
    /// The word used in messages and at the boundary.
    pub fn name(self) -> &'static str {
        match self {
            HandleKind::Buffer => "buffer",
            HandleKind::Executable => "executable",
            HandleKind::File => "file",
            HandleKind::TimelineValue => "timeline value",
        }
    }
}

impl std::fmt::Display for HandleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Result of a plug-in's method.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $variant:ident;)*) => {
        impl Error {
            $($(#[$doc])* pub fn $name(detail: impl Into<String>) -> Error {
                Error::$variant { detail: detail.into() }
            })*
        }
    };
}

constructors! {
    /// [`Error::Unsupported`] with this sentence.
    unsupported => Unsupported;
    /// [`Error::InvalidArgument`] with this sentence.
    invalid => InvalidArgument;
    /// [`Error::OutOfMemory`] with this sentence.
    out_of_memory => OutOfMemory;
    /// [`Error::Cancelled`] with this sentence.
    cancelled => Cancelled;
    /// [`Error::DependencyFailed`] with this sentence.
    dependency_failed => DependencyFailed;
    /// [`Error::DeviceLost`] with this sentence.
    device_lost => DeviceLost;
    /// [`Error::Io`] with this sentence.
    io => Io;
    /// [`Error::Config`] with this sentence.
    config => Config;
    /// [`Error::Data`] with this sentence.
    data => Data;
    /// [`Error::Infeasible`] with this sentence.
    infeasible => Infeasible;
    /// [`Error::Panicked`] with this sentence.
    panicked => Panicked;
    /// [`Error::Internal`] with this sentence.
    internal => Internal;
}

impl Error {
    /// The code of this error at the plug-in boundary; 0 means success there.
    pub fn code(&self) -> u32 {
        match self {
            Error::Unsupported { .. } => 1,
            Error::InvalidArgument { .. } => 2,
            Error::UnknownHandle { kind, .. } => match kind {
                HandleKind::Buffer => 30,
                HandleKind::Executable => 31,
                HandleKind::File => 32,
                HandleKind::TimelineValue => 33,
            },
            Error::OutOfMemory { .. } => 4,
            Error::Cancelled { .. } => 5,
            Error::DependencyFailed { .. } => 6,
            Error::DeviceLost { .. } => 7,
            Error::Io { .. } => 8,
            Error::Config { .. } => 9,
            Error::Data { .. } => 10,
            Error::Infeasible { .. } => 11,
            Error::Panicked { .. } => 12,
            Error::Internal { .. } => 13,
        }
    }

    /// The sentence that crosses the boundary beside the code (for a handle: its number).
    pub fn detail(&self) -> String {
        match self {
            Error::UnknownHandle { handle, .. } => handle.to_string(),
            Error::Unsupported { detail }
            | Error::InvalidArgument { detail }
            | Error::OutOfMemory { detail }
            | Error::Cancelled { detail }
            | Error::DependencyFailed { detail }
            | Error::DeviceLost { detail }
            | Error::Io { detail }
            | Error::Config { detail }
            | Error::Data { detail }
            | Error::Infeasible { detail }
            | Error::Panicked { detail }
            | Error::Internal { detail } => detail.clone(),
        }
    }

    /// The error with this code and sentence; a code that is not known (or 0) becomes [`Error::Internal`].
    pub fn from_code(code: u32, detail: String) -> Error {
        let handle = |kind| Error::UnknownHandle { kind, handle: detail.parse().unwrap_or(u64::MAX) };
        match code {
            1 => Error::Unsupported { detail },
            2 => Error::InvalidArgument { detail },
            30 => handle(HandleKind::Buffer),
            31 => handle(HandleKind::Executable),
            32 => handle(HandleKind::File),
            33 => handle(HandleKind::TimelineValue),
            4 => Error::OutOfMemory { detail },
            5 => Error::Cancelled { detail },
            6 => Error::DependencyFailed { detail },
            7 => Error::DeviceLost { detail },
            8 => Error::Io { detail },
            9 => Error::Config { detail },
            10 => Error::Data { detail },
            11 => Error::Infeasible { detail },
            12 => Error::Panicked { detail },
            13 => Error::Internal { detail },
            other => Error::Internal { detail: format!("unknown error code {other}: {detail}") },
        }
    }

    /// [`Error::UnknownHandle`] for this handle.
    pub fn unknown(kind: HandleKind, handle: u64) -> Error {
        Error::UnknownHandle { kind, handle }
    }
}

/// The answer of a `wait`: whether the value was reached within the time given.
///
/// A failure of the awaited work is the method's `Err`, so `Done` always means success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// The work up to the value has been done.
    Done,
    /// The time ran out first; the work goes on.
    TimedOut,
}

/// A time long enough to mean "until it is done" (waits never take an unbounded time by accident).
pub const FOREVER: Duration = Duration::from_secs(u64::MAX / 2_000_000_000);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for code in (1..=2).chain(4..=13).chain(30..=33) {
            let error = Error::from_code(code, "7".into());
            assert_eq!(error.code(), code);
            assert_eq!(Error::from_code(error.code(), error.detail()), error);
        }
        assert!(matches!(Error::from_code(0, String::new()), Error::Internal { .. }));
        assert!(matches!(Error::from_code(99, String::new()), Error::Internal { .. }));
    }
}
