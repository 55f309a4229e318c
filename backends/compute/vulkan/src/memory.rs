//! Buffers: memory of the device or views of the host's, behind handles, within a budget.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;
use engine_core::backend::{BufferId, BufferView};
use engine_core::operation::Slot;
use engine_core::{Error, HandleKind, HostSpan, Result, TensorType};

use crate::device::{Device, Kind};

/// Counts bytes against a limit.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Budget {
        Budget { limit, used: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    fn short(&self, bytes: u64) -> Error {
        let left = self.limit.saturating_sub(self.used.load(Relaxed));
        Error::out_of_memory(format!(
            "{bytes} bytes are needed, {left} of the device's {} are left (option `memory_limit`)",
            self.limit
        ))
    }

    fn take(&self, bytes: u64) -> Result<()> {
        let took = self
            .used
            .fetch_update(Relaxed, Relaxed, |used| used.checked_add(bytes).filter(|&n| n <= self.limit));
        let before = took.map_err(|_| self.short(bytes))?;
        self.peak.fetch_max(before + bytes, Relaxed);
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Relaxed);
    }

    /// Bytes in use, and the most there ever were.
    pub(crate) fn used_and_peak(&self) -> (u64, u64) {
        (self.used.load(Relaxed), self.peak.load(Relaxed))
    }
}

/// A buffer of the driver with its memory.
pub(crate) struct Memory {
    device: Arc<Device>,
    budget: Arc<Budget>,
    pub(crate) buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    /// What a view may reach; the driver's buffer may be a few bytes longer.
    pub(crate) bytes: u64,
    /// Length of the driver's buffer.
    pub(crate) length: u64,
    /// Where byte 0 lies within the driver's buffer: an import begins at a page.
    pub(crate) skew: u64,
    counted: u64,
    writable: bool,
    mapped: Option<usize>,
}

const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw(),
);

impl Memory {
    fn empty(device: &Arc<Device>, budget: &Arc<Budget>, bytes: u64, length: u64) -> Memory {
        Memory {
            device: device.clone(),
            budget: budget.clone(),
            buffer: vk::Buffer::null(),
            memory: vk::DeviceMemory::null(),
            bytes,
            length,
            skew: 0,
            counted: 0,
            writable: true,
            mapped: None,
        }
    }

