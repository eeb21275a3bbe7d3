// Rows of int8 activations as the gemms read them.
//
// A unit is the 32 columns that share a scale: unit (span, w) has the columns 256 * span + 128b + 32j + 4w + t, with b in 0..2 and
// j and t in 0..4. A row is its units one after the other:
//
//     xq, vec4<u32> [rows][SPANS][8][2]: int8 of unit (span, w) in block b, a word for each plane j
//     xs, vec2<u32> [rows][SPANS][8]: the bits of the unit's f32 scale; UNIT_START less the sum of its q
//
// The second is what a gemm's integer sum starts from: codes are sign + 1, so the sum of q goes off; and an integer added to
// the bits of 1.5 * 2^23 is that integer added to the number, so that one subtraction makes it an f32.

// use int8

const UNIT_START: u32 = 0x4b400000u;

// Columns of a row, a multiple of 4.

override COLS: u32 = 2048u;
// Spans of 256 columns, and units of a row.
override SPANS: u32 = (COLS + 255u) / 256u;
override UNITS: u32 = SPANS * 8u;

// A unit's 32 values, by block and plane.
struct Values {
    a0: vec4<f32>,
    a1: vec4<f32>,
    a2: vec4<f32>,
    a3: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
}

struct Unit {
    a: vec4<u32>,
    b: vec4<u32>,
    scale: vec2<u32>,
}

// Four values to int8: their bytes, and their sum.
fn unit_pack(x: vec4<f32>, inverse: f32) -> vec2<u32> {
    let q = vec4<i32>(round(x * inverse));
    let b = bitcast<vec4<u32>>(q) & vec4<u32>(255u);
    return vec2<u32>(b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u), bitcast<u32>((q.x + q.y) + (q.z + q.w)));
}

// As lib/int8 has it; a unit with a NaN or an infinity gets zeros and scale NaN.
fn unit_quantize(x: Values) -> Unit {
    let largest = max(
        max(max(int8_largest(x.a0), int8_largest(x.a1)), max(int8_largest(x.a2), int8_largest(x.a3))),
        max(max(int8_largest(x.b0), int8_largest(x.b1)), max(int8_largest(x.b2), int8_largest(x.b3))),
    );
    if !int8_usable(largest) {
        return Unit(vec4<u32>(), vec4<u32>(), vec2<u32>(int8_scale(largest), UNIT_START));
    }
    let inverse = 127.0 / bitcast<f32>(largest);
    let a0 = unit_pack(x.a0, inverse);
    let a1 = unit_pack(x.a1, inverse);
    let a2 = unit_pack(x.a2, inverse);
    let a3 = unit_pack(x.a3, inverse);
    let b0 = unit_pack(x.b0, inverse);
    let b1 = unit_pack(x.b1, inverse);
    let b2 = unit_pack(x.b2, inverse);
    let b3 = unit_pack(x.b3, inverse);
    let sum = ((a0.y + a1.y) + (a2.y + a3.y)) + ((b0.y + b1.y) + (b2.y + b3.y));
    return Unit(
        vec4<u32>(a0.x, a1.x, a2.x, a3.x),
        vec4<u32>(b0.x, b1.x, b2.x, b3.x),
        vec2<u32>(int8_scale(largest), UNIT_START - sum),
    );
}
