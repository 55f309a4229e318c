//! The library's own handles for one device: log, backend, device; and graphs within contexts.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use engine_core::{Error, Result};

use crate::ffi::{self, Config, Handle, HtpDeviceConfig, HtpGraphConfig, OpConfig, Tensor};
use crate::graph::{Port, RawTensors, Spec};
use crate::library::Library;
use crate::log;
use crate::quiet::Quiet;

/// The system-on-chip of the sessions that are open, and how many there are: the library keeps one choice per process, and
/// a second one would change what the first one's graphs are checked against.
static CHOSEN: Mutex<(u32, usize)> = Mutex::new((0, 0));

fn chosen() -> MutexGuard<'static, (u32, usize)> {
    CHOSEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An open device. Every call into the library goes through one of these, by one thread at a time.
pub(crate) struct Session {
    pub(crate) library: &'static Library,
    log: Handle,
    backend: Handle,
    device: Handle,
}

// SAFETY: the library's handles may be used by any thread.
unsafe impl Send for Session {}
// SAFETY: as above; `Driver` calls them one at a time.
unsafe impl Sync for Session {}

/// A context with one graph in it. It is freed with the last user.
pub(crate) struct Compiled {
    session: Arc<Session>,
    context: Handle,
    graph: Handle,
    pub(crate) inputs: Vec<Port>,
    pub(crate) outputs: Vec<Port>,
}

// SAFETY: as the session's.
unsafe impl Send for Compiled {}
// SAFETY: as the session's.
unsafe impl Sync for Compiled {}

/// The name of the one graph of a context.
const GRAPH: &std::ffi::CStr = c"thermocline";

impl Session {
    /// Opens the device of a system-on-chip; 0 is the one that the library finds (the emulator: its default).
    pub(crate) fn open(library: &'static Library, soc: u32) -> Result<Session> {
        log::clear();
        {
            let mut chosen = chosen();
            if chosen.1 > 0 && chosen.0 != soc {
                return Err(Error::unsupported(format!(
                    "SoC {soc}: this process drives SoC {} already, and the QNN library keeps one choice per process (option \
                     `soc`)",
                    chosen.0
                )));
            }
            *chosen = (soc, chosen.1 + 1);
        }
        let mut session = Session { library, log: null_mut(), backend: null_mut(), device: null_mut() };
        // Declared behind the session, so that it ends first where one of the calls fails: closing is quiet by itself.
        let _quiet = Quiet::begin();
        if let Some(create) = library.functions.log_create {
            // SAFETY: the callback lives as long as the program. A library without a log works all the same.
            unsafe { create(log::callback, log::LEVEL, &mut session.log) };
        }
        let create = library.functions.backend_create.ok_or_else(|| library.lacks("backendCreate"))?;
        // SAFETY: no configuration; the handle's place is written by the call.
        let status = unsafe { create(session.log, std::ptr::null(), &mut session.backend) };
        session.check("opening the backend", status)?;
        let create = library.functions.device_create.ok_or_else(|| library.lacks("deviceCreate"))?;
        let of_soc = HtpDeviceConfig::soc(soc);
        let config = Config { option: 0, custom: (&raw const of_soc).cast() };
        let configs = [&raw const config, std::ptr::null()];
        let configs = if soc == 0 { std::ptr::null() } else { configs.as_ptr() };
        // SAFETY: the configuration outlives the call, which copies it.
        let status = unsafe { create(session.log, configs, &mut session.device) };
        session.check(&format!("opening the device for SoC {soc}"), status)?;
        Ok(session)
    }

    fn check(&self, what: &str, status: u64) -> Result<()> {
        if status == 0 { Ok(()) } else { Err(self.library.error(what, status)) }
    }

    /// Builds and finalises a graph.
    pub(crate) fn compile(self: &Arc<Session>, spec: &Spec) -> Result<Compiled> {
        log::clear();
        let functions = &self.library.functions;
        let create = functions.context_create.ok_or_else(|| self.library.lacks("contextCreate"))?;
        let mut compiled = self.empty();
        // SAFETY: handles of this session; the place is written by the call.
        let status = unsafe { create(self.backend, self.device, std::ptr::null(), &mut compiled.context) };
        self.check("creating a context", status)?;
        let create = functions.graph_create.ok_or_else(|| self.library.lacks("graphCreate"))?;
        let precision = HtpGraphConfig::PRECISION_F16;
        let config = Config { option: 0, custom: (&raw const precision).cast() };
        let configs = [&raw const config, std::ptr::null()];
        // SAFETY: the configuration outlives the call.
        let status =
            unsafe { create(compiled.context, GRAPH.as_ptr(), configs.as_ptr(), &mut compiled.graph) };
        self.check("creating a graph", status)?;
        let mut raw = RawTensors::of(spec)?;
        let create = functions
            .tensor_create_graph_tensor
            .ok_or_else(|| self.library.lacks("tensorCreateGraphTensor"))?;
        for (at, tensor) in raw.tensors.iter_mut().enumerate() {
            // SAFETY: everything that the tensor points to lives in `raw` or `spec`.
            let status = unsafe { create(compiled.graph, tensor) };
            self.check(&format!("creating tensor `{}`", spec.tensors[at].name), status)?;
        }
        let validate = functions
            .backend_validate_op_config
            .ok_or_else(|| self.library.lacks("backendValidateOpConfig"))?;
        let add = functions.graph_add_node.ok_or_else(|| self.library.lacks("graphAddNode"))?;
        for node in &spec.nodes {
            let name =
                CString::new(node.name.as_str()).map_err(|_| Error::internal("a name with a zero byte"))?;
            let pick = |of: &[usize]| of.iter().map(|at| raw.tensors[*at]).collect::<Vec<Tensor>>();
            let (inputs, outputs) = (pick(&node.inputs), pick(&node.outputs));
            let config = OpConfig {
                version: 1,
                name: name.as_ptr(),
                package: ffi::PACKAGE.as_ptr(),
                kind: node.kind.as_ptr(),
                param_count: 0,
                params: std::ptr::null(),
                input_count: inputs.len() as u32,
                inputs: inputs.as_ptr(),
                output_count: outputs.len() as u32,
                outputs: outputs.as_ptr(),
            };
            let what = |step: &str| format!("{step} {} `{}`", node.kind.to_string_lossy(), node.name);
            // SAFETY: what the configuration points to outlives both calls.
            let status = unsafe { validate(self.backend, config) };
            self.check(&what("validating"), status)?;
            // SAFETY: as above.
            let status = unsafe { add(compiled.graph, config) };
            self.check(&what("adding"), status)?;
        }
        let finalize = functions.graph_finalize.ok_or_else(|| self.library.lacks("graphFinalize"))?;
        // SAFETY: a graph of this session; no profile and no signal.
        let status = unsafe { finalize(compiled.graph, null_mut(), null_mut()) };
        self.check("finalising the graph", status)?;
        for (at, tensor) in spec.tensors.iter().enumerate() {
            let port = || Port { id: raw.tensors[at].v1.id, ..Port::of(tensor) };
            match tensor.kind {
                ffi::tensor_type::APP_WRITE => compiled.inputs.push(port()),
                ffi::tensor_type::APP_READ => compiled.outputs.push(port()),
                _ => {}
            }
        }
        Ok(compiled)
    }

