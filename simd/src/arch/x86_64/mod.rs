//! x86-64.
//!
//! The integer kernels are written once, as the macros `ternary_kernels` and `affine4_kernels`, over a vector
//! width (`ymm`, `zmm`) and an instruction set's way to multiply bytes (`dot` and `sums` in its `mod.rs`).
//!
//! The tokens that prove an instruction set are `pulp`'s. They ask the standard library, which looks at CPUID,
//! OSXSAVE and XCR0; `tests/emulated_cpus.rs` has CPUs that only seem to have one.

#[macro_use]
mod affine4;
#[macro_use]
mod lines;
#[macro_use]
mod ternary;

pub(crate) mod avx2;
pub(crate) mod avx512;
pub(crate) mod avx512_vnni;
pub(crate) mod avx_vnni;
mod ymm;
mod zmm;

use std::arch::x86_64::*;

use crate::activation::{ACT_BLOCK, LANES, QuantizedRow, QuantizedRows, SPAN_BLOCKS};
use crate::arch::generic;
use crate::arch::generic::attention_q8::Sums;
use crate::rows::{AHEAD, CHUNK, PANEL_ROWS};

/// Blocks of a panel that a gemm unpacks at a time: 8 KiB of bytes, which stay in the first cache.
const RUN_BLOCKS: usize = 2048 / ACT_BLOCK;
const _: () = assert!(RUN_BLOCKS.is_multiple_of(SPAN_BLOCKS));

/// Tokens that a gemm takes through all panels at a time: their activations stay in the second cache.
const GEMM_TOKENS: usize = 64;

/// The f32 lanes of the four rows of a panel.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct PanelLanes([[f32; LANES]; PANEL_ROWS]);

/// Codes of one chunk, a byte each: plane by plane, in each the four rows.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Unpacked<const PLANES: usize>([[u8; CHUNK]; PLANES]);

/// Asks for the two cache lines [`AHEAD`] bytes after `chunk`, unless they are after `end`.
#[inline(always)]
fn prefetch_within(chunk: &[u8; CHUNK], end: *const u8) {
    if chunk.as_ptr().wrapping_add(AHEAD) < end {
        prefetch(chunk);
    }
}

/// Asks for the two cache lines [`AHEAD`] bytes after `chunk`.
#[inline(always)]
fn prefetch(chunk: &[u8; CHUNK]) {
    generic::prefetch(chunk.as_ptr(), AHEAD);
    generic::prefetch(chunk.as_ptr(), AHEAD + 64);
}

/// Activations `tokens` of a gemm's pass, at most [`GEMM_TOKENS`] of them; what is beyond repeats the first.
#[inline(always)]
fn acts_of<'a>(acts: &QuantizedRows<'a>, tokens: &[u32]) -> [QuantizedRow<'a>; GEMM_TOKENS] {
    let mut rows = [acts.row(tokens[0] as usize); GEMM_TOKENS];
    for (row, &token) in rows.iter_mut().zip(tokens) {
        *row = acts.row(token as usize);
    }
    rows
}

/// `$run.tile` for a tile of `$n` tokens, 1 to 6.
macro_rules! tile {
    ($n:expr, $run:ident $(, $flag:literal)?; $($arg:expr),*) => {
        match $n {
            1 => $run.tile::<1 $(, $flag)?>($($arg),*),
            2 => $run.tile::<2 $(, $flag)?>($($arg),*),
            3 => $run.tile::<3 $(, $flag)?>($($arg),*),
            4 => $run.tile::<4 $(, $flag)?>($($arg),*),
            5 => $run.tile::<5 $(, $flag)?>($($arg),*),
            _ => $run.tile::<6 $(, $flag)?>($($arg),*),
        }
    };
}
pub(crate) use tile;

/// The size of the next tile of `left` tokens: no tile is small if there are enough of them.
#[inline(always)]
fn tile_len(left: usize, largest: usize) -> usize {
    if left >= 2 * largest {
        largest
    } else if left > largest {
        left.div_ceil(2)
    } else {
        left
    }
}

/// The first of `dots` to `out`, one a row, fewer than four at the rows' end.
#[inline]
#[target_feature(enable = "sse")]
fn put(dots: __m128, out: &mut [f32]) {
    let mut array = [0.0f32; PANEL_ROWS];
    // SAFETY: the array is the 16 bytes written; an unaligned store of SSE, which x86-64 has.
    unsafe { _mm_storeu_ps(array.as_mut_ptr(), dots) };
    match out.as_mut_array::<PANEL_ROWS>() {
        Some(out) => *out = array,
        None => out.iter_mut().zip(array).for_each(|(out, dot)| *out = dot),
    }
}

/// Row scales of a panel, bf16, as f32.
#[inline]
#[target_feature(enable = "sse")]
fn row_scales(scales: &[u8; 2 * PANEL_ROWS]) -> __m128 {
    let [a, b, c, d] = [0, 1, 2, 3].map(|r| crate::rows::bf16(scales.as_chunks().0[r]));
    _mm_setr_ps(a, b, c, d)
}

/// From sums of bytes of lines to sums of the int8 that they are, given the sums of coefficients.
#[inline(always)]
fn take_128(sums: &mut Sums, totals: &[i32; 4]) {
    for (sums, total) in sums.iter_mut().zip(totals) {
        sums.iter_mut().for_each(|sum| *sum = sum.wrapping_sub(total.wrapping_mul(128)));
    }
}
