// with: push
// The weighted sum over the experts of a token, in their order; a token whose experts do not ascend, or are none, is put
// into `status`, the lowest winning.
//
// n0: columns, experts of a token, words from row to row of out and of shares
// n1: words from row to row of ids, experts in all, 1 where the sum is added to what `out` holds, word of `status`
@group(0) @binding(0) var<storage, read> outputs: array<f32>;
@group(0) @binding(1) var<storage, read> shares: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<storage, read_write> status: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read> ids: array<i32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let c = group.x * 64u + lane;
    let token = group.y;
    if c == 0u {
        var before = -1;
        for (var j = 0u; j < p.n0.y; j++) {
            let id = ids[p.base_more.x + token * p.n1.x + j];
            if id <= before || id >= i32(p.n1.y) {
                atomicMin(&status[p.base.w + p.n1.w], token);
            }
            before = id;
        }
    }
    if c >= p.n0.x {
        return;
    }
    let at = p.base.z + token * p.n0.z + c;
    var sum = 0.0;
    if p.n1.z != 0u {
        sum = out[at];
    }
    for (var j = 0u; j < p.n0.y; j++) {
        sum = fma(shares[p.base.y + token * p.n0.w + j], outputs[p.base.x + (token * p.n0.y + j) * p.n0.x + c], sum);
    }
    out[at] = sum;
}
