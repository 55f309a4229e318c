//! Host memory that plug-ins read and write: addresses that cross the boundary, and an owned, aligned allocation.
#![expect(
    unsafe_code,
    reason = "host memory shared with devices: the one place in engine-core that holds raw memory"
)]

use crate::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// A run of bytes in the host's address space, as it crosses the plug-in boundary.
///
/// It owns nothing. Whoever passes one on promises that the memory stays valid and is not touched in a conflicting way
/// until the work it was passed to is reached on its timeline (for an import: until the buffer is freed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostSpan {
    address: usize,
    len: u64,
    writable: bool,
}

impl HostSpan {
    /// The span of `len` bytes at `address`.
    ///
    /// # Safety
    /// The bytes must be readable (and, where `writable`, writable) for as long as the receiver may use them: until
    /// the timeline value of the work is reached, or until the imported buffer is freed. Nothing else may write them
    /// in that time, nor read them where the receiver writes.
    pub unsafe fn new(address: *const u8, len: u64, writable: bool) -> HostSpan {
        HostSpan { address: address as usize, len, writable }
    }

    /// First byte.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the receiver may write.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// The part `offset..offset + len` of this span.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the part does not lie within the span.
    pub fn slice(&self, offset: u64, len: u64) -> Result<HostSpan> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                Ok(HostSpan { address: self.address + offset as usize, len, writable: self.writable })
            }
            _ => Err(Error::invalid(format!(
                "bytes {offset}+{len} are not within a host span of {} bytes",
                self.len
            ))),
        }
    }
}

/// Plain numbers that may be copied as bytes: every bit pattern is a value, and there is no padding.
pub trait Plain: Copy + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
}

macro_rules! plain {
    ($($t:ty),*) => { $(impl sealed::Sealed for $t {} impl Plain for $t {})* };
}
plain!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// An owned, zeroed, aligned allocation in host memory, read and written by value only.
///
/// The host gives its spans to plug-ins; it must not read or write the memory while work that uses it is under way
/// (wait for the timeline value first). That is the contract of [`HostMemory::span`].
#[derive(Debug)]
pub struct HostMemory {
    /// First byte handed out: the first aligned one of the allocation.
    base: NonNull<u8>,
    /// What the allocator gave, to be given back.
    allocation: NonNull<u8>,
    layout: Layout,
    len: u64,
}

// SAFETY: the allocation is plain memory owned by this value; access from several threads follows `span`'s contract.
unsafe impl Send for HostMemory {}
// SAFETY: as above; `&self` methods only read, and writing needs `&mut self`.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Alignment of every allocation, in bytes: a page, so that any device may import it.
    pub const ALIGNMENT: u64 = 4096;

    /// `len` zeroed bytes, aligned to [`HostMemory::ALIGNMENT`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the allocator has none.
    pub fn allocate(len: u64) -> Result<HostMemory> {
        let refused = || Error::out_of_memory(format!("the host could not allocate {len} bytes"));
        // Aligned by hand: for the allocator's own alignment zeroed memory comes untouched from the system, while for
        // a larger one every page would be written at once.
        let size = len
            .max(1)
            .checked_add(Self::ALIGNMENT)
            .and_then(|s| usize::try_from(s).ok())
            .ok_or_else(refused)?;
        let layout = Layout::from_size_align(size, 16).map_err(|_| refused())?;
        // SAFETY: the layout's size is not 0.
        let allocation = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        let skipped = allocation.align_offset(Self::ALIGNMENT as usize);
        if skipped > Self::ALIGNMENT as usize {
            // SAFETY: allocated just above with this layout.
            unsafe { dealloc(allocation.as_ptr(), layout) };
            return Err(Error::internal("the allocation could not be aligned"));
        }
        // SAFETY: at most `ALIGNMENT` bytes are skipped, and that many more than `len` were allocated.
        let base = unsafe { allocation.add(skipped) };
        Ok(HostMemory { base, allocation, layout, len })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The memory as a span to pass to a plug-in, which may write it.
    ///
    /// # Safety
    /// This value must outlive every use of the span, and its other methods must not be called while work that uses
    /// the span is under way (from `submit` or `read` until the timeline value is reached).
    pub unsafe fn span(&self) -> HostSpan {
        // SAFETY: the allocation is valid for `len` bytes; the caller takes over the rest of the contract.
        unsafe { HostSpan::new(self.base.as_ptr(), self.len, true) }
    }

    fn range(&self, offset: u64, bytes: usize, align: usize) -> Result<usize> {
        let start = usize::try_from(offset).ok();
        match start.and_then(|s| s.checked_add(bytes).map(|end| (s, end))) {
            Some((start, end)) if end as u64 <= self.len && start.is_multiple_of(align) => Ok(start),
            _ => Err(Error::invalid(format!(
                "{bytes} bytes at {offset} (alignment {align}) are not within a host allocation of {} bytes",
                self.len
            ))),
        }
    }

    /// Copies `values` in at byte `offset`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where they do not fit or the offset is not aligned for `T`.
    pub fn write<T: Plain>(&mut self, offset: u64, values: &[T]) -> Result<()> {
        let start = self.range(offset, size_of_val(values), align_of::<T>())?;
        // SAFETY: `range` checked that the bytes lie within the allocation; source and target cannot overlap since
        // `&mut self` owns the target; T is plain data.
        unsafe {
            std::ptr::copy_nonoverlapping(
                values.as_ptr().cast::<u8>(),
                self.base.as_ptr().add(start),
                size_of_val(values),
            );
        }
        Ok(())
    }

    /// Copies values out from byte `offset`, filling `values`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where they do not lie within the allocation or the offset is not aligned for `T`.
    pub fn read<T: Plain>(&self, offset: u64, values: &mut [T]) -> Result<()> {
        let start = self.range(offset, size_of_val(values), align_of::<T>())?;
        // SAFETY: `range` checked that the bytes lie within the allocation; every bit pattern is a valid T.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.base.as_ptr().add(start),
                values.as_mut_ptr().cast::<u8>(),
                size_of_val(values),
            );
        }
        Ok(())
    }

    /// The bytes, borrowed.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is initialised (zeroed) and valid for `len` bytes; writers need `&mut self`, and
        // `span`'s contract keeps plug-ins from writing while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len as usize) }
    }

    /// The bytes, borrowed for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len as usize) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `allocate` with this very layout, and freed only here.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_in_and_out() {
        let mut memory = HostMemory::allocate(16).unwrap();
        memory.write(4, &[1.5f32, -2.0]).unwrap();
        let mut out = [0f32; 2];
        memory.read(4, &mut out).unwrap();
        assert_eq!(out, [1.5, -2.0]);
        assert!(memory.write(12, &[0f32; 2]).is_err());
        assert!(memory.write(2, &[0f32]).is_err());
        assert!(memory.read(u64::MAX, &mut out).is_err());
        // SAFETY: nothing uses the span after this test.
        let span = unsafe { memory.span() };
        assert_eq!(span.slice(8, 8).unwrap().len(), 8);
        assert!(span.slice(8, 9).is_err());
        assert!(span.slice(u64::MAX, 2).is_err());
        assert_eq!(span.address() as u64 % HostMemory::ALIGNMENT, 0);
    }
}
