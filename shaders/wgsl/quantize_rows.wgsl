// f32 rows to int8 rows, for the gemm that follows.
//
// Grid: (ceil(rows * UNITS / 256)). An invocation makes one unit of 32 values. Units past the last row are made of what the buffer
// holds, as long as it has them, and are not used.
//
// Bindings: x f32 [rows, COLS]; xq, xs as in lib/quantize_unit.
// Constants: COLS, a multiple of 4. (SPANS and UNITS follow.)

// use quantize_unit

@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> xq: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> xs: array<vec2<u32>>;

// Four columns of a row, by their index in units of four; zero past the last.
fn four(row: u32, i: u32) -> vec4<f32> {
    if i < COLS / 4u {
        return x[row * (COLS / 4u) + i];
    }
    return vec4<f32>();
}

@compute @workgroup_size(256)
fn quantize_rows(@builtin(global_invocation_id) id: vec3<u32>) {
    let unit = id.x;
    let row = unit / UNITS;
    if unit >= arrayLength(&xs) || (row + 1u) * (COLS / 4u) > arrayLength(&x) {
        return;
    }
    let i = unit % UNITS / 8u * 64u + unit % 8u;
    let made = unit_quantize(Values(
        four(row, i),
        four(row, i + 8u),
        four(row, i + 16u),
        four(row, i + 24u),
        four(row, i + 32u),
        four(row, i + 40u),
        four(row, i + 48u),
        four(row, i + 56u),
    ));
    xq[2u * unit] = made.a;
    xq[2u * unit + 1u] = made.b;
    xs[unit] = made.scale;
}