    /// A graph from a context binary, with the ports that were saved beside it.
    pub(crate) fn load(
        self: &Arc<Session>,
        binary: &[u8],
        inputs: Vec<Port>,
        outputs: Vec<Port>,
    ) -> Result<Compiled> {
        log::clear();
        let functions = &self.library.functions;
        let create = functions
            .context_create_from_binary
            .ok_or_else(|| self.library.lacks("contextCreateFromBinary"))?;
        let mut compiled = self.empty();
        (compiled.inputs, compiled.outputs) = (inputs, outputs);
        // SAFETY: the binary outlives the call; the place is written by it.
        let status = unsafe {
            create(
                self.backend,
                self.device,
                std::ptr::null(),
                binary.as_ptr().cast(),
                binary.len() as u64,
                &mut compiled.context,
                null_mut(),
            )
        };
        self.check("loading a context binary", status)?;
        let retrieve = functions.graph_retrieve.ok_or_else(|| self.library.lacks("graphRetrieve"))?;
        // SAFETY: a context of this session; the place is written by the call.
        let status = unsafe { retrieve(compiled.context, GRAPH.as_ptr(), &mut compiled.graph) };
        self.check("finding the graph of a context binary", status)?;
        Ok(compiled)
    }

    fn empty(self: &Arc<Session>) -> Compiled {
        Compiled {
            session: self.clone(),
            context: null_mut(),
            graph: null_mut(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _quiet = Quiet::begin();
        let functions = &self.library.functions;
        // SAFETY: handles of our own, each freed once; contexts hold the session, so none is left.
        unsafe {
            for (handle, free) in [
                (self.device, functions.device_free),
                (self.backend, functions.backend_free),
                (self.log, functions.log_free),
            ] {
                if let Some(free) = free.filter(|_| !handle.is_null()) {
                    free(handle);
                }
            }
        }
        chosen().1 -= 1;
    }
}

impl Compiled {
    /// The context as bytes.
    pub(crate) fn binary(&self) -> Result<Vec<u8>> {
        let library = self.session.library;
        let size_of =
            library.functions.context_get_binary_size.ok_or_else(|| library.lacks("contextGetBinarySize"))?;
        let get = library.functions.context_get_binary.ok_or_else(|| library.lacks("contextGetBinary"))?;
        let (mut size, mut written) = (0u64, 0u64);
        // SAFETY: a context of this session; the places are written by the calls, the buffer has the size asked for.
        let status = unsafe { size_of(self.context, &mut size) };
        self.session.check("asking for the size of a context binary", status)?;
        let length = usize::try_from(size).map_err(|_| Error::internal("a context binary of no size"))?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(length)
            .map_err(|_| Error::out_of_memory(format!("{size} bytes for a context binary")))?;
        bytes.resize(length, 0);
        // SAFETY: as above.
        let status = unsafe { get(self.context, bytes.as_mut_ptr().cast(), size, &mut written) };
        self.session.check("taking a context binary", status)?;
        bytes.truncate(usize::try_from(written).unwrap_or(length).min(length));
        Ok(bytes)
    }

    /// Runs the graph once over these bytes, one buffer per port.
    pub(crate) fn execute(&self, inputs: &mut [Vec<u8>], outputs: &mut [Vec<u8>]) -> Result<()> {
        log::clear();
        let library = self.session.library;
        let execute = library.functions.graph_execute.ok_or_else(|| library.lacks("graphExecute"))?;
        let ins = RawTensors::bound(&self.inputs, inputs)?;
        let mut outs = RawTensors::bound(&self.outputs, outputs)?;
        // SAFETY: each tensor has a buffer of its own length, which outlives the call.
        let status = unsafe {
            execute(
                self.graph,
                ins.tensors.as_ptr(),
                ins.tensors.len() as u32,
                outs.tensors.as_mut_ptr(),
                outs.tensors.len() as u32,
                null_mut(),
                null_mut(),
            )
        };
        self.session.check("executing a graph", status)
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        if let Some(free) = self.session.library.functions.context_free.filter(|_| !self.context.is_null()) {
            // SAFETY: a context of our own, freed once; its graph goes with it.
            unsafe { free(self.context, null_mut()) };
        }
    }
}
