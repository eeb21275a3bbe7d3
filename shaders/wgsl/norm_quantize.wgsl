// RMSNorm of each token's residual, and the result as int8, for the gemm that follows; for the router also as it is.
//
// Grid: (tokens). A workgroup of 64 norms one row; then an invocation makes units of 32 values.
//
// Bindings: h f32 [tokens, COLS]; norm f32 [COLS]; xq, xs as in lib/quantize_unit; normed f32 [tokens, COLS] (if NORMED, else
// anything).
// Constants: COLS, a multiple of 4; EPS; NORMED. (SPANS and UNITS follow.)

// use quantize_unit

override EPS: f32 = 1e-6;
override NORMED: bool = true;

@group(0) @binding(0) var<storage, read> h: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> xq: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> xs: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> normed: array<vec4<f32>>;

const WIDTH: u32 = 64u;

var<workgroup> partials: array<f32, 64>;

// Four normed columns of a row, by their index in units of four; zero past the last.
fn four(row: u32, i: u32, inverse: f32) -> vec4<f32> {
    if i < COLS / 4u {
        let at = row * (COLS / 4u) + i;
        let y = norm[i] * (h[at] * inverse);
        if NORMED {
            normed[at] = y;
        }
        return y;
    }
    return vec4<f32>();
}

@compute @workgroup_size(64)
fn norm_quantize(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let row = group.x;
    // Squares by column modulo 4 and invocation, then a tree.
    var squares = vec4<f32>();
    for (var i = local; i < COLS / 4u; i += WIDTH) {
        let x = h[row * (COLS / 4u) + i];
        squares += x * x;
    }
    partials[local] = (squares.x + squares.y) + (squares.z + squares.w);
    workgroupBarrier();
    for (var stride = WIDTH / 2u; stride > 0u; stride >>= 1u) {
        if local < stride {
            partials[local] += partials[local + stride];
        }
        workgroupBarrier();
    }
    // An overflow is seen, not turned into zeros.
    let inverse = 1.0 / sqrt(number_or_nan(partials[0] / f32(COLS)) + EPS);

    for (var u = local; u < UNITS; u += WIDTH) {
        let i = u / 8u * 64u + u % 8u;
        let made = unit_quantize(Values(
            four(row, i, inverse),
            four(row, i + 8u, inverse),
            four(row, i + 16u, inverse),
            four(row, i + 24u, inverse),
            four(row, i + 32u, inverse),
            four(row, i + 40u, inverse),
            four(row, i + 48u, inverse),
            four(row, i + 56u, inverse),
        ));
        let unit = row * UNITS + u;
        xq[2u * unit] = made.a;
        xq[2u * unit + 1u] = made.b;
        xs[unit] = made.scale;
    }
}
