//! Ternary codes: row after row, four rows at a time, and interleaved in panels of four and eight.

use std::arch::x86_64::*;
use std::ops::Range;

use criterion::Criterion;
use samara_simd::{ACT_SPAN, Isa, Kernels, QuantizedRow, TernaryRows};

use super::{Activations, COLS, Comparison, Random, Weights, load, load_f32, pair_sums, prefetch, tree};

const ROWS: usize = 425_984; // 218 MB, the body of a token
const N_BLOCKS: usize = COLS / 128;
const ROW_BYTES: usize = 32 * N_BLOCKS;
const SPAN_BLOCKS: usize = ACT_SPAN / 128;
/// A scalar kernel is some 20 times slower: a share of the rows is enough to time it.
const SCALAR_ROWS: usize = ROWS / 16;

pub(crate) fn compare(criterion: &mut Criterion) {
    let by_row = random_codes();
    let panels4 = interleave::<4>(&by_row);
    let panels8 = interleave::<8>(&by_row);
    let alphas = Random(4).bf16s(ROWS);
    let activations = Activations::new();
    let act = activations.row();
    let rows = TernaryRows::new(&panels4, &alphas, ROWS, COLS);
    let avx2 = Kernels::for_isa(Isa::Avx2).expect("main has seen AVX2");
    assert_same_sums(&avx2, [&by_row, &panels4, &panels8], &act);

    let mut comparison = Comparison::new(criterion, "ternary", ROWS, by_row.len());
    comparison.read(&by_row);
    comparison.gemv("rows", variant::<1, 512, 32, 0>(&by_row, &act));
    comparison.gemv("rows, prefetch 2K", variant::<1, 512, 32, 2048>(&by_row, &act));
    comparison.gemv("4 rows", variant::<4, 512, 32, 0>(&by_row, &act));
    comparison.gemv("4 rows, prefetch 2K", variant::<4, 512, 32, 2048>(&by_row, &act));
    comparison.gemv("4-row panels", variant::<4, 32, 128, 0>(&panels4, &act));
    comparison.gemv("4-row panels, prefetch 1K", variant::<4, 32, 128, 1024>(&panels4, &act));
    comparison.gemv("4-row panels, prefetch 2K", variant::<4, 32, 128, 2048>(&panels4, &act));
    comparison.gemv("4-row panels, prefetch 4K", variant::<4, 32, 128, 4096>(&panels4, &act));
    comparison.gemv("4-row panels, prefetch 8K", variant::<4, 32, 128, 8192>(&panels4, &act));
    comparison.gemv("8-row panels", variant::<8, 32, 256, 0>(&panels8, &act));
    comparison.gemv("8-row panels, prefetch 2K", variant::<8, 32, 256, 2048>(&panels8, &act));
    comparison.gemv("8-row panels, prefetch 4K", variant::<8, 32, 256, 4096>(&panels8, &act));
    comparison.gemv("4-row panels, prefetch 2K, a scale for each plane", |range, out| {
        // SAFETY: main has seen AVX2.
        unsafe { gemv_by_plane(&panels4, &act, range, out) }
    });
    comparison.gemv("crate", |range, out| avx2.ternary_gemv(&rows, &act, range, out));
    drop(comparison);

    let codes = &panels4[..SCALAR_ROWS * ROW_BYTES];
    let rows = TernaryRows::new(codes, &alphas[..2 * SCALAR_ROWS], SCALAR_ROWS, COLS);
    let mut comparison = Comparison::new(criterion, "ternary-scalar", SCALAR_ROWS, codes.len());
    comparison.gemv("rows", |range, out| {
        for (row, out) in by_row[range.start * ROW_BYTES..].chunks_exact(ROW_BYTES).zip(out) {
            *out = scalar_dot(row, &act);
        }
    });
    comparison.gemv("crate", |range, out| Kernels::scalar().ternary_gemv(&rows, &act, range, out));
}

