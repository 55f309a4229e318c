// with: push, numbers, weights_binding, weights
// Rows of a table by their ids, four columns per lane. Rows outside of this dispatch's window are left alone; an id that is
// no row of the table at all puts its token into `status`, the lowest winning.
//
// n0: columns, bytes from row to row of the table, words from row to row of output, words from id to id
// n1: first row and rows of the window, rows of the table, scale       n2: word of `status`
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read_write> output: array<f32>;
@group(0) @binding(3) var<storage, read_write> status: array<atomic<u32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let c = (group.x * 64u + lane) * 4u;
    if c >= p.n0.x {
        return;
    }
    let token = group.y;
    let id = ids[p.base.y + token * p.n0.w];
    if id < 0 || u32(id) >= p.n1.z {
        atomicMin(&status[p.base.w + p.n2.x], token);
        return;
    }
    let row = u32(id);
    if row < p.n1.x || row - p.n1.x >= p.n1.y {
        return;
    }
    let values = load4(p.base.x + (row - p.n1.x) * p.n0.y, c, p.n0.x) * bitcast<f32>(p.n1.w);
    let at = p.base.z + token * p.n0.z + c;
    output[at] = values.x;
    if c + 1u < p.n0.x {
        output[at + 1u] = values.y;
    }
    if c + 2u < p.n0.x {
        output[at + 2u] = values.z;
    }
    if c + 3u < p.n0.x {
        output[at + 3u] = values.w;
    }
}
