// Dot products of four bytes, with the instruction for it.

// The sum of four products of signed bytes; i32, exact.
fn dot4(a: u32, b: u32) -> i32 {
    return dot4I8Packed(a, b);
}

// The sum of four signed bytes.
fn sum4(a: u32) -> i32 {
    return dot4I8Packed(a, 0x01010101u);
}
