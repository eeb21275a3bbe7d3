// One word of ternary codes against the activations it stands beside.

// use quantize

// Σ sign * q of the 16 columns of a code word and of `q`, the words of planes 0 to 3; i32, exact. A code is the sign + 1.
fn ternary_dot(codes: u32, q: vec4<u32>) -> i32 {
    let products = dot4(codes & 0x03030303u, q.x) + dot4((codes >> 2u) & 0x03030303u, q.y)
        + dot4((codes >> 4u) & 0x03030303u, q.z) + dot4((codes >> 6u) & 0x03030303u, q.w);
    return products - (sum4(q.x) + sum4(q.y) + sum4(q.z) + sum4(q.w));
}

// The share of chunk word (block, w) in a row's sum, f32.
fn ternary_part(codes: u32, row: u32, block: u32, w: u32) -> f32 {
    let scale = xs[(row * Q_SPANS + block / 2u) * 8u + w];
    return scale * f32(ternary_dot(codes, xq[(row * COL_BLOCKS + block) * 8u + w]));
}
