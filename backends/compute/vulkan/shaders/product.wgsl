// with: push, numbers, weights_binding, weights, blocks
// A matrix product: each workgroup has ROWS rows of weights and TILE tokens. A lane sums every 64th group of columns (four, or
// eight of a block with one scale) from left to right, then lanes are added as a tree: the order depends on the number of
// columns alone.
//
// n0: rows, columns, tokens, bytes from row to row        n1: words from row to row of x and of out, flags, first row
// n2: function, threshold, bytes from row to row of mask, first word of the active neurons in `parameters`
// n3: where x is codes (DOT), the first word of their scales; with EXPERTS, where a row of out is one expert of one token and
// `mask` has the experts' ids: experts of a token, words from row to row of ids, first expert here      n4: experts here
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<u32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read> mask: array<u32>;
@group(0) @binding(5) var<storage, read> parameters: array<u32>;

const LANES: u32 = 64u;
const ROWS: u32 = 4u;
const ALL: u32 = ROWS * TILE;
const LINEAR: u32 = 0u;
const GATE: u32 = 1u;
const UP: u32 = 2u;
const DOWN: u32 = 3u;
const BIAS: u32 = 1u;
const ACCUMULATE: u32 = 2u;
const MASK: u32 = 4u;
const RANGES: u32 = 8u;
const DROP: u32 = 16u;

var<workgroup> sums: array<f32, ALL * LANES>;
var<workgroup> takes_part: array<u32, ALL>;

fn out_index(row: u32, token: u32) -> u32 {
    return p.base.z + token * p.n1.y + p.n1.w + row;
}

/// Whether the neuron in this row is to be computed for the token.
fn selected(row: u32, token: u32) -> bool {
    if row >= p.n0.x || token >= p.n0.z {
        return false;
    }
    if MODE == UP {
        return out[out_index(row, token)] != NONE;
    }
    let neuron = p.n1.w + row;
    if (p.n1.z & RANGES) != 0u {
        let word = parameters[p.base_more.y + p.n2.w + neuron / 32u];
        if ((word >> (neuron % 32u)) & 1u) == 0u {
            return false;
        }
    }
    if (p.n1.z & MASK) != 0u {
        let at = token * p.n2.z + neuron;
        let byte = p.base_more.x * 4u + at;
        if ((mask[byte >> 2u] >> ((byte & 3u) * 8u)) & 0xFFu) == 0u {
            return false;
        }
    }
    return true;
}

fn finish(row: u32, token: u32, sum: f32) {
    if row >= p.n0.x || token >= p.n0.z {
        return;
    }
    let at = out_index(row, token);
    var value = sum;
    if (p.n1.z & BIAS) != 0u {
        value += bias[p.base.w + p.n1.w + row];
    }
    if MODE == LINEAR || MODE == DOWN {
        if (p.n1.z & ACCUMULATE) != 0u {
            value += bitcast<f32>(out[at]);
        }
        out[at] = bitcast<u32>(value);
        return;
    }
    // Drivers may take what follows for arithmetic without NaN, and make a maximum of a relu.
    let before = out[at];
    let invalid = is_nan(value) || (MODE == UP && is_nan(bitcast<f32>(before)));
    value = apply(p.n2.x, value);
    if MODE == UP {
        value = bitcast<f32>(before) * value;
    }
    let drops = (p.n1.z & DROP) != 0u;
    if invalid || is_nan(value) {
        out[at] = QUIET_NAN;
    } else if drops && abs(value) <= bitcast<f32>(p.n2.y) {
        out[at] = NONE;
    } else {
        out[at] = bitcast<u32>(value);
    }
}

fn load_x(token: u32, c: u32) -> vec4<u32> {
    let at = p.base.y + min(token, p.n0.z - 1u) * p.n1.x + c;
    if c + 4u <= p.n0.y {
        if (at & 3u) == 0u {
            return x[at >> 2u];
        }
        return vec4<u32>(x_at(at), x_at(at + 1u), x_at(at + 2u), x_at(at + 3u));
    }
    var bits = vec4<u32>(x_at(at), 0u, 0u, 0u);
    if c + 1u < p.n0.y {
        bits.y = x_at(at + 1u);
    }
    if c + 2u < p.n0.y {
        bits.z = x_at(at + 2u);
    }
    return bits;
}

fn x_at(at: u32) -> u32 {
    return x[at >> 2u][at & 3u];
}

