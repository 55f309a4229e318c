// with: push, numbers
// Rows replaced by what blocks of int8 codes keep of them: `scale * code` per block of 32, as `engine_core` defines it. A
// lane has one block. Neurons that take no part count as 0 in their block and stay marked.
//
// n0: columns, words from row to row of `from` and of `to`, 0
@group(0) @binding(0) var<storage, read> values: array<u32>;
@group(0) @binding(1) var<storage, read_write> kept: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let first = (group.x * 64u + lane) * 32u;
    if first >= p.n0.x {
        return;
    }
    let end = min(first + 32u, p.n0.x);
    let from_row = p.base.x + group.y * p.n0.y;
    let to_row = p.base.y + group.y * p.n0.z;
    var most = 0.0;
    var finite = true;
    for (var c = first; c < end; c++) {
        let bits = values[from_row + c];
        if bits != NONE {
            finite = finite && is_finite(bitcast<f32>(bits));
            most = max(most, abs(bitcast<f32>(bits)));
        }
    }
    let scale = divide(most, 127.0);
    let inverse = divide(127.0, most);
    for (var c = first; c < end; c++) {
        let bits = values[from_row + c];
        var result = bits;
        if bits != NONE {
            if !finite {
                result = QUIET_NAN;
            } else if most == 0.0 || bitcast<f32>(bits) == 0.0 {
                result = 0u;
            } else {
                let code = clamp(round(bitcast<f32>(bits) * inverse), -127.0, 127.0);
                result = bitcast<u32>(scale * code);
            }
        }
        kept[to_row + c] = result;
    }
}
