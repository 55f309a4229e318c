//! Storage tiers: bytes arrive as they are in the file, and nothing else is touched.

use super::must;
use crate::finding::{Fallible, Finding, Outcome};
use crate::rng::Rng;
use crate::run::span_of;
use engine_core::backend::TimelineValue;
use engine_core::storage::{FileId, Read};
use engine_core::{Error, HandleKind, HostMemory, Reached, StorageTier};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// A tier with an open file whose bytes are known.
pub(super) struct Tier<'a> {
    tier: &'a dyn StorageTier,
    file: FileId,
    path: &'a Path,
    bytes: &'a [u8],
    seed: u64,
}

type Case = fn(&Tier<'_>) -> Fallible<()>;

/// Every case.
pub(super) const CASES: &[(&str, Case)] = &[
    ("storage/length", length),
    ("storage/whole-file", whole),
    ("storage/ranges", ranges),
    ("storage/many-in-flight", many),
    ("storage/several-threads", threads),
    ("storage/resident", resident),
    ("storage/unknown-handles", unknown),
    ("storage/double-close", double_close),
    ("storage/beyond-the-end", beyond),
    ("storage/wrong-length", wrong_length),
    ("storage/missing-file", missing),
    ("storage/cancel", cancel),
    ("storage/counters", counters),
];

const MEBIBYTE: usize = 1 << 20;
/// No multiple of any alignment.
const FILE_BYTES: usize = 3 * MEBIBYTE + 777;
const PATIENCE: Duration = Duration::from_secs(60);

/// Runs a case with a file of its own.
pub(super) fn with_file(tier: &dyn StorageTier, seed: u64, case: Case) -> Fallible<Outcome> {
    let broken = |e: std::io::Error| Finding::new("suite", format!("the test file cannot be written: {e}"));
    let mut rng = Rng::new(seed);
    let bytes: Vec<u8> =
        (0..FILE_BYTES / 8 + 1).flat_map(|_| rng.bits().to_le_bytes()).take(FILE_BYTES).collect();
    let path = std::env::temp_dir().join(format!("thermocline-conformance-{}-{seed}", std::process::id()));
    std::fs::write(&path, &bytes).map_err(broken)?;
    let result = tier
        .open(&path)
        .map_err(|e| Finding::new("open", format!("opening a file of {FILE_BYTES} bytes failed: {e}")))
        .and_then(|file| {
            let done = case(&Tier { tier, file, path: &path, bytes: &bytes, seed });
            // A case may have closed it.
            let _ = tier.close(file);
            done
        });
    let _ = std::fs::remove_file(&path);
    result.map(|()| Outcome::OK)
}

impl Tier<'_> {
    fn aligned(&self, range: Range<u64>) -> Range<u64> {
        let align = self.tier.describe().alignment.max(1);
        let start = range.start / align * align;
        let end = range.end.next_multiple_of(align);
        if end <= self.bytes.len() as u64 { start..end } else { start..start.max(range.end / align * align) }
    }

    fn finish(&self, value: TimelineValue) -> Fallible<()> {
        match self.tier.wait(value, PATIENCE)? {
            Reached::Done => Ok(()),
            Reached::TimedOut => Err(Finding::new("hang", "a read was not done after a minute")),
        }
    }

    /// Reads ranges at once into one allocation with guards between them, and compares.
    fn check(&self, ranges: &[Range<u64>]) -> Fallible<()> {
        const GUARD: u64 = 4096;
        let total: u64 = ranges.iter().map(|r| (r.end - r.start).next_multiple_of(GUARD) + GUARD).sum();
        let mut memory = HostMemory::allocate(total + GUARD)?;
        memory.bytes_mut().fill(0xA5);
        let (mut at, mut requests, mut places) = (GUARD, Vec::new(), Vec::new());
        for (index, range) in ranges.iter().enumerate() {
            let len = range.end - range.start;
            let into = span_of(&memory).slice(at, len)?;
            requests.push(Read { file: self.file, range: range.clone(), into, priority: (index % 3) as u8 });
            places.push(at);
            at += len.next_multiple_of(GUARD) + GUARD;
        }
        let done = self.tier.read(&requests).map_err(Finding::from).and_then(|value| self.finish(value));
        if let Err(finding) = done {
            // Reads may still be under way.
            std::mem::forget(memory);
            return Err(finding);
        }
        let mut expected = vec![0xA5u8; memory.len() as usize];
        for (range, place) in ranges.iter().zip(&places) {
            let source = &self.bytes[range.start as usize..range.end as usize];
            expected[*place as usize..][..source.len()].copy_from_slice(source);
        }
        let wrong = memory.bytes().iter().zip(&expected).position(|(a, b)| a != b);
        must(wrong.is_none(), "bytes", || {
            let at = wrong.unwrap_or(0) as u64;
            let inside =
                ranges.iter().zip(&places).find(|(r, p)| (**p..**p + (r.end - r.start)).contains(&at));
            match inside {
                Some((r, p)) => format!("byte {} of the file arrived wrong (range {r:?})", r.start + at - p),
                None => "a byte outside of the targets was overwritten".into(),
            }
        })
    }
}

