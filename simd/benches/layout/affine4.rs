//! 4-bit rows: scales and biases in a header of each panel, in one array apart, in two arrays by row.

use std::arch::x86_64::*;
use std::ops::Range;

use criterion::Criterion;
use samara_simd::{ACT_SPAN, Affine4Rows, Isa, Kernels, QuantizedRow};

use super::{Activations, COLS, Comparison, Random, Weights, load, load_f32, pair_sums, prefetch, tree};

const ROWS: usize = 151_936; // the head
const N_GROUPS: usize = COLS / 64;
const HEADER: usize = 16 * N_GROUPS;
const CODES: usize = 128 * N_GROUPS;

pub(crate) fn compare(criterion: &mut Criterion) {
    let activations = Activations::new();
    let act = activations.row();
    let mut random = Random(2);
    let codes = random.bytes(ROWS / 4 * CODES);
    let affine = random.bf16s(ROWS / 4 * HEADER / 2);
    let mut panels = Weights::zeroed(codes.len() + affine.len());
    let parts = affine.chunks_exact(HEADER).zip(codes.chunks_exact(CODES));
    for (panel, (header, codes)) in panels.chunks_exact_mut(HEADER + CODES).zip(parts) {
        panel[..HEADER].copy_from_slice(header);
        panel[HEADER..].copy_from_slice(codes);
    }
    let (scales, biases) = by_row(&affine);
    let rows = Affine4Rows::new(&panels, ROWS, COLS);
    let avx2 = Kernels::for_isa(Isa::Avx2).expect("main has seen AVX2");

    let mut comparison = Comparison::new(criterion, "affine4", ROWS, panels.len());
    comparison.read(&panels);
    comparison.gemv("panel headers, no prefetch", |range, out| {
        let bytes = &panels[range.start / 4 * (HEADER + CODES)..];
        let parts = bytes.chunks_exact(HEADER + CODES).map(|panel| panel.split_at(HEADER));
        // SAFETY: main has seen AVX2.
        unsafe { gemv::<0>(parts, &act, out) }
    });
    comparison.gemv("panel headers, prefetch 2K", |range, out| {
        let bytes = &panels[range.start / 4 * (HEADER + CODES)..];
        let parts = bytes.chunks_exact(HEADER + CODES).map(|panel| panel.split_at(HEADER));
        // SAFETY: main has seen AVX2.
        unsafe { gemv::<2048>(parts, &act, out) }
    });
    comparison.gemv("one array of scales apart, prefetch 2K", |range, out| {
        let affine = affine[range.start / 4 * HEADER..].chunks_exact(HEADER);
        let codes = codes[range.start / 4 * CODES..].chunks_exact(CODES);
        // SAFETY: main has seen AVX2.
        unsafe { gemv::<2048>(affine.zip(codes), &act, out) }
    });
    comparison.gemv("two arrays by row, prefetch 2K", |range, out| {
        // SAFETY: main has seen AVX2.
        unsafe { gemv_by_row([&codes, &scales, &biases], &act, range, out) }
    });
    comparison.gemv("crate", |range, out| avx2.affine4_gemv(&rows, &act, range, out));
}

/// Panel headers to bf16 `[ROWS][N_GROUPS]` scales and biases.
fn by_row(affine: &[u8]) -> (Weights, Weights) {
    let len = 2 * ROWS * N_GROUPS;
    let (mut scales, mut biases) = (Weights::zeroed(len), Weights::zeroed(len));
    for (i, group) in affine.chunks_exact(16).enumerate() {
        let (panel, g) = (i / N_GROUPS, i % N_GROUPS);
        for r in 0..4 {
            let at = 2 * ((4 * panel + r) * N_GROUPS + g);
            scales[at..at + 2].copy_from_slice(&group[2 * r..2 * r + 2]);
            biases[at..at + 2].copy_from_slice(&group[8 + 2 * r..10 + 2 * r]);
        }
    }
    (scales, biases)
}