/// Codes 0, 1, 2 in every byte, row-major planes: `[ROWS][N_BLOCKS][32]`.
fn random_codes() -> Weights {
    let mut codes = Random(1).bytes(ROWS * ROW_BYTES);
    for byte in codes.iter_mut() {
        let low = *byte & 0x55;
        *byte = low | *byte & 0xaa & !(low << 1);
    }
    codes
}

/// `[rows][blocks][32]` to `[panels][blocks][N][32]`.
fn interleave<const N: usize>(by_row: &[u8]) -> Weights {
    let mut panels = Weights::zeroed(by_row.len());
    for (rows, panel) in by_row.chunks_exact(N * ROW_BYTES).zip(panels.chunks_exact_mut(N * ROW_BYTES)) {
        for (r, row) in rows.chunks_exact(ROW_BYTES).enumerate() {
            for (b, piece) in row.chunks_exact(32).enumerate() {
                panel[32 * (N * b + r)..][..32].copy_from_slice(piece);
            }
        }
    }
    panels
}

/// The layouts hold the same rows: the variants' sums are the crate's, bit for bit.
fn assert_same_sums(avx2: &Kernels, [by_row, panels4, panels8]: [&[u8]; 3], act: &QuantizedRow<'_>) {
    let ones = [0x80, 0x3f].repeat(16);
    let mut expected = [0.0; 16];
    let rows = TernaryRows::new(&panels4[..16 * ROW_BYTES], &ones, 16, COLS);
    avx2.ternary_gemv(&rows, act, 0..16, &mut expected);
    let mut found = [[0.0; 16]; 4];
    variant::<1, 512, 32, 0>(by_row, act)(0..16, &mut found[0]);
    variant::<4, 512, 32, 0>(by_row, act)(0..16, &mut found[1]);
    variant::<4, 32, 128, 0>(panels4, act)(0..16, &mut found[2]);
    variant::<8, 32, 256, 0>(panels8, act)(0..16, &mut found[3]);
    assert_eq!(found, [expected; 4]);
}

/// A gemv of `N` rows at a time whose 32 byte pieces lie `ROW` bytes apart, the next block's `BLOCK` bytes on.
fn variant<const N: usize, const ROW: usize, const BLOCK: usize, const AHEAD: usize>(
    codes: &[u8],
    act: &QuantizedRow<'_>,
) -> impl Fn(Range<usize>, &mut [f32]) + Sync {
    |range, out| {
        // SAFETY: main has seen AVX2.
        unsafe { gemv::<N, ROW, BLOCK, AHEAD>(codes, act, range, out) }
    }
}

#[target_feature(enable = "avx2")]
fn gemv<const N: usize, const ROW: usize, const BLOCK: usize, const AHEAD: usize>(
    codes: &[u8],
    act: &QuantizedRow<'_>,
    range: Range<usize>,
    out: &mut [f32],
) {
    let codes = &codes[range.start * ROW_BYTES..range.end * ROW_BYTES];
    for (rows, out) in codes.chunks_exact(N * ROW_BYTES).zip(out.chunks_exact_mut(N)) {
        let mut lanes = [_mm256_setzero_ps(); N];
        let mut span = [_mm256_setzero_si256(); N];
        for b in 0..N_BLOCKS {
            if BLOCK >= 128 {
                (0..BLOCK / 64).for_each(|line| prefetch::<AHEAD>(rows[BLOCK * b + 64 * line..].as_ptr()));
            }
            let q = act.q().as_chunks::<32>().0;
            let q = [load(&q[4 * b]), load(&q[4 * b + 1]), load(&q[4 * b + 2]), load(&q[4 * b + 3])];
            for (r, span) in span.iter_mut().enumerate() {
                let at = ROW * r + BLOCK * b;
                if BLOCK < 64 && b % 2 == 0 {
                    prefetch::<AHEAD>(rows[at..].as_ptr());
                }
                // SAFETY: `at` + 32 is at most the N rows' length for the ROW and BLOCK of a layout.
                let piece = unsafe { load(&*rows.as_ptr().add(at).cast::<[u8; 32]>()) };
                let products = planes(piece);
                let products = [0, 1, 2, 3].map(|j| _mm256_maddubs_epi16(products[j], q[j]));
                let sum = _mm256_add_epi16(
                    _mm256_add_epi16(products[0], products[1]),
                    _mm256_add_epi16(products[2], products[3]),
                );
                *span = _mm256_add_epi16(*span, sum);
            }
            if (b + 1).is_multiple_of(SPAN_BLOCKS) {
                let scales = load_f32(&act.scales().as_chunks().0[b / SPAN_BLOCKS]);
                for (lanes, span) in lanes.iter_mut().zip(&mut span) {
                    *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scales, pair_sums(*span)));
                    *span = _mm256_setzero_si256();
                }
            }
        }
        for (out, lanes) in out.iter_mut().zip(lanes) {
            *out = tree(lanes) - act.correction();
        }
    }
}

