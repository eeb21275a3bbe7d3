// y = W x for one ternary matrix and one activation row, in 8-bit integer dot products.
//
// W is read as the model file stores it (TERNARY2): panels of 4 rows, each panel a run of 128-byte chunks of 128 columns.
// One workgroup computes one panel. Its 256 invocations are 8 slices of 32; slice s takes column blocks s, s + 8, ...,
// and its 32 lanes read one chunk as one coalesced line: lane = 8 * row + word.
//
// A chunk word holds four planes: (word >> 2j) & 0x03030303 is the codes of 4 consecutive columns, so it meets one packed activation
// word. The 16 activations that one chunk word meets share a scale, so an invocation has one i32 sum for each chunk.
// code = sign + 1, hence sum(sign * q) = sum(code * q) - sum(q); both are exact in i32.

requires packed_4x8_integer_dot_product;

struct Params {
    n_rows: u32,
    // Column blocks of 128, ceil(n_cols / 128).
    n_col_blocks: u32,
    // Offset of the codes in `weights`, in u32 words.
    codes_at: u32,
    // Offset of the row scales in `weights`, in u32 words.
    scales_at: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// The bytes of the tensor, or of a whole expert block: codes, then bf16 row scales, two to a word.
@group(0) @binding(1) var<storage, read> weights: array<u32>;
// Activations, [n_col_blocks * 128] i8, four to a word; zero past the last column.
@group(0) @binding(2) var<storage, read> x: array<u32>;
// [n_col_blocks, 8]: in each block, scale w belongs to the columns 32j + 4w + t with j and t in 0..4.
@group(0) @binding(3) var<storage, read> x_scales: array<f32>;
// [n_rows].
@group(0) @binding(4) var<storage, read_write> y: array<f32>;

const N_SLICES: u32 = 8u;
const ROWS_PER_PANEL: u32 = 4u;
const CHUNK_WORDS: u32 = 32u;
// Partial sums of one row: one for each slice and word.
const PARTIALS_PER_ROW: u32 = 64u;

var<workgroup> partials: array<f32, 256>;

fn row_scale(row: u32) -> f32 {
    let pair = weights[params.scales_at + (row >> 1u)];
    return bitcast<f32>(((pair >> (16u * (row & 1u))) & 0xffffu) << 16u);
}

// The dispatch is (ceil(n_rows / 4), 1, 1) workgroups.
@compute @workgroup_size(256)
fn ternary_gemv(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let panel = group.x;
    let slice = local / CHUNK_WORDS;
    let lane = local % CHUNK_WORDS;
    let row_in_panel = lane / 8u;
    let word = lane % 8u;

    // f32 over blocks, ascending; i32, exact, within one.
    var sum = 0.0;
    for (var block = slice; block < params.n_col_blocks; block += N_SLICES) {
        let chunk = panel * params.n_col_blocks + block;
        let codes = weights[params.codes_at + chunk * CHUNK_WORDS + lane];
        var dot = 0;
        for (var plane = 0u; plane < 4u; plane++) {
            let q = x[block * CHUNK_WORDS + plane * 8u + word];
            let c = (codes >> (2u * plane)) & 0x03030303u;
            dot += dot4I8Packed(c, q) - dot4I8Packed(0x01010101u, q);
        }
        sum += x_scales[block * 8u + word] * f32(dot);
    }

    partials[row_in_panel * PARTIALS_PER_ROW + slice * 8u + word] = sum;
    workgroupBarrier();

    // A tree of fixed shape within each row's 64 partials, so the result does not depend on the device's scheduling.
    let place = local % PARTIALS_PER_ROW;
    for (var stride = PARTIALS_PER_ROW / 2u; stride > 0u; stride >>= 1u) {
        if place < stride {
            partials[local] += partials[local + stride];
        }
        workgroupBarrier();
    }

    let row = panel * ROWS_PER_PANEL + local / PARTIALS_PER_ROW;
    if place == 0u && row < params.n_rows {
        y[row] = row_scale(row) * partials[local];
    }
}