    /// `bytes` of memory of this kind; staging and parameters are mapped.
    pub(crate) fn allocate(
        device: &Arc<Device>,
        budget: &Arc<Budget>,
        bytes: u64,
        kind: Kind,
    ) -> Result<Memory> {
        device.alive()?;
        if bytes > budget.limit {
            return Err(budget.short(bytes));
        }
        let most = device.of.description.max_buffer_bytes;
        if most != 0 && bytes > most {
            return Err(Error::out_of_memory(format!(
                "a buffer of {bytes} bytes; the driver gives at most {most}"
            )));
        }
        // On failure dropping `made` gives back what there is by then.
        let mut made = Memory::empty(device, budget, bytes, bytes.max(1).next_multiple_of(16));
        let info = vk::BufferCreateInfo::default().size(made.length).usage(USAGE);
        // SAFETY: the device is valid.
        made.buffer = unsafe { device.raw.create_buffer(&info, None) }
            .map_err(|e| device.error(&format!("making a buffer of {bytes} bytes"), e))?;
        // SAFETY: the buffer was made above.
        let needs = unsafe { device.raw.get_buffer_memory_requirements(made.buffer) };
        budget.take(needs.size)?;
        made.counted = needs.size;
        let kind_of = device
            .memory_type(needs.memory_type_bits, kind)
            .ok_or_else(|| Error::unsupported(format!("the driver has no memory for {kind:?} buffers")))?;
        let info = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind_of);
        // SAFETY: as above.
        made.memory = unsafe { device.raw.allocate_memory(&info, None) }
            .map_err(|e| device.error(&format!("allocating {bytes} bytes"), e))?;
        // SAFETY: both were made above, and the memory has the size that the buffer needs.
        unsafe { device.raw.bind_buffer_memory(made.buffer, made.memory, 0) }
            .map_err(|e| device.error("binding memory", e))?;
        if kind != Kind::Device {
            // SAFETY: memory of these kinds is visible to the host, and is mapped once.
            let address =
                unsafe { device.raw.map_memory(made.memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty()) }
                    .map_err(|e| device.error("mapping memory", e))?;
            made.mapped = Some(address as usize);
        }
        Ok(made)
    }

    /// A view of host memory, from the page where it begins to the page where it ends.
    fn import(device: &Arc<Device>, budget: &Arc<Budget>, span: HostSpan) -> Result<Memory> {
        device.alive()?;
        if span.is_empty() || span.address() == 0 {
            return Err(Error::invalid("an import of no bytes, or of the null address"));
        }
        let (Some(page), Some(host)) = (device.of.import_alignment, &device.host_memory) else {
            return Err(Error::unsupported("this device does not import host memory (option `import`)"));
        };
        let address = span.address() as u64;
        let end = address.checked_add(span.len()).and_then(|end| end.checked_next_multiple_of(page));
        let end = end.ok_or_else(|| Error::invalid("an import that ends beyond the address space"))?;
        let start = address - address % page;
        let length = end - start;
        let most = device.of.description.max_buffer_bytes;
        if most != 0 && length > most {
            return Err(Error::unsupported(format!(
                "{length} bytes cannot be imported: the driver takes at most {most}"
            )));
        }
        let handle = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        // SAFETY: the pages lie around memory that the host keeps valid until the buffer is freed.
        let code = unsafe {
            (host.fp().get_memory_host_pointer_properties_ext)(
                device.raw.handle(),
                handle,
                start as *const std::ffi::c_void,
                &mut properties,
            )
        };
        let refused =
            |what: &str, code| Error::unsupported(format!("host memory cannot be imported: {what}: {code}"));
        code.result().map_err(|e| refused("asking for its properties", e))?;
        let mut made = Memory::empty(device, budget, span.len(), length);
        (made.skew, made.writable) = (address - start, span.is_writable());
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handle);
        let info = vk::BufferCreateInfo::default().size(length).usage(USAGE).push_next(&mut external);
        // SAFETY: the device is valid.
        made.buffer =
            unsafe { device.raw.create_buffer(&info, None) }.map_err(|e| refused("making a buffer", e))?;
        // SAFETY: the buffer was made above.
        let needs = unsafe { device.raw.get_buffer_memory_requirements(made.buffer) };
        let allowed = needs.memory_type_bits & properties.memory_type_bits;
        let kind = device.memory_type(allowed, Kind::Device);
        let kind = kind.filter(|_| needs.size <= length).ok_or_else(|| {
            Error::unsupported("host memory cannot be imported: no type of memory fits a buffer of it")
        })?;
        let mut pointer = vk::ImportMemoryHostPointerInfoEXT::default()
            .handle_type(handle)
            .host_pointer(start as *mut std::ffi::c_void);
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(length)
            .memory_type_index(kind)
            .push_next(&mut pointer);
        // SAFETY: as for the properties above; the pages are aligned as the driver asks.
        made.memory =
            unsafe { device.raw.allocate_memory(&info, None) }.map_err(|e| refused("importing", e))?;
        // SAFETY: both were made above.
        unsafe { device.raw.bind_buffer_memory(made.buffer, made.memory, 0) }
            .map_err(|e| refused("binding", e))?;
        Ok(made)
    }

    fn mapped(&self, offset: u64, bytes: usize) -> Result<*mut u8> {
        let address = self.mapped.ok_or_else(|| Error::internal("memory that is not mapped"))?;
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.length => Ok((address + offset as usize) as *mut u8),
            _ => Err(Error::internal(format!("{bytes} bytes at {offset} of {} mapped ones", self.length))),
        }
    }

    /// Writes mapped memory that no work under way uses.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let to = self.mapped(offset, bytes.len())?;
        // SAFETY: the range lies within the mapping, and cannot overlap memory of Rust's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Writes words into mapped memory.
    pub(crate) fn write_words(&self, offset: u64, words: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.write(offset, &bytes)
    }

    /// Reads mapped memory that no work under way writes.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let from = self.mapped(offset, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies from or to memory of the host that was bound to a submission.
    ///
    /// # Safety
    /// The span is one of a submission that has not been reached.
    pub(crate) unsafe fn exchange(&self, offset: u64, span: HostSpan, to_host: bool) -> Result<()> {
        let ours = self.mapped(offset, span.len() as usize)?;
        let theirs = span.address() as *mut u8;
        let (from, to) = if to_host { (ours, theirs) } else { (theirs, ours) };
        // SAFETY: our range lies within the mapping; the span is valid by its contract until the submission is reached.
        unsafe { std::ptr::copy_nonoverlapping(from, to, span.len() as usize) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.device.hangs() {
            // SAFETY: nobody else names the buffer, and work that used it was waited for; null handles are allowed.
            unsafe {
                self.device.raw.destroy_buffer(self.buffer, None);
                self.device.raw.free_memory(self.memory, None);
            }
        }
        self.budget.give_back(self.counted);
    }
}

