// with: push, numbers
// Causal attention of one token and one head per workgroup: 64 positions at a time, with a running maximum (Milakov and
// Gimelshein 2018). A lane has one position for the scores and every 64th element of the head for the sum of values.
//
// n0: elements of a head, heads, KV heads, words of a position in a plane
// n1: words from row to row of query and output, first word of the positions, window or 0      n2: scale, soft cap or 0
@group(0) @binding(0) var<storage, read> query: array<f32>;
@group(0) @binding(1) var<storage, read> key_plane: array<u32>;
@group(0) @binding(2) var<storage, read> value_plane: array<u32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;
@group(0) @binding(4) var<storage, read> parameters: array<u32>;

const LANES: u32 = 64u;
const PARTS: u32 = 8u;

var<workgroup> q: array<f32, LANES * PARTS>;
var<workgroup> scores: array<f32, LANES>;
var<workgroup> folded: array<f32, LANES>;

fn element(word: u32, half: u32) -> f32 {
    return half_to_float(word >> (half * 16u));
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let size = p.n0.x;
    let head = group.x;
    let token = group.y;
    let at = p.base_more.x + p.n1.z + token * 2u;
    let own = parameters[at];
    let cache = parameters[at + 1u];
    var first = 0u;
    if p.n1.w != 0u && own + 1u > p.n1.w {
        first = own + 1u - p.n1.w;
    }
    let from_head = p.base.x + token * p.n1.x + head * size;
    for (var d = lane; d < size; d += LANES) {
        q[d] = query[from_head + d];
    }
    // The head's first element within a position, in elements of f16.
    let offset = (head / (p.n0.y / p.n0.z)) * size;
    var sum: array<f32, PARTS>;
    for (var i = 0u; i < PARTS; i++) {
        sum[i] = 0.0;
    }
    var most = -infinity();
    var weight = 0.0;
    workgroupBarrier();
    for (var start = first; start <= own; start += LANES) {
        let here = min(LANES, own + 1u - start);
        var score = -infinity();
        if lane < here {
            let row = (cache + start + lane) * p.n0.w;
            var dot = 0.0;
            for (var d = 0u; d < size; d++) {
                let e = offset + d;
                dot = fma(q[d], element(key_plane[p.base.y + row + e / 2u], e % 2u), dot);
            }
            score = dot * bitcast<f32>(p.n2.x);
            let cap = bitcast<f32>(p.n2.y);
            if cap != 0.0 {
                score = cap * hyperbolic_tangent(score / cap);
            }
        }
        folded[lane] = score;
        workgroupBarrier();
        for (var half = LANES / 2u; half > 0u; half /= 2u) {
            if lane < half {
                let other = folded[lane + half];
                if is_nan(other) || other > folded[lane] {
                    folded[lane] = other;
                }
            }
            workgroupBarrier();
        }
        let before = most;
        if is_nan(folded[0]) || folded[0] > most {
            most = folded[0];
        }
        var share = 0.0;
        if lane < here {
            share = exponential(score - most);
        }
        workgroupBarrier();
        scores[lane] = share;
        folded[lane] = share;
        workgroupBarrier();
        for (var half = LANES / 2u; half > 0u; half /= 2u) {
            if lane < half {
                folded[lane] += folded[lane + half];
            }
            workgroupBarrier();
        }
        var shrink = 1.0;
        if start > first {
            shrink = exponential(before - most);
        }
        weight = fma(weight, shrink, folded[0]);
        for (var i = 0u; i < PARTS; i++) {
            let d = lane + i * LANES;
            if d < size {
                let e = offset + d;
                var value = sum[i] * shrink;
                for (var j = 0u; j < here; j++) {
                    let row = (cache + start + j) * p.n0.w;
                    value = fma(scores[j], element(value_plane[p.base.z + row + e / 2u], e % 2u), value);
                }
                sum[i] = value;
            }
        }
        workgroupBarrier();
    }
    let to_head = p.base.w + token * p.n1.y + head * size;
    for (var i = 0u; i < PARTS; i++) {
        let d = lane + i * LANES;
        if d < size {
            output[to_head + d] = sum[i] / weight;
        }
    }
}
