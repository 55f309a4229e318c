// with: push
// Rotates the pairs of each head by angles whose cosine and sine the host computed, and copies the rest.
//
// n0: elements of a head, pairs, heads, tokens      n1: words from row to row of input and output, 1 for neighbours as pairs,
// first word of the table in `parameters`
@group(0) @binding(0) var<storage, read> input: array<u32>;
@group(0) @binding(1) var<storage, read_write> output: array<u32>;
@group(0) @binding(2) var<storage, read> parameters: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let pairs = p.n0.y;
    let units = p.n0.x - pairs;
    let unit = group.x * 64u + lane;
    if unit >= units * p.n0.z {
        return;
    }
    let head = unit / units;
    let j = unit % units;
    let token = group.y;
    let from_head = p.base.x + token * p.n1.x + head * p.n0.x;
    let to_head = p.base.y + token * p.n1.y + head * p.n0.x;
    if j >= pairs {
        output[to_head + pairs + j] = input[from_head + pairs + j];
        return;
    }
    var a = j;
    var b = j + pairs;
    if p.n1.z != 0u {
        a = 2u * j;
        b = a + 1u;
    }
    let at = p.base.z + p.n1.w + (token * pairs + j) * 2u;
    let cosine = bitcast<f32>(parameters[at]);
    let sine = bitcast<f32>(parameters[at + 1u]);
    let left = bitcast<f32>(input[from_head + a]);
    let right = bitcast<f32>(input[from_head + b]);
    output[to_head + a] = bitcast<u32>(left * cosine - right * sine);
    output[to_head + b] = bitcast<u32>(left * sine + right * cosine);
}
