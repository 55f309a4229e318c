//! The part of QNN's C interface that the plug-in calls: our own definitions, with their sizes asserted.
//!
//! The layouts are those of core API 2 on 64-bit systems. The table of functions has grown by appending only, so a library
//! of a later minor version has every slot named here where it is named here.

use std::ffi::{c_char, c_void};
use std::mem::{offset_of, size_of};

/// A handle of a backend, context, device, graph or log.
pub(crate) type Handle = *mut c_void;
/// 0 is success; the code is the low 16 bits.
pub(crate) type Status = u64;

/// Major version of the core API that these definitions are of.
pub(crate) const CORE_MAJOR: u32 = 2;
/// Minor versions that were run with them.
pub(crate) const CORE_MINORS_TESTED: &[u32] = &[40];
/// `backendId` of the HTP library.
pub(crate) const BACKEND_HTP: u32 = 6;
/// The package that holds the built-in operations.
pub(crate) const PACKAGE: &std::ffi::CStr = c"qti.aisw";

/// Element types of tensors and scalars.
pub(crate) mod data_type {
    pub(crate) const FLOAT_16: u32 = 0x216;
    pub(crate) const SFIXED_POINT_8: u32 = 0x308;
}

/// What a tensor is to its graph.
pub(crate) mod tensor_type {
    pub(crate) const APP_WRITE: u32 = 0;
    pub(crate) const APP_READ: u32 = 1;
    pub(crate) const NATIVE: u32 = 3;
    pub(crate) const STATIC: u32 = 4;
}

/// How quantised numbers stand for real ones.
pub(crate) mod encoding {
    pub(crate) const UNDEFINED: u32 = 0x7fff_ffff;
    pub(crate) const DEFINED: u32 = 1;
    pub(crate) const AXIS_SCALE_OFFSET: u32 = 1;
    pub(crate) const BLOCK: u32 = 4;
}

/// `value = scale * (code + offset)`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ScaleOffset {
    pub(crate) scale: f32,
    pub(crate) offset: i32,
}

/// An encoding per index of one axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AxisScaleOffset {
    pub(crate) axis: i32,
    pub(crate) count: u32,
    pub(crate) scale_offsets: *const ScaleOffset,
}

/// An encoding per block of elements; `block_size` has a number per axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BlockEncoding {
    pub(crate) block_size: *const u32,
    pub(crate) scale_offsets: *const ScaleOffset,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union EncodingUnion {
    pub(crate) axis: AxisScaleOffset,
    pub(crate) block: BlockEncoding,
    pub(crate) room: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QuantizeParams {
    pub(crate) definition: u32,
    pub(crate) encoding: u32,
    pub(crate) of: EncodingUnion,
}

impl QuantizeParams {
    /// Of a tensor that is not quantised.
    pub(crate) const NONE: QuantizeParams = QuantizeParams {
        definition: encoding::UNDEFINED,
        encoding: encoding::UNDEFINED,
        of: EncodingUnion { room: [0; 4] },
    };
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ClientBuffer {
    pub(crate) data: *mut c_void,
    pub(crate) bytes: u32,
}

/// `Qnn_TensorV1_t`, which every call that the plug-in makes takes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TensorV1 {
    /// Given by the call that creates the tensor.
    pub(crate) id: u32,
    pub(crate) name: *const c_char,
    pub(crate) kind: u32,
    pub(crate) data_format: u32,
    pub(crate) data_type: u32,
    pub(crate) quantize: QuantizeParams,
    pub(crate) rank: u32,
    pub(crate) dimensions: *mut u32,
    pub(crate) memory_type: u32,
    pub(crate) buffer: ClientBuffer,
}

/// `Qnn_Tensor_t`: a version, and room for the longest one.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) version: u32,
    pub(crate) v1: TensorV1,
    /// Fields of version 2.
    pub(crate) later: [u64; 3],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OpConfig {
    pub(crate) version: u32,
    pub(crate) name: *const c_char,
    pub(crate) package: *const c_char,
    pub(crate) kind: *const c_char,
    pub(crate) param_count: u32,
    /// The operations that the plug-in uses need none.
    pub(crate) params: *const c_void,
    pub(crate) input_count: u32,
    pub(crate) inputs: *const Tensor,
    pub(crate) output_count: u32,
    pub(crate) outputs: *const Tensor,
}

/// One entry of the null-terminated lists that configure graphs, contexts and devices; option 0 is a backend's own.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) option: u32,
    pub(crate) custom: *const c_void,
}

/// A graph option of the HTP library.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct HtpGraphConfig {
    pub(crate) option: u32,
    /// The value's first word holds it, whatever its width up to 8 bytes.
    pub(crate) value: [u64; 6],
}

impl HtpGraphConfig {
    /// Arithmetic in f16.
    pub(crate) const PRECISION_F16: HtpGraphConfig = HtpGraphConfig { option: 2, value: [1, 0, 0, 0, 0, 0] };
}

/// A device option of the HTP library. Its value lies at byte 4 or at byte 8, depending on the library's version, so both
/// hold it, in more room than any version reads.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct HtpDeviceConfig {
    pub(crate) words: [u32; 16],
}

impl HtpDeviceConfig {
    /// Asks for the system-on-chip of this number.
    pub(crate) fn soc(model: u32) -> HtpDeviceConfig {
        let mut words = [0; 16];
        (words[1], words[2]) = (model, model);
        HtpDeviceConfig { words }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) patch: u32,
}

/// Called with a format, a level, a time stamp and the arguments.
pub(crate) type LogCallback = unsafe extern "C" fn(*const c_char, u32, u64, *mut c_void);

