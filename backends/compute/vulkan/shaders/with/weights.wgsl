// Four consecutive elements of a row of weights, whatever their type. `weights` is declared by the shader.

/// The 16 bits at an even byte offset.
fn bits16(at: u32) -> u32 {
    return (weights[at >> 2u] >> ((at & 2u) * 8u)) & 0xFFFFu;
}

/// The 32 bits at an even byte offset.
fn bits32(at: u32) -> u32 {
    let word = at >> 2u;
    if (at & 2u) == 0u {
        return weights[word];
    }
    return (weights[word] >> 16u) | (weights[word + 1u] << 16u);
}

fn byte_at(at: u32) -> u32 {
    return (weights[at >> 2u] >> ((at & 3u) * 8u)) & 0xFFu;
}

fn bytes_to_floats(bytes: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(bytes));
}

/// Scale and minimum of sub-block `i` of a Q4_K block at byte `at`: six bits each.
fn scale_and_minimum(at: u32, i: u32) -> vec2<f32> {
    let scales = at + 4u;
    if i < 4u {
        return vec2<f32>(vec2<u32>(byte_at(scales + i) & 63u, byte_at(scales + i + 4u) & 63u));
    }
    let low = byte_at(scales + i + 4u);
    let scale = (low & 15u) | ((byte_at(scales + i - 4u) >> 6u) << 4u);
    let minimum = (low >> 4u) | ((byte_at(scales + i) >> 6u) << 4u);
    return vec2<f32>(vec2<u32>(scale, minimum));
}

/// Elements `c..c + 4` of the row at byte `row`, which has `columns`; 0 beyond them. `c` is a multiple of 4.
fn load4(row: u32, c: u32, columns: u32) -> vec4<f32> {
    switch FORMAT {
        case 0u: {
            let word = (row >> 2u) + c;
            var values = vec4<f32>(bitcast<f32>(weights[word]), 0.0, 0.0, 0.0);
            if c + 4u <= columns {
                values = bitcast<vec4<f32>>(vec4<u32>(weights[word], weights[word + 1u], weights[word + 2u], weights[word + 3u]));
            } else {
                if c + 1u < columns {
                    values.y = bitcast<f32>(weights[word + 1u]);
                }
                if c + 2u < columns {
                    values.z = bitcast<f32>(weights[word + 2u]);
                }
            }
            return values;
        }
        case 1u, 2u: {
            let at = row + c * 2u;
            var bits = vec4<u32>(bits16(at), 0u, 0u, 0u);
            if c + 4u <= columns {
                let low = bits32(at);
                let high = bits32(at + 4u);
                bits = vec4<u32>(low & 0xFFFFu, low >> 16u, high & 0xFFFFu, high >> 16u);
            } else {
                if c + 1u < columns {
                    bits.y = bits16(at + 2u);
                }
                if c + 2u < columns {
                    bits.z = bits16(at + 4u);
                }
            }
            if FORMAT == 2u {
                return bitcast<vec4<f32>>(bits << vec4<u32>(16u));
            }
            return vec4<f32>(unpack2x16float(bits.x | (bits.y << 16u)), unpack2x16float(bits.z | (bits.w << 16u)));
        }
        case 3u: {
            let block = row + (c / 32u) * 34u;
            let codes = vec4<f32>(unpack4xI8(bits32(block + 2u + c % 32u)));
            return codes * half_to_float(bits16(block));
        }
        case 4u, 5u: {
            let header = select(2u, 4u, FORMAT == 5u);
            let block = row + (c / 32u) * (16u + header);
            let packed = bits32(block + header + c % 16u) >> (4u * ((c % 32u) / 16u));
            let codes = bytes_to_floats(packed & 0x0F0F0F0Fu);
            let scale = half_to_float(bits16(block));
            if FORMAT == 5u {
                return fma(codes, vec4<f32>(scale), vec4<f32>(half_to_float(bits16(block + 2u))));
            }
            return (codes - 8.0) * scale;
        }
        case 6u: {
            let block = row + (c / 256u) * 144u;
            let k = c % 256u;
            let packed = bits32(block + 16u + 32u * (k / 64u) + k % 32u) >> (4u * ((k % 64u) / 32u));
            let codes = bytes_to_floats(packed & 0x0F0F0F0Fu);
            let factors = scale_and_minimum(block, k / 32u);
            let scale = half_to_float(bits16(block)) * factors.x;
            let minimum = half_to_float(bits16(block + 2u)) * factors.y;
            return fma(codes, vec4<f32>(scale), vec4<f32>(-minimum));
        }
        default: {
            let block = row + (c / 256u) * 210u;
            let part = (c % 256u) / 128u;
            let quarter = (c % 128u) / 32u;
            let l = c % 32u;
            let low = bits32(block + part * 64u + l + 32u * (quarter & 1u)) >> (4u * (quarter >> 1u));
            let high = bits32(block + 128u + part * 32u + l) >> (2u * quarter);
            let codes = (low & 0x0F0F0F0Fu) | ((high & 0x03030303u) << 4u);
            let code = byte_at(block + 192u + part * 8u + l / 16u + 2u * quarter);
            let scale = half_to_float(bits16(block + 208u)) * f32(i32(code << 24u) >> 24u);
            return (bytes_to_floats(codes) - 32.0) * scale;
        }
    }
}

