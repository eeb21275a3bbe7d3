// A row of activations as int8 with one f32 scale for 32 of them, in workgroup memory. The scheme is the CPU's: in a span of 256
// columns, scale w belongs to the columns 128b + 32j + 4w + t, b in 0..2, j and t in 0..4.
//
// An invocation takes the 16 columns of one (span, w, b), which meet the four planes of one word of ternary codes, and its
// neighbour those of the other b.

// use int8
// use dot
// use reduce

// Columns of the row, a multiple of 4.
override COLS: u32 = 2048u;
// Blocks of 128 columns, the last one filled up with zeros.
override COL_BLOCKS: u32 = (COLS + 127u) / 128u;
// Rows in the arrays below.
override Q_ROWS: u32 = 1u;
override Q_WORDS: u32 = Q_ROWS * COL_BLOCKS * 8u;
override Q_SPANS: u32 = (COL_BLOCKS + 1u) / 2u;
override Q_SCALES: u32 = Q_ROWS * Q_SPANS * 8u;

// [row][block][w]: the words of planes 0 to 3.
var<workgroup> xq: array<vec4<u32>, Q_WORDS>;
// [row][span][w].
var<workgroup> xs: array<f32, Q_SCALES>;

// 16 columns, four of each plane.
struct Sixteen {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
}

// Which of a row's 16 columns an invocation has: the place in [block][w], of which there are 8 * COL_BLOCKS.
fn q_place(task: u32) -> u32 {
    return ((task / 16u) * 2u + task % 2u) * 8u + task % 16u / 2u;
}

// The first column of plane j at a place.
fn q_column(place: u32, j: u32) -> u32 {
    return place / 8u * 128u + 32u * j + 4u * (place % 8u);
}

// Quantises the 16 columns of `task` (span, w, b) of `row`. All invocations call this; a task past the row does nothing. A barrier
// must come before xq and xs are read.
fn quantize(x: Sixteen, row: u32, task: u32, local: u32) {
    let own = max(max(int8_largest(x.a), int8_largest(x.b)), max(int8_largest(x.c), int8_largest(x.d)));
    let largest = max2(own, local);
    let place = q_place(task);
    if task >= Q_SPANS * 16u || row >= Q_ROWS {
        return;
    }
    if task % 2u == 0u {
        xs[row * Q_SPANS * 8u + task / 2u] = bitcast<f32>(int8_scale(largest));
    }
    if place < COL_BLOCKS * 8u {
        xq[row * COL_BLOCKS * 8u + place] = vec4(
            int8_word(x.a, largest),
            int8_word(x.b, largest),
            int8_word(x.c, largest),
            int8_word(x.d, largest)
        );
    }
}
