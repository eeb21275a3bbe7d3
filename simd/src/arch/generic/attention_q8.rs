//! Attention over keys and values of 8 bits: as [`attention`](super::attention), but in integers.
//!
//! The queries of a head are rounded to 16 bits below their largest magnitude, and so are its weights times the scales of the
//! values; products with the cache's int8 are added up in i32, which is exact, and then scaled. Rounding costs 2^-16 of the largest where
//! the cache costs 2^-8.
//!
//! Keys and values have one shape: lines of 16 lanes, each with four bytes that meet four coefficients. In a line of keys lanes
//! are positions and the four are dimensions, in one of values the other way round. So an instruction set has one kernel, `dot_lines`.

use std::ops::Range;

use super::attention::softmax;
use super::quantize::{ROUND, scale_of};
use crate::kv::{KV_BLOCK, KV_PART, Q8_DIMS, Q8_MAX_DIM, q8_dims};

/// Query heads at a time.
const HEADS: usize = 4;

/// 16 lanes of four elements of the cache, int8 plus 128.
pub(crate) type Line = [u8; 64];

/// Lanes of each query head.
pub(crate) type Sums = [[i32; 16]; HEADS];

/// The largest coefficient: its upper and lower byte, of which the lower is signed too, are both int8.
const LARGEST: i16 = 127 * 256 + 127;

/// Most lines that are added up: four dimensions each, or four positions of a part.
const MAX_LINES: usize = KV_PART / 4;
const _: () = assert!(Q8_MAX_DIM <= 4 * MAX_LINES);

/// Elements and scales of keys and values, as in [`crate::Kv::Q8`].
#[derive(Clone, Copy)]
pub(crate) struct Q8<'a> {
    pub(crate) keys: &'a [u8],
    pub(crate) key_scales: &'a [f32],
    pub(crate) values: &'a [u8],
    pub(crate) value_scales: &'a [f32],
}

/// What lines are multiplied by, for up to four heads: four coefficients a line, and their bytes.
pub(crate) struct Coefficients {
    /// At most [`LARGEST`].
    pub(crate) words: [[[i16; 4]; MAX_LINES]; HEADS],
    /// `words = 256 * high + low`.
    pub(crate) high: [[[i8; 4]; MAX_LINES]; HEADS],
    pub(crate) low: [[[i8; 4]; MAX_LINES]; HEADS],
    /// Sums of each head's words.
    pub(crate) totals: [i32; HEADS],
    /// What a word of 1 stands for.
    scales: [f32; HEADS],
}

impl Coefficients {
    /// Head `head` becomes `x`, rounded, with zeros after it to a whole line. NaN or infinity makes the scale NaN.
    #[inline(always)]
    fn set(&mut self, head: usize, x: &[f32]) {
        let inverse;
        (self.scales[head], inverse) = scale_of(x, f32::from(LARGEST));
        let keep = if inverse == 0.0 { 0 } else { u32::MAX };
        let n = x.len().next_multiple_of(4);
        let words = &mut self.words[head].as_flattened_mut()[..n];
        words[x.len()..].fill(0);
        for (word, x) in words.iter_mut().zip(x) {
            *word = ((x * inverse + ROUND).to_bits() & keep) as i16;
        }
        self.totals[head] = words.iter().map(|word| i32::from(*word)).sum();
        let high = self.high[head].as_flattened_mut();
        let low = self.low[head].as_flattened_mut();
        for ((high, low), word) in high.iter_mut().zip(low).zip(words) {
            *low = *word as i8;
            *high = ((*word - i16::from(*low)) >> 8) as i8;
        }
    }
}

/// Of each head what meets some lines.
#[inline(always)]
pub(crate) fn of_lines<T>(heads: &[[T; MAX_LINES]; HEADS], lines: Range<usize>) -> [&[T]; HEADS] {
    let [a, b, c, d] = heads;
    [&a[lines.clone()], &b[lines.clone()], &c[lines.clone()], &d[lines]]
}

