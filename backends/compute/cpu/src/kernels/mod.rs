//! The arithmetic of the CPU backend: kernels written once over an eight-lane vector, compiled once per instruction
//! tier, chosen at run time.
//!
//! A tier is one file that implements [`simd::Simd`] and calls `kernel_table!`; [`tiers`] lists those that this
//! architecture has. Nothing outside a tier's entry points is compiled for wider instructions than the target's
//! baseline, so nothing wide runs before the choice is made.
//!
//! # Sums
//! An output element is one accumulator of eight lanes, walked over its row in order (element `i` belongs to lane
//! `i % 8`; with int8 activations lane `i` has the exact sum of elements `4i..4i + 4` of each block, but see
//! [`simd::Simd::SQUARES`] and the estimate of [`planes`]), folded once at the end in a fixed
//! order. Speed comes from several outputs at a time, never from several accumulators per output, so the bits of an
//! output depend on its row, its token and the tier, and on nothing else.

#![allow(
    clippy::needless_range_loop,
    reason = "register blocks index several arrays by the same small number"
)]

pub(crate) mod attention;
pub(crate) mod axpy;
pub(crate) mod blocks;
pub(crate) mod format;
pub(crate) mod masked;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod planes;
pub(crate) mod pointwise;
pub(crate) mod prefill;
pub(crate) mod quantised;
pub(crate) mod rope;
pub(crate) mod simd;
mod squares;
mod wide;

mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod dotprod;
#[cfg(target_arch = "aarch64")]
mod i8mm;
#[cfg(target_arch = "aarch64")]
mod neon;

use engine_core::{Error, Result};

