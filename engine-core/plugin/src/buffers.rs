//! Buffers: memory that the backend owns or views, behind handles, within a budget.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use engine_core::backend::{BufferId, BufferView};
use engine_core::operation::Slot;
use engine_core::{DType, Error, HandleKind, HostMemory, HostSpan, Result, TensorType};

/// Counts bytes against a limit.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

/// Bytes taken from a budget, given back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Budget> {
        Arc::new(Budget { limit, used: AtomicU64::new(0), peak: AtomicU64::new(0) })
    }

    /// Takes `bytes` for `what`.
    pub fn reserve(self: &Arc<Budget>, bytes: u64, what: &str) -> Result<Reservation> {
        let took = self
            .used
            .fetch_update(Relaxed, Relaxed, |used| used.checked_add(bytes).filter(|&n| n <= self.limit));
        match took {
            Ok(before) => {
                self.peak.fetch_max(before + bytes, Relaxed);
                Ok(Reservation { budget: self.clone(), bytes })
            }
            Err(used) => Err(Error::out_of_memory(format!(
                "{what} needs {bytes} bytes; {} of the device's {} bytes are left (option `memory_limit`)",
                self.limit.saturating_sub(used),
                self.limit
            ))),
        }
    }

    /// Bytes in use, and the most there ever were.
    pub fn used_and_peak(&self) -> (u64, u64) {
        (self.used.load(Relaxed), self.peak.load(Relaxed))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Relaxed);
    }
}

/// Memory of our own within a budget.
#[derive(Debug)]
pub struct Owned {
    memory: HostMemory,
    _reservation: Reservation,
}

impl Owned {
    /// `bytes` zeroed bytes, aligned to a page.
    pub fn allocate(budget: &Arc<Budget>, bytes: u64, what: &str) -> Result<Owned> {
        let reservation = budget.reserve(bytes, what)?;
        Ok(Owned { memory: HostMemory::allocate(bytes)?, _reservation: reservation })
    }

    /// First byte.
    pub fn address(&self) -> *mut u8 {
        // SAFETY: the memory lives as long as `self`, and its other methods are never used.
        unsafe { self.memory.span() }.address() as *mut u8
    }
}

/// What a handle names.
#[derive(Debug)]
pub struct Buffer {
    address: usize,
    bytes: u64,
    writable: bool,
    /// Keeps the memory of an allocation; absent for imports.
    _owned: Option<Owned>,
}

/// A checked place in a buffer, which it keeps alive.
#[derive(Clone, Debug)]
pub struct Place {
    /// First byte.
    pub address: *mut u8,
    /// Length of what was checked.
    pub bytes: u64,
    _buffer: Arc<Buffer>,
}

// SAFETY: an address of memory that the host promised to leave alone until the work is reached.
unsafe impl Send for Place {}
// SAFETY: as above.
unsafe impl Sync for Place {}

/// All buffers of a device.
#[derive(Debug)]
pub struct Buffers {
    budget: Arc<Budget>,
    next: AtomicU64,
    table: Mutex<HashMap<u64, Arc<Buffer>>>,
}

impl Buffers {
    /// No buffers yet.
    pub fn new(budget: Arc<Budget>) -> Buffers {
        Buffers { budget, next: AtomicU64::new(1), table: Mutex::default() }
    }

    fn insert(&self, buffer: Buffer) -> BufferId {
        let id = self.next.fetch_add(1, Relaxed);
        self.table.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(buffer));
        BufferId(id)
    }

    /// See `ComputeBackend::allocate`.
    pub fn allocate(&self, bytes: u64) -> Result<BufferId> {
        if bytes == 0 {
            return Err(Error::invalid("a buffer of 0 bytes"));
        }
        let owned = Owned::allocate(&self.budget, bytes, "a buffer")?;
        Ok(self.insert(Buffer {
            address: owned.address() as usize,
            bytes,
            writable: true,
            _owned: Some(owned),
        }))
    }

    /// See `ComputeBackend::import`.
    pub fn import(&self, span: HostSpan) -> Result<BufferId> {
        if span.is_empty() || span.address() == 0 {
            return Err(Error::invalid("an import of no bytes, or of the null address"));
        }
        if span.address().checked_add(usize::try_from(span.len()).unwrap_or(usize::MAX)).is_none() {
            return Err(Error::invalid("an import that ends beyond the address space"));
        }
        let (address, bytes, writable) = (span.address(), span.len(), span.is_writable());
        Ok(self.insert(Buffer { address, bytes, writable, _owned: None }))
    }

    /// See `ComputeBackend::free`. Work that still uses the buffer keeps its memory.
    pub fn free(&self, id: BufferId) -> Result<()> {
        let removed = self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
        removed.map(|_| ()).ok_or(Error::unknown(HandleKind::Buffer, id.0))
    }

    /// Checks that a slot of `rows` rows fits where it is bound, and may be written if it is.
    pub fn place(&self, slot: &Slot, view: BufferView, rows: u64, written: bool) -> Result<Place> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer =
            table.get(&view.buffer.0).cloned().ok_or(Error::unknown(HandleKind::Buffer, view.buffer.0))?;
        drop(table);
        let needed = TensorType { rows, ..slot.tensor }.bytes();
        if view.offset.checked_add(needed).is_none_or(|end| end > buffer.bytes) {
            return Err(Error::invalid(format!(
                "slot `{}` needs {needed} bytes at offset {} of buffer {}, which has {}",
                slot.name, view.offset, view.buffer.0, buffer.bytes
            )));
        }
        if written && !buffer.writable {
            return Err(Error::invalid(format!(
                "slot `{}` is written, but buffer {} was imported read-only",
                slot.name, view.buffer.0
            )));
        }
        let address = buffer.address + view.offset as usize;
        check_alignment(slot, address)?;
        Ok(Place { address: address as *mut u8, bytes: needed, _buffer: buffer })
    }
}

/// Bytes that an address of this type must be a multiple of. Quantised blocks are read byte by byte.
pub fn alignment(dtype: DType) -> usize {
    match dtype {
        DType::F64 | DType::I64 => 8,
        DType::F32 | DType::I32 => 4,
        DType::F16 | DType::BF16 | DType::I16 => 2,
        _ => 1,
    }
}

/// The address suits the slot's type.
pub fn check_alignment(slot: &Slot, address: usize) -> Result<()> {
    let wanted = alignment(slot.tensor.dtype);
    if !address.is_multiple_of(wanted) {
        return Err(Error::invalid(format!(
            "slot `{}` ({}) is bound to address {address:#x}, which is no multiple of {wanted}",
            slot.name, slot.tensor.dtype
        )));
    }
    Ok(())
}