/// `sum + w . x`, from the first to the last; what takes no part is left out.
fn add(sum: f32, w: vec4<f32>, bits: vec4<u32>) -> f32 {
    let v = bitcast<vec4<f32>>(bits);
    var s = sum;
    if MODE == DOWN {
        s = select(fma(w.x, v.x, s), s, bits.x == NONE);
        s = select(fma(w.y, v.y, s), s, bits.y == NONE);
        s = select(fma(w.z, v.z, s), s, bits.z == NONE);
        s = select(fma(w.w, v.w, s), s, bits.w == NONE);
        return s;
    }
    s = fma(w.x, v.x, s);
    s = fma(w.y, v.y, s);
    s = fma(w.z, v.z, s);
    return fma(w.w, v.w, s);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row0 = group.x * ROWS;
    let token0 = group.y * TILE;
    var weights_base = p.base.x;
    var x_token = token0;
    var here = true;
    if EXPERTS {
        let token = token0 / p.n3.y;
        let id = mask[p.base_more.x + token * p.n3.z + token0 % p.n3.y];
        here = id >= p.n3.w && id - p.n3.w < p.n4.x;
        weights_base += select(0u, id - p.n3.w, here) * p.n0.x * p.n0.w;
        if MODE != DOWN {
            x_token = token;
        }
    }
    var wanted: array<bool, ROWS>;
    var any = true;
    if MODE == GATE || MODE == UP {
        if lane < ALL {
            takes_part[lane] = select(0u, 1u, selected(row0 + lane / TILE, token0 + lane % TILE));
        }
        workgroupBarrier();
        any = false;
        for (var r = 0u; r < ROWS; r++) {
            wanted[r] = false;
            for (var t = 0u; t < TILE; t++) {
                wanted[r] = wanted[r] || takes_part[r * TILE + t] != 0u;
            }
            any = any || wanted[r];
        }
    } else {
        for (var r = 0u; r < ROWS; r++) {
            wanted[r] = row0 + r < p.n0.x;
        }
    }
    any = any && here;
    var sum: array<f32, ALL>;
    for (var i = 0u; i < ALL; i++) {
        sum[i] = 0.0;
    }
    if any && DOT {
        // The same eight columns as integers: x is codes, four in a word.
        for (var unit = lane; unit < p.n0.y / 8u; unit += LANES) {
            let first = first_column(unit) / 4u;
            let block = unit / 4u;
            var low: array<u32, TILE>;
            var high: array<u32, TILE>;
            var scale: array<f32, TILE>;
            for (var t = 0u; t < TILE; t++) {
                let token = min(x_token + t, p.n0.z - 1u);
                let at = p.base.y + token * p.n1.x + first;
                low[t] = x_at(at);
                high[t] = x_at(at + SECOND / 4u);
                scale[t] = bitcast<f32>(x_at(p.base.y + p.n3.x + token * (p.n0.y / 32u) + block));
            }
            for (var r = 0u; r < ROWS; r++) {
                if wanted[r] {
                    let w = load_codes(weights_base + (row0 + r) * p.n0.w, unit);
                    for (var t = 0u; t < TILE; t++) {
                        let dot = dot4I8Packed(w.low, low[t]) + dot4I8Packed(w.high, high[t]);
                        var s = sum[r * TILE + t];
                        if FORMAT == 5u {
                            let ones = 0x01010101u;
                            let total = dot4I8Packed(ones, low[t]) + dot4I8Packed(ones, high[t]);
                            s = fma(w.minimum * scale[t], f32(total), s);
                        }
                        sum[r * TILE + t] = fma(w.scale * scale[t], f32(dot), s);
                    }
                }
            }
        }
    } else if any && BLOCKS {
        // Eight columns of a block: two groups of four.
        for (var unit = lane; unit < p.n0.y / 8u; unit += LANES) {
            let first = first_column(unit);
            let second = first + SECOND;
            var low: array<vec4<u32>, TILE>;
            var high: array<vec4<u32>, TILE>;
            for (var t = 0u; t < TILE; t++) {
                low[t] = load_x(x_token + t, first);
                high[t] = load_x(x_token + t, second);
            }
            for (var r = 0u; r < ROWS; r++) {
                if wanted[r] {
                    let w = load_unit(weights_base + (row0 + r) * p.n0.w, unit);
                    for (var t = 0u; t < TILE; t++) {
                        let dot = add(add(0.0, w.low, low[t]), w.high, high[t]);
                        var s = sum[r * TILE + t];
                        if FORMAT == 5u {
                            let ones = vec4<f32>(1.0);
                            s = fma(w.minimum, add(add(0.0, ones, low[t]), ones, high[t]), s);
                        }
                        sum[r * TILE + t] = fma(w.scale, dot, s);
                    }
                }
            }
        }
    } else if any {
        for (var c = lane * 4u; c < p.n0.y; c += LANES * 4u) {
            var bits: array<vec4<u32>, TILE>;
            for (var t = 0u; t < TILE; t++) {
                bits[t] = load_x(x_token + t, c);
            }
            for (var r = 0u; r < ROWS; r++) {
                if wanted[r] {
                    let w = load4(weights_base + (row0 + r) * p.n0.w, c, p.n0.y);
                    for (var t = 0u; t < TILE; t++) {
                        sum[r * TILE + t] = add(sum[r * TILE + t], w, bits[t]);
                    }
                }
            }
        }
    }
    for (var i = 0u; i < ALL; i++) {
        sums[i * LANES + lane] = sum[i];
    }
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if lane < half {
            for (var i = 0u; i < ALL; i++) {
                sums[i * LANES + lane] += sums[i * LANES + lane + half];
            }
        }
        workgroupBarrier();
    }
    if lane < ALL && here {
        let row = row0 + lane / TILE;
        let token = token0 + lane % TILE;
        if (MODE == GATE || MODE == UP) && takes_part[lane] == 0u {
            if row < p.n0.x && token < p.n0.z {
                out[out_index(row, token)] = NONE;
            }
        } else {
            finish(row, token, sums[lane * LANES]);
        }
    }
}
