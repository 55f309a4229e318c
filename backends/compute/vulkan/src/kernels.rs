//! The shaders by name, and the codes that they and the host agree on.

use engine_core::DType;
use engine_core::operation::Activation;

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// Lanes of every workgroup.
pub(crate) const LANES: u64 = 64;
/// Rows of weights that a workgroup of `product` has.
pub(crate) const PRODUCT_ROWS: u64 = 4;
/// Neurons that a workgroup of `down_neurons` adds; windows of such weights begin at multiples.
pub(crate) const CHUNK: u64 = 64;
/// Tokens that a workgroup of `down_neurons` works on.
pub(crate) const DOWN_TILE: u64 = 4;
/// The longest head that `attention` has room for.
pub(crate) const LONGEST_HEAD: u32 = 512;
/// The most experts that `route` has room for.
pub(crate) const MOST_EXPERTS: u64 = 1024;
/// Bindings that a shader may have.
pub(crate) const BINDINGS: usize = 6;
/// Words of push constants: eight bases, then 24 numbers.
pub(crate) const PUSH_WORDS: usize = 32;

/// Bits of `n1.z` of `product`.
pub(crate) mod flags {
    pub(crate) const BIAS: u32 = 1;
    pub(crate) const ACCUMULATE: u32 = 2;
    pub(crate) const MASK: u32 = 4;
    pub(crate) const RANGES: u32 = 8;
    pub(crate) const DROP: u32 = 16;
}

/// The types of weights that the shaders read.
pub(crate) const WEIGHT_TYPES: [DType; 8] =
    [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q4K, DType::Q6K];

/// The name of a weight type in names of shaders.
pub(crate) fn format_name(dtype: DType) -> Option<&'static str> {
    Some(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::Q8_0 => "q8_0",
        DType::Q4_0 => "q4_0",
        DType::Q4_1 => "q4_1",
        DType::Q4K => "q4_k",
        DType::Q6K => "q6_k",
        _ => return None,
    })
}

/// Whether codes of these weights can be multiplied with codes of activations.
pub(crate) fn is_coded(dtype: DType) -> bool {
    matches!(dtype, DType::Q8_0 | DType::Q4_0 | DType::Q4_1)
}

/// What a product is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Linear,
    Gate,
    Up,
    Down,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Linear => "linear",
            Mode::Gate => "gate",
            Mode::Up => "up",
            Mode::Down => "down",
        }
    }
}

/// The code of an activation function in `numbers.wgsl`.
pub(crate) fn function_code(function: Activation) -> Option<u32> {
    Some(match function {
        Activation::Identity => 0,
        Activation::Relu => 1,
        Activation::ReluSquared => 2,
        Activation::Silu => 3,
        Activation::GeluTanh => 4,
        Activation::GeluErf => 5,
        _ => return None,
    })
}

/// The SPIR-V of a shader.
pub(crate) fn shader(name: &str) -> Option<Vec<u32>> {
    let (_, bytes) = SHADERS.iter().find(|(known, _)| *known == name)?;
    Some(bytes.chunks_exact(4).map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_its_shaders() {
        for dtype in WEIGHT_TYPES {
            let format = format_name(dtype).unwrap();
            for mode in [Mode::Linear, Mode::Gate, Mode::Up, Mode::Down] {
                for tile in [1, 4] {
                    let name = format!("product_{format}_{}_{tile}", mode.name());
                    assert!(shader(&name).is_some());
                    let dot = shader(&format!("{name}_dot"));
                    assert_eq!(dot.is_some(), is_coded(dtype) && mode != Mode::Down, "{name}");
                }
            }
            for kernel in ["embed", "down_neurons"] {
                let words = shader(&format!("{kernel}_{format}")).unwrap();
                assert_eq!(words[0], 0x0723_0203, "the magic number of SPIR-V");
            }
        }
        assert!(shader("no-such-shader").is_none());
    }
}
