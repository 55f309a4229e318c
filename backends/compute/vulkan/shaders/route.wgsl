// with: push, numbers
// The best experts of one token per workgroup, ascending by index, and their shares. An expert is chosen where fewer than k
// others are better; of equal scores the lower index is better, and NaN is the largest.
//
// n0: experts, k, words from row to row of scores and of chosen
// n1: words from row to row of shares, 1 for softmax (0: sigmoid), 1 where shares sum to 1, factor
@group(0) @binding(0) var<storage, read> scores: array<f32>;
@group(0) @binding(1) var<storage, read_write> chosen: array<i32>;
@group(0) @binding(2) var<storage, read_write> shares: array<f32>;

const MOST: u32 = 1024u;
var<workgroup> taken: array<u32, MOST>;
var<workgroup> values: array<f32, MOST>;
var<workgroup> folded: array<f32, 64>;

fn better(a: f32, a_index: u32, b: f32, b_index: u32) -> bool {
    if is_nan(a) || is_nan(b) {
        if is_nan(a) && is_nan(b) {
            return a_index < b_index;
        }
        return is_nan(a);
    }
    return a > b || (a == b && a_index < b_index);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = group.x;
    let experts = p.n0.x;
    var most = -infinity();
    for (var e = lane; e < experts; e += 64u) {
        let score = scores[p.base.x + token * p.n0.z + e];
        values[e] = score;
        if score > most {
            most = score;
        }
    }
    folded[lane] = most;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if lane < half {
            folded[lane] = max(folded[lane], folded[lane + half]);
        }
        workgroupBarrier();
    }
    most = folded[0];
    workgroupBarrier();
    var sum = 0.0;
    for (var e = lane; e < experts; e += 64u) {
        var rank = 0u;
        for (var other = 0u; other < experts; other++) {
            rank += select(0u, 1u, better(values[other], other, values[e], e));
        }
        taken[e] = select(0u, 1u, rank < p.n0.y);
        sum += exponential(values[e] - most);
    }
    folded[lane] = sum;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if lane < half {
            folded[lane] += folded[lane + half];
        }
        workgroupBarrier();
    }
    if lane != 0u {
        return;
    }
    // A few numbers: one lane writes them in their order.
    var place = 0u;
    var total = 0.0;
    for (var e = 0u; e < experts; e++) {
        if taken[e] != 0u && place < p.n0.y {
            var share = 0.0;
            if p.n1.y != 0u {
                share = exponential(values[e] - most) / folded[0];
            } else {
                share = 1.0 / (1.0 + exponential(-values[e]));
            }
            chosen[p.base.y + token * p.n0.w + place] = i32(e);
            shares[p.base.z + token * p.n1.x + place] = share;
            total += share;
            place += 1u;
        }
    }
    for (var j = 0u; j < place; j++) {
        let at = p.base.z + token * p.n1.x + j;
        var share = shares[at];
        if p.n1.z != 0u {
            share = share / total;
        }
        shares[at] = share * bitcast<f32>(p.n1.w);
    }
}
