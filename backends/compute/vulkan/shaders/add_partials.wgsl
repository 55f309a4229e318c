// with: push
// Adds the chunks of `down_neurons`, ascending.
//
// n0: columns, chunks, words from row to row of out, 1 where the sum is added to what `out` holds
@group(0) @binding(0) var<storage, read> partials: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let c = group.x * 64u + lane;
    if c >= p.n0.x {
        return;
    }
    let token = group.y;
    var sum = 0.0;
    for (var chunk = 0u; chunk < p.n0.y; chunk++) {
        sum += partials[p.base.x + (token * p.n0.y + chunk) * p.n0.x + c];
    }
    let at = p.base.y + token * p.n0.z + c;
    if p.n0.w != 0u {
        sum += out[at];
    }
    out[at] = sum;
}
