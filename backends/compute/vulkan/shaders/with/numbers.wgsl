// Functions of one number, written out so that every driver computes the same, and tests that no driver may optimise away.

/// Marks a neuron that takes no part: a NaN that arithmetic does not make (results are stored with the usual one).
const NONE: u32 = 0xFFF5A5A5u;
const QUIET_NAN: u32 = 0x7FC00000u;

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7F800000u) != 0x7F800000u;
}

fn infinity() -> f32 {
    var bits = 0x7F800000u;
    return bitcast<f32>(bits);
}

fn half_to_float(bits: u32) -> f32 {
    return unpack2x16float(bits & 0xFFFFu).x;
}

/// f32 bits to f16 bits, to nearest, ties to even.
fn float_to_half(bits: u32) -> u32 {
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7FFFFFFFu;
    if magnitude > 0x7F800000u {
        return sign | 0x7E00u | ((magnitude >> 13u) & 0x3FFu);
    }
    if magnitude >= 0x477FF000u {
        return sign | 0x7C00u;
    }
    if magnitude < 0x33000000u {
        return sign;
    }
    if magnitude < 0x38800000u {
        let shift = 126u - (magnitude >> 23u);
        let mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
        let kept = mantissa >> shift;
        let rest = mantissa & ((1u << shift) - 1u);
        let middle = 1u << (shift - 1u);
        let up = rest > middle || (rest == middle && (kept & 1u) == 1u);
        return sign | (kept + select(0u, 1u, up));
    }
    let rounded = magnitude + 0xFFFu + ((magnitude >> 13u) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13u);
}

/// `a / b` for numbers that are not negative, rounded to nearest, ties to even, by long division of the mantissas: drivers'
/// own divisions may be off by two units in the last place, which would turn ties of int8 codes the other way.
fn divide(a: f32, b: f32) -> f32 {
    let plain = a / b;
    let a_bits = bitcast<u32>(a);
    let b_bits = bitcast<u32>(b);
    let smallest = 0x00800000u;
    if a_bits < smallest || b_bits < smallest || !is_finite(a) || !is_finite(b) {
        return plain;
    }
    var rest = (a_bits & 0x7FFFFFu) | smallest;
    let divisor = (b_bits & 0x7FFFFFu) | smallest;
    var exponent = i32(a_bits >> 23u) - i32(b_bits >> 23u) + 127;
    if rest < divisor {
        rest = rest << 1u;
        exponent -= 1;
    }
    var quotient = 1u;
    rest -= divisor;
    for (var i = 0u; i < 24u; i++) {
        rest = rest << 1u;
        quotient = quotient << 1u;
        if rest >= divisor {
            rest -= divisor;
            quotient |= 1u;
        }
    }
    if exponent < 1 || exponent > 253 {
        return plain;
    }
    let kept = quotient >> 1u;
    let up = (quotient & 1u) == 1u && (rest != 0u || (kept & 1u) == 1u);
    // Rounding up may carry into the exponent, which is then right as well.
    return bitcast<f32>((u32(exponent) << 23u) + (kept & 0x7FFFFFu) + select(0u, 1u, up));
}

fn power_of_two(n: i32) -> f32 {
    return bitcast<f32>(u32(n + 127) << 23u);
}

/// `exp(x)`: reduced to +-ln(2)/2, then the polynomial of Cephes' expf.
fn exponential(x: f32) -> f32 {
    if is_nan(x) {
        return x;
    }
    if x > 88.72283 {
        return infinity();
    }
    if x < -104.0 {
        return 0.0;
    }
    let n = round(x * 1.4426950408889634);
    var r = fma(n, -0.693359375, x);
    r = fma(n, 2.12194440e-4, r);
    var y = 1.9875691500e-4;
    y = fma(y, r, 1.3981999507e-3);
    y = fma(y, r, 8.3334519073e-3);
    y = fma(y, r, 4.1665795894e-2);
    y = fma(y, r, 1.6666665459e-1);
    y = fma(y, r, 5.0000001201e-1);
    y = fma(y, r * r, r) + 1.0;
    let whole = i32(n);
    let part = whole / 2;
    return y * power_of_two(part) * power_of_two(whole - part);
}

/// `tanh(x)`: the polynomial of Cephes' tanhf near 0, by the exponential elsewhere.
fn hyperbolic_tangent(x: f32) -> f32 {
    if is_nan(x) {
        return x;
    }
    let magnitude = abs(x);
    if magnitude < 0.625 {
        let z = x * x;
        var y = -5.70498872745e-3;
        y = fma(y, z, 2.06390887954e-2);
        y = fma(y, z, -5.37397155531e-2);
        y = fma(y, z, 1.33314422036e-1);
        y = fma(y, z, -3.33332819422e-1);
        return fma(y * z, x, x);
    }
    let y = 1.0 - 2.0 / (exponential(2.0 * magnitude) + 1.0);
    return select(y, -y, x < 0.0);
}

/// `1 - erf(x)` for `x >= 0`, to 1.2e-7 of itself: the fit of Numerical Recipes (section 6.2, erfcc).
fn complementary_error(x: f32) -> f32 {
    let t = 1.0 / fma(0.5, x, 1.0);
    var y = 0.17087277;
    y = fma(y, t, -0.82215223);
    y = fma(y, t, 1.48851587);
    y = fma(y, t, -1.13520398);
    y = fma(y, t, 0.27886807);
    y = fma(y, t, -0.18628806);
    y = fma(y, t, 0.09678418);
    y = fma(y, t, 0.37409196);
    y = fma(y, t, 1.00002368);
    y = fma(y, t, -1.26551223);
    return t * exponential(fma(-x, x, y));
}

/// `max(x, 0)` by the bits: as a maximum, drivers would lose NaN and denormals.
fn rectified(x: f32) -> f32 {
    let negative = (bitcast<u32>(x) >> 31u) != 0u;
    return bitcast<f32>(select(bitcast<u32>(x), 0u, negative && !is_nan(x)));
}

/// An activation function by its code (the order of `function_code` in `src/kernels.rs`).
fn apply(code: u32, x: f32) -> f32 {
    switch code {
        case 1u: {
            return rectified(x);
        }
        case 2u: {
            let y = rectified(x);
            return y * y;
        }
        case 3u: {
            return x / (1.0 + exponential(-x));
        }
        case 4u: {
            // x/2 * (1 + tanh(u)) without the cancellation.
            let u = 0.7978845608028654 * fma(0.044715 * x * x, x, x);
            return x / (1.0 + exponential(-2.0 * u));
        }
        case 5u: {
            let tail = 0.5 * complementary_error(abs(x) * 0.7071067811865476);
            return x * select(tail, 1.0 - tail, x > 0.0);
        }
        default: {
            return x;
        }
    }
}

