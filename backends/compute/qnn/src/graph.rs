//! A graph as data: tensors, nodes and the bytes of constants, before the library sees any of it.

use std::ffi::{CStr, CString};

use engine_core::{Error, Result};

use crate::ffi::{
    self, AxisScaleOffset, BlockEncoding, ClientBuffer, EncodingUnion, QuantizeParams, ScaleOffset, Tensor,
    TensorV1, data_type, encoding,
};

/// How the numbers of a constant are encoded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Encoding {
    /// As its type says.
    #[default]
    None,
    /// A scale per row.
    Rows(Vec<f32>),
    /// A scale per block, row of blocks by row of blocks.
    Blocks {
        /// Rows and columns of a block.
        block: [u32; 2],
        /// The scales.
        scales: Vec<f32>,
    },
}

/// One tensor.
#[derive(Clone, Debug)]
pub(crate) struct TensorSpec {
    pub(crate) name: String,
    /// See [`ffi::tensor_type`].
    pub(crate) kind: u32,
    /// See [`ffi::data_type`].
    pub(crate) data_type: u32,
    pub(crate) dimensions: Vec<u32>,
    pub(crate) encoding: Encoding,
    /// Bytes of a constant; none otherwise.
    pub(crate) data: Vec<u8>,
}

/// One operation.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The library's name of the operation.
    pub(crate) kind: &'static CStr,
    /// Indices of tensors.
    pub(crate) inputs: Vec<usize>,
    pub(crate) outputs: Vec<usize>,
}

/// A graph, its nodes in the order in which they run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spec {
    pub(crate) tensors: Vec<TensorSpec>,
    pub(crate) nodes: Vec<Node>,
}

/// What a run binds: one input or output of a finished graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) kind: u32,
    pub(crate) data_type: u32,
    pub(crate) dimensions: Vec<u32>,
}

impl Spec {
    /// Bytes of its constants, with their scales.
    pub(crate) fn bytes(&self) -> u64 {
        let scales = |encoding: &Encoding| match encoding {
            Encoding::None => 0,
            Encoding::Rows(scales) | Encoding::Blocks { scales, .. } => size_of_val(&scales[..]),
        };
        self.tensors.iter().map(|tensor| (tensor.data.len() + scales(&tensor.encoding)) as u64).sum()
    }

    /// Adds a tensor.
    pub(crate) fn tensor(&mut self, name: impl Into<String>, kind: u32, dimensions: &[u32]) -> usize {
        self.tensors.push(TensorSpec {
            name: name.into(),
            kind,
            data_type: data_type::FLOAT_16,
            dimensions: dimensions.to_vec(),
            encoding: Encoding::None,
            data: Vec::new(),
        });
        self.tensors.len() - 1
    }

    /// Adds a constant.
    pub(crate) fn constant(
        &mut self,
        name: impl Into<String>,
        dimensions: &[u32],
        (data_type, encoding, data): (u32, Encoding, Vec<u8>),
    ) -> usize {
        let at = self.tensor(name, ffi::tensor_type::STATIC, dimensions);
        let tensor = &mut self.tensors[at];
        (tensor.data_type, tensor.encoding, tensor.data) = (data_type, encoding, data);
        at
    }

    /// Adds a node with one output; answers that.
    pub(crate) fn node(&mut self, kind: &'static CStr, inputs: &[usize], output: usize) -> usize {
        let name = format!("n{}_{}", self.nodes.len(), kind.to_string_lossy());
        self.nodes.push(Node { name, kind, inputs: inputs.to_vec(), outputs: vec![output] });
        output
    }
}

impl Port {
    /// The port of a tensor, with an id yet to come.
    pub(crate) fn of(tensor: &TensorSpec) -> Port {
        Port {
            id: 0,
            name: tensor.name.clone(),
            kind: tensor.kind,
            data_type: tensor.data_type,
            dimensions: tensor.dimensions.clone(),
        }
    }

    /// Bytes of its buffer.
    pub(crate) fn bytes(&self) -> usize {
        self.dimensions.iter().map(|n| *n as usize).product::<usize>() * element_bytes(self.data_type)
    }
}

