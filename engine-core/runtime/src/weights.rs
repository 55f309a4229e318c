//! Brings the weights that a model's lists read to their devices: as a view of the storage tier's memory where the device
//! can, as a copy otherwise, converted where the device needs it.

use crate::graph::Places;
use crate::host_binding::{self, Submission};
use crate::resource::{DeviceBuffer, Executable, OpenFile};
use crate::stages::Named;
use crate::weight::{Run, Stored, Weight, address_unit, path_of};
use crate::{Result, RuntimeError};
use engine_core::backend::{Bindings, Bound, BufferUse, BufferView};
use engine_core::error::FOREVER;
use engine_core::operation::{Arithmetic, OperationKind, OperationList, Place, Slot, SlotId, SlotRole};
use engine_core::{ComputeBackend, DType, HostMemory, HostSpan, Reached, StorageTier, TensorType};
use formats::ModelDescription;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// The weights on their devices. Buffers go before the files whose memory they may view.
pub(crate) struct Weights {
    /// Per device of the plan.
    pub(crate) places: Vec<Places>,
    /// Of all weights: those that devices view, each once, and what each device holds itself.
    pub(crate) bytes: u64,
    /// Of those that devices hold themselves, beside what they view.
    pub(crate) copied: u64,
    /// Names of those that are viewed.
    viewed: BTreeSet<String>,
    _buffers: Vec<DeviceBuffer>,
    _files: Vec<Arc<ModelFile>>,
}

impl Weights {
    /// Opens the model's files in `storage` and brings each device its `weights` (each once). `files_len` is the length of
    /// all files when their headers were read.
    pub(crate) fn load(
        model: &ModelDescription,
        files_len: u64,
        weights: &[Vec<Weight>],
        storage: &Arc<dyn StorageTier>,
        devices: &[Named],
    ) -> Result<Weights> {
        let files = open(model, files_len, storage)?;
        let mut all = Weights {
            places: Vec::new(),
            bytes: 0,
            copied: 0,
            viewed: BTreeSet::new(),
            _buffers: Vec::new(),
            _files: Vec::new(),
        };
        for (device, weights) in devices.iter().zip(weights) {
            all.bring(model, weights, storage, device, &files)?;
        }
        // A file that nothing views is needed no more: a tier that keeps it in memory gives that back.
        drop(files);
        Ok(all)
    }

    /// Brings one device its weights.
    fn bring(
        &mut self,
        model: &ModelDescription,
        weights: &[Weight],
        storage: &Arc<dyn StorageTier>,
        device: &Named,
        files: &[Arc<ModelFile>],
    ) -> Result<()> {
        let mut files = Files {
            model,
            storage,
            device: &device.name,
            backend: &device.backend,
            files: files.iter().map(|file| OnDevice { file: Arc::clone(file), imported: None }).collect(),
            reasons: BTreeMap::new(),
        };
        let mut places = Places::default();
        let (mut as_stored, mut made, mut copied) = (Vec::new(), Vec::new(), 0);
        for weight in weights {
            match weight.stored() {
                None => made.push(weight),
                Some(stored) => match files.view(weight, stored)? {
                    Some(view) => {
                        places.set(weight, view);
                        if self.viewed.insert(weight.name.clone()) {
                            self.bytes += weight.byte_len();
                        }
                        continue;
                    }
                    None => as_stored.push((weight, stored)),
                },
            }
            copied += weight.byte_len();
        }
        let mut buffers = Vec::new();
        files.copy(&as_stored, &mut places, &mut buffers)?;
        files.make(&made, &mut places, &mut buffers)?;
        if !weights.is_empty() {
            files.tell(&made, copied);
        }
        let viewed = files.files.into_iter().filter_map(|file| Some((file.imported??, file.file)));
        let (imported, viewed): (Vec<DeviceBuffer>, Vec<Arc<ModelFile>>) = viewed.unzip();
        buffers.extend(imported);
        self.places.push(places);
        self.bytes += copied;
        self.copied += copied;
        self._buffers.extend(buffers);
        self._files.extend(viewed);
        Ok(())
    }
}

