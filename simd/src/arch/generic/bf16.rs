//! bf16 rows times f32 activations, all in f32: the router, where int8 would change which experts run.
//!
//! Four dot products are added up at a time, element `c` in lane `c % 16`: their lanes stay in registers.

use std::ops::Range;

use crate::activation::LANES;
use crate::arch::generic::tree;
use crate::rows::{BF16_COLS, Bf16Rows, CHUNK, PANEL_ROWS, bf16};

/// Lanes of a dot product.
type Lanes = [f32; BF16_COLS];

/// `out[i] = row[4 * panels.start + i] . x`, `x` f32 `[cols]`.
#[inline(always)]
pub(crate) fn gemv(rows: &Bf16Rows<'_>, x: &[f32], panels: Range<usize>, out: &mut [f32]) {
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        let dots = four_rows(rows.panel(p), x);
        out.copy_from_slice(&dots[..out.len()]);
    }
}

/// [`gemv`] for each row of `x`, f32 `[n, cols]`; `out` f32 `[n, n_rows]`. Two rows of `x`, which stay in the first cache, pass over
/// all panels, which stay in the second.
#[inline(always)]
pub(crate) fn gemm(rows: &Bf16Rows<'_>, x: &[f32], panels: Range<usize>, n_rows: usize, out: &mut [f32]) {
    let cols = rows.cols();
    for (x, out) in x.chunks(2 * cols).zip(out.chunks_mut(2 * n_rows)) {
        if x.len() < 2 * cols {
            return gemv(rows, x, panels, out);
        }
        let ((x0, x1), (out0, out1)) = (x.split_at(cols), out.split_at_mut(n_rows));
        let out = out0.chunks_mut(PANEL_ROWS).zip(out1.chunks_mut(PANEL_ROWS));
        for (p, (out0, out1)) in panels.clone().zip(out) {
            let out = out0.chunks_mut(2).zip(out1.chunks_mut(2));
            for (row, (out0, out1)) in [0, 2].into_iter().zip(out) {
                let [a, b, c, d] = two_rows(rows.panel(p), row, x0, x1);
                out0.copy_from_slice(&[a, b][..out0.len()]);
                out1.copy_from_slice(&[c, d][..out1.len()]);
            }
        }
    }
}

/// The rows of a panel times `x`.
#[inline(always)]
fn four_rows(chunks: &[[u8; CHUNK]], x: &[f32]) -> [f32; 4] {
    let (x, tail) = x.as_chunks();
    let (whole, rest) = chunks.split_at(x.len());
    let mut lanes = [[0.0; BF16_COLS]; 4];
    for (chunk, x) in whole.iter().zip(x) {
        add_four_rows(&mut lanes, chunk, x);
    }
    if let Some(chunk) = rest.first() {
        add_four_rows(&mut lanes, chunk, &padded(tail));
    }
    trees(&lanes)
}

/// Rows `row` and `row + 1` of a panel times `x0`, then times `x1`.
#[inline(always)]
fn two_rows(chunks: &[[u8; CHUNK]], row: usize, x0: &[f32], x1: &[f32]) -> [f32; 4] {
    let ((x0, tail0), (x1, tail1)) = (x0.as_chunks(), x1.as_chunks());
    let (whole, rest) = chunks.split_at(x0.len());
    let mut lanes = [[0.0; BF16_COLS]; 4];
    for ((chunk, x0), x1) in whole.iter().zip(x0).zip(x1) {
        add_two_rows(&mut lanes, chunk, row, x0, x1);
    }
    if let Some(chunk) = rest.first() {
        add_two_rows(&mut lanes, chunk, row, &padded(tail0), &padded(tail1));
    }
    trees(&lanes)
}

fn padded(tail: &[f32]) -> Lanes {
    let mut padded = [0.0; BF16_COLS];
    padded[..tail.len()].copy_from_slice(tail);
    padded
}

/// The sum of each dot product's lanes. A call, so that lanes lie one after the other before it: otherwise the compiler
/// may make vectors of the same lane of all four, and shuffle for it in the loop above.
#[inline(never)]
fn trees(lanes: &[Lanes; 4]) -> [f32; 4] {
    lanes.map(|lanes| tree(std::array::from_fn(|l| lanes[l] + lanes[LANES + l])))
}

// These two are written out: given a loop, the compiler may make vectors of the four, with gathers.
#[inline(always)]
fn add_four_rows(lanes: &mut [Lanes; 4], chunk: &[u8; CHUNK], x: &Lanes) {
    let chunk = rows_of(chunk);
    add_products(&mut lanes[0], &chunk[0], x);
    add_products(&mut lanes[1], &chunk[1], x);
    add_products(&mut lanes[2], &chunk[2], x);
    add_products(&mut lanes[3], &chunk[3], x);
}

#[inline(always)]
fn add_two_rows(lanes: &mut [Lanes; 4], chunk: &[u8; CHUNK], row: usize, x0: &Lanes, x1: &Lanes) {
    let chunk = rows_of(chunk);
    add_products(&mut lanes[0], &chunk[row], x0);
    add_products(&mut lanes[1], &chunk[row + 1], x0);
    add_products(&mut lanes[2], &chunk[row], x1);
    add_products(&mut lanes[3], &chunk[row + 1], x1);
}

#[inline(always)]
fn rows_of(chunk: &[u8; CHUNK]) -> &[[u8; 2 * BF16_COLS]; PANEL_ROWS] {
    chunk.as_chunks().0.first_chunk().expect("a chunk is four rows")
}

#[inline(always)]
fn add_products(lanes: &mut Lanes, row: &[u8; 2 * BF16_COLS], x: &Lanes) {
    let row = row.as_chunks::<2>().0;
    for l in 0..BF16_COLS {
        lanes[l] += bf16(row[l]) * x[l];
    }
}