fn length(t: &Tier<'_>) -> Fallible<()> {
    let len = t.tier.len(t.file)?;
    must(len == FILE_BYTES as u64, "length", || {
        format!("the file has {FILE_BYTES} bytes, the tier says {len}")
    })
}

fn whole(t: &Tier<'_>) -> Fallible<()> {
    t.check(&[t.aligned(0..FILE_BYTES as u64)])
}

fn ranges(t: &Tier<'_>) -> Fallible<()> {
    let mut rng = Rng::new(t.seed);
    let mut all = vec![t.aligned(0..1), t.aligned(4095..4097), t.aligned(1..8191), t.aligned(65535..196_609)];
    for _ in 0..24 {
        let start = rng.below(FILE_BYTES as u64 - 1);
        let bits = rng.below(19);
        let len = 1 + rng.below(1 << bits);
        all.push(t.aligned(start..(start + len).min(FILE_BYTES as u64)));
    }
    all.retain(|r| r.start < r.end);
    all.iter().try_for_each(|range| t.check(std::slice::from_ref(range)))
}

fn many(t: &Tier<'_>) -> Fallible<()> {
    let mut rng = Rng::new(t.seed ^ 1);
    let all: Vec<Range<u64>> = (0..96)
        .map(|_| rng.below(FILE_BYTES as u64 - 70_000))
        .map(|start| t.aligned(start..start + 65_536))
        .filter(|r| r.start < r.end)
        .collect();
    t.check(&all)
}

fn threads(t: &Tier<'_>) -> Fallible<()> {
    std::thread::scope(|scope| {
        let handles: Vec<_> =
            (0..4u64).map(|i| scope.spawn(move || ranges(&Tier { seed: t.seed ^ (i + 2), ..*t }))).collect();
        handles
            .into_iter()
            .try_for_each(|h| h.join().unwrap_or_else(|_| Err(Finding::new("threads", "a thread panicked"))))
    })
}

fn resident(t: &Tier<'_>) -> Fallible<()> {
    let says = t.tier.describe().resident;
    for range in [0..1u64, 100..70_000, 0..FILE_BYTES as u64] {
        let Some(span) = t.tier.resident(t.file, range.clone())? else {
            must(!says, "resident", || {
                format!("it says that it keeps files in memory, but not bytes {range:?}")
            })?;
            continue;
        };
        must(span.len() == range.end - range.start, "resident", || {
            format!("bytes {range:?} came as {} bytes", span.len())
        })?;
        // SAFETY: the tier promises memory that is valid until the file is closed, which is after this.
        let got = unsafe { std::slice::from_raw_parts(span.address() as *const u8, span.len() as usize) };
        must(got == &t.bytes[range.start as usize..range.end as usize], "resident", || {
            format!("bytes {range:?} are not those of the file")
        })?;
    }
    let beyond = FILE_BYTES as u64..FILE_BYTES as u64 + 1;
    match t.tier.resident(t.file, beyond) {
        Err(Error::InvalidArgument { .. }) => Ok(()),
        Ok(None) if !says => Ok(()),
        other => Err(Finding::new(
            "resident",
            format!("bytes beyond the file: wanted an invalid argument, got {other:?}"),
        )),
    }
}

fn is_file(e: &Error) -> bool {
    matches!(e, Error::UnknownHandle { kind: HandleKind::File, .. })
}

fn expect<T: std::fmt::Debug>(
    what: &str,
    got: engine_core::Result<T>,
    is: fn(&Error) -> bool,
) -> Fallible<()> {
    match got {
        Err(error) if is(&error) => Ok(()),
        other => Err(Finding::new("error paths", format!("{what}: got {other:?}"))),
    }
}

