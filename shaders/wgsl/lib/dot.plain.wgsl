// Dot products of four bytes, for devices without an instruction for it.

// Byte `i` with its sign.
fn dot_byte(a: u32, i: u32) -> i32 {
    return bitcast<i32>(a << (24u - 8u * i)) >> 24u;
}

// The sum of four products of signed bytes; i32, exact.
fn dot4(a: u32, b: u32) -> i32 {
    return dot_byte(a, 0u) * dot_byte(b, 0u) + dot_byte(a, 1u) * dot_byte(b, 1u)
        + dot_byte(a, 2u) * dot_byte(b, 2u) + dot_byte(a, 3u) * dot_byte(b, 3u);
}

// The sum of four signed bytes.
fn sum4(a: u32) -> i32 {
    return dot_byte(a, 0u) + dot_byte(a, 1u) + dot_byte(a, 2u) + dot_byte(a, 3u);
}
