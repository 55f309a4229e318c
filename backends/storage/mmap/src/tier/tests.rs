//! Contents, and one error for every mistake.
#![expect(unsafe_code, reason = "host spans are raw addresses")]

use super::*;
use engine_core::HostMemory;
use std::io::Write as _;

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A span over all of `memory`, which the caller leaves alone until the read is reached.
fn span(memory: &HostMemory) -> HostSpan {
    // SAFETY: the tests keep `memory` until after the read and do not touch it before.
    unsafe { memory.span() }
}

fn counter(tier: &MemoryMap, name: &str) -> u64 {
    tier.counters().into_iter().find(|c| c.name == name).unwrap().value
}

#[test]
fn large_files_arrive_whole() {
    let bytes: Vec<u8> =
        (0..(17u32 << 20) + 3).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let file = file(&bytes);
    for (willneed, populate) in [(false, false), (true, false), (false, true)] {
        let tier = MemoryMap::new(Options { willneed, populate });
        let id = tier.open(file.path()).unwrap();
        assert_eq!(tier.len(id).unwrap(), bytes.len() as u64);
        let mut copied = HostMemory::allocate(bytes.len() as u64).unwrap();
        copied.bytes_mut().fill(0xee);
        let range = 0..bytes.len() as u64;
        let value = tier.read(&[Read { file: id, range, into: span(&copied), priority: 0 }]).unwrap();
        tier.cancel(value).unwrap();
        assert_eq!(tier.wait(value, Duration::ZERO).unwrap(), Reached::Done);
        assert!(copied.bytes() == bytes);
        let resident = tier.resident(id, 5..9).unwrap().unwrap();
        assert_eq!((resident.len(), resident.is_writable()), (4, false));
        assert_eq!(counter(&tier, "bytes_read"), bytes.len() as u64);
        assert_eq!((counter(&tier, "reads"), counter(&tier, "bytes_mapped")), (1, bytes.len() as u64));
    }
}

#[test]
fn a_file_that_shrank_is_not_read() {
    let file = file(&[7; 60]);
    let tier = MemoryMap::new(Options::default());
    let id = tier.open(file.path()).unwrap();
    file.as_file().set_len(10).unwrap();
    let memory = HostMemory::allocate(11).unwrap();
    let error = tier.read(&[Read { file: id, range: 0..11, into: span(&memory), priority: 0 }]).unwrap_err();
    assert!(
        matches!(&error, Error::Io { detail } if detail.contains("60 bytes when it was opened and has 10 now"))
    );
}

#[test]
fn mistakes_are_errors() {
    let file = file(&[1, 2, 3, 4]);
    let tier = MemoryMap::new(Options::default());
    let id = tier.open(file.path()).unwrap();
    let memory = HostMemory::allocate(4).unwrap();
    let read = |file, range: Range<u64>, into| tier.read(&[Read { file, range, into, priority: 0 }]);
    let into = span(&memory);
    // SAFETY: as for `span`; never written.
    let read_only = unsafe { HostSpan::new(into.address() as *const u8, 4, false) };
    let backwards = Range { start: 3, end: 2 };
    for result in [
        read(id, 0..5, into).map(|_| ()),
        read(id, backwards.clone(), into.slice(0, 0).unwrap()).map(|_| ()),
        read(id, u64::MAX..u64::MAX, into.slice(0, 0).unwrap()).map(|_| ()),
        read(id, 0..3, into).map(|_| ()),
        read(id, 0..4, read_only).map(|_| ()),
        tier.resident(id, 2..5).map(|_| ()),
        tier.resident(id, backwards).map(|_| ()),
    ] {
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
    }
    // A good request before a bad one is not carried out.
    let good = Read { file: id, range: 0..4, into, priority: 0 };
    let bad = Read { file: FileId(9), ..good.clone() };
    let unknown =
        |result: Result<()>| assert!(matches!(result, Err(Error::UnknownHandle { .. })), "{result:?}");
    unknown(tier.read(&[good, bad]).map(|_| ()));
    assert_eq!((memory.bytes(), counter(&tier, "reads")), (&[0; 4][..], 0));
    unknown(tier.wait(TimelineValue(1), Duration::ZERO).map(|_| ()));
    unknown(tier.cancel(TimelineValue(0)));
    tier.close(id).unwrap();
    unknown(tier.close(id));
    unknown(tier.len(id).map(|_| ()));
    unknown(tier.resident(id, 0..1).map(|_| ()));
}

#[test]
fn what_is_no_model_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let empty = file(&[]);
    let tier = MemoryMap::new(Options::default());
    for (path, wanted) in [
        (folder.path().join("absent"), "absent: open: No such file"),
        (folder.path().to_owned(), "it is a directory"),
        (empty.path().to_owned(), "it is empty"),
        ("/dev/null".into(), "it is no regular file"),
    ] {
        let error = tier.open(&path).unwrap_err();
        assert!(matches!(&error, Error::Io { detail } if detail.contains(wanted)), "{error}");
    }
}
