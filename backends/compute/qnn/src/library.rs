//! Qualcomm's library, opened at run time.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use engine_core::{Error, Result};

use crate::ffi::{self, Functions, Interface, Status};
use crate::log;
use crate::quiet::Quiet;

/// The environment variable that names the library where the option does not.
pub(crate) const VARIABLE: &str = "THERMOCLINE_QNN_LIB";
/// The file that is looked for where neither does.
pub(crate) const DEFAULT_LIBRARY: &str = "libQnnHtp.so";
/// What to do where there is no library.
pub(crate) const INSTALL_HINT: &str = "get Qualcomm's library, which is not part of this program (`pip download --no-deps \
     onnxruntime-qnn==2.7.0`, then `unzip` the wheel: onnxruntime_qnn/libQnnHtp.so), and name the file in the option \
     `library` or in THERMOCLINE_QNN_LIB";

/// A library that is open, with what it says of itself.
pub(crate) struct Library {
    pub(crate) functions: Functions,
    /// `HTP_QTI_AISW`.
    pub(crate) provider: String,
    pub(crate) core: ffi::Version,
    pub(crate) backend: ffi::Version,
    /// The SDK's build, such as `v2.51.0.260929181845`.
    pub(crate) build: String,
    /// Where it was found.
    pub(crate) path: String,
}

/// The libraries that are open, by their keys. One is never closed: it leaves threads and exit handlers behind.
static OPENED: Mutex<Option<HashMap<String, &'static Library>>> = Mutex::new(None);

fn opened<T>(f: impl FnOnce(&mut HashMap<String, &'static Library>) -> T) -> T {
    f(OPENED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// The file that these options and the environment mean.
pub(crate) fn resolve(option: &str) -> String {
    let named = |name: String| if name.is_empty() { None } else { Some(name) };
    named(option.to_owned())
        .or_else(|| named(std::env::var(VARIABLE).unwrap_or_default()))
        .unwrap_or_else(|| DEFAULT_LIBRARY.to_owned())
}

/// What a library is known by: its file with links and `..` resolved, so that another spelling is no other library. A bare
/// name is the system's to find, and stays what it is.
pub(crate) fn key(file: &str) -> String {
    let path = Path::new(file).canonicalize().ok().filter(|_| file.contains('/'));
    path.map_or_else(|| file.to_owned(), |path| path.display().to_string())
}

/// The library in this file.
///
/// # Errors
/// `Unsupported` with the reason and what to install.
pub(crate) fn open(file: &str) -> Result<&'static Library> {
    let key = key(file);
    if let Some(library) = opened(|all| all.get(&key).copied()) {
        return Ok(library);
    }
    let _quiet = Quiet::begin();
    // SAFETY: running the library's constructors is what opening it means; that the file is Qualcomm's is what the user
    // says who names it, and the loader's probe has been through this in a process of its own.
    let object = unsafe { libloading::Library::new(file) }.map_err(|e| {
        let why = std::error::Error::source(&e).map_or_else(|| e.to_string(), |source| source.to_string());
        Error::unsupported(format!("the QNN library {file} cannot be opened: {why}; {INSTALL_HINT}"))
    })?;
    let library = Library::of(file, &object)?;
    std::mem::forget(object);
    let library: &'static Library = Box::leak(Box::new(library));
    opened(|all| all.insert(key, library));
    Ok(library)
}

impl Library {
    fn of(file: &str, object: &libloading::Library) -> Result<Library> {
        let unfit = |what: String| Error::unsupported(format!("{file}: {what}; {INSTALL_HINT}"));
        // SAFETY: the symbol's type is what every QNN library declares.
        let entry = unsafe { object.get::<ffi::GetProviders>(ffi::ENTRY) }
            .map_err(|e| unfit(format!("it is no QNN library: {e}")))?;
        let (mut providers, mut count) = (std::ptr::null(), 0u32);
        // SAFETY: both places are written by the call.
        let status = unsafe { entry(&mut providers, &mut count) };
        if status != 0 || providers.is_null() || count == 0 {
            return Err(unfit(format!("it offers no interface (code {})", code(status))));
        }
        // SAFETY: the library answered with `count` pointers to interfaces that live as long as it is open.
        let listed = unsafe { std::slice::from_raw_parts(providers, count as usize) };
        // SAFETY: as above; null ones are left out.
        let interfaces = listed.iter().filter_map(|at| unsafe { at.as_ref() });
        let mut others = Vec::new();
        for interface in interfaces {
            let provider = text(interface.provider_name);
            if interface.backend_id != ffi::BACKEND_HTP || interface.core.major != ffi::CORE_MAJOR {
                let Interface { backend_id, core, .. } = interface;
                others.push(format!("{provider} (backend {backend_id}, API {}.{})", core.major, core.minor));
                continue;
            }
            return Ok(Library {
                build: build_of(&interface.functions),
                functions: interface.functions,
                provider,
                core: interface.core,
                backend: interface.backend,
                path: path_of(file, *entry),
            });
        }
        Err(unfit(format!(
            "it has no HTP backend (number {}) with core API {}, only {}",
            ffi::BACKEND_HTP,
            ffi::CORE_MAJOR,
            others.join(", ")
        )))
    }

    /// An error of a call: the library's own words for it, and what it logged since.
    pub(crate) fn error(&self, what: &str, status: Status) -> Error {
        let mut words = std::ptr::null();
        let known = self.functions.error_get_message.is_some_and(|message| {
            // SAFETY: the place is written by the call; the text is the library's own.
            unsafe { message(status, &mut words) == 0 }
        });
        let words = if known { text(words) } else { String::new() };
        let words = if words.is_empty() { String::new() } else { format!(" ({words})") };
        let detail = format!("{what} failed with QNN code {}{words}{}", code(status), log::said());
        match code(status) {
            MEMORY => Error::out_of_memory(detail),
            _ => Error::internal(detail),
        }
    }

    /// What a library without this function cannot do.
    pub(crate) fn lacks(&self, function: &str) -> Error {
        Error::unsupported(format!("{}: the library has no function {function}", self.path))
    }
}

/// `QNN_COMMON_ERROR_MEM_ALLOC`, which the library also gives for operations that it does not have.
const MEMORY: u64 = 1002;

/// The part of a status that says what happened.
pub(crate) fn code(status: Status) -> u64 {
    status & 0xFFFF
}

fn text(words: *const c_char) -> String {
    if words.is_null() {
        return String::new();
    }
    // SAFETY: texts of the library end with a zero and live as long as it is open.
    unsafe { CStr::from_ptr(words) }.to_string_lossy().into_owned()
}

fn build_of(functions: &Functions) -> String {
    let mut words = std::ptr::null();
    match functions.backend_get_build_id {
        // SAFETY: the place is written by the call.
        Some(build) if unsafe { build(&mut words) } == 0 => text(words),
        _ => "unknown".into(),
    }
}

/// The file that the system's loader took, where it says so.
fn path_of(file: &str, entry: ffi::GetProviders) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let address = entry as usize;
    let found = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
        let path = rest.find('/').map(|at| rest[at..].to_owned())?;
        (start..end).contains(&address).then_some(path)
    });
    found.unwrap_or_else(|| {
        Path::new(file).canonicalize().map_or_else(|_| file.to_owned(), |path| path.display().to_string())
    })
}
