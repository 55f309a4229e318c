//! An instance of Vulkan and the devices that it lists: which can be used, in which order, and what they are.

use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;
use engine_core::backend::{DeviceDescription, ToleranceClass};
use engine_core::{Error, Result};

use crate::kernels::BINDINGS;
use crate::library;
use crate::module::VulkanOptions;
use engine_plugin::machine::{self, Roots};

/// Words of a driver's error code, for messages.
pub(crate) fn failed(what: &str, code: vk::Result) -> Error {
    let detail = format!("{what}: {code} ({})", code.as_raw());
    match code {
        vk::Result::ERROR_DEVICE_LOST => Error::device_lost(detail),
        vk::Result::ERROR_OUT_OF_HOST_MEMORY
        | vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
        | vk::Result::ERROR_TOO_MANY_OBJECTS => Error::out_of_memory(detail),
        _ => Error::internal(detail),
    }
}

/// Complaints of the validation layers.
pub(crate) type Complaints = Mutex<Vec<String>>;

/// An instance, destroyed when dropped.
pub(crate) struct Instance {
    pub(crate) raw: ash::Instance,
    messenger: Option<(ash::ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    /// What the validation layers found, where they were asked for. The messenger points to it.
    pub(crate) complaints: Arc<Complaints>,
}

/// A device that can be used.
#[derive(Clone)]
pub(crate) struct Candidate {
    pub(crate) physical: vk::PhysicalDevice,
    pub(crate) description: DeviceDescription,
    pub(crate) queue_family: u32,
    pub(crate) max_range: u64,
    pub(crate) offset_alignment: u64,
    pub(crate) max_groups: u32,
    /// Whether it multiplies packed bytes itself, and is to.
    pub(crate) int8_dot: bool,
    /// The extension that brings this to drivers older than Vulkan 1.3.
    pub(crate) int8_dot_extension: bool,
    /// Alignment of imported addresses, where host memory can be imported.
    pub(crate) import_alignment: Option<u64>,
    /// Names the driver and its version, for the file of the pipeline cache.
    pub(crate) cache_key: String,
}

/// Of bound offsets, in bytes: shaders read four words at once.
const ALIGNMENT: u64 = 16;

const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

unsafe extern "system" fn on_message(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer hands over a valid structure, and the pointer that the messenger was made with, whose target
    // outlives the messenger.
    let (data, complaints) = unsafe { (&*data, &*user.cast::<Complaints>()) };
    // SAFETY: a message is a C string, or null.
    let text =
        unsafe { data.message_as_c_str() }.map_or_else(String::new, |m| m.to_string_lossy().into_owned());
    complaints.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    vk::FALSE
}

impl Instance {
    /// Makes an instance of the library that the options name.
    pub(crate) fn new(options: &VulkanOptions) -> Result<Instance> {
        let entry = library::open(&options.library)?;
        // SAFETY: the entry is a loaded Vulkan library.
        let version = unsafe { entry.try_enumerate_instance_version() }
            .map_err(|e| failed("the Vulkan loader does not tell its version", e))?
            .unwrap_or(vk::API_VERSION_1_0);
        if version < vk::API_VERSION_1_1 {
            return Err(Error::unsupported("the Vulkan loader is older than 1.1; install a newer libvulkan"));
        }
        let application = vk::ApplicationInfo::default()
            .application_name(c"thermocline")
            .api_version(version.min(vk::API_VERSION_1_3));
        let (mut layers, mut extensions) = (Vec::new(), Vec::new());
        if options.validation {
            // SAFETY: as above.
            let present = unsafe { entry.enumerate_instance_layer_properties() }
                .map_err(|e| failed("listing the layers of Vulkan", e))?;
            if !present.iter().any(|l| l.layer_name_as_c_str() == Ok(VALIDATION)) {
                return Err(Error::config(
                    "[compute.options.vulkan]: `validation` is true, but the layer VK_LAYER_KHRONOS_validation is not \
                     installed (Debian: `apt-get install vulkan-validationlayers`)",
                ));
            }
            layers.push(VALIDATION.as_ptr());
            extensions.push(ash::ext::debug_utils::NAME.as_ptr());
        }
        let info = vk::InstanceCreateInfo::default()
            .application_info(&application)
            .enabled_layer_names(&layers)
            .enabled_extension_names(&extensions);
        // SAFETY: the structure and what it points to live until the call returns.
        let raw = unsafe { entry.create_instance(&info, None) }.map_err(|e| match e {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                Error::unsupported(format!("there is no Vulkan driver; {}", library::INSTALL_HINT))
            }
            other => failed("making an instance of Vulkan", other),
        })?;
        let complaints = Arc::new(Complaints::default());
        let mut instance = Instance { raw, messenger: None, complaints };
        if options.validation {
            let debug = ash::ext::debug_utils::Instance::new(entry, &instance.raw);
            let info = vk::DebugUtilsMessengerCreateInfoEXT::default()
                .message_severity(
                    vk::DebugUtilsMessageSeverityFlagsEXT::ERROR
                        | vk::DebugUtilsMessageSeverityFlagsEXT::WARNING,
                )
                .message_type(
                    vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION
                        | vk::DebugUtilsMessageTypeFlagsEXT::GENERAL,
                )
                .pfn_user_callback(Some(on_message))
                .user_data(Arc::as_ptr(&instance.complaints).cast_mut().cast());
            // SAFETY: the user data lives in an `Arc` that this instance holds until the messenger is destroyed.
            let messenger = unsafe { debug.create_debug_utils_messenger(&info, None) }
                .map_err(|e| failed("making a messenger for the validation layers", e))?;
            instance.messenger = Some((debug, messenger));
        }
        Ok(instance)
    }

