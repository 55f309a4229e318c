//! Dispatches and copies, and the command buffer that they become: descriptors written, barriers only where one command
//! needs what another wrote (decided by the bytes that each touches, so that aliasing slots are safe).

use std::sync::Arc;

use ash::vk;
use engine_core::{Error, Result};

use crate::device::Device;
use crate::kernels::{BINDINGS, PUSH_WORDS};
use crate::memory::Place;

/// What a shader does with a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// An operand of a dispatch.
#[derive(Clone)]
pub(crate) struct Binding {
    pub(crate) index: usize,
    pub(crate) place: Place,
    pub(crate) access: Access,
    /// Whether the shader counts from its base in bytes, not in words.
    pub(crate) in_bytes: bool,
}

/// One thing that the device is told to do.
#[derive(Clone)]
pub(crate) enum Command {
    /// Runs a shader.
    Dispatch { pipeline: vk::Pipeline, bindings: Vec<Binding>, numbers: Vec<u32>, groups: [u32; 3] },
    /// Copies runs of (from, to, length), relative to the places.
    Copy { from: Place, to: Place, runs: Vec<(u64, u64, u64)> },
}

/// Bytes of a buffer that a command since the last barrier touched.
struct Touched {
    buffer: vk::Buffer,
    start: u64,
    end: u64,
    written: bool,
}

/// A command buffer that can be executed again and again, with the descriptors that it names.
pub(crate) struct Recorded {
    device: Arc<Device>,
    commands_pool: vk::CommandPool,
    pub(crate) commands: vk::CommandBuffer,
    descriptors: vk::DescriptorPool,
    pub(crate) dispatches: u64,
}

