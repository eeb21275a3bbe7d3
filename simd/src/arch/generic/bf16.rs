//! bf16 rows times f32 activations, all in f32: the router, where int8 would change which experts run.

use std::ops::Range;

use crate::activation::LANES;
use crate::arch::generic::tree;
use crate::rows::{BF16_COLS, Bf16Rows, CHUNK, PANEL_ROWS, bf16};

/// Dot products that are added up at a time: their lanes stay in registers.
const DOTS: usize = 4;

/// `out[i] = row[4 * panels.start + i] . x`, `x` f32 `[cols]`.
#[inline(always)]
pub(crate) fn gemv(rows: &Bf16Rows<'_>, x: &[f32], panels: Range<usize>, out: &mut [f32]) {
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        let dots = dots(rows.panel(p), [0, 1, 2, 3], [x; DOTS]);
        out.copy_from_slice(&dots[..out.len()]);
    }
}

/// [`gemv`] for each row of `x`, f32 `[n, cols]`; `out` f32 `[n, n_rows]`.
#[inline(always)]
pub(crate) fn gemm(rows: &Bf16Rows<'_>, x: &[f32], panels: Range<usize>, n_rows: usize, out: &mut [f32]) {
    let cols = rows.cols();
    for p in panels.clone() {
        let at = PANEL_ROWS * (p - panels.start);
        let here = at..n_rows.min(at + PANEL_ROWS);
        for (x, out) in x.chunks(DOTS * cols).zip(out.chunks_mut(DOTS * n_rows)) {
            if x.len() == DOTS * cols {
                let x = std::array::from_fn(|t| &x[t * cols..][..cols]);
                for row in here.clone() {
                    let dots = dots(rows.panel(p), [row - at; DOTS], x);
                    for (out, dot) in out.chunks_exact_mut(n_rows).zip(dots) {
                        out[row] = dot;
                    }
                }
            } else {
                for (x, out) in x.chunks_exact(cols).zip(out.chunks_exact_mut(n_rows)) {
                    let dots = dots(rows.panel(p), [0, 1, 2, 3], [x; DOTS]);
                    out[here.clone()].copy_from_slice(&dots[..here.len()]);
                }
            }
        }
    }
}

/// `x[i]` times row `rows[i]` of a panel: element `c` in lane `c % 16`.
#[inline(always)]
fn dots(chunks: &[[u8; CHUNK]], rows: [usize; DOTS], x: [&[f32]; DOTS]) -> [f32; DOTS] {
    let mut lanes = [[0.0f32; BF16_COLS]; DOTS];
    let whole = x.map(|x| x.as_chunks::<BF16_COLS>().0);
    let n_whole = whole[0].len();
    for (c, chunk) in chunks[..n_whole].iter().enumerate() {
        add_chunk(&mut lanes, chunk, rows, whole.map(|x| &x[c]));
    }
    if let Some(chunk) = chunks.get(n_whole) {
        let padded = x.map(|x| {
            let tail = x.as_chunks::<BF16_COLS>().1;
            let mut padded = [0.0f32; BF16_COLS];
            padded[..tail.len()].copy_from_slice(tail);
            padded
        });
        add_chunk(&mut lanes, chunk, rows, padded.each_ref());
    }
    trees(&lanes)
}

/// The sum of each dot product's lanes. A call, so that lanes lie one after the other before it: otherwise the compiler
/// may make vectors of the same lane of all four, and shuffle for it in the loop above.
#[inline(never)]
fn trees(lanes: &[[f32; BF16_COLS]; DOTS]) -> [f32; DOTS] {
    lanes.map(|lanes| tree(std::array::from_fn(|l| lanes[l] + lanes[LANES + l])))
}

// Written out four times: given a loop, the compiler may make vectors of the four, with gathers.
#[inline(always)]
fn add_chunk(
    lanes: &mut [[f32; BF16_COLS]; DOTS],
    chunk: &[u8; CHUNK],
    rows: [usize; DOTS],
    x: [&[f32; BF16_COLS]; DOTS],
) {
    let [a, b, c, d] = lanes;
    let chunk = chunk.as_chunks().0;
    add_products(a, &chunk[rows[0]], x[0]);
    add_products(b, &chunk[rows[1]], x[1]);
    add_products(c, &chunk[rows[2]], x[2]);
    add_products(d, &chunk[rows[3]], x[3]);
}

#[inline(always)]
fn add_products(lanes: &mut [f32; BF16_COLS], row: &[u8; 2 * BF16_COLS], x: &[f32; BF16_COLS]) {
    let row = row.as_chunks::<2>().0;
    for l in 0..BF16_COLS {
        lanes[l] += bf16(row[l]) * x[l];
    }
}
