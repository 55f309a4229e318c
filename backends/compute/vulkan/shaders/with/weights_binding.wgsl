@group(0) @binding(0) var<storage, read> weights: array<u32>;
