//! The two tables of limits, each figure with its reason.
//!
//! A limit is a share of an element's scale (see [`crate::scale`]): the element may differ from the oracle by
//! `figure * scale.sum`, plus what the scale itself allows for ties and flushed subnormal numbers. [`stated`] holds
//! against the oracle doing the descriptor's own arithmetic, [`exact`] against true f64, where the bound of the stated
//! quantisation is added by rule (half a step per int8 code) instead of being hidden in a figure.

use engine_core::DType;
use engine_core::backend::ToleranceClass;

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// Share of the scale.
    pub figure: f64,
    /// Why it is what it is.
    pub reason: &'static str,
}

const fn limit(figure: f64, reason: &'static str) -> Limit {
    Limit { figure, reason }
}

/// Unit roundoff of f32.
const U: f64 = 5.960_464_477_539_063e-8;
/// Unit roundoff of f16.
const H: f64 = 4.882_812_5e-4;

/// The limit against the oracle in the stated arithmetic.
pub fn stated(operation: &str, dtype: DType, class: ToleranceClass) -> Limit {
    match class {
        ToleranceClass::Exact64 => exact64(operation),
        ToleranceClass::F16 => f16_class(operation),
        _ => f32_class(operation, dtype),
    }
}

/// The limit against true f64.
pub fn exact(operation: &str, dtype: DType, class: ToleranceClass) -> Limit {
    let stated = stated(operation, dtype, class);
    match operation {
        "copy" | "kv-append" | "kv-export" | "kv-import" => stated,
        _ => limit(
            4.0 * stated.figure,
            "four times the stated limit: the oracle's own rounding to f32 and second-order terms come on top; the \
             bound of the stated quantisation is added by rule",
        ),
    }
}

fn exact64(operation: &str) -> Limit {
    match operation {
        "copy" | "kv-append" | "kv-export" | "kv-import" | "predict" => EXACT,
        _ => limit(
            2.0 * U,
            "f64 arithmetic, rounded once to f32 (half an ulp), and once more for an accumulated output",
        ),
    }
}

const EXACT: Limit = limit(0.0, "bytes are moved or decided, not computed: any difference is a fault");

fn f32_class(operation: &str, dtype: DType) -> Limit {
    match operation {
        "copy" | "kv-append" | "kv-export" | "kv-import" => EXACT,
        "embed" => limit(
            4.0 * U,
            "scale, code and minimum are at most three f32 roundings after an exact f16 conversion",
        ),
        "add" | "multiply" => limit(U, "one f32 rounding"),
        "activate" => limit(
            16.0 * U,
            "an exponential, erf or tanh good to a few ulp, and two or three roundings; 16 covers the usual polynomials",
        ),
        "norm" => limit(
            16.0 * U,
            "the sum of squares is of one sign: lanes keep its relative error at a few ulp; root, division and product \
             add three",
        ),
        "rope" => limit(
            16.0 * U,
            "pow, position * theta and sine each a few ulp, taken relative to the angle by the scale",
        ),
        "attention" => limit(
            24.0 * U,
            "scores, exponential and the weighted sum, each a few ulp on its own condition; the scale carries the \
             scores' condition through the softmax",
        ),
        "predict" => limit(32.0 * U, "two products with f32 sums"),
        "route" => limit(
            16.0 * U,
            "an exponential of a difference, a sum of one sign and two quotients, each a few ulp on its own condition",
        ),
        "experts" => limit(
            36.0 * U,
            "as ffn, then a product and a sum per expert; the experts' conditions are weighted in the scale",
        ),
        "ffn" => limit(
            32.0 * U,
            "three products with f32 sums in 8 lanes or more, and a function; their conditions are in the scale",
        ),
        _ => match dtype {
            DType::F32 | DType::F16 | DType::BF16 => limit(
                24.0 * U,
                "an f32 sum of f32 products in 8 lanes or more: about sqrt(n/8) roundings where all terms have one sign",
            ),
            _ => limit(
                24.0 * U,
                "f32 sums over blocks, the scales multiplied in; a block's own sum is exact (int8) or 32 terms (f32)",
            ),
        },
    }
}

fn f16_class(operation: &str) -> Limit {
    match operation {
        "copy" | "kv-append" | "kv-export" | "kv-import" => EXACT,
        "add" | "multiply" | "embed" => limit(2.0 * H, "operands and result rounded to f16"),
        "rope" => limit(4.0 * H, "sine and cosine in f16, two products and a sum"),
        "route" => limit(4.0 * H, "exponentials in f16"),
        "ffn" | "experts" => limit(
            8.0 * H,
            "f16 operands, products and hidden activations through three products; a phone's NPU measures near 6e-4",
        ),
        _ => limit(4.0 * H, "f16 operands and products; a phone's NPU measures near 6e-4"),
    }
}

/// Every row of both tables, for the report's page of limits.
pub fn table() -> Vec<(&'static str, &'static str, ToleranceClass, Limit, Limit)> {
    let operations = [
        "copy",
        "embed",
        "norm",
        "linear",
        "rope",
        "kv-append",
        "attention",
        "ffn",
        "predict",
        "route",
        "experts",
        "activate",
        "add",
        "multiply",
        "kv-export",
        "kv-import",
    ];
    let mut rows = Vec::new();
    for class in [ToleranceClass::Exact64, ToleranceClass::F32, ToleranceClass::F16] {
        for operation in operations {
            let dtypes: &[(&str, DType)] = match operation {
                "linear" => &[("unquantised", DType::F32), ("quantised", DType::Q8_0)],
                _ => &[("all", DType::F32)],
            };
            for (name, dtype) in dtypes {
                rows.push((
                    operation,
                    *name,
                    class,
                    stated(operation, *dtype, class),
                    exact(operation, *dtype, class),
                ));
            }
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_has_a_reason_and_classes_are_ordered() {
        for (operation, _, _, stated, exact) in table() {
            assert!(stated.reason.len() > 10 && exact.figure >= stated.figure, "{operation}");
        }
        for operation in ["linear", "ffn", "norm", "attention", "activate"] {
            let of = |class| stated(operation, DType::F32, class).figure;
            assert!(of(ToleranceClass::Exact64) < of(ToleranceClass::F32));
            assert!(of(ToleranceClass::F32) < of(ToleranceClass::F16));
        }
    }
}