impl Recorded {
    /// Records the commands in their order.
    pub(crate) fn new(device: &Arc<Device>, commands: &[Command]) -> Result<Recorded> {
        device.alive()?;
        let mut made = Recorded {
            device: device.clone(),
            commands_pool: vk::CommandPool::null(),
            commands: vk::CommandBuffer::null(),
            descriptors: vk::DescriptorPool::null(),
            dispatches: 0,
        };
        let raw = &device.raw;
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(device.of.queue_family);
        // SAFETY: the device is valid; so for every call below, each naming only what was made here.
        made.commands_pool = unsafe { raw.create_command_pool(&info, None) }
            .map_err(|e| device.error("making a command pool", e))?;
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(made.commands_pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: as above.
        let buffers = unsafe { raw.allocate_command_buffers(&info) }
            .map_err(|e| device.error("making a command buffer", e))?;
        made.commands =
            *buffers.first().ok_or_else(|| Error::internal("the driver made no command buffer"))?;
        let sets = made.descriptor_sets(commands)?;
        // SAFETY: as above.
        unsafe { raw.begin_command_buffer(made.commands, &vk::CommandBufferBeginInfo::default()) }
            .map_err(|e| device.error("beginning a command buffer", e))?;
        // What earlier submissions and the host wrote is seen.
        made.barrier();
        let (mut touched, mut next_set) = (Vec::new(), sets.iter());
        for command in commands {
            match command {
                Command::Dispatch { pipeline, bindings, numbers, groups } => {
                    let uses: Vec<(&Place, bool)> =
                        bindings.iter().map(|b| (&b.place, b.access == Access::Write)).collect();
                    made.order(&mut touched, &uses);
                    let set = next_set.next().ok_or_else(|| Error::internal("too few descriptor sets"))?;
                    made.dispatch(*pipeline, *set, bindings, numbers, *groups);
                    made.dispatches += 1;
                }
                Command::Copy { from, to, runs } => {
                    made.order(&mut touched, &[(from, false), (to, true)]);
                    let regions: Vec<vk::BufferCopy> = runs
                        .iter()
                        .map(|(source, target, length)| vk::BufferCopy {
                            src_offset: from.offset + source,
                            dst_offset: to.offset + target,
                            size: *length,
                        })
                        .collect();
                    if !regions.is_empty() {
                        // SAFETY: as above; the runs lie within places that were checked.
                        unsafe {
                            raw.cmd_copy_buffer(
                                made.commands,
                                from.memory.buffer,
                                to.memory.buffer,
                                &regions,
                            );
                        }
                    }
                }
            }
        }
        // What was written is seen by the host.
        made.barrier();
        // SAFETY: as above.
        unsafe { raw.end_command_buffer(made.commands) }
            .map_err(|e| device.error("ending a command buffer", e))?;
        Ok(made)
    }

    fn descriptor_sets(&mut self, commands: &[Command]) -> Result<Vec<vk::DescriptorSet>> {
        let dispatches: Vec<&Vec<Binding>> = commands
            .iter()
            .filter_map(|c| if let Command::Dispatch { bindings, .. } = c { Some(bindings) } else { None })
            .collect();
        if dispatches.is_empty() {
            return Ok(Vec::new());
        }
        let (device, count) = (&self.device, dispatches.len() as u32);
        let sizes = [vk::DescriptorPoolSize {
            ty: vk::DescriptorType::STORAGE_BUFFER,
            descriptor_count: count * BINDINGS as u32,
        }];
        let info = vk::DescriptorPoolCreateInfo::default().max_sets(count).pool_sizes(&sizes);
        // SAFETY: the device is valid.
        self.descriptors = unsafe { device.raw.create_descriptor_pool(&info, None) }
            .map_err(|e| device.error("making a descriptor pool", e))?;
        let layouts = vec![device.set_layout; dispatches.len()];
        let info =
            vk::DescriptorSetAllocateInfo::default().descriptor_pool(self.descriptors).set_layouts(&layouts);
        // SAFETY: the pool has room for them.
        let sets = unsafe { device.raw.allocate_descriptor_sets(&info) }
            .map_err(|e| device.error("making descriptor sets", e))?;
        for (set, bindings) in sets.iter().zip(dispatches) {
            let infos = bindings.iter().map(|b| self.buffer_info(b)).collect::<Result<Vec<_>>>()?;
            let writes: Vec<vk::WriteDescriptorSet<'_>> = bindings
                .iter()
                .zip(&infos)
                .map(|(binding, info)| {
                    vk::WriteDescriptorSet::default()
                        .dst_set(*set)
                        .dst_binding(binding.index as u32)
                        .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                        .buffer_info(std::slice::from_ref(info))
                })
                .collect();
            // SAFETY: sets and buffers are valid; offset and range obey the device's limits.
            unsafe { device.raw.update_descriptor_sets(&writes, &[]) };
        }
        Ok(sets)
    }

    /// Where the descriptor begins: at the device's alignment, before the operand itself.
    fn aligned(&self, place: &Place) -> u64 {
        place.offset - place.offset % self.device.of.offset_alignment
    }

    fn buffer_info(&self, binding: &Binding) -> Result<vk::DescriptorBufferInfo> {
        let place = &binding.place;
        let start = self.aligned(place);
        let range =
            (place.offset - start + place.bytes).next_multiple_of(16).min(place.memory.length - start);
        if range > self.device.of.max_range {
            return Err(Error::internal(format!(
                "a shader would see {range} bytes of a buffer, more than the {} that it may",
                self.device.of.max_range
            )));
        }
        Ok(vk::DescriptorBufferInfo { buffer: place.memory.buffer, offset: start, range })
    }

    fn dispatch(
        &self,
        pipeline: vk::Pipeline,
        set: vk::DescriptorSet,
        bindings: &[Binding],
        numbers: &[u32],
        groups: [u32; 3],
    ) {
        let mut words = [0u32; PUSH_WORDS];
        for binding in bindings {
            let bytes = binding.place.offset - self.aligned(&binding.place);
            words[binding.index] = if binding.in_bytes { bytes as u32 } else { (bytes / 4) as u32 };
        }
        words[8..8 + numbers.len()].copy_from_slice(numbers);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let (raw, layout) = (&self.device.raw, self.device.pipeline_layout);
        // SAFETY: the command buffer is being recorded; pipeline, set and layout are the device's.
        unsafe {
            raw.cmd_bind_pipeline(self.commands, vk::PipelineBindPoint::COMPUTE, pipeline);
            raw.cmd_bind_descriptor_sets(
                self.commands,
                vk::PipelineBindPoint::COMPUTE,
                layout,
                0,
                &[set],
                &[],
            );
            raw.cmd_push_constants(self.commands, layout, vk::ShaderStageFlags::COMPUTE, 0, &bytes);
            raw.cmd_dispatch(self.commands, groups[0], groups[1], groups[2]);
        }
    }

    /// A barrier, where one of these uses conflicts with what was touched since the last one.
    fn order(&self, touched: &mut Vec<Touched>, uses: &[(&Place, bool)]) {
        let conflict = uses.iter().any(|(place, written)| {
            let (start, end) = words(place);
            touched.iter().any(|t| {
                t.buffer == place.memory.buffer && t.start < end && start < t.end && (*written || t.written)
            })
        });
        if conflict {
            self.barrier();
            touched.clear();
        }
        touched.extend(uses.iter().map(|(place, written)| {
            let (start, end) = words(place);
            Touched { buffer: place.memory.buffer, start, end, written: *written }
        }));
    }

    fn barrier(&self) {
        let stages = vk::PipelineStageFlags::COMPUTE_SHADER
            | vk::PipelineStageFlags::TRANSFER
            | vk::PipelineStageFlags::HOST;
        let barrier = vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
            .dst_access_mask(vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE);
        // SAFETY: the command buffer is being recorded.
        unsafe {
            self.device.raw.cmd_pipeline_barrier(
                self.commands,
                stages,
                stages,
                vk::DependencyFlags::empty(),
                &[barrier],
                &[],
                &[],
            );
        }
    }
}

/// The bytes of a place, from word to word: shaders write whole words.
fn words(place: &Place) -> (u64, u64) {
    (place.offset & !3, (place.offset + place.bytes).next_multiple_of(4))
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if self.device.hangs() {
            return;
        }
        // SAFETY: its executions were waited for; null handles are allowed.
        unsafe {
            self.device.raw.destroy_descriptor_pool(self.descriptors, None);
            self.device.raw.destroy_command_pool(self.commands_pool, None);
        }
    }
}
