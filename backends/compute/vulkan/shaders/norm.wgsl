// with: push
// Normalises one group of one row per workgroup.
//
// n0: elements of a group, words from row to row of input and of output, 0
// n1: 1 with a mean, 1 with a bias, epsilon, 1 / elements
@group(0) @binding(0) var<storage, read> input: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read_write> output: array<f32>;

var<workgroup> sums: array<f32, 64>;

fn total(lane: u32, value: f32) -> f32 {
    workgroupBarrier();
    sums[lane] = value;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if lane < half {
            sums[lane] += sums[lane + half];
        }
        workgroupBarrier();
    }
    return sums[0];
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let n = p.n0.x;
    let from_row = p.base.x + group.y * p.n0.y + group.x * n;
    let to_row = p.base.w + group.y * p.n0.z + group.x * n;
    var mean = 0.0;
    if p.n1.x != 0u {
        var sum = 0.0;
        for (var i = lane; i < n; i += 64u) {
            sum += input[from_row + i];
        }
        mean = total(lane, sum) / f32(n);
    }
    var squares = 0.0;
    for (var i = lane; i < n; i += 64u) {
        let d = input[from_row + i] - mean;
        squares = fma(d, d, squares);
    }
    let variance = total(lane, squares) / f32(n);
    let inverse = 1.0 / sqrt(variance + bitcast<f32>(p.n1.z));
    for (var i = lane; i < n; i += 64u) {
        var value = (input[from_row + i] - mean) * inverse * weight[p.base.y + i];
        if p.n1.y != 0u {
            value += bias[p.base.z + i];
        }
        output[to_row + i] = value;
    }
}