fn read_of(file: FileId, range: Range<u64>, memory: &HostMemory, len: u64) -> Fallible<Read> {
    Ok(Read { file, range, into: span_of(memory).slice(0, len)?, priority: 0 })
}

fn unknown(t: &Tier<'_>) -> Fallible<()> {
    let never = FileId(u64::MAX - 7);
    expect("length of an unknown file", t.tier.len(never), is_file)?;
    expect("closing an unknown file", t.tier.close(never), is_file)?;
    expect("resident bytes of an unknown file", t.tier.resident(never, 0..1), is_file)?;
    let memory = HostMemory::allocate(4096)?;
    expect("reading an unknown file", t.tier.read(&[read_of(never, 0..4096, &memory, 4096)?]), is_file)?;
    let value = TimelineValue(u64::MAX - 7);
    let is_value = |e: &Error| matches!(e, Error::UnknownHandle { kind: HandleKind::TimelineValue, .. });
    expect("waiting for an unknown value", t.tier.wait(value, Duration::ZERO), is_value)?;
    expect("cancelling an unknown value", t.tier.cancel(value), is_value)
}

fn double_close(t: &Tier<'_>) -> Fallible<()> {
    let file = t.tier.open(t.path)?;
    t.tier.close(file)?;
    expect("closing a file twice", t.tier.close(file), is_file)?;
    expect("length of a closed file", t.tier.len(file), is_file)
}

fn is_invalid(e: &Error) -> bool {
    matches!(e, Error::InvalidArgument { .. })
}

fn beyond(t: &Tier<'_>) -> Fallible<()> {
    let align = t.tier.describe().alignment.max(1);
    let memory = HostMemory::allocate(2 * align.max(4096))?;
    let far = (FILE_BYTES as u64 * 2).next_multiple_of(align);
    let len = align.max(64);
    let request = read_of(t.file, far..far + len, &memory, len)?;
    expect("reading beyond the end of a file", t.tier.read(&[request]), is_invalid)
}

fn wrong_length(t: &Tier<'_>) -> Fallible<()> {
    let align = t.tier.describe().alignment.max(64);
    let memory = HostMemory::allocate(4 * align)?;
    let request = read_of(t.file, 0..2 * align, &memory, align)?;
    expect("reading into less memory than the range has", t.tier.read(&[request]), is_invalid)?;
    must(memory.bytes().iter().all(|b| *b == 0), "error paths", || "something was read all the same".into())
}

fn missing(t: &Tier<'_>) -> Fallible<()> {
    let path = t.path.with_extension("missing");
    match t.tier.open(&path) {
        Err(Error::Io { detail }) if detail.contains(&*path.to_string_lossy()) => Ok(()),
        other => Err(Finding::new(
            "error paths",
            format!("opening a missing file: wanted an i/o error that names it, got {other:?}"),
        )),
    }
}

fn cancel(t: &Tier<'_>) -> Fallible<()> {
    let range = t.aligned(0..MEBIBYTE as u64);
    let len = range.end - range.start;
    let memory = HostMemory::allocate(len)?;
    let value = t.tier.read(&[read_of(t.file, range, &memory, len)?])?;
    t.tier.cancel(value)?;
    let end = t.tier.wait(value, PATIENCE);
    let ok = match &end {
        Ok(Reached::Done) => memory.bytes() == &t.bytes[..len as usize],
        Err(Error::Cancelled { .. }) => true,
        _ => false,
    };
    if !matches!(end, Ok(Reached::Done)) {
        std::mem::forget(memory);
    }
    must(ok, "cancel", || format!("a cancelled read is done with its bytes, or Cancelled; got {end:?}"))
}

fn counters(t: &Tier<'_>) -> Fallible<()> {
    let count = |name: &str| -> Fallible<u64> {
        let found = t.tier.counters().into_iter().find(|c| c.name == name);
        found
            .map(|c| c.value)
            .ok_or_else(|| Finding::new("counters", format!("there is no counter `{name}`")))
    };
    let (bytes, reads) = (count("bytes_read")?, count("reads")?);
    t.check(&[t.aligned(0..MEBIBYTE as u64)])?;
    let (more_bytes, more_reads) = (count("bytes_read")?, count("reads")?);
    must(more_reads > reads && more_bytes > bytes, "counters", || {
        format!("a read of a mebibyte counted {} reads and {} bytes", more_reads - reads, more_bytes - bytes)
    })
}
