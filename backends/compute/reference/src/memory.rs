//! Memory behind handles: owned buffers, imported host spans, and bounds-checked views that copy bytes in and out.
//!
//! Nothing here ever makes a reference to the memory: views copy through raw pointers, so slots may alias as they like.
#![expect(
    unsafe_code,
    reason = "buffers are shared with the host by address; the one place that touches them"
)]

use engine_core::{Error, HostSpan, Result};
use std::cell::UnsafeCell;
use std::sync::Arc;

/// What a buffer handle names.
pub(crate) enum Memory {
    /// An allocation of this backend, aligned to 8 bytes.
    Owned(Box<[UnsafeCell<u64>]>, u64),
    /// Host memory, kept valid by the host until the buffer is freed.
    Imported(HostSpan),
}

// SAFETY: the words are plain data that is only copied through raw pointers; the backend runs one submission at a time,
// and the host promises not to touch bound memory in a conflicting way until the submission is reached.
unsafe impl Sync for Memory {}

impl Memory {
    /// `bytes` zeroed bytes.
    pub(crate) fn allocate(bytes: u64) -> Result<Memory> {
        let refused = || Error::out_of_memory(format!("the host could not allocate {bytes} bytes"));
        let words = usize::try_from(bytes.div_ceil(8)).map_err(|_| refused())?;
        let mut memory: Vec<UnsafeCell<u64>> = Vec::new();
        memory.try_reserve_exact(words).map_err(|_| refused())?;
        memory.resize_with(words, || UnsafeCell::new(0));
        Ok(Memory::Owned(memory.into_boxed_slice(), bytes))
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Memory::Owned(_, bytes) => *bytes,
            Memory::Imported(span) => span.len(),
        }
    }

    /// Bytes that count against the budget.
    pub(crate) fn owned_bytes(&self) -> u64 {
        match self {
            Memory::Owned(_, bytes) => *bytes,
            Memory::Imported(_) => 0,
        }
    }

    /// Address of the first byte.
    pub(crate) fn address(&self) -> usize {
        match self {
            Memory::Owned(words, _) => words.as_ptr() as usize,
            Memory::Imported(span) => span.address(),
        }
    }

    /// Whether it may be written.
    pub(crate) fn is_writable(&self) -> bool {
        match self {
            Memory::Owned(..) => true,
            Memory::Imported(span) => span.is_writable(),
        }
    }
}

/// A part of a memory that one submission may use.
#[derive(Clone)]
pub(crate) struct View {
    memory: Arc<Memory>,
    offset: u64,
    len: u64,
}

impl View {
    /// The bytes `offset..offset + len` of `memory`; `None` where they do not lie within it.
    pub(crate) fn new(memory: Arc<Memory>, offset: u64, len: u64) -> Option<View> {
        offset.checked_add(len).filter(|end| *end <= memory.len())?;
        Some(View { memory, offset, len })
    }

    /// Address of the first byte, and a panic for anything outside: the caller computed a wrong offset, which the
    /// checks at submit exclude.
    fn pointer(&self, offset: u64, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes as u64);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{bytes} bytes at {offset} of a view of {}",
            self.len
        );
        (self.memory.address() + (self.offset + offset) as usize) as *mut u8
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.pointer(offset, into.len());
        // SAFETY: `pointer` checked that the bytes lie within the view and `new` that the view lies within the memory,
        // which this view keeps alive (an import: the host does). Nothing writes it meanwhile: submissions run one at
        // a time and the host keeps away. `into` is a local buffer, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies bytes in.
    pub(crate) fn write(&self, offset: u64, from: &[u8]) {
        assert!(self.memory.is_writable(), "a read-only import is written");
        let to = self.pointer(offset, from.len());
        // SAFETY: as in `read`; the memory is writable (an owned allocation is made of `UnsafeCell`s, an import says
        // so) and `from` is a local buffer.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Fills the view with one byte.
    pub(crate) fn fill(&self, byte: u8) {
        let chunk = [byte; 4096];
        let mut offset = 0;
        while offset < self.len {
            let bytes = (self.len - offset).min(chunk.len() as u64);
            self.write(offset, &chunk[..bytes as usize]);
            offset += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_stay_inside() {
        let memory = Arc::new(Memory::allocate(13).unwrap());
        assert!(View::new(memory.clone(), 5, 9).is_none());
        assert!(View::new(memory.clone(), u64::MAX, 2).is_none());
        let all = View::new(memory.clone(), 0, 13).unwrap();
        let part = View::new(memory, 5, 8).unwrap();
        all.fill(1);
        part.write(2, &[7, 8]);
        let mut bytes = [0u8; 13];
        all.read(0, &mut bytes);
        assert_eq!(bytes, [1, 1, 1, 1, 1, 1, 1, 7, 8, 1, 1, 1, 1]);
        let beyond = std::panic::AssertUnwindSafe(|| part.write(7, &[0, 0]));
        assert!(std::panic::catch_unwind(beyond).is_err());
    }
}