/// The entry points of one tier. All pointers are to memory that the caller owns for the call.
///
/// # Safety
/// Every entry needs the tier to have been detected, which [`select`] does, and memory as its arguments describe it.
pub(crate) struct Kernels {
    /// The tier's name, as in the option `features`.
    pub(crate) name: &'static str,
    /// Rows of a weight matrix times tokens.
    pub(crate) matmul: unsafe fn(&matmul::Matmul<'_>, &mut matmul::Tile),
    /// Rows of a weight matrix times one token of which only some elements take part.
    pub(crate) masked: unsafe fn(&masked::Masked<'_>),
    /// `y += h x row` over many rows.
    pub(crate) axpy: unsafe fn(&axpy::Axpy<'_>),
    /// The same for several tokens that share the rows.
    pub(crate) axpy_tokens: unsafe fn(&axpy::AxpyTokens<'_>, &mut matmul::Tile),
    /// Int8 blocks of a row of activations.
    pub(crate) quantise: unsafe fn(x: *const f32, n: usize, codes: *mut i8, scales: *mut f32),
    /// Int8 blocks back to f32.
    pub(crate) dequantise: unsafe fn(codes: *const i8, scales: *const f32, n: usize, out: *mut f32),
    /// One row of weights as f32, times a factor.
    pub(crate) weight_row:
        unsafe fn(row: format::Row, format: format::WeightType, n: usize, scale: f32, out: *mut f32),
    /// One group of a normalisation.
    pub(crate) norm: unsafe fn(&norm::Norm),
    /// One head of one token.
    pub(crate) attention: unsafe fn(&attention::Head),
    /// A scalar function over a run of elements.
    pub(crate) activate:
        unsafe fn(engine_core::operation::Activation, x: *const f32, out: *mut f32, n: usize),
    /// Sums of two runs.
    pub(crate) add: unsafe fn(a: *const f32, b: *const f32, out: *mut f32, n: usize),
    /// Products of two runs.
    pub(crate) multiply: unsafe fn(a: *const f32, b: *const f32, out: *mut f32, n: usize),
    /// f32 to f16, nearest even.
    pub(crate) to_f16: unsafe fn(x: *const f32, out: *mut u16, n: usize),
}

/// Builds a tier's entry points: each is a function compiled for the tier's features around the generic kernel.
macro_rules! kernel_table {
    ($simd:ident, $value:expr, $name:literal $(, $features:literal)?) => {
        mod entries {
            use super::$simd;
            use crate::kernels;
            use crate::kernels::format::{Row, WeightType};
            use engine_core::operation::Activation;

            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn matmul(job: &kernels::matmul::Matmul<'_>, tile: &mut kernels::matmul::Tile) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::matmul::matmul($value, job, tile) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn masked(job: &kernels::masked::Masked<'_>) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::masked::masked($value, job) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn axpy(job: &kernels::axpy::Axpy<'_>) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::axpy::axpy($value, job) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn axpy_tokens(job: &kernels::axpy::AxpyTokens<'_>, tile: &mut kernels::matmul::Tile) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::axpy::axpy_tokens($value, job, tile) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn quantise(x: *const f32, n: usize, codes: *mut i8, scales: *mut f32) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::blocks::quantise($value, x, n, codes, scales) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn dequantise(codes: *const i8, scales: *const f32, n: usize, out: *mut f32) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::blocks::dequantise($value, codes, scales, n, out) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn weight_row(row: Row, format: WeightType, n: usize, scale: f32, out: *mut f32) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::format::weight_row($value, row, format, n, scale, out) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn norm(job: &kernels::norm::Norm) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::norm::norm($value, job) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn attention(job: &kernels::attention::Head) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::attention::head($value, job) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn activate(f: Activation, x: *const f32, out: *mut f32, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::pointwise::activate($value, f, x, out, n) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn add(a: *const f32, b: *const f32, out: *mut f32, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::pointwise::add($value, a, b, out, n) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn multiply(a: *const f32, b: *const f32, out: *mut f32, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::pointwise::multiply($value, a, b, out, n) }
            }
            /// # Safety
            /// As for [`kernels::Kernels`].
            $(#[target_feature(enable = $features)])?
            pub(super) unsafe fn to_f16(x: *const f32, out: *mut u16, n: usize) {
                // SAFETY: the caller's promise, passed on.
                unsafe { kernels::pointwise::to_f16($value, x, out, n) }
            }
        }

        /// This tier's entry points.
        pub(crate) static KERNELS: crate::kernels::Kernels = crate::kernels::Kernels {
            name: $name,
            matmul: entries::matmul,
            masked: entries::masked,
            axpy: entries::axpy,
            axpy_tokens: entries::axpy_tokens,
            quantise: entries::quantise,
            dequantise: entries::dequantise,
            weight_row: entries::weight_row,
            norm: entries::norm,
            attention: entries::attention,
            activate: entries::activate,
            add: entries::add,
            multiply: entries::multiply,
            to_f16: entries::to_f16,
        };
    };
}
use kernel_table;

/// The features of a list that the machine lacks, by the architecture's detection macro.
macro_rules! missing {
    ($detected:ident: $($feature:tt),+) => {{
        let all = [$(($feature, std::arch::$detected!($feature))),+];
        all.into_iter().filter(|(_, has)| !has).map(|(feature, _)| feature).collect()
    }};
}
#[allow(unused_imports, reason = "an architecture may have no tier but the portable one")]
use missing;

/// A tier: its entry points and whether it can run here.
pub(crate) struct Tier {
    /// Entry points.
    pub(crate) kernels: &'static Kernels,
    /// What processor and system lack of what it needs; empty where it runs.
    pub(crate) missing: fn() -> Vec<&'static str>,
}

/// The tiers of this architecture, best first; the last one always runs.
pub(crate) static TIERS: &[Tier] = &[
    #[cfg(target_arch = "x86_64")]
    Tier { kernels: &avx512::KERNELS, missing: avx512::missing },
    #[cfg(target_arch = "x86_64")]
    Tier { kernels: &avx2::KERNELS, missing: avx2::missing },
    #[cfg(target_arch = "aarch64")]
    Tier { kernels: &i8mm::KERNELS, missing: i8mm::missing },
    #[cfg(target_arch = "aarch64")]
    Tier { kernels: &dotprod::KERNELS, missing: dotprod::missing },
    #[cfg(target_arch = "aarch64")]
    Tier { kernels: &neon::KERNELS, missing: neon::missing },
    Tier { kernels: &portable::KERNELS, missing: Vec::new },
];

/// The tiers' names.
pub(crate) fn names() -> String {
    TIERS.iter().map(|t| t.kernels.name).collect::<Vec<_>>().join(", ")
}

/// The environment variable that forces a tier where the option `features` does not.
pub const FEATURES_VARIABLE: &str = "THERMOCLINE_CPU_FEATURES";

/// The tier to use, and the reason as a sentence. `wanted` names a tier; none or `auto` takes the best that runs here.
///
/// # Errors
/// [`Error::Config`] where the wanted tier does not exist on this architecture or cannot run here.
pub(crate) fn select(wanted: Option<&str>) -> Result<(&'static Kernels, String)> {
    match wanted {
        None | Some("auto" | "") => {
            let best = TIERS.iter().find(|t| (t.missing)().is_empty()).unwrap_or(&TIERS[TIERS.len() - 1]);
            Ok((
                best.kernels,
                format!("kernels: {}, the best tier that this processor and system run", best.kernels.name),
            ))
        }
        Some(name) => match TIERS.iter().find(|t| t.kernels.name == name) {
            Some(tier) => match (tier.missing)().join(", ") {
                missing if missing.is_empty() => Ok((
                    tier.kernels,
                    format!("kernels: {name}, as asked for by `features` or {FEATURES_VARIABLE}"),
                )),
                missing => Err(Error::Config {
                    detail: format!(
                        "features = {name:?}: this processor or system lacks {missing}; leave it at \"auto\""
                    ),
                }),
            },
            None => Err(Error::Config {
                detail: format!(
                    "features = {name:?} is no tier of this architecture; it has: auto, {}",
                    names()
                ),
            }),
        },
    }
}
