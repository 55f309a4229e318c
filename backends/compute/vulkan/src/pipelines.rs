//! Compiled shaders, made when first needed, and the driver's cache of them on disk.
//!
//! The file lies in `$XDG_CACHE_HOME/thermocline/vulkan` (or `~/.cache/thermocline/vulkan`), one per device and driver
//! version. It is written to the side and renamed, and begins with its length and a checksum of our own: some drivers trust
//! what they are given.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;
use engine_core::{Error, Result};

use crate::device::Device;
use crate::kernels::shader;

const MAGIC: &[u8; 8] = b"THVKPC01";
/// A file longer than this is not ours.
const LONGEST: u64 = 64 << 20;

/// The pipelines of a device.
pub(crate) struct Pipelines {
    device: Arc<Device>,
    cache: vk::PipelineCache,
    file: Option<PathBuf>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    made: HashMap<String, vk::Pipeline>,
    /// Made since the file was read or written.
    new: usize,
}

impl Pipelines {
    /// None yet; with the cache of `folder`, where there is one.
    pub(crate) fn new(device: Arc<Device>, folder: Option<PathBuf>) -> Result<Pipelines> {
        let file = folder.map(|folder| folder.join(format!("{}.bin", device.of.cache_key)));
        let known = file.as_deref().and_then(read).unwrap_or_default();
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&known);
        // SAFETY: the data is what this driver's own cache gave, whole by its checksum; drivers check it again.
        let cache = unsafe { device.raw.create_pipeline_cache(&info, None) }
            .map_err(|e| device.error("making a pipeline cache", e))?;
        Ok(Pipelines { device, cache, file, state: Mutex::default() })
    }

    /// The pipeline of a shader.
    pub(crate) fn get(&self, name: &str) -> Result<vk::Pipeline> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = state.made.get(name) {
            return Ok(*pipeline);
        }
        let code = shader(name).ok_or_else(|| Error::internal(format!("there is no shader `{name}`")))?;
        let raw = &self.device.raw;
        let info = vk::ShaderModuleCreateInfo::default().code(&code);
        // SAFETY: the code was validated when it was compiled.
        let module = unsafe { raw.create_shader_module(&info, None) }
            .map_err(|e| self.device.error(&format!("loading shader `{name}`"), e))?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"main");
        let info = vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.device.pipeline_layout);
        // SAFETY: module, layout and cache are the device's.
        let made = unsafe { raw.create_compute_pipelines(self.cache, &[info], None) };
        // SAFETY: a pipeline does not need its module once it is made.
        unsafe { raw.destroy_shader_module(module, None) };
        let made = made.map_err(|(_, e)| self.device.error(&format!("compiling shader `{name}`"), e))?;
        let pipeline = *made.first().ok_or_else(|| Error::internal("the driver made no pipeline"))?;
        state.made.insert(name.to_owned(), pipeline);
        state.new += 1;
        Ok(pipeline)
    }

    /// How many are made.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).made.len() as u64
    }

    /// Writes the cache where there is something new. That it cannot be written costs time at the next start, no more.
    pub(crate) fn save(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(file) = self.file.as_deref().filter(|_| state.new > 0) else { return };
        state.new = 0;
        // SAFETY: the cache is the device's.
        if let Ok(data) = unsafe { self.device.raw.get_pipeline_cache_data(self.cache) } {
            let _ = write(file, &data);
        }
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        if self.device.hangs() {
            return;
        }
        self.save();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for pipeline in state.made.values() {
            // SAFETY: nothing that uses a pipeline is under way: executables are gone before this.
            unsafe { self.device.raw.destroy_pipeline(*pipeline, None) };
        }
        // SAFETY: as above.
        unsafe { self.device.raw.destroy_pipeline_cache(self.cache, None) };
    }
}

/// The folder that the option `pipeline_cache` names.
pub(crate) fn folder(option: &str) -> Option<PathBuf> {
    match option {
        "off" => None,
        "auto" => {
            let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
            Some(base.join("thermocline/vulkan"))
        }
        path => Some(PathBuf::from(path)),
    }
}

/// FNV-1a, 64 bits.
fn checksum(data: &[u8]) -> u64 {
    data.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn read(file: &Path) -> Option<Vec<u8>> {
    if std::fs::metadata(file).ok()?.len() > LONGEST {
        return None;
    }
    let bytes = std::fs::read(file).ok()?;
    let rest = bytes.strip_prefix(MAGIC.as_slice())?;
    let (sum, data) = rest.split_first_chunk::<8>()?;
    (u64::from_le_bytes(*sum) == checksum(data)).then(|| data.to_vec())
}

fn write(file: &Path, data: &[u8]) -> std::io::Result<()> {
    if data.len() as u64 + 16 > LONGEST {
        return Ok(());
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let beside = file.with_extension(format!("{}.part", std::process::id()));
    let bytes = [MAGIC.as_slice(), &checksum(data).to_le_bytes(), data].concat();
    std::fs::write(&beside, bytes)?;
    std::fs::rename(&beside, file).inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_file_is_no_cache() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a/b.bin");
        assert_eq!(read(&file), None);
        write(&file, b"what the driver said").unwrap();
        assert_eq!(read(&file).unwrap(), b"what the driver said");
        let good = std::fs::read(&file).unwrap();
        for cut in 0..good.len() {
            std::fs::write(&file, &good[..cut]).unwrap();
            assert_eq!(read(&file), None, "cut to {cut}");
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&file, &bad).unwrap();
            assert_eq!(read(&file), None, "flipped at {at}");
        }
    }

    #[test]
    fn the_option_names_a_folder() {
        assert_eq!(folder("off"), None);
        assert_eq!(folder("/some/where"), Some(PathBuf::from("/some/where")));
    }
}
