// with: push, numbers
// Writes keys and values of all tokens into the KV cache, two elements per lane. The cache is two planes, keys and values,
// each with a row of f16 per position.
//
// n0: words of a position in a plane, words from row to row of keys and of values, first word of the positions
@group(0) @binding(0) var<storage, read> keys: array<u32>;
@group(0) @binding(1) var<storage, read> values: array<u32>;
@group(0) @binding(2) var<storage, read_write> key_plane: array<u32>;
@group(0) @binding(3) var<storage, read_write> value_plane: array<u32>;
@group(0) @binding(4) var<storage, read> parameters: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let word = group.x * 64u + lane;
    if word >= p.n0.x {
        return;
    }
    let token = group.y;
    let at = p.base_more.x + p.n0.w + token * 2u;
    let row = parameters[at] + parameters[at + 1u];
    let key = p.base.x + token * p.n0.y + word * 2u;
    let value = p.base.y + token * p.n0.z + word * 2u;
    key_plane[p.base.z + row * p.n0.x + word] = float_to_half(keys[key]) | (float_to_half(keys[key + 1u]) << 16u);
    value_plane[p.base.w + row * p.n0.x + word] = float_to_half(values[value]) | (float_to_half(values[value + 1u]) << 16u);
}
