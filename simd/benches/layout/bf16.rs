//! bf16 rows, as the router has them: row after row, four at a time, and in panels.

use std::arch::x86_64::*;
use std::ops::Range;

use criterion::Criterion;
use samara_simd::{Bf16Rows, Isa, Kernels};

use super::{COLS, Comparison, Random, Weights, load_f32, prefetch, tree};

const ROWS: usize = 49_152; // 201 MB: what a router reads has been evicted by the experts before it
const ROW_BYTES: usize = 2 * COLS;

pub(crate) fn compare(criterion: &mut Criterion) {
    let x = Random(6).f32s(COLS);
    let by_row = Random(5).bf16s(ROWS * COLS);
    let mut panels = Weights::zeroed(by_row.len());
    for (rows, panel) in by_row.chunks_exact(4 * ROW_BYTES).zip(panels.chunks_exact_mut(4 * ROW_BYTES)) {
        for (i, piece) in rows.chunks_exact(32).enumerate() {
            let (r, b) = (i / (COLS / 16), i % (COLS / 16));
            panel[32 * (4 * b + r)..][..32].copy_from_slice(piece);
        }
    }
    let rows = Bf16Rows::new(&panels, ROWS, COLS);
    let avx2 = Kernels::for_isa(Isa::Avx2).expect("main has seen AVX2");

    let mut comparison = Comparison::new(criterion, "bf16", ROWS, panels.len());
    comparison.read(&panels);
    comparison.gemv("rows", variant::<1, ROW_BYTES, 32, 0>(&by_row, &x));
    comparison.gemv("4 rows", variant::<4, ROW_BYTES, 32, 0>(&by_row, &x));
    comparison.gemv("4-row panels", variant::<4, 32, 128, 0>(&panels, &x));
    comparison.gemv("4-row panels, prefetch 2K", variant::<4, 32, 128, 2048>(&panels, &x));
    comparison.gemv("crate", |range, out| avx2.bf16_gemv(&rows, &x, range, out));
}

/// As in the ternary comparison: `N` rows at a time, pieces of 16 columns.
fn variant<const N: usize, const ROW: usize, const BLOCK: usize, const AHEAD: usize>(
    weights: &[u8],
    x: &[f32],
) -> impl Fn(Range<usize>, &mut [f32]) + Sync {
    |range, out| {
        // SAFETY: main has seen AVX2.
        unsafe { gemv::<N, ROW, BLOCK, AHEAD>(weights, x, range, out) }
    }
}

#[target_feature(enable = "avx2")]
fn gemv<const N: usize, const ROW: usize, const BLOCK: usize, const AHEAD: usize>(
    weights: &[u8],
    x: &[f32],
    range: Range<usize>,
    out: &mut [f32],
) {
    let weights = &weights[range.start * ROW_BYTES..range.end * ROW_BYTES];
    for (rows, out) in weights.chunks_exact(N * ROW_BYTES).zip(out.chunks_exact_mut(N)) {
        let mut lanes = [_mm256_setzero_ps(); N];
        for (b, x) in x.as_chunks::<16>().0.iter().enumerate() {
            if BLOCK == 128 {
                prefetch::<AHEAD>(rows[BLOCK * b..].as_ptr());
                prefetch::<AHEAD>(rows[BLOCK * b + 64..].as_ptr());
            }
            let x = x.as_chunks::<8>().0;
            let x = [load_f32(&x[0]), load_f32(&x[1])];
            for (r, lanes) in lanes.iter_mut().enumerate() {
                for (half, &x) in x.iter().enumerate() {
                    let at = ROW * r + BLOCK * b + 16 * half;
                    // SAFETY: `at` + 16 is at most the N rows' length for the ROW and BLOCK of a layout.
                    let values = unsafe { _mm_loadu_si128(rows.as_ptr().add(at).cast()) };
                    let values = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values));
                    *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(_mm256_castsi256_ps(values), x));
                }
            }
        }
        for (out, lanes) in out.iter_mut().zip(lanes) {
            *out = tree(lanes);
        }
    }
}