type Configs = *const *const Config;
/// A slot that these definitions only count.
type Unused = Option<unsafe extern "C" fn()>;

/// The table of functions, as far as the plug-in reads it; every slot may be null.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    _0: Unused,
    pub(crate) backend_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _2: [Unused; 2],
    pub(crate) backend_get_build_id: Option<unsafe extern "C" fn(*mut *const c_char) -> Status>,
    _5: [Unused; 2],
    pub(crate) backend_validate_op_config: Option<unsafe extern "C" fn(Handle, OpConfig) -> Status>,
    pub(crate) backend_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    pub(crate) context_create: Option<unsafe extern "C" fn(Handle, Handle, Configs, *mut Handle) -> Status>,
    _10: Unused,
    pub(crate) context_get_binary_size: Option<unsafe extern "C" fn(Handle, *mut u64) -> Status>,
    pub(crate) context_get_binary: Option<unsafe extern "C" fn(Handle, *mut c_void, u64, *mut u64) -> Status>,
    pub(crate) context_create_from_binary: Option<
        unsafe extern "C" fn(Handle, Handle, Configs, *const c_void, u64, *mut Handle, Handle) -> Status,
    >,
    pub(crate) context_free: Option<unsafe extern "C" fn(Handle, Handle) -> Status>,
    pub(crate) graph_create:
        Option<unsafe extern "C" fn(Handle, *const c_char, Configs, *mut Handle) -> Status>,
    _16: [Unused; 2],
    pub(crate) graph_add_node: Option<unsafe extern "C" fn(Handle, OpConfig) -> Status>,
    pub(crate) graph_finalize: Option<unsafe extern "C" fn(Handle, Handle, Handle) -> Status>,
    pub(crate) graph_retrieve: Option<unsafe extern "C" fn(Handle, *const c_char, *mut Handle) -> Status>,
    pub(crate) graph_execute:
        Option<unsafe extern "C" fn(Handle, *const Tensor, u32, *mut Tensor, u32, Handle, Handle) -> Status>,
    _22: [Unused; 2],
    pub(crate) tensor_create_graph_tensor: Option<unsafe extern "C" fn(Handle, *mut Tensor) -> Status>,
    pub(crate) log_create: Option<unsafe extern "C" fn(LogCallback, u32, *mut Handle) -> Status>,
    _26: Unused,
    pub(crate) log_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _28: [Unused; 12],
    pub(crate) device_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _41: [Unused; 2],
    pub(crate) device_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _44: [Unused; 4],
    pub(crate) error_get_message: Option<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>,
}

/// What the library's one entry answers with.
#[repr(C)]
pub(crate) struct Interface {
    pub(crate) backend_id: u32,
    pub(crate) provider_name: *const c_char,
    pub(crate) core: Version,
    pub(crate) backend: Version,
    pub(crate) functions: Functions,
}

/// The entry's name and type.
pub(crate) const ENTRY: &[u8] = b"QnnInterface_getProviders\0";
pub(crate) type GetProviders = unsafe extern "C" fn(*mut *const *const Interface, *mut u32) -> Status;

const _: () = {
    assert!(size_of::<ScaleOffset>() == 8 && size_of::<AxisScaleOffset>() == 16);
    assert!(size_of::<BlockEncoding>() == 16 && size_of::<QuantizeParams>() == 40);
    assert!(size_of::<TensorV1>() == 112 && size_of::<Tensor>() == 144);
    assert!(offset_of!(TensorV1, quantize) == 32 && offset_of!(TensorV1, rank) == 72);
    assert!(offset_of!(TensorV1, dimensions) == 80 && offset_of!(TensorV1, buffer) == 96);
    assert!(size_of::<OpConfig>() == 80 && offset_of!(OpConfig, outputs) == 72);
    assert!(size_of::<Config>() == 16 && size_of::<HtpGraphConfig>() == 56);
    assert!(offset_of!(HtpGraphConfig, value) == 8 && size_of::<HtpDeviceConfig>() == 64);
    assert!(size_of::<Version>() == 12 && offset_of!(Interface, core) == 16);
    assert!(offset_of!(Interface, functions) == 40);
    assert!(
        offset_of!(Functions, backend_create) == 8 && offset_of!(Functions, backend_get_build_id) == 8 * 4
    );
    assert!(offset_of!(Functions, backend_validate_op_config) == 8 * 7);
    assert!(offset_of!(Functions, backend_free) == 8 * 8 && offset_of!(Functions, context_create) == 8 * 9);
    assert!(offset_of!(Functions, context_get_binary_size) == 8 * 11);
    assert!(offset_of!(Functions, context_get_binary) == 8 * 12);
    assert!(offset_of!(Functions, context_create_from_binary) == 8 * 13);
    assert!(offset_of!(Functions, context_free) == 8 * 14 && offset_of!(Functions, graph_create) == 8 * 15);
    assert!(
        offset_of!(Functions, graph_add_node) == 8 * 18 && offset_of!(Functions, graph_finalize) == 8 * 19
    );
    assert!(
        offset_of!(Functions, graph_retrieve) == 8 * 20 && offset_of!(Functions, graph_execute) == 8 * 21
    );
    assert!(offset_of!(Functions, tensor_create_graph_tensor) == 8 * 24);
    assert!(offset_of!(Functions, log_create) == 8 * 25 && offset_of!(Functions, log_free) == 8 * 27);
    assert!(offset_of!(Functions, device_create) == 8 * 40 && offset_of!(Functions, device_free) == 8 * 43);
    assert!(offset_of!(Functions, error_get_message) == 8 * 48);
};