/// A file of the model with its memory.
struct ModelFile {
    file: OpenFile,
    span: HostSpan,
}

/// A file of the model and one device.
struct OnDevice {
    file: Arc<ModelFile>,
    /// The device's view of it, asked for once; none where the device cannot.
    imported: Option<Option<DeviceBuffer>>,
}

/// The model's files, open.
fn open(
    model: &ModelDescription,
    files_len: u64,
    storage: &Arc<dyn StorageTier>,
) -> Result<Vec<Arc<ModelFile>>> {
    let tier = &storage.describe().name;
    let (mut files, mut total) = (Vec::new(), 0_u64);
    for path in &model.files {
        let failed = |doing| {
            move |source| RuntimeError::Storage { tier: tier.clone(), path: path.clone(), doing, source }
        };
        let file = OpenFile::open(storage, path).map_err(failed("open the model"))?;
        let length = storage.len(file.id()).map_err(failed("tell the model's length"))?;
        total = total.saturating_add(length);
        let span = storage
            .resident(file.id(), 0..length)
            .map_err(failed("show the model in memory"))?
            .ok_or_else(|| engine_core::Error::unsupported(
                "it keeps nothing in memory, and reading weights piece by piece is not built yet; choose `mmap` or `ram` in [storage] tier"
            ))
            .map_err(failed("keep the model in memory"))?;
        files.push(Arc::new(ModelFile { file, span }));
    }
    if total != files_len {
        let detail = format!("it has {total} bytes now, {files_len} when its header was read; load it again");
        let (tier, path) = (tier.clone(), model.path.clone());
        let source = engine_core::Error::io(detail);
        return Err(RuntimeError::Storage { tier, path, doing: "read the model", source });
    }
    Ok(files)
}

/// The model's files on their way to one device.
struct Files<'a> {
    model: &'a ModelDescription,
    storage: &'a Arc<dyn StorageTier>,
    device: &'a str,
    backend: &'a Arc<dyn ComputeBackend>,
    files: Vec<OnDevice>,
    /// Why weights are copied: how many bytes and weights, by reason.
    reasons: BTreeMap<String, (u64, usize)>,
}

impl<'a> Files<'a> {
    fn file(&self, at: usize) -> Result<&ModelFile> {
        self.files.get(at).map(|file| &*file.file).ok_or_else(|| {
            let source = engine_core::Error::internal(format!("the model has no file {at}"));
            RuntimeError::device(self.device, "reading the weights")(source)
        })
    }

    /// Where the device can see the weight without a copy; `None` where it cannot, the reason noted.
    fn view(&mut self, weight: &Weight, stored: &Stored) -> Result<Option<BufferView>> {
        let description = self.backend.describe();
        let (alignment, limit) = (description.alignment.max(1), description.max_buffer_bytes);
        let alignment = alignment.max(address_unit(stored.dtype));
        let reason = match &stored.runs[..] {
            _ if !description.imports_host_memory => "the device views no memory of the host".to_owned(),
            [run] => {
                let span = self.file(run.file)?.span;
                if limit != 0 && span.len() > limit {
                    format!("a buffer of the device has at most {limit} bytes, the file {}", span.len())
                } else if !(span.address() as u64).wrapping_add(run.range.start).is_multiple_of(alignment) {
                    format!("no multiple of {alignment} bytes")
                } else if let Some(buffer) = self.import(run.file)? {
                    return Ok(Some(buffer.at(run.range.start)));
                } else {
                    "the device cannot view this memory".to_owned()
                }
            }
            _ if stored.gathered => "a tensor per expert, gathered into one".to_owned(),
            _ => "rows that take turns with others".to_owned(),
        };
        let (bytes, count) = self.reasons.entry(reason).or_default();
        (*bytes, *count) = (*bytes + weight.byte_len(), *count + 1);
        Ok(None)
    }