/// 4-row panels if a scale belonged to 32 neighbouring inputs, one plane: each plane needs a convert,
/// a multiply and an add of its own.
#[target_feature(enable = "avx2")]
fn gemv_by_plane(codes: &[u8], act: &QuantizedRow<'_>, range: Range<usize>, out: &mut [f32]) {
    let codes = &codes[range.start * ROW_BYTES..range.end * ROW_BYTES];
    for (panel, out) in codes.chunks_exact(4 * ROW_BYTES).zip(out.chunks_exact_mut(4)) {
        let mut lanes = [_mm256_setzero_ps(); 4];
        for (b, chunk) in panel.as_chunks::<128>().0.iter().enumerate() {
            prefetch::<2048>(chunk.as_ptr());
            prefetch::<2048>(chunk[64..].as_ptr());
            let pieces = chunk.as_chunks::<32>().0;
            let pieces = [0, 1, 2, 3].map(|r| planes(load(&pieces[r])));
            for j in 0..4 {
                let q = load(&act.q().as_chunks::<32>().0[4 * b + j]);
                let scale = _mm256_set1_ps(act.scales()[8 * (b / SPAN_BLOCKS) + j]);
                for (lanes, piece) in lanes.iter_mut().zip(&pieces) {
                    let sums = pair_sums(_mm256_maddubs_epi16(piece[j], q));
                    *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scale, sums));
                }
            }
        }
        for (out, lanes) in out.iter_mut().zip(lanes) {
            *out = tree(lanes) - act.correction();
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn planes(piece: __m256i) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(3);
    [
        _mm256_and_si256(piece, mask),
        _mm256_and_si256(_mm256_srli_epi16::<2>(piece), mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(piece), mask),
        _mm256_and_si256(_mm256_srli_epi16::<6>(piece), mask),
    ]
}

/// The crate's scalar loop over one row of row-major planes.
fn scalar_dot(row: &[u8], act: &QuantizedRow<'_>) -> f32 {
    let mut lanes = [0.0f32; 8];
    let q = act.q().as_chunks::<128>().0;
    let spans = row.as_chunks::<32>().0.chunks(SPAN_BLOCKS).zip(q.chunks(SPAN_BLOCKS));
    for ((codes, q), scales) in spans.zip(act.scales().as_chunks::<8>().0) {
        let mut products = [0i16; 32];
        for (codes, q) in codes.iter().zip(q) {
            for (j, q) in q.as_chunks::<32>().0.iter().enumerate() {
                for i in 0..32 {
                    products[i] += i16::from((codes[i] >> (2 * j)) & 3) * i16::from(q[i]);
                }
            }
        }
        for (l, four) in products.as_chunks::<4>().0.iter().enumerate() {
            lanes[l] += scales[l] * four.iter().map(|&product| i32::from(product)).sum::<i32>() as f32;
        }
    }
    lanes.iter().sum::<f32>() - act.correction()
}