    /// The devices that can be used, and why the others cannot: GPUs first, each kind in the driver's order; those that the
    /// option `device` names, where it does.
    pub(crate) fn candidates(&self, options: &VulkanOptions) -> Result<(Vec<Candidate>, Vec<String>)> {
        // SAFETY: the instance is valid.
        let physical = unsafe { self.raw.enumerate_physical_devices() }
            .map_err(|e| failed("listing the devices of Vulkan", e))?;
        let (mut found, mut refused) = (Vec::new(), Vec::new());
        for device in physical {
            match self.candidate(device, options) {
                Ok((rank, candidate)) => found.push((rank, candidate)),
                Err(reason) => refused.push(reason),
            }
        }
        found.sort_by_key(|(rank, _)| *rank);
        let mut found: Vec<Candidate> = found.into_iter().map(|(_, candidate)| candidate).collect();
        for (index, candidate) in found.iter_mut().enumerate() {
            candidate.description.name = format!("vulkan:{index}");
        }
        Ok((chosen(found, &options.device)?, refused))
    }

    fn candidate(
        &self,
        physical: vk::PhysicalDevice,
        options: &VulkanOptions,
    ) -> std::result::Result<(u32, Candidate), String> {
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut maintenance = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        // SAFETY: the device is one of this instance's.
        let extensions =
            unsafe { self.raw.enumerate_device_extension_properties(physical) }.unwrap_or_default();
        let has = |name: &CStr| extensions.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
        let can_import = has(ash::ext::external_memory_host::NAME);
        // SAFETY: as above.
        let version = unsafe { self.raw.get_physical_device_properties(physical) }.api_version;
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut maintenance);
        if version >= vk::API_VERSION_1_2 {
            properties = properties.push_next(&mut driver);
        }
        if can_import {
            properties = properties.push_next(&mut host);
        }
        // SAFETY: as above; the chained structures are those of versions and extensions that the device has.
        unsafe { self.raw.get_physical_device_properties2(physical, &mut properties) };
        let properties = properties.properties;
        let name = properties.device_name_as_c_str().unwrap_or(c"?").to_string_lossy().into_owned();
        if version < vk::API_VERSION_1_2 {
            return Err(format!("{name}: its driver has Vulkan {}, wanted 1.2", version_text(version)));
        }
        let limits = properties.limits;
        if (limits.max_per_stage_descriptor_storage_buffers as usize) < BINDINGS {
            return Err(format!("{name}: a shader may have fewer than {BINDINGS} buffers"));
        }
        let mut timeline = vk::PhysicalDeviceTimelineSemaphoreFeatures::default();
        let mut dot = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default();
        let dot_extension = has(ash::khr::shader_integer_dot_product::NAME);
        let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut timeline);
        if version >= vk::API_VERSION_1_3 || dot_extension {
            features = features.push_next(&mut dot);
        }
        // SAFETY: as above.
        unsafe { self.raw.get_physical_device_features2(physical, &mut features) };
        if timeline.timeline_semaphore == vk::FALSE {
            return Err(format!("{name}: its driver has no timeline semaphores"));
        }
        let has_dot = dot.shader_integer_dot_product == vk::TRUE;
        let int8_dot = has_dot && options.features != "plain";
        let dot_note = match (has_dot, int8_dot) {
            (_, true) => "int8 activations meet quantised weights as integers (integer dot product)",
            (true, false) => "int8 activations are multiplied as f32 (option `features`)",
            _ => "int8 activations are multiplied as f32: the driver has no integer dot product",
        };
        // SAFETY: as above.
        let families = unsafe { self.raw.get_physical_device_queue_family_properties(physical) };
        let queue_family = families
            .iter()
            .position(|f| f.queue_flags.contains(vk::QueueFlags::COMPUTE))
            .ok_or_else(|| format!("{name}: it has no queue that computes"))?
            as u32;
        // SAFETY: as above.
        let memory = unsafe { self.raw.get_physical_device_memory_properties(physical) };
        let device_bytes = memory.memory_heaps[..memory.memory_heap_count as usize]
            .iter()
            .filter(|heap| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL))
            .map(|heap| heap.size)
            .max()
            .unwrap_or(0);
        // A driver on the CPU says what the machine has, whatever the process's control group allows.
        let device_bytes = match properties.device_type {
            vk::PhysicalDeviceType::CPU => {
                machine::memory(&Roots::default()).unwrap_or(u64::MAX).min(device_bytes)
            }
            _ => device_bytes,
        };
        let memory_bytes = match options.memory_limit {
            0 => device_bytes,
            limit => limit.min(device_bytes),
        };
        // A discrete GPU would read imported weights through the bus for every token.
        let (rank, kind, near) = match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => (0, "discrete GPU", false),
            vk::PhysicalDeviceType::INTEGRATED_GPU => (1, "integrated GPU", true),
            vk::PhysicalDeviceType::VIRTUAL_GPU => (2, "virtual GPU", false),
            vk::PhysicalDeviceType::CPU => (3, "software on the CPU", true),
            _ => (4, "device", false),
        };
        let imports = can_import
            && match options.import.as_str() {
                "on" => true,
                "off" => false,
                _ => near,
            };
        let import_note = if !can_import {
            "host memory is copied: the driver has no VK_EXT_external_memory_host"
        } else if imports {
            "host memory is imported (VK_EXT_external_memory_host)"
        } else {
            "host memory is copied to the device (option `import`)"
        };
        let driver_name = driver.driver_name_as_c_str().unwrap_or(c"").to_string_lossy().into_owned();
        let driver_info = driver.driver_info_as_c_str().unwrap_or(c"").to_string_lossy().into_owned();
        let max_range = u64::from(limits.max_storage_buffer_range) & !3;
        let description = DeviceDescription {
            name: String::new(),
            description: format!("{name} ({kind}, {driver_name} {driver_info})"),
            tolerance: ToleranceClass::F32,
            memory_bytes,
            alignment: ALIGNMENT,
            imports_host_memory: imports,
            needs_constant_weights: false,
            max_buffer_bytes: maintenance.max_memory_allocation_size,
            notes: vec![
                format!(
                    "Vulkan {}, queue family {queue_family} of {}",
                    version_text(version),
                    families.len()
                ),
                import_note.into(),
                dot_note.into(),
                format!(
                    "a shader sees at most {max_range} bytes of a buffer: larger weights are read in parts"
                ),
            ],
        };
        let uuid: String = properties.pipeline_cache_uuid.iter().map(|b| format!("{b:02x}")).collect();
        let candidate = Candidate {
            physical,
            description,
            queue_family,
            max_range,
            offset_alignment: limits.min_storage_buffer_offset_alignment.max(ALIGNMENT),
            max_groups: limits.max_compute_work_group_count.iter().copied().min().unwrap_or(0),
            int8_dot,
            int8_dot_extension: int8_dot && version < vk::API_VERSION_1_3,
            import_alignment: imports.then_some(host.min_imported_host_pointer_alignment.max(1)),
            cache_key: format!(
                "{:04x}-{:04x}-{:08x}-{uuid}",
                properties.vendor_id, properties.device_id, properties.driver_version
            ),
        };
        Ok((rank, candidate))
    }
}

