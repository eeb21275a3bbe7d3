// f32 and bf16 as bits, where a comparison must not lose a NaN: compilers may take it that there is none.

// No number is above it; NaN is.
const INFINITY_BITS: u32 = 0x7f800000u;

// Whether a value is a number: not NaN, not infinite.
fn is_number(x: f32) -> bool {
    return (bitcast<u32>(x) & INFINITY_BITS) != INFINITY_BITS;
}

// min and max that keep NaN. By its bits: a compiler may take a comparison and a choice for the min that loses it.
fn at_most(x: f32, most: f32) -> f32 {
    return select(min(x, most), x, (bitcast<u32>(x) & 0x7fffffffu) > INFINITY_BITS);
}

fn at_least(x: f32, least: f32) -> f32 {
    return select(max(x, least), x, (bitcast<u32>(x) & 0x7fffffffu) > INFINITY_BITS);
}

// `x` if it is a number, else NaN.
fn number_or_nan(x: f32) -> f32 {
    return bitcast<f32>(select(bitcast<u32>(x) | 0x7fffffffu, bitcast<u32>(x), is_number(x)));
}

// The low and the high half of a word as bf16.
fn bf16_low(word: u32) -> f32 {
    return bitcast<f32>(word << 16u);
}

fn bf16_high(word: u32) -> f32 {
    return bitcast<f32>(word & 0xffff0000u);
}

// Half `i` of a word.
fn bf16_half(word: u32, i: u32) -> f32 {
    return bitcast<f32>((word >> (16u * i)) << 16u);
}

// The upper half of `x`, rounded to the nearest, of two the even one; NaN stays NaN.
fn bf16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 0x40u, (bits & 0x7fffffffu) > INFINITY_BITS);
}

// Orders as the values do: 0 and -0 alike, NaN of either sign on top.
fn order_key(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) > INFINITY_BITS {
        return 0xffffffffu;
    }
    if bits == 0x80000000u {
        return 0x80000000u;
    }
    return bits ^ select(0x80000000u, 0xffffffffu, (bits >> 31u) == 1u);
}

// The key of -infinity: all others are above it.
const MINUS_INFINITY_KEY: u32 = 0x007fffffu;

// The value of a key.
fn order_value(key: u32) -> f32 {
    return bitcast<f32>(key ^ select(0xffffffffu, 0x80000000u, (key >> 31u) == 1u));
}
