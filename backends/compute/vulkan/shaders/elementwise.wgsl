// with: push, numbers
// Element by element: an activation function, a sum, a product, or the rows of a predictor's mask.
//
// n0: columns, words from row to row of left, right (0: the same row for all) and output
// n1: what (0 function, 1 sum, 2 product, 3 at least n1.z), function, threshold, 0
@group(0) @binding(0) var<storage, read> left: array<u32>;
@group(0) @binding(1) var<storage, read> right: array<u32>;
@group(0) @binding(2) var<storage, read_write> output: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let c = group.x * 64u + lane;
    if c >= p.n0.x {
        return;
    }
    let a = bitcast<f32>(left[p.base.x + group.y * p.n0.y + c]);
    var result = 0u;
    switch p.n1.x {
        case 0u: {
            result = select(bitcast<u32>(apply(p.n1.y, a)), QUIET_NAN, is_nan(a));
        }
        case 1u: {
            result = bitcast<u32>(a + bitcast<f32>(right[p.base.y + group.y * p.n0.z + c]));
        }
        case 2u: {
            result = bitcast<u32>(a * bitcast<f32>(right[p.base.y + group.y * p.n0.z + c]));
        }
        default: {
            result = select(0u, 1u, a >= bitcast<f32>(p.n1.z) && !is_nan(a));
        }
    }
    output[p.base.z + group.y * p.n0.w + c] = result;
}
