// int8 of f32 values that share a scale, as on the CPU: scale = max|x| / 127, q = x * (127 / max) rounded half to even; zeros where the
// largest is below 2^-100; and where one is NaN or infinite, zeros and scale NaN.

// use bits

const INT8_SMALLEST: u32 = 0x0d800000u; // 2^-100

// Magnitudes as integers, which order as the values do, with infinity and NaN on top.
fn int8_largest(x: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(x) & vec4(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

fn int8_usable(largest: u32) -> bool {
    return largest < INFINITY_BITS && largest >= INT8_SMALLEST;
}

// Bits of the scale of values with this largest magnitude.
fn int8_scale(largest: u32) -> u32 {
    let other = select(0u, largest | 0x7fffffffu, largest >= INFINITY_BITS);
    return select(other, bitcast<u32>(bitcast<f32>(largest) / 127.0), int8_usable(largest));
}

// Four values as bytes.
fn int8_word(x: vec4<f32>, largest: u32) -> u32 {
    if !int8_usable(largest) {
        return 0u;
    }
    let inverse = 127.0 / bitcast<f32>(largest);
    let q = bitcast<vec4<u32>>(vec4<i32>(round(x * inverse)));
    return (q.x & 0xffu) | ((q.y & 0xffu) << 8u) | ((q.z & 0xffu) << 16u) | (q.w << 24u);
}
