//! The logical device: one queue, one timeline semaphore, and what is known once the driver has lost it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ash::vk;
use engine_core::{Error, Result};

use crate::instance::{Candidate, Instance, failed};
use crate::kernels::{BINDINGS, PUSH_WORDS};

/// How long one look at the semaphore takes at most.
const LOOK: Duration = Duration::from_millis(200);

/// What a buffer's memory should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The device's own.
    Device,
    /// Written and read by the host, copied from and to by the device.
    Staging,
    /// Written by the host before every run, read by shaders.
    Parameters,
}

/// The device, destroyed when dropped.
pub(crate) struct Device {
    pub(crate) raw: ash::Device,
    pub(crate) of: Candidate,
    pub(crate) host_memory: Option<ash::ext::external_memory_host::Device>,
    pub(crate) set_layout: vk::DescriptorSetLayout,
    pub(crate) pipeline_layout: vk::PipelineLayout,
    memory: vk::PhysicalDeviceMemoryProperties,
    queue: vk::Queue,
    semaphore: vk::Semaphore,
    /// The value that the last submission signals. Held while submitting: a queue has one user at a time.
    last: Mutex<u64>,
    /// Longest time that one submission may take.
    patience: Duration,
    lost: Mutex<Option<Error>>,
    /// Work that did not end may still use everything: nothing is destroyed then.
    hangs: AtomicBool,
    /// Command buffers that the driver executed.
    pub(crate) executed: AtomicU64,
    instance: Arc<Instance>,
}

impl Device {
    /// Opens the device. `patience` is the longest time that one submission may take.
    pub(crate) fn open(instance: Arc<Instance>, of: Candidate, patience: Duration) -> Result<Device> {
        let priorities = [1.0];
        let queues = [vk::DeviceQueueCreateInfo::default()
            .queue_family_index(of.queue_family)
            .queue_priorities(&priorities)];
        let mut extensions = Vec::new();
        if of.import_alignment.is_some() {
            extensions.push(ash::ext::external_memory_host::NAME.as_ptr());
        }
        if of.int8_dot_extension {
            extensions.push(ash::khr::shader_integer_dot_product::NAME.as_ptr());
        }
        let mut dot =
            vk::PhysicalDeviceShaderIntegerDotProductFeatures::default().shader_integer_dot_product(true);
        let mut timeline = vk::PhysicalDeviceTimelineSemaphoreFeatures::default().timeline_semaphore(true);
        let mut info = vk::DeviceCreateInfo::default()
            .queue_create_infos(&queues)
            .enabled_extension_names(&extensions)
            .push_next(&mut timeline);
        if of.int8_dot {
            info = info.push_next(&mut dot);
        }
        // SAFETY: the physical device is this instance's; what the structure points to lives until the call returns.
        let raw = unsafe { instance.raw.create_device(of.physical, &info, None) }
            .map_err(|e| failed(&format!("opening {}", of.description.description), e))?;
        // SAFETY: as above.
        let memory = unsafe { instance.raw.get_physical_device_memory_properties(of.physical) };
        // SAFETY: the queue was asked for above.
        let queue = unsafe { raw.get_device_queue(of.queue_family, 0) };
        let host_memory = of
            .import_alignment
            .is_some()
            .then(|| ash::ext::external_memory_host::Device::new(&instance.raw, &raw));
        let mut device = Device {
            raw,
            of,
            host_memory,
            set_layout: vk::DescriptorSetLayout::null(),
            pipeline_layout: vk::PipelineLayout::null(),
            memory,
            queue,
            semaphore: vk::Semaphore::null(),
            last: Mutex::new(0),
            patience,
            lost: Mutex::default(),
            hangs: AtomicBool::new(false),
            executed: AtomicU64::new(0),
            instance,
        };
        device.make_shared()?;
        Ok(device)
    }

