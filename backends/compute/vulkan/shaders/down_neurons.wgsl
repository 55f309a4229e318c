// with: push, numbers, weights_binding, weights
// The second product of a feed-forward layer whose `down` has a row per neuron: each workgroup adds the neurons of one
// chunk, ascending, for 256 columns and up to TILE tokens; `add_partials` adds the chunks. What takes no part is skipped,
// so the order depends on the neuron's number alone.
//
// n0: neurons, columns, tokens, bytes from row to row      n1: words from row to row of h, first neuron, first chunk, chunks in all
// n2: with EXPERTS, where a row of h is one expert of one token: experts of a token, words from row to row of ids, first
// expert here, experts here      n3: first row of h
@group(0) @binding(1) var<storage, read> h: array<u32>;
@group(0) @binding(2) var<storage, read_write> partials: array<f32>;
@group(0) @binding(3) var<storage, read> ids: array<u32>;

const CHUNK: u32 = 64u;
const TILE: u32 = select(4u, 1u, EXPERTS);

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let c = (group.x * 64u + lane) * 4u;
    if c >= p.n0.y {
        return;
    }
    let token0 = group.z * TILE;
    let tokens = min(TILE, p.n0.z - token0);
    var weights_base = p.base.x;
    if EXPERTS {
        let row = p.n3.x + token0;
        let id = ids[p.base.w + row / p.n2.x * p.n2.y + row % p.n2.x];
        if id < p.n2.z || id - p.n2.z >= p.n2.w {
            return;
        }
        weights_base += (id - p.n2.z) * p.n0.x * p.n0.w;
    }
    let first = group.y * CHUNK;
    let end = min(first + CHUNK, p.n0.x);
    var sum: array<vec4<f32>, TILE>;
    for (var t = 0u; t < TILE; t++) {
        sum[t] = vec4<f32>(0.0);
    }
    for (var i = first; i < end; i++) {
        var bits: array<u32, TILE>;
        var any = false;
        for (var t = 0u; t < TILE; t++) {
            bits[t] = NONE;
            if t < tokens {
                bits[t] = h[p.base.y + (token0 + t) * p.n1.x + p.n1.y + i];
            }
            any = any || bits[t] != NONE;
        }
        if any {
            let w = load4(weights_base + i * p.n0.w, c, p.n0.y);
            for (var t = 0u; t < TILE; t++) {
                if bits[t] != NONE {
                    sum[t] = fma(vec4<f32>(bitcast<f32>(bits[t])), w, sum[t]);
                }
            }
        }
    }
    let chunk = p.n1.z + group.y;
    for (var t = 0u; t < tokens; t++) {
        let at = p.base.z + ((token0 + t) * p.n1.w + chunk) * p.n0.y + c;
        partials[at] = sum[t].x;
        if c + 1u < p.n0.y {
            partials[at + 1u] = sum[t].y;
        }
        if c + 2u < p.n0.y {
            partials[at + 2u] = sum[t].z;
        }
        if c + 3u < p.n0.y {
            partials[at + 3u] = sum[t].w;
        }
    }
}