/// As [`attention_part`](super::attention::attention_part), over `keys` of `cache`. `dot_lines` sets its last argument to `Σ (line - 128) * coefficient` for lines that
/// meet the coefficients from its third argument on.
#[inline(always)]
#[expect(
    clippy::too_many_arguments,
    reason = "those of attention_part, and what differs between instruction sets"
)]
pub(crate) fn attention_part_q8(
    queries: &[f32],
    cache: Q8<'_>,
    keys: Range<usize>,
    head_dim: usize,
    scale: f32,
    weights: &mut [f32],
    state: &mut [f32],
    dot_lines: impl Fn(&[Line], &Coefficients, usize, &mut Sums),
) {
    let dims = q8_dims(head_dim);
    let n_queries = queries.len() / head_dim;
    let (sums, rest) = state.split_at_mut(queries.len());
    let (largest, totals) = rest.split_at_mut(n_queries);
    let mut coefficients = Coefficients {
        words: [[[0; 4]; MAX_LINES]; HEADS],
        high: [[[0; 4]; MAX_LINES]; HEADS],
        low: [[[0; 4]; MAX_LINES]; HEADS],
        totals: [0; HEADS],
        scales: [0.0; HEADS],
    };
    let groups = queries.chunks(HEADS * head_dim).zip(sums.chunks_mut(HEADS * head_dim));
    let groups = groups.zip(weights.as_chunks_mut::<KV_PART>().0.chunks_mut(HEADS));
    let groups = groups.zip(largest.chunks_mut(HEADS).zip(totals.chunks_mut(HEADS)));
    for (((queries, sums), weights), (largest, totals)) in groups {
        for (head, query) in queries.chunks_exact(head_dim).enumerate() {
            coefficients.set(head, query);
        }
        // The weight of a key is `query . key * scale` first.
        for block in keys.start / KV_BLOCK..keys.end.div_ceil(KV_BLOCK) {
            let lines = &cache.keys[block * KV_BLOCK * dims..].as_chunks().0[..head_dim.div_ceil(4)];
            let mut sums = [[0; 16]; HEADS];
            dot_lines(lines, &coefficients, 0, &mut sums);
            let scales = cache.key_scales.as_chunks::<KV_BLOCK>().0[block];
            for (head, weights) in weights.iter_mut().enumerate() {
                let weights = &mut weights.as_chunks_mut::<KV_BLOCK>().0[block];
                let scale = coefficients.scales[head] * scale;
                for l in 0..KV_BLOCK {
                    weights[l] = sums[head][l] as f32 * scale * scales[l];
                }
            }
        }
        for ((weights, largest), total) in weights.iter_mut().zip(largest).zip(totals) {
            (*largest, *total) = softmax::<false>(&keys, weights);
        }
        for (head, weights) in weights.iter_mut().enumerate() {
            weights[..keys.start].fill(0.0);
            weights[keys.end..].fill(0.0);
            // Scales of positions that are not seen may be anything.
            let seen = weights[keys.clone()].iter_mut().zip(&cache.value_scales[keys.clone()]);
            seen.for_each(|(weight, scale)| *weight *= scale);
            coefficients.set(head, weights);
        }
        let lines = keys.start / 4..keys.end.div_ceil(4);
        for (g, values) in cache.values.chunks_exact(KV_PART * Q8_DIMS).enumerate() {
            let mut lanes = [[0; 16]; HEADS];
            dot_lines(&values.as_chunks().0[lines.clone()], &coefficients, lines.start, &mut lanes);
            for (head, sums) in sums.chunks_exact_mut(head_dim).enumerate() {
                let scale = coefficients.scales[head];
                for (sum, lane) in sums[Q8_DIMS * g..].iter_mut().zip(lanes[head]) {
                    *sum = lane as f32 * scale;
                }
            }
        }
    }
}