/// Bytes of one element.
pub(crate) fn element_bytes(of: u32) -> usize {
    match of {
        data_type::FLOAT_16 => 2,
        data_type::SFIXED_POINT_8 => 1,
        _ => 4,
    }
}

/// Tensors as the library takes them, with what they point to.
#[derive(Default)]
pub(crate) struct RawTensors {
    pub(crate) tensors: Vec<Tensor>,
    names: Vec<CString>,
    dimensions: Vec<Vec<u32>>,
    scales: Vec<Vec<ScaleOffset>>,
    blocks: Vec<Vec<u32>>,
}

impl RawTensors {
    /// Of a graph's tensors, whose constants stay where they are.
    pub(crate) fn of(spec: &Spec) -> Result<RawTensors> {
        let mut raw = RawTensors::default();
        for tensor in &spec.tensors {
            raw.push(&Port::of(tensor), &tensor.encoding, (tensor.data.as_ptr(), tensor.data.len()))?;
        }
        Ok(raw)
    }

    /// Of a graph's ports with their buffers.
    pub(crate) fn bound(ports: &[Port], buffers: &mut [Vec<u8>]) -> Result<RawTensors> {
        let mut raw = RawTensors::default();
        if ports.len() != buffers.len() {
            return Err(Error::internal(format!("{} buffers for {} ports", buffers.len(), ports.len())));
        }
        for (port, buffer) in ports.iter().zip(buffers) {
            if buffer.len() != port.bytes() {
                return Err(Error::internal(format!("{} bytes for `{}`", buffer.len(), port.name)));
            }
            raw.push(port, &Encoding::None, (buffer.as_mut_ptr(), buffer.len()))?;
        }
        Ok(raw)
    }

    fn push(&mut self, port: &Port, encoding: &Encoding, (data, bytes): (*const u8, usize)) -> Result<()> {
        let name = CString::new(port.name.replace('\0', "_"))
            .map_err(|_| Error::internal("a name with a zero byte"))?;
        let mut dimensions = port.dimensions.clone();
        let bytes = u32::try_from(bytes).map_err(|_| {
            Error::unsupported(format!(
                "`{}` has {bytes} bytes; the library takes less than 4 GiB",
                port.name
            ))
        })?;
        let quantize = self.encode(encoding);
        self.tensors.push(Tensor {
            version: 1,
            v1: TensorV1 {
                id: port.id,
                name: name.as_ptr(),
                kind: port.kind,
                data_format: 0,
                data_type: port.data_type,
                quantize,
                rank: dimensions.len() as u32,
                dimensions: dimensions.as_mut_ptr(),
                memory_type: 0,
                buffer: ClientBuffer {
                    data: if bytes == 0 { std::ptr::null_mut() } else { data.cast_mut().cast() },
                    bytes,
                },
            },
            later: [0; 3],
        });
        self.names.push(name);
        self.dimensions.push(dimensions);
        Ok(())
    }

    fn encode(&mut self, encoding: &Encoding) -> QuantizeParams {
        let mut kept = |scales: &[f32]| {
            self.scales.push(scales.iter().map(|scale| ScaleOffset { scale: *scale, offset: 0 }).collect());
            self.scales.last().map_or(std::ptr::null(), |scales| scales.as_ptr())
        };
        let (encoding, of) = match encoding {
            Encoding::None => return QuantizeParams::NONE,
            Encoding::Rows(scales) => {
                let (count, scale_offsets) = (scales.len() as u32, kept(scales));
                let axis = AxisScaleOffset { axis: 0, count, scale_offsets };
                (encoding::AXIS_SCALE_OFFSET, EncodingUnion { axis })
            }
            Encoding::Blocks { block, scales } => {
                let scale_offsets = kept(scales);
                self.blocks.push(block.to_vec());
                let block_size = self.blocks.last().map_or(std::ptr::null(), |sizes| sizes.as_ptr());
                (encoding::BLOCK, EncodingUnion { block: BlockEncoding { block_size, scale_offsets } })
            }
        };
        QuantizeParams { definition: encoding::DEFINED, encoding, of }
    }
}
