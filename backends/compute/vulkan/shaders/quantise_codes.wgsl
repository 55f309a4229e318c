// with: push, numbers
// Rows as blocks of int8 codes with a scale each, as `engine_core` defines them, for products of integers. A lane has one
// block of 32; four codes are a word, and all scales lie behind all codes.
//
// n0: columns, words from row to row of `values` and of codes, first word of the scales
@group(0) @binding(0) var<storage, read> values: array<u32>;
@group(0) @binding(1) var<storage, read_write> codes: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let block = group.x * 64u + lane;
    if block * 32u >= p.n0.x {
        return;
    }
    let from_block = p.base.x + group.y * p.n0.y + block * 32u;
    var most = 0.0;
    var finite = true;
    for (var c = 0u; c < 32u; c++) {
        let value = bitcast<f32>(values[from_block + c]);
        finite = finite && is_finite(value);
        most = max(most, abs(value));
    }
    var scale = divide(most, 127.0);
    let inverse = divide(127.0, most);
    if !finite {
        scale = bitcast<f32>(QUIET_NAN);
    }
    for (var word = 0u; word < 8u; word++) {
        var packed = 0u;
        for (var i = 0u; i < 4u; i++) {
            let value = bitcast<f32>(values[from_block + word * 4u + i]);
            if finite && most != 0.0 && value != 0.0 {
                let code = i32(clamp(round(value * inverse), -127.0, 127.0));
                packed |= (u32(code) & 0xFFu) << (i * 8u);
            }
        }
        codes[p.base.y + group.y * p.n0.z + block * 8u + word] = packed;
    }
    codes[p.base.y + p.n0.w + group.y * (p.n0.x / 32u) + block] = bitcast<u32>(scale);
}