    /// The whole file as one buffer, where the device can view it.
    fn import(&mut self, at: usize) -> Result<Option<&DeviceBuffer>> {
        let span = self.file(at)?.span;
        let imported = &mut self.files[at].imported;
        if imported.is_none() {
            *imported = Some(match DeviceBuffer::import(self.backend, span) {
                Ok(buffer) => Some(buffer),
                Err(engine_core::Error::Unsupported { detail }) => {
                    tracing::info!("device `{}` cannot view the tier's memory: {detail}", self.device);
                    None
                }
                Err(error) => {
                    return Err(RuntimeError::device(self.device, "viewing the model's memory")(error));
                }
            });
        }
        Ok(imported.as_ref().and_then(Option::as_ref))
    }

    fn allocate(
        &self,
        weight: &Weight,
        places: &mut Places,
        buffers: &mut Vec<DeviceBuffer>,
    ) -> Result<BufferView> {
        let what = format!("allocating `{}`", weight.name);
        let buffer = DeviceBuffer::allocate(self.backend, weight.byte_len(), BufferUse::Weights)
            .map_err(RuntimeError::device(self.device, &what))?;
        let view = buffer.at(0);
        places.set(weight, view);
        buffers.push(buffer);
        Ok(view)
    }

    /// Bytes as they are, copied by the device run by run, some at a time.
    fn copy(
        &self,
        weights: &[(&Weight, &Stored)],
        places: &mut Places,
        buffers: &mut Vec<DeviceBuffer>,
    ) -> Result<()> {
        let failed = RuntimeError::device(self.device, "copying the weights to it");
        let (mut list, mut bound, mut together) = (OperationList::new(1), Vec::new(), 0);
        for (weight, stored) in weights {
            let mut view = self.allocate(weight, places, buffers)?;
            for (file, range) in stored.runs.iter().flat_map(|run| pieces(weight, run)) {
                let bytes = range.end - range.start;
                let (from, to) = copy_bytes(&mut list, weight, bytes).map_err(&failed)?;
                let part = self.file(file)?.span.slice(range.start, bytes).map_err(&failed)?;
                bound.extend([(from, Bound::Host(part)), (to, Bound::Buffer(view))]);
                view.offset += bytes;
                together += bytes;
                if together >= TOGETHER {
                    together = 0;
                    self.copy_list(&std::mem::replace(&mut list, OperationList::new(1)), &bound)
                        .map_err(&failed)?;
                    bound.clear();
                }
            }
        }
        if list.operations.is_empty() {
            return Ok(());
        }
        self.copy_list(&list, &bound).map_err(&failed)
    }

    fn copy_list(&self, list: &OperationList, bound: &[(SlotId, Bound)]) -> engine_core::Result<()> {
        list.validate()?;
        let executable = Executable::prepare(self.backend, list)?;
        let bindings = Bindings { tokens: 1, slots: bound, sequences: &[], ranges: &[] };
        let value = self.backend.submit(executable.id(), &bindings, &[])?;
        while self.backend.wait(value, FOREVER)? == Reached::TimedOut {}
        Ok(())
    }

