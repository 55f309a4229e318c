// with: push, numbers
// Per token: writes the hidden activations with 0 for neurons that took no part, and counts those that are not 0.
//
// n0: neurons, words from row to row of h, of hidden and of counts     n1: 1 for hidden + 2 for counts, rows of h per token
@group(0) @binding(0) var<storage, read> h: array<u32>;
@group(0) @binding(1) var<storage, read_write> hidden: array<u32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;

var<workgroup> sums: array<u32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let token = group.x;
    var count = 0u;
    for (var row = token * p.n1.y; row < (token + 1u) * p.n1.y; row++) {
        for (var i = lane; i < p.n0.x; i += 64u) {
            var bits = h[p.base.x + row * p.n0.y + i];
            if bits == NONE {
                bits = 0u;
            }
            count += select(0u, 1u, (bits & 0x7FFFFFFFu) != 0u);
            if (p.n1.x & 1u) != 0u {
                hidden[p.base.y + row * p.n0.z + i] = bits;
            }
        }
    }
    sums[lane] = count;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if lane < half {
            sums[lane] += sums[lane + half];
        }
        workgroupBarrier();
    }
    if lane == 0u && (p.n1.x & 2u) != 0u {
        counts[p.base.z + token * p.n0.w] = sums[0];
    }
}
