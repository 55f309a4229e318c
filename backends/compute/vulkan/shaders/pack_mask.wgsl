// with: push
// Packs words that hold 0 or 1 into the bytes of a mask; a lane has one word of the mask and leaves bytes outside of the
// row as they are. Rows that share a word must not be written by one dispatch.
//
// n0: neurons, words from row to row of `flags`, bytes from row to row of the mask, first row
// n1: bytes between the word where the binding begins and the mask's first byte, rows apart in this dispatch
@group(0) @binding(0) var<storage, read> flags: array<u32>;
@group(0) @binding(1) var<storage, read_write> mask: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = p.n0.w + group.y * p.n1.y;
    let start = p.base.y * 4u + p.n1.x + row * p.n0.z;
    let word = start / 4u + group.x * 64u + lane;
    if word * 4u >= start + p.n0.x {
        return;
    }
    var bytes = mask[word];
    for (var i = 0u; i < 4u; i++) {
        let at = word * 4u + i;
        if at >= start && at < start + p.n0.x {
            let flag = flags[p.base.x + row * p.n0.y + at - start];
            bytes = (bytes & ~(0xFFu << (i * 8u))) | (flag << (i * 8u));
        }
    }
    mask[word] = bytes;
}