    /// The objects that all executables share; on failure dropping `self` destroys those made.
    fn make_shared(&mut self) -> Result<()> {
        let mut timeline = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut timeline);
        // SAFETY: the device is valid, and has timeline semaphores enabled.
        self.semaphore = unsafe { self.raw.create_semaphore(&info, None) }
            .map_err(|e| failed("making a timeline semaphore", e))?;
        let bindings: Vec<_> = (0..BINDINGS as u32)
            .map(|binding| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: the device is valid.
        self.set_layout = unsafe { self.raw.create_descriptor_set_layout(&info, None) }
            .map_err(|e| failed("making a descriptor set layout", e))?;
        let ranges = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size((PUSH_WORDS * 4) as u32)];
        let layouts = [self.set_layout];
        let info =
            vk::PipelineLayoutCreateInfo::default().set_layouts(&layouts).push_constant_ranges(&ranges);
        // SAFETY: the device and the layout are valid.
        self.pipeline_layout = unsafe { self.raw.create_pipeline_layout(&info, None) }
            .map_err(|e| failed("making a pipeline layout", e))?;
        Ok(())
    }

    /// The error that everything gives once the device is lost.
    pub(crate) fn alive(&self) -> Result<()> {
        match &*self.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Whether work that never ended may still be using what was given to the driver.
    pub(crate) fn hangs(&self) -> bool {
        self.hangs.load(Relaxed)
    }

    /// An error of the driver; a lost device stays lost.
    pub(crate) fn error(&self, what: &str, code: vk::Result) -> Error {
        let error = failed(what, code);
        if code == vk::Result::ERROR_DEVICE_LOST {
            self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.clone());
        }
        error
    }

    /// The index of a memory type among `allowed` that suits `kind`.
    pub(crate) fn memory_type(&self, allowed: u32, kind: Kind) -> Option<u32> {
        use vk::MemoryPropertyFlags as F;
        let host = F::HOST_VISIBLE | F::HOST_COHERENT;
        let wishes = match kind {
            Kind::Device => [F::DEVICE_LOCAL, F::empty()],
            Kind::Staging => [host | F::HOST_CACHED, host],
            Kind::Parameters => [host | F::DEVICE_LOCAL, host],
        };
        let types = &self.memory.memory_types[..self.memory.memory_type_count as usize];
        wishes.iter().find_map(|wish| {
            let fits = |i: usize| allowed & (1 << i) != 0 && types[i].property_flags.contains(*wish);
            (0..types.len()).find(|&i| fits(i)).map(|i| i as u32)
        })
    }

    /// Executes a command buffer and waits until it is done.
    pub(crate) fn execute(&self, commands: vk::CommandBuffer) -> Result<()> {
        self.alive()?;
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let value = *last + 1;
        let (buffers, semaphores, values) = ([commands], [self.semaphore], [value]);
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default().signal_semaphore_values(&values);
        let submit = vk::SubmitInfo::default()
            .command_buffers(&buffers)
            .signal_semaphores(&semaphores)
            .push_next(&mut timeline);
        // SAFETY: the lock makes this thread the queue's only user; the command buffer is recorded, and neither it nor what
        // it names is changed or destroyed before the wait below has ended.
        unsafe { self.raw.queue_submit(self.queue, &[submit], vk::Fence::null()) }
            .map_err(|e| self.error("submitting work", e))?;
        *last = value;
        drop(last);
        self.executed.fetch_add(1, Relaxed);
        self.wait(value)
    }

    fn wait(&self, value: u64) -> Result<()> {
        let (semaphores, values) = ([self.semaphore], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let began = Instant::now();
        loop {
            // SAFETY: the semaphore lives as long as the device.
            match unsafe { self.raw.wait_semaphores(&info, LOOK.as_nanos() as u64) } {
                Ok(()) => break,
                Err(vk::Result::TIMEOUT) if began.elapsed() < self.patience => {}
                Err(vk::Result::TIMEOUT) => {
                    self.hangs.store(true, Relaxed);
                    let error = Error::device_lost(format!(
                        "{} did not end a submission within {} s (option `submit_timeout_s`)",
                        self.of.description.description,
                        self.patience.as_secs()
                    ));
                    self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error.clone());
                    return Err(error);
                }
                Err(code) => return Err(self.error("waiting for work", code)),
            }
        }
        let mut complaints = self.instance.complaints.lock().unwrap_or_else(PoisonError::into_inner);
        match complaints.is_empty() {
            true => Ok(()),
            false => Err(Error::internal(format!(
                "the validation layers say: {}",
                complaints.drain(..).collect::<Vec<_>>().join("; ")
            ))),
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.hangs() {
            // The driver is still at work: its instance stays, too, until the program ends.
            std::mem::forget(self.instance.clone());
            return;
        }
        // SAFETY: every executable and buffer holds an `Arc` of the device and is gone, and all work was waited for.
        unsafe {
            self.raw.destroy_pipeline_layout(self.pipeline_layout, None);
            self.raw.destroy_descriptor_set_layout(self.set_layout, None);
            self.raw.destroy_semaphore(self.semaphore, None);
            self.raw.destroy_device(None);
        }
    }
}
