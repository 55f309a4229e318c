//! The sizes of a model, and those that have names.

use crate::{Result, SyntheticError};
use engine_core::DType;
use formats::model::Activation;

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// How many a layer has; each has [`Shape::hidden`] neurons.
    pub count: u32,
    /// How many a token uses.
    pub used: u32,
}

/// Everything that decides a model's bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Width of the residual.
    pub width: u32,
    /// Neurons of a layer, or of an expert.
    pub hidden: u32,
    /// Layers.
    pub layers: u32,
    /// Query heads; they divide the width.
    pub heads: u32,
    /// Key and value heads; they divide the query heads.
    pub kv_heads: u32,
    /// Ids.
    pub vocabulary: u32,
    /// Positions that the model is made for.
    pub context: u32,
    /// Experts, where there are several.
    pub experts: Option<Experts>,
    /// `relu` or `drelu`.
    pub activation: Activation,
    /// Rank of the predictors, a multiple of 32; 0 writes none. Mixtures have none.
    pub predictor_rank: u32,
    /// Type of the matrices. Norms are F32, `fc1` is F16, `fc2` is Q8_0.
    pub dtype: DType,
    /// Everything random follows from it.
    pub seed: u64,
}

const TINY: Shape = Shape {
    width: 256,
    hidden: 1024,
    layers: 4,
    heads: 4,
    kv_heads: 2,
    vocabulary: 1024,
    context: 512,
    experts: None,
    activation: Activation::Relu,
    predictor_rank: 64,
    dtype: DType::Q8_0,
    seed: 1,
};

/// Shapes by name: what benchmarks and tests use, so that a figure says what it was measured on.
pub const PRESETS: &[(&str, Shape)] = &[
    (
        "1b",
        Shape {
            width: 2048,
            hidden: 8192,
            layers: 16,
            heads: 32,
            kv_heads: 8,
            vocabulary: 32_768,
            context: 2048,
            predictor_rank: 128,
            ..TINY
        },
    ),
    // Wide enough for every block format, small enough for tests.
    ("wide", Shape { width: 2048, hidden: 768, layers: 1, heads: 16, kv_heads: 4, vocabulary: 512, ..TINY }),
    ("tiny", TINY),
    (
        "tiny-moe",
        Shape {
            hidden: 256,
            layers: 2,
            experts: Some(Experts { count: 8, used: 2 }),
            predictor_rank: 0,
            ..TINY
        },
    ),
];

impl Shape {
    /// The shape of this name.
    ///
    /// # Errors
    /// Where there is none, with the names there are.
    pub fn preset(name: &str) -> Result<Shape> {
        let found = PRESETS.iter().find(|(known, _)| *known == name);
        found.map(|(_, shape)| shape.clone()).ok_or_else(|| {
            let names: Vec<&str> = PRESETS.iter().map(|(known, _)| *known).collect();
            problem("preset", format!("`{name}` is not known; there are {}", names.join(", ")))
        })
    }

    /// Checks the numbers against each other.
    ///
    /// # Errors
    /// The first number that does not suit.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("width", self.width),
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv-heads", self.kv_heads),
            ("vocabulary", self.vocabulary),
            ("context", self.context),
        ];
        for (what, size) in sizes {
            if size == 0 || size > 1 << 20 {
                return Err(problem(what, format!("is {size}; 1 to {} is allowed", 1 << 20)));
            }
        }
        let block = self.dtype.block_elements();
        if !u64::from(self.width).is_multiple_of(block) {
            return Err(problem(
                "width",
                format!("is {}; {} needs a multiple of {block}", self.width, self.dtype),
            ));
        }
        if !self.width.is_multiple_of(self.heads) || !(self.width / self.heads).is_multiple_of(2) {
            return Err(problem(
                "heads",
                format!("is {}; the width {} is to be an even multiple of it", self.heads, self.width),
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(problem(
                "kv-heads",
                format!("is {}; it is to divide the {} heads", self.kv_heads, self.heads),
            ));
        }
        if self.vocabulary < crate::vocabulary::FEWEST {
            let fewest = crate::vocabulary::FEWEST;
            return Err(problem(
                "vocabulary",
                format!("is {}; at least {fewest} is needed", self.vocabulary),
            ));
        }
        if !matches!(self.activation, Activation::Relu | Activation::DRelu) {
            return Err(problem(
                "activation",
                format!("is {}; relu and drelu are made", self.activation.name()),
            ));
        }
        if let Some(Experts { count, used }) = self.experts {
            if count == 0 || count > 4096 || used == 0 || used > count {
                return Err(problem(
                    "experts",
                    format!("are {used} of {count}; at least 1 of at most 4096 is to be used"),
                ));
            }
            if self.predictor_rank != 0 {
                return Err(problem("predictor-rank", "is not 0; mixtures have no predictors".to_owned()));
            }
        }
        let rank = self.predictor_rank;
        if rank != 0 && (!rank.is_multiple_of(32) || rank > self.width) {
            let problem_text = format!("is {rank}; 0 or a multiple of 32 up to the width is allowed");
            return Err(problem("predictor-rank", problem_text));
        }
        Ok(())
    }

    /// Width of a head.
    pub(crate) fn head(&self) -> u32 {
        self.width / self.heads
    }

    /// Width of all keys of a token, and of all values.
    pub(crate) fn kv_width(&self) -> u32 {
        self.head() * self.kv_heads
    }

    /// Rank of the gates' low-rank part: what a predictor of the stated rank can hold, with both signs of each
    /// direction and one row for the bias.
    pub(crate) fn gate_rank(&self) -> u32 {
        match self.predictor_rank {
            0 => (self.width / 32).clamp(4, 63),
            rank => rank / 2 - 1,
        }
    }
}

pub(crate) fn problem(what: &'static str, problem: String) -> SyntheticError {
    SyntheticError::Shape { what, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_shapes_and_others_are_refused() {
        for (name, shape) in PRESETS {
            shape.check().unwrap();
            assert_eq!(&Shape::preset(name).unwrap(), shape);
        }
        let text = Shape::preset("2b").unwrap_err().to_string();
        assert!(text.contains("1b, wide, tiny, tiny-moe"), "{text}");
        let tiny = Shape::preset("tiny").unwrap();
        let wrong = [
            (Shape { width: 0, ..tiny.clone() }, "width"),
            (Shape { width: 288, heads: 4, dtype: DType::Q4K, ..tiny.clone() }, "multiple of 256"),
            (Shape { heads: 3, ..tiny.clone() }, "heads"),
            (Shape { kv_heads: 3, ..tiny.clone() }, "kv-heads"),
            (Shape { vocabulary: 8, ..tiny.clone() }, "vocabulary"),
            (Shape { activation: Activation::Silu, ..tiny.clone() }, "relu and drelu"),
            (Shape { predictor_rank: 33, ..tiny.clone() }, "multiple of 32"),
            (Shape { experts: Some(Experts { count: 2, used: 3 }), ..tiny.clone() }, "3 of 2"),
            (Shape { experts: Some(Experts { count: 2, used: 1 }), ..tiny }, "no predictors"),
        ];
        for (shape, text) in wrong {
            let error = shape.check().unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
