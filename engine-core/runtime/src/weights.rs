//! Brings the weights that a model's lists read to a device: as a view of the storage tier's memory where the device
//! can, as a copy otherwise.

use crate::graph::Places;
use crate::resource::{DeviceBuffer, Executable, OpenFile};
use crate::{Result, RuntimeError};
use engine_core::backend::{Bindings, Bound, BufferUse};
use engine_core::error::FOREVER;
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotRole};
use engine_core::{ComputeBackend, HostSpan, Reached, StorageTier, TensorType};
use formats::TensorInfo;
use std::path::Path;
use std::sync::Arc;

/// The weights on the device. Buffers go before the file whose memory they may view.
pub(crate) struct Weights {
    pub(crate) places: Places,
    pub(crate) bytes: u64,
    pub(crate) imported: bool,
    _buffers: Vec<DeviceBuffer>,
    _file: OpenFile,
}

impl Weights {
    /// Opens `path` in `storage` and brings `tensors` (each once) to `backend`.
    pub(crate) fn load(
        path: &Path,
        file_len: u64,
        tensors: &[TensorInfo],
        storage: &Arc<dyn StorageTier>,
        (device, backend): (&str, &Arc<dyn ComputeBackend>),
    ) -> Result<Weights> {
        let failed = |doing| {
            let (tier, path) = (storage.describe().name.clone(), path.to_path_buf());
            move |source| RuntimeError::Storage { tier, path, doing, source }
        };
        let file = OpenFile::open(storage, path).map_err(failed("open the model"))?;
        let found = storage.len(file.id()).map_err(failed("tell the model's length"))?;
        if found != file_len {
            let detail =
                format!("it has {found} bytes now, {file_len} when its header was read; load it again");
            return Err(failed("read the model")(engine_core::Error::io(detail)));
        }
        let span = storage
            .resident(file.id(), 0..file_len)
            .map_err(failed("show the model in memory"))?
            .ok_or_else(|| engine_core::Error::unsupported(
                "it keeps nothing in memory, and reading weights piece by piece is not built yet; choose `mmap` or `ram` in [storage] tier"
            ))
            .map_err(failed("keep the model in memory"))?;
        let bytes = tensors.iter().map(TensorInfo::byte_len).sum();
        if let Some(buffer) = import(span, tensors, device, backend)? {
            let mut places = Places::nowhere();
            for tensor in tensors {
                places.set(tensor, buffer.at(tensor.file_range.start));
            }
            return Ok(Weights { places, bytes, imported: true, _buffers: vec![buffer], _file: file });
        }
        let (places, buffers) = copy(span, tensors, device, backend)?;
        Ok(Weights { places, bytes, imported: false, _buffers: buffers, _file: file })
    }
}

/// The whole file as one buffer, where the device can view it; says why not otherwise.
fn import(
    span: HostSpan,
    tensors: &[TensorInfo],
    device: &str,
    backend: &Arc<dyn ComputeBackend>,
) -> Result<Option<DeviceBuffer>> {
    let description = backend.describe();
    if !description.imports_host_memory {
        return Ok(None);
    }
    let alignment = description.alignment.max(1);
    let unaligned = |tensor: &&TensorInfo| {
        !(span.address() as u64).wrapping_add(tensor.file_range.start).is_multiple_of(alignment)
    };
    if let Some(tensor) = tensors.iter().find(unaligned) {
        tracing::info!(
            "weights are copied: `{}` does not lie at a multiple of {alignment} bytes, as device `{device}` needs",
            tensor.name
        );
        return Ok(None);
    }
    let limit = description.max_buffer_bytes;
    if limit != 0 && span.len() > limit {
        tracing::info!(
            "weights are copied: the file has {} bytes, a buffer of device `{device}` at most {limit}",
            span.len()
        );
        return Ok(None);
    }
    match DeviceBuffer::import(backend, span) {
        Ok(buffer) => Ok(Some(buffer)),
        Err(engine_core::Error::Unsupported { detail }) => {
            tracing::info!("weights are copied: device `{device}` cannot view this memory: {detail}");
            Ok(None)
        }
        Err(error) => Err(RuntimeError::device(device, "viewing the model's memory")(error)),
    }
}

/// A buffer per tensor, filled by the device.
fn copy(
    span: HostSpan,
    tensors: &[TensorInfo],
    device: &str,
    backend: &Arc<dyn ComputeBackend>,
) -> Result<(Places, Vec<DeviceBuffer>)> {
    let failed = RuntimeError::device(device, "copying the weights to it");
    let mut list = OperationList::new(1);
    let (mut places, mut buffers, mut bound) = (Places::nowhere(), Vec::new(), Vec::new());
    for tensor in tensors {
        let what = format!("allocating `{}`", tensor.name);
        let buffer = DeviceBuffer::allocate(backend, tensor.byte_len(), BufferUse::Weights)
            .map_err(RuntimeError::device(device, &what))?;
        let shape =
            TensorType::matrix(tensor.dtype, tensor.rows(), tensor.row_elements()).map_err(&failed)?;
        let host = Slot {
            name: format!("{} in the file", tensor.name),
            role: SlotRole::Input,
            place: Place::Host,
            tensor: shape,
            per_token: false,
        };
        let from = list.add_slot(host);
        let to = list.fixed(&tensor.name, SlotRole::Output, shape);
        list.push(&tensor.name, OperationKind::Copy { from, to }, Arithmetic::F32);
        let part = span.slice(tensor.file_range.start, tensor.byte_len()).map_err(&failed)?;
        bound.extend([(from, Bound::Host(part)), (to, Bound::Buffer(buffer.at(0)))]);
        places.set(tensor, buffer.at(0));
        buffers.push(buffer);
    }
    list.validate().map_err(&failed)?;
    let executable = Executable::prepare(backend, &list).map_err(&failed)?;
    let bindings = Bindings { tokens: 1, slots: &bound, sequences: &[], ranges: &[] };
    let value = backend.submit(executable.id(), &bindings, &[]).map_err(&failed)?;
    while backend.wait(value, FOREVER).map_err(&failed)? == Reached::TimedOut {}
    Ok((places, buffers))
}
