// Eight columns of a block of 32 that share a scale, as codes: what a lane of a product takes at once.

/// Whether the type's blocks can be read so.
const BLOCKS: bool = FORMAT == 3u || FORMAT == 4u || FORMAT == 5u;
/// Columns from a unit's first group of four to its second: the halves of a byte lie 16 apart.
const SECOND: u32 = select(16u, 4u, FORMAT == 3u);

struct Unit {
    low: vec4<f32>,
    high: vec4<f32>,
    scale: f32,
    minimum: f32,
}

fn first_column(unit: u32) -> u32 {
    if FORMAT == 3u {
        return unit * 8u;
    }
    return (unit / 4u) * 32u + (unit % 4u) * 4u;
}

/// Four-bit codes that lie in bits 19 to 22, as numbers: 16 + code is a float whose mantissa begins with them.
fn nibbles(bits: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>((bits & vec4<u32>(0x00780000u)) | vec4<u32>(0x41800000u));
}

/// The unit of the row at byte `row`.
fn load_unit(row: u32, unit: u32) -> Unit {
    var result: Unit;
    result.minimum = 0.0;
    if FORMAT == 3u {
        let block = row + (unit / 4u) * 34u;
        let at = block + 2u + (unit % 4u) * 8u;
        let word = at >> 2u;
        var first = weights[word];
        var second = weights[word + 1u];
        if (at & 2u) != 0u {
            let third = weights[word + 2u];
            first = (first >> 16u) | (second << 16u);
            second = (second >> 16u) | (third << 16u);
        }
        result.scale = half_to_float(bits16(block));
        result.low = vec4<f32>(unpack4xI8(first));
        result.high = vec4<f32>(unpack4xI8(second));
        return result;
    }
    let header = select(2u, 4u, FORMAT == 5u);
    let block = row + (unit / 4u) * (16u + header);
    let bits = bits32(block + header + (unit % 4u) * 4u);
    result.scale = half_to_float(bits16(block));
    let low = nibbles(vec4<u32>(bits << 19u, bits << 11u, bits << 3u, bits >> 5u));
    let high = nibbles(vec4<u32>(bits << 15u, bits << 7u, bits >> 1u, bits >> 9u));
    if FORMAT == 5u {
        result.minimum = half_to_float(bits16(block + 2u));
        result.low = low - vec4<f32>(16.0);
        result.high = high - vec4<f32>(16.0);
    } else {
        result.low = low - vec4<f32>(24.0);
        result.high = high - vec4<f32>(24.0);
    }
    return result;
}

/// The unit as packed signed bytes.
struct Codes {
    low: u32,
    high: u32,
    scale: f32,
    minimum: f32,
}

/// Four codes of 0 to 15 less 8, in the bytes of a word.
fn centred(codes: u32) -> u32 {
    let bits = codes ^ 0x08080808u;
    return bits | ((bits & 0x08080808u) * 0x1Eu);
}

fn load_codes(row: u32, unit: u32) -> Codes {
    var result: Codes;
    result.minimum = 0.0;
    if FORMAT == 3u {
        let block = row + (unit / 4u) * 34u;
        let at = block + 2u + (unit % 4u) * 8u;
        let word = at >> 2u;
        result.low = weights[word];
        result.high = weights[word + 1u];
        if (at & 2u) != 0u {
            let third = weights[word + 2u];
            result.low = (result.low >> 16u) | (result.high << 16u);
            result.high = (result.high >> 16u) | (third << 16u);
        }
        result.scale = half_to_float(bits16(block));
        return result;
    }
    let header = select(2u, 4u, FORMAT == 5u);
    let block = row + (unit / 4u) * (16u + header);
    let bits = bits32(block + header + (unit % 4u) * 4u);
    result.scale = half_to_float(bits16(block));
    result.low = bits & 0x0F0F0F0Fu;
    result.high = (bits >> 4u) & 0x0F0F0F0Fu;
    if FORMAT == 5u {
        result.minimum = half_to_float(bits16(block + 2u));
    } else {
        result.low = centred(result.low);
        result.high = centred(result.high);
    }
    return result;
}