/// The devices that `wanted` names: all where it is empty, one by its index, or those whose description contains it.
fn chosen(found: Vec<Candidate>, wanted: &str) -> Result<Vec<Candidate>> {
    if wanted.is_empty() || found.is_empty() {
        return Ok(found);
    }
    let names = || {
        let all: Vec<String> =
            found.iter().map(|c| format!("{} = {}", c.description.name, c.description.description)).collect();
        all.join("; ")
    };
    let fits: Vec<Candidate> = match wanted.parse::<usize>() {
        Ok(index) => found.get(index).cloned().into_iter().collect(),
        Err(_) => {
            let lower = wanted.to_lowercase();
            let fits = |c: &&Candidate| c.description.description.to_lowercase().contains(&lower);
            found.iter().filter(fits).cloned().collect()
        }
    };
    if fits.is_empty() {
        return Err(Error::config(format!(
            "[compute.options.vulkan]: `device` is {wanted:?}, but no device has this index or name; there are: {}",
            names()
        )));
    }
    Ok(fits)
}

fn version_text(version: u32) -> String {
    format!(
        "{}.{}.{}",
        vk::api_version_major(version),
        vk::api_version_minor(version),
        vk::api_version_patch(version)
    )
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some((debug, messenger)) = self.messenger.take() {
            // SAFETY: made by this instance, and not used after.
            unsafe { debug.destroy_debug_utils_messenger(messenger, None) };
        }
        // SAFETY: everything made by the instance holds an `Arc` of it and is gone.
        unsafe { self.raw.destroy_instance(None) };
    }
}
