//! Element-wise functions: activations, sums, products, conversion to f16. A short end goes through the same vector
//! code with idle lanes, so an element's place changes none of its bits.

use engine_core::operation::Activation;

use super::norm::{load, store, vectors};
use super::simd::{LANES, Simd};

/// `out = f(x)`.
///
/// # Safety
/// `x` and `out` have `n` elements; they may be the same.
#[inline(always)]
pub(crate) unsafe fn activate<S: Simd>(s: S, f: Activation, x: *const f32, out: *mut f32, n: usize) {
    macro_rules! each {
        ($v:ident => $result:expr) => {
            vectors(n, |at, len| {
                // SAFETY: the caller's promise.
                unsafe {
                    let $v = load(s, x, at, len);
                    store(s, out, at, len, $result);
                }
            })
        };
    }
    match f {
        Activation::Relu => each!(v => s.max(s.splat(0.0), v)),
        Activation::ReluSquared => each!(v => {
            let v = s.max(s.splat(0.0), v);
            s.mul(v, v)
        }),
        Activation::Silu => each!(v => silu(s, v)),
        Activation::GeluTanh => each!(v => gelu_tanh(s, v)),
        Activation::GeluErf => each!(v => gelu_erf(s, v)),
        // `supports` denies functions that this version does not know.
        _ => each!(v => v),
    }
}

/// Whether [`activate`] knows the function.
pub(crate) fn knows(f: Activation) -> bool {
    matches!(
        f,
        Activation::Identity
            | Activation::Relu
            | Activation::ReluSquared
            | Activation::Silu
            | Activation::GeluTanh
            | Activation::GeluErf
    )
}

#[inline(always)]
fn negate<S: Simd>(s: S, v: S::V) -> S::V {
    s.sub(s.splat(0.0), v)
}

/// `x / (1 + exp(-x))`.
#[inline(always)]
fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    s.div(x, s.add(s.splat(1.0), s.exp(negate(s, x))))
}

/// With `tanh(u) = 2 / (1 + exp(-2u)) - 1` the tanh form of GELU is `x / (1 + exp(-2u))`.
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let cubic = s.mul(s.mul(x, x), s.mul(x, s.splat(0.044_715)));
    let u = s.mul(s.add(x, cubic), s.splat(2.0 * 0.797_884_6));
    s.div(x, s.add(s.splat(1.0), s.exp(negate(s, u))))
}

/// `x x (1 - erfc(x / sqrt 2) / 2)`, with the Chebyshev fit of erfc in Press et al., Numerical Recipes, section 6.2
/// (fractional error below 1.2e-7).
#[inline(always)]
fn gelu_erf<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    let z = s.mul(s.abs(x), s.splat(core::f32::consts::FRAC_1_SQRT_2));
    let t = s.div(one, s.fma(z, s.splat(0.5), one));
    let mut p = s.splat(0.170_872_77);
    for c in [
        -0.822_152_23,
        1.488_515_87,
        -1.135_203_98,
        0.278_868_07,
        -0.186_288_06,
        0.096_784_18,
        0.374_091_96,
        1.000_023_68,
        -1.265_512_23,
    ] {
        p = s.fma(p, t, s.splat(c as f32));
    }
    let half_tail = s.mul(s.mul(t, s.splat(0.5)), s.exp(s.sub(p, s.mul(z, z))));
    // For x >= 0 the share is 1 - tail, below it is the tail: chosen by the sign of x without a branch.
    let negative = s.min(x, s.splat(0.0));
    let positive = s.max(x, s.splat(0.0));
    s.fma(positive, s.sub(one, half_tail), s.mul(negative, half_tail))
}

/// `c x tanh(x / c)`: the soft cap on attention scores.
#[inline(always)]
pub(crate) fn soft_cap<S: Simd>(s: S, x: S::V, cap: f32) -> S::V {
    let one = s.splat(1.0);
    let u = s.div(x, s.splat(cap));
    // tanh is odd: from exp(-2|u|), which cannot overflow, then times u / |u| (guarded against 0 / 0).
    let magnitude = s.abs(u);
    let e = s.exp(s.mul(magnitude, s.splat(-2.0)));
    let tanh = s.div(s.sub(one, e), s.add(one, e));
    let sign = s.div(u, s.max(s.splat(f32::MIN_POSITIVE), magnitude));
    s.mul(s.mul(tanh, sign), s.splat(cap))
}

/// `out = a + b`.
///
/// # Safety
/// All have `n` elements; `out` may be one of the inputs.
#[inline(always)]
pub(crate) unsafe fn add<S: Simd>(s: S, a: *const f32, b: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promise.
    vectors(n, |at, len| unsafe { store(s, out, at, len, s.add(load(s, a, at, len), load(s, b, at, len))) });
}

/// `out = a x b`.
///
/// # Safety
/// All have `n` elements; `out` may be one of the inputs.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd>(s: S, a: *const f32, b: *const f32, out: *mut f32, n: usize) {
    // SAFETY: the caller's promise.
    vectors(n, |at, len| unsafe { store(s, out, at, len, s.mul(load(s, a, at, len), load(s, b, at, len))) });
}

/// f32 to f16, nearest even.
///
/// # Safety
/// Both have `n` elements.
#[inline(always)]
pub(crate) unsafe fn to_f16<S: Simd>(s: S, x: *const f32, out: *mut u16, n: usize) {
    // SAFETY: the caller's promise.
    vectors(n, |at, len| unsafe {
        let v = load(s, x, at, len);
        if len == LANES { s.store_f16(out.add(at), v) } else { s.store_f16_part(out.add(at), v, len) }
    });
}
