//! bf16 rows times f32 activations, all in f32: the router, where int8 would change which experts run.

use std::ops::Range;

use crate::activation::LANES;
use crate::arch::generic::tree;
use crate::rows::{BF16_COLS, Bf16Rows, CHUNK, PANEL_ROWS, bf16};

/// `out[i] = row[4 * panels.start + i] . x`, `x` f32 `[cols]`; element `c` in lane `c % 8`.
#[inline(always)]
pub(crate) fn gemv(rows: &Bf16Rows<'_>, x: &[f32], panels: Range<usize>, out: &mut [f32]) {
    let (x, tail) = x.as_chunks::<BF16_COLS>();
    let mut padded = [0.0f32; BF16_COLS];
    padded[..tail.len()].copy_from_slice(tail);
    for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
        let chunks = rows.panel(p);
        let mut lanes = [[0.0f32; LANES]; PANEL_ROWS];
        for (chunk, x) in chunks.iter().zip(x) {
            add_chunk(&mut lanes, chunk, x);
        }
        if let Some(chunk) = chunks.get(x.len()) {
            add_chunk(&mut lanes, chunk, &padded);
        }
        for (out, lanes) in out.iter_mut().zip(lanes) {
            *out = tree(lanes);
        }
    }
}

#[inline(always)]
fn add_chunk(lanes: &mut [[f32; LANES]; PANEL_ROWS], chunk: &[u8; CHUNK], x: &[f32; BF16_COLS]) {
    for (lanes, row) in lanes.iter_mut().zip(chunk.as_chunks::<32>().0) {
        for (half, x) in row.as_chunks::<{ 2 * LANES }>().0.iter().zip(x.as_chunks::<LANES>().0) {
            for l in 0..LANES {
                lanes[l] += bf16([half[2 * l], half[2 * l + 1]]) * x[l];
            }
        }
    }
}