    /// Weights that are not in the files as the device gets them: made on the host, then copied, some at a time.
    fn make(&self, weights: &[&Weight], places: &mut Places, buffers: &mut Vec<DeviceBuffer>) -> Result<()> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut staged = Vec::new();
        let mut bytes = 0;
        for &weight in weights {
            let mut view = self.allocate(weight, places, buffers)?;
            weight.make(threads, &mut |file, range| self.read(file, range), &mut |portion| {
                let failed = RuntimeError::device("host", "converting weights");
                let mut memory = HostMemory::allocate(portion.len() as u64).map_err(&failed)?;
                memory.write(0, portion).map_err(&failed)?;
                staged.push((weight, memory, view));
                view.offset += portion.len() as u64;
                bytes += portion.len();
                if bytes >= TOGETHER as usize {
                    bytes = 0;
                    self.send(&mut staged)?;
                }
                Ok(())
            })?;
        }
        self.send(&mut staged)
    }

    fn read(&self, file: usize, range: Range<u64>) -> Result<Cow<'static, [u8]>> {
        let failed = |source| {
            let (tier, path) =
                (self.storage.describe().name.clone(), path_of(self.model, file).to_path_buf());
            RuntimeError::Storage { tier, path, doing: "read a weight", source }
        };
        let (memory, within) =
            host_binding::read(&**self.storage, self.file(file)?.file.id(), range).map_err(failed)?;
        Ok(memory.bytes().get(within).unwrap_or_default().to_vec().into())
    }

    /// Copies what is staged to the device, and forgets it.
    fn send(&self, staged: &mut Vec<(&Weight, HostMemory, BufferView)>) -> Result<()> {
        let failed = RuntimeError::device(self.device, "copying converted weights to it");
        let mut list = OperationList::new(1);
        let mut submission = Submission { tokens: 1, ..Submission::default() };
        for (weight, memory, view) in staged.iter_mut() {
            let (from, to) = copy_bytes(&mut list, weight, memory.len()).map_err(&failed)?;
            submission.device.push((to, *view));
            submission.host.push((from, memory));
        }
        if !list.operations.is_empty() {
            list.validate().map_err(&failed)?;
            let executable = Executable::prepare(self.backend, &list).map_err(&failed)?;
            submission.run(&**self.backend, executable.id()).map_err(&failed)?;
        }
        staged.clear();
        Ok(())
    }

    /// Says what is copied and converted, why, and what memory it takes.
    fn tell(&self, made: &[&Weight], copied: u64) {
        let device = self.device;
        for (reason, (bytes, count)) in &self.reasons {
            tracing::info!("{count} weight(s), {bytes} bytes, are copied to device `{device}`: {reason}");
        }
        let mut conversions: BTreeMap<(DType, DType), (u64, u64, usize)> = BTreeMap::new();
        for weight in made {
            let Some(stored) = weight.made_from().filter(|from| from.dtype != weight.shape.dtype) else {
                continue;
            };
            let before = stored.byte_len();
            let entry = conversions.entry((stored.dtype, weight.shape.dtype)).or_default();
            *entry = (entry.0 + before, entry.1 + weight.byte_len(), entry.2 + 1);
        }
        for ((from, to), (before, after, count)) in conversions {
            if from.is_quantised() {
                // Memory that a person did not reckon with.
                tracing::warn!(
                    "{count} weight(s) of type {from} are converted to {to}, since device `{device}` has no kernels \
                     for them: {after} bytes instead of {before}"
                );
            } else {
                tracing::info!(
                    "{count} weight(s) are held as {to} instead of {from}: {after} bytes for {before}"
                );
            }
        }
        tracing::debug!("{copied} bytes of weights are in memory of device `{device}` itself");
    }
}

/// Bytes that are copied in one submission, or one piece of at most [`AT_ONCE`] bytes more: a device may hold as many beside
/// what it is given, which its budget must have room for.
pub(crate) const TOGETHER: u64 = 1 << 20;
pub(crate) const AT_ONCE: u64 = 16 << 20;

/// A run in pieces of whole rows: its file, and their bytes there.
fn pieces(weight: &Weight, run: &Run) -> impl Iterator<Item = (usize, Range<u64>)> {
    let row = if weight.shape.rows == 1 { 1 } else { weight.shape.row_bytes().max(1) };
    let step = (AT_ONCE - AT_ONCE % row).max(row);
    let (file, end) = (run.file, run.range.end);
    let starts = std::iter::successors(Some(run.range.start), move |start| start.checked_add(step));
    starts.take_while(move |start| *start < end).map(move |start| (file, start..end.min(start + step)))
}

/// A copy of whole rows of a weight from the host, by the byte: these may start anywhere.
fn copy_bytes(
    list: &mut OperationList,
    weight: &Weight,
    bytes: u64,
) -> engine_core::Result<(SlotId, SlotId)> {
    let row = if weight.shape.rows == 1 { bytes } else { weight.shape.row_bytes() };
    let tensor = TensorType::matrix(DType::U8, bytes / row.max(1), row)?;
    let name = &weight.name;
    let from = list.add_slot(Slot {
        name: format!("{name} on the host"),
        role: SlotRole::Input,
        place: Place::Host,
        tensor,
        per_token: false,
    });
    let to = list.fixed(name, SlotRole::Output, tensor);
    list.push(name, OperationKind::Copy { from, to }, Arithmetic::F32);
    Ok((from, to))
}
