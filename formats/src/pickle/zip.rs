//! The parts of the zip format that `torch.save` uses: stored entries, found by the central directory, with zip64's sizes.

use std::collections::HashMap;
use std::ops::Range;

type Result<T> = std::result::Result<T, String>;

/// Names of entries with the ranges of their bytes, all inside the file.
pub(super) struct Archive {
    entries: HashMap<String, Range<usize>>,
}

const END: &[u8] = b"PK\x05\x06";
const END_64: &[u8] = b"PK\x06\x06";
const LOCATOR_64: &[u8] = b"PK\x06\x07";
const CENTRAL: &[u8] = b"PK\x01\x02";
const LOCAL: &[u8] = b"PK\x03\x04";
/// The end record's length without its comment, whose length has 16 bits.
const END_LENGTH: usize = 22;
/// Of an entry in the central directory, without name, extra and comment.
const CENTRAL_LENGTH: usize = 46;
const LOCAL_LENGTH: usize = 30;
const NARROW: u64 = 0xffff_ffff;

fn damaged(what: &str) -> String {
    format!("it is damaged: {what}; fetch it again")
}

/// `N` bytes at `at` as a little-endian number.
fn number<const N: usize>(bytes: &[u8], at: usize) -> Result<u64> {
    let slice = at.checked_add(N).and_then(|end| bytes.get(at..end));
    let slice = slice.ok_or_else(|| damaged("the file ends inside the archive's directory"))?;
    Ok(slice.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

fn signed(bytes: &[u8], at: usize, signature: &[u8]) -> bool {
    at.checked_add(4).and_then(|end| bytes.get(at..end)) == Some(signature)
}

fn small(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| damaged("an offset is larger than memory"))
}

impl Archive {
    pub(super) fn read(bytes: &[u8]) -> Result<Archive> {
        if bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
            return Err(
                "it is a git-LFS pointer, not the file itself; run `git lfs pull` or download the file"
                    .into(),
            );
        }
        if !bytes.starts_with(LOCAL) {
            return Err(match bytes {
                [] => "it is empty (0 bytes); fetch it again".into(),
                [0x80, ..] => "it is a plain pickle, as old versions of PyTorch wrote it; save it again with one from 1.6 on".into(),
                _ => "it is no zip archive, as PyTorch writes its files since 1.6".into(),
            });
        }
        let end = find_end(bytes)?;
        let (mut count, mut start) = (number::<2>(bytes, end + 10)?, number::<4>(bytes, end + 16)?);
        if let Some(locator) = end.checked_sub(20).filter(|&at| signed(bytes, at, LOCATOR_64)) {
            let end = small(number::<8>(bytes, locator + 8)?)?;
            if !signed(bytes, end, END_64) {
                return Err(damaged("the directory's 64-bit end is not where it should be"));
            }
            (count, start) = (number::<8>(bytes, end + 32)?, number::<8>(bytes, end + 48)?);
        }
        let mut at = small(start)?;
        let mut entries = HashMap::new(); // grows as entries are really read
        for _ in 0..count {
            if !signed(bytes, at, CENTRAL) {
                return Err(damaged("the archive's directory is not where it should be"));
            }
            let length = |field: usize| number::<2>(bytes, at + field).map(|value| value as usize);
            let (name_length, extra, comment) = (length(28)?, length(30)?, length(32)?);
            let name = at + CENTRAL_LENGTH;
            let Some(text) = bytes.get(name..name + name_length) else {
                return Err(damaged("the file ends inside the archive's directory"));
            };
            let name_text = String::from_utf8_lossy(text).into_owned();
            let after = name + name_length + extra;
            let Some(extra) = bytes.get(name + name_length..after) else {
                return Err(damaged("the file ends inside the archive's directory"));
            };
            let range =
                entry(bytes, at, extra).map_err(|problem| format!("entry `{name_text}`: {problem}"))?;
            if entries.insert(name_text.clone(), range).is_some() {
                return Err(damaged(&format!("entry `{name_text}` occurs twice")));
            }
            at = after + comment;
        }
        Ok(Archive { entries })
    }

    pub(super) fn find(&self, name: &str) -> Option<Range<usize>> {
        self.entries.get(name).cloned()
    }

    /// The one entry with this name in any folder, and the folder with its slash.
    pub(super) fn only_named(&self, name: &str) -> Result<(Range<usize>, String)> {
        let is_it = |entry: &&String| {
            entry.strip_suffix(name).is_some_and(|folder| folder.is_empty() || folder.ends_with('/'))
        };
        let found: Vec<&String> = self.entries.keys().filter(is_it).collect();
        match found[..] {
            [entry] => {
                let folder = entry[..entry.len() - name.len()].to_owned();
                Ok((self.entries[entry].clone(), folder))
            }
            [] => Err(format!("the archive has no `{name}`: it was not written by `torch.save`")),
            _ => Err(format!("the archive has several files `{name}`")),
        }
    }
}

/// Where the end record starts: the last one, behind which is just its comment.
fn find_end(bytes: &[u8]) -> Result<usize> {
    let last = bytes.len().checked_sub(END_LENGTH).ok_or_else(|| damaged("it is too short"))?;
    let first = last.saturating_sub(0xffff);
    (first..=last)
        .rev()
        .find(|&at| signed(bytes, at, END))
        .ok_or_else(|| damaged("the archive's directory is missing, so the file was cut short"))
}

/// The bytes of the entry whose directory record is at `at`.
fn entry(bytes: &[u8], at: usize, mut extra: &[u8]) -> Result<Range<usize>> {
    let flags = number::<2>(bytes, at + 8)?;
    let method = number::<2>(bytes, at + 10)?;
    if method != 0 || flags & 1 != 0 {
        return Err("it is compressed or encrypted; PyTorch stores its files as they are".into());
    }
    let mut packed = number::<4>(bytes, at + 20)?;
    let mut size = number::<4>(bytes, at + 24)?;
    let mut offset = number::<4>(bytes, at + 42)?;
    // Field 1 holds, in this order, those of the numbers that did not fit.
    while extra.len() >= 4 {
        let (id, length) = (number::<2>(extra, 0)?, number::<2>(extra, 2)? as usize);
        let field = extra.get(4..4 + length).ok_or_else(|| damaged("an extra field is cut short"))?;
        if id == 1 {
            let mut next = 0;
            for value in [&mut size, &mut packed, &mut offset] {
                if *value == NARROW {
                    *value = number::<8>(field, next)?;
                    next += 8;
                }
            }
        }
        extra = &extra[4 + length..];
    }
    if packed != size {
        return Err(damaged("its two sizes differ"));
    }
    let local = small(offset)?;
    if !signed(bytes, local, LOCAL) {
        return Err(damaged("it is not where the directory says"));
    }
    let skipped = number::<2>(bytes, local + 26)? + number::<2>(bytes, local + 28)?;
    let start = local + LOCAL_LENGTH + skipped as usize;
    let end = start.checked_add(small(size)?).filter(|&end| end <= bytes.len());
    match end {
        Some(end) => Ok(start..end),
        None => Err(damaged(&format!("it needs {size} bytes, more than the file has"))),
    }
}
