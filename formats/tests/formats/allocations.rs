//! Watches every allocation of this test binary, to show that no number in a file sizes one.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Watching = Watching;

// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `alloc` above or `realloc` below, that is, from the system.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as in `dealloc`, with the caller's promise about `size`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Panics where any allocation of this process so far was larger than the largest text or model that a test made.
pub(crate) fn assert_small() {
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < 100 << 20, "an allocation of {largest} bytes");
}