#[target_feature(enable = "avx2")]
fn gemv<'a, const AHEAD: usize>(
    panels: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    act: &QuantizedRow<'_>,
    out: &mut [f32],
) {
    for ((header, codes), out) in panels.zip(out.chunks_exact_mut(4)) {
        let mut lanes = [_mm256_setzero_ps(); 4];
        let mut bias_sums = _mm_setzero_ps();
        header.as_chunks::<64>().0.iter().for_each(|line| prefetch::<AHEAD>(line.as_ptr()));
        for (g, (affine, chunk)) in
            header.as_chunks::<16>().0.iter().zip(codes.as_chunks::<128>().0).enumerate()
        {
            prefetch::<AHEAD>(chunk.as_ptr());
            prefetch::<AHEAD>(chunk[64..].as_ptr());
            let affine = bf16s(affine);
            let bias = _mm256_extractf128_ps::<1>(affine);
            bias_sums = _mm_add_ps(bias_sums, _mm_mul_ps(bias, _mm_set1_ps(act.offsets()[g])));
            for (r, lanes) in lanes.iter_mut().enumerate() {
                let scale = _mm256_permutevar8x32_ps(affine, _mm256_set1_epi32(r as i32));
                let sums = chunk_sums(chunk, r, g, act);
                *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scale, sums));
            }
        }
        let mut biases = [0.0; 4];
        // SAFETY: the array is the 16 bytes written.
        unsafe { _mm_storeu_ps(biases.as_mut_ptr(), bias_sums) };
        (0..4).for_each(|r| out[r] = tree(lanes[r]) + biases[r]);
    }
}

#[target_feature(enable = "avx2")]
fn gemv_by_row(
    [codes, scales, biases]: [&[u8]; 3],
    act: &QuantizedRow<'_>,
    range: Range<usize>,
    out: &mut [f32],
) {
    let codes = &codes[range.start / 4 * CODES..];
    let row = 8 * N_GROUPS; // bytes of four rows' scales
    let scales = scales[range.start / 4 * row..].chunks_exact(row);
    let biases = biases[range.start / 4 * row..].chunks_exact(row);
    for (((codes, scales), biases), out) in
        codes.chunks_exact(CODES).zip(scales).zip(biases).zip(out.chunks_exact_mut(4))
    {
        let mut lanes = [_mm256_setzero_ps(); 4];
        let scales = scales.as_chunks::<2>().0;
        for (g, chunk) in codes.as_chunks::<128>().0.iter().enumerate() {
            prefetch::<2048>(chunk.as_ptr());
            prefetch::<2048>(chunk[64..].as_ptr());
            for (r, lanes) in lanes.iter_mut().enumerate() {
                let scale = u32::from(u16::from_le_bytes(scales[N_GROUPS * r + g])) << 16;
                let scale = _mm256_set1_ps(f32::from_bits(scale));
                *lanes = _mm256_add_ps(*lanes, _mm256_mul_ps(scale, chunk_sums(chunk, r, g, act)));
            }
        }
        for (r, biases) in biases.chunks_exact(2 * N_GROUPS).enumerate() {
            let mut sums = _mm256_setzero_ps();
            for (bias, offset) in biases.as_chunks::<16>().0.iter().zip(act.offsets().as_chunks::<8>().0) {
                sums = _mm256_add_ps(sums, _mm256_mul_ps(bf16s(bias), load_f32(offset)));
            }
            out[r] = tree(lanes[r]) + tree(sums);
        }
    }
}

/// Activation scale * Σ nibble * q of row `r` of a chunk, by lane.
#[inline]
#[target_feature(enable = "avx2")]
fn chunk_sums(chunk: &[u8; 128], r: usize, g: usize, act: &QuantizedRow<'_>) -> __m256 {
    let q = act.q().as_chunks::<32>().0;
    let mask = _mm256_set1_epi8(15);
    let nibbles = load(&chunk.as_chunks::<32>().0[r]);
    let low = _mm256_maddubs_epi16(_mm256_and_si256(nibbles, mask), load(&q[2 * g]));
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), mask);
    let sums = pair_sums(_mm256_add_epi16(low, _mm256_maddubs_epi16(high, load(&q[2 * g + 1]))));
    _mm256_mul_ps(load_f32(&act.scales().as_chunks::<8>().0[64 * g / ACT_SPAN]), sums)
}

#[inline]
#[target_feature(enable = "avx2")]
fn bf16s(values: &[u8; 16]) -> __m256 {
    // SAFETY: the reference covers the 16 bytes read; an unaligned load.
    let values = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(values)))
}