/// A checked place in a buffer, which it keeps alive.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) memory: Arc<Memory>,
    /// Within the driver's buffer.
    pub(crate) offset: u64,
    /// Length of what was checked.
    pub(crate) bytes: u64,
}

impl Place {
    /// The place of `bytes` at `offset` of memory of our own.
    pub(crate) fn of(memory: &Arc<Memory>, offset: u64, bytes: u64) -> Place {
        Place { memory: memory.clone(), offset, bytes }
    }

    /// The part that begins `offset` bytes further on.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Place {
        Place { memory: self.memory.clone(), offset: self.offset + offset, bytes }
    }
}

/// How a list uses a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotAccess {
    pub(crate) written: bool,
    pub(crate) by_shader: bool,
}

/// All buffers of a device.
pub(crate) struct Buffers {
    device: Arc<Device>,
    budget: Arc<Budget>,
    next: AtomicU64,
    table: Mutex<HashMap<u64, Arc<Memory>>>,
}

impl Buffers {
    pub(crate) fn new(device: Arc<Device>, budget: Arc<Budget>) -> Buffers {
        Buffers { device, budget, next: AtomicU64::new(1), table: Mutex::default() }
    }

    fn insert(&self, memory: Memory) -> BufferId {
        let id = self.next.fetch_add(1, Relaxed);
        self.table.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(memory));
        BufferId(id)
    }

    /// See `ComputeBackend::allocate`.
    pub(crate) fn allocate(&self, bytes: u64) -> Result<BufferId> {
        if bytes == 0 {
            return Err(Error::invalid("a buffer of 0 bytes"));
        }
        Ok(self.insert(Memory::allocate(&self.device, &self.budget, bytes, Kind::Device)?))
    }

    /// See `ComputeBackend::import`.
    pub(crate) fn import(&self, span: HostSpan) -> Result<BufferId> {
        Ok(self.insert(Memory::import(&self.device, &self.budget, span)?))
    }

    /// See `ComputeBackend::free`. Work that still uses the buffer keeps its memory.
    pub(crate) fn free(&self, id: BufferId) -> Result<()> {
        let removed = self.table.lock().unwrap_or_else(PoisonError::into_inner).remove(&id.0);
        removed.map(|_| ()).ok_or(Error::unknown(HandleKind::Buffer, id.0))
    }

    /// Checks that a slot of `rows` rows fits where it is bound, may be written if it is, and is aligned where a shader
    /// uses it (copies need no alignment).
    pub(crate) fn place(
        &self,
        slot: &Slot,
        view: BufferView,
        rows: u64,
        access: SlotAccess,
    ) -> Result<Place> {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let memory =
            table.get(&view.buffer.0).cloned().ok_or(Error::unknown(HandleKind::Buffer, view.buffer.0))?;
        drop(table);
        let needed = TensorType { rows, ..slot.tensor }.bytes();
        if view.offset.checked_add(needed).is_none_or(|end| end > memory.bytes) {
            return Err(Error::invalid(format!(
                "slot `{}` needs {needed} bytes at offset {} of buffer {}, which has {}",
                slot.name, view.offset, view.buffer.0, memory.bytes
            )));
        }
        if access.written && !memory.writable {
            return Err(Error::invalid(format!(
                "slot `{}` is written, but buffer {} was imported read-only",
                slot.name, view.buffer.0
            )));
        }
        let offset = memory.skew + view.offset;
        let alignment = self.device.of.description.alignment;
        if access.by_shader && !offset.is_multiple_of(alignment) {
            return Err(Error::invalid(format!(
                "slot `{}` is bound to offset {} of buffer {}, which is no multiple of {alignment} bytes on the device",
                slot.name, view.offset, view.buffer.0
            )));
        }
        Ok(Place { memory, offset, bytes: needed })
    }
}
