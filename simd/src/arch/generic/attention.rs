//! Query heads that share a kv head, over keys and values in the cache's layout.
//!
//! Keys are looked at in parts of [`KV_PART`] positions. A part's result is kept as a running softmax, the
//! sum of weighted values beside the largest score and the sum of weights, and results are merged in the
//! order of positions, so the answer does not depend on who computed which part.
//!
//! Nearly all the work is `sum += a * b`, with an element of the cache for `b`. One of bf16's 8 bits times
//! a number of 16 is exact in f32, and then one rounding, that of a fused multiply-add, is the same as those of a product and
//! a sum. So queries and weights are rounded to 16 bits, which costs 2^-17 of them where the cache costs 2^-9, and each instruction
//! set takes the faster of both. An f32 cache is never fused. int8: [`attention_q8`](super::attention_q8).

use std::ops::Range;

use crate::KvSlice;
use crate::activation::LANES;
use crate::arch::generic::attention_q8::{Coefficients, Line, Q8, Sums, attention_part_q8};
use crate::arch::generic::exp::exp;
use crate::arch::generic::{prefetch, tree};
use crate::kv::{KV_BLOCK, KV_DIMS, KV_LEAST, KV_PART, Kv};

/// How far ahead of a stream of keys or values to prefetch, bytes: the machine's own prefetching ends with a page.
pub(crate) const PREFETCH: usize = 8192;

/// Bytes of a cache line, on most machines.
const LINE: usize = 64;

/// Queries and weights below this are zero: the last bit of a product with an element of [`KV_LEAST`] or more is not below f32's
/// least, 2^-149.
const LEAST: f32 = 2.0 * KV_LEAST;
const _: () = assert!(LEAST * KV_LEAST >= f32::MIN_POSITIVE / 2.0);

/// `x` rounded to 16 significant bits (Dekker, A floating-point technique for extending the available precision, 1971),
/// zero below [`LEAST`]; NaN if it is no number, or 2^119 and more.
#[inline(always)]
fn short(x: f32) -> f32 {
    let scaled = x * 257.0;
    let rounded = scaled - (scaled - x);
    if rounded.abs() < LEAST { 0.0 } else { rounded }
}

/// `a * b + c`, in one operation if `FUSED`.
#[inline(always)]
fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// One element of the cache.
trait Element: Copy {
    /// Whether it has 8 significant bits.
    const SHORT: bool;
    /// Dimensions of a block of keys in a cache line.
    const KEYS_A_LINE: usize = at_least_one(LINE / (KV_BLOCK * size_of::<Self>()));
    /// Positions of a block of values in a cache line.
    const VALUES_A_LINE: usize = at_least_one(LINE / (KV_DIMS * size_of::<Self>()));

    /// As f32.
    fn widen(self) -> f32;
}

const fn at_least_one(n: usize) -> usize {
    if n == 0 { 1 } else { n }
}

impl Element for f32 {
    const SHORT: bool = false;

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// bf16.
impl Element for u16 {
    const SHORT: bool = true;

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

/// Fills `state`, `[n_queries, head_dim]` sums, then `[n_queries]` largest scores and `[n_queries]` sums of weights,
/// for the keys `first..` of `kv`, whose first position is a multiple of [`KV_PART`]. `weights` is `[n_queries, KV_PART]`. If
/// `FUSED`, by fused multiply-adds where that changes no bit. `dot_lines`: [`attention_part_q8`].
#[inline(always)]
pub(crate) fn attention_part<const FUSED: bool>(
    queries: &[f32],
    kv: &KvSlice<'_>,
    first: usize,
    scale: f32,
    weights: &mut [f32],
    state: &mut [f32],
    dot_lines: impl Fn(&[Line], &Coefficients, usize, &mut Sums),
) {
    let KvSlice { kv, n_keys, head_dim } = *kv;
    let run = Run { queries, keys: first..n_keys, head_dim, scale };
    match kv {
        Kv::F32 { keys, values } => run.in_groups::<f32, false>(keys, values, weights, state),
        Kv::Bf16 { keys, values } => run.in_groups::<u16, FUSED>(keys, values, weights, state),
        Kv::Q8 { keys, key_scales, values, value_scales } => {
            let cache = Q8 { keys, key_scales, values, value_scales };
            attention_part_q8(queries, cache, run.keys, head_dim, scale, weights, state, dot_lines);
        }
    }
}

struct Run<'a> {
    /// `[n, head_dim]`.
    queries: &'a [f32],
    keys: Range<usize>,
    head_dim: usize,
    scale: f32,
}

impl Run<'_> {
    /// Four query heads at a time, then one.
    #[inline(always)]
    fn in_groups<T: Element, const FUSED: bool>(
        &self,
        keys: &[T],
        values: &[T],
        weights: &mut [f32],
        state: &mut [f32],
    ) {
        let head_dim = self.head_dim;
        let n_queries = self.queries.len() / head_dim;
        let (sums, rest) = state.split_at_mut(self.queries.len());
        let (largest, totals) = rest.split_at_mut(n_queries);
        let weights = weights.as_chunks_mut::<KV_PART>().0;
        let mut done = 0;
        while done < n_queries {
            let n = if n_queries - done >= 4 { 4 } else { 1 };
            let group = done..done + n;
            let queries = &self.queries[done * head_dim..][..n * head_dim];
            let sums = &mut sums[done * head_dim..][..n * head_dim];
            let (weights, largest, totals) =
                (&mut weights[group.clone()], &mut largest[group.clone()], &mut totals[group]);
            let run = Run { queries, keys: self.keys.clone(), ..*self };
            match n {
                4 => run.all::<T, 4, FUSED>(keys, values, weights, largest, totals, sums),
                _ => run.all::<T, 1, FUSED>(keys, values, weights, largest, totals, sums),
            }
            done += n;
        }
    }

    /// `N` query heads.
    #[inline(always)]
    fn all<T: Element, const N: usize, const FUSED: bool>(
        &self,
        keys: &[T],
        values: &[T],
        weights: &mut [[f32; KV_PART]],
        largest: &mut [f32],
        totals: &mut [f32],
        sums: &mut [f32],
    ) {
        // The sums have the shape of the queries, and are not needed yet.
        sums.iter_mut().zip(self.queries).for_each(|(out, &x)| *out = if T::SHORT { short(x) } else { x });
        self.scores::<T, N, FUSED>(sums, keys, weights);
        for ((weights, largest), total) in weights.iter_mut().zip(largest).zip(totals) {
            (*largest, *total) = if T::SHORT {
                softmax::<true>(&self.keys, weights)
            } else {
                softmax::<false>(&self.keys, weights)
            };
        }
        self.values::<T, N, FUSED>(values, weights, sums);
    }

    /// `weights[q][key] = query . key * scale`: dimensions ascending, one key a lane.
    #[inline(always)]
    fn scores<T: Element, const N: usize, const FUSED: bool>(
        &self,
        queries: &[f32],
        keys: &[T],
        weights: &mut [[f32; KV_PART]],
    ) {
        let blocks = self.keys.start / KV_BLOCK..self.keys.end.div_ceil(KV_BLOCK);
        for block in blocks {
            let len = KV_BLOCK * self.head_dim;
            let keys = keys[block * len..][..len].as_chunks::<KV_BLOCK>().0;
            let queries = std::array::from_fn(|q| &queries[q * self.head_dim..][..keys.len()]);
            let sums = dot_block::<T, N, FUSED>(keys, queries);
            for (weights, sums) in weights.iter_mut().zip(&sums) {
                let weights = &mut weights.as_chunks_mut::<KV_BLOCK>().0[block];
                for l in 0..KV_BLOCK {
                    weights[l] = sums[l] * self.scale;
                }
            }
        }
    }

    /// `sums[q] = Σ weights[q][key] * value`: keys ascending, one dimension a lane. Values are read in the order in which
    /// they are stored.
    #[inline(always)]
    fn values<T: Element, const N: usize, const FUSED: bool>(
        &self,
        values: &[T],
        weights: &[[f32; KV_PART]],
        sums: &mut [f32],
    ) {
        sums.fill(0.0);
        let blocks = values.chunks_exact(KV_BLOCK * self.head_dim).zip((0..).step_by(KV_BLOCK));
        for (values, start) in blocks.skip(self.keys.start / KV_BLOCK) {
            let keys = self.keys.start.max(start)..self.keys.end.min(start + KV_BLOCK);
            if keys.is_empty() {
                break;
            }
            let weights: [&[f32]; N] = std::array::from_fn(|q| &weights[q][keys.clone()]);
            let keys = keys.start - start..keys.end - start;
            let mut from = 0;
            for columns in values.chunks(KV_BLOCK * KV_DIMS) {
                let width = columns.len() / KV_BLOCK;
                let columns = &columns[keys.start * width..keys.end * width];
                let sums = sums.chunks_exact_mut(self.head_dim).map(|sums| &mut sums[from..from + width]);
                if width == KV_DIMS {
                    add_columns::<T, N, FUSED>(columns.as_chunks().0, weights, sums);
                } else {
                    for (sums, weights) in sums.zip(weights) {
                        for (value, weight) in columns.chunks_exact(width).zip(weights) {
                            let sums = sums.iter_mut().zip(value);
                            sums.for_each(|(sum, v)| *sum = mul_add::<FUSED>(*weight, v.widen(), *sum));
                        }
                    }
                }
                from += width;
            }
        }
    }
}

/// Scores to weights, `exp(score - largest)`, the largest score and the sum of weights: key `i` in lane `i % 8`, then the
/// tree. The sum is NaN when a score is. If `SHORT`, weights are rounded by [`short`].
#[inline(always)]
pub(crate) fn softmax<const SHORT: bool>(keys: &Range<usize>, weights: &mut [f32; KV_PART]) -> (f32, f32) {
    let blocks = keys.start / KV_BLOCK * KV_BLOCK..keys.end.next_multiple_of(KV_BLOCK);
    weights[blocks.start..keys.start].fill(f32::NEG_INFINITY);
    weights[keys.end..blocks.end].fill(f32::NEG_INFINITY);
    let weights = weights[blocks].as_chunks_mut::<LANES>().0;
    let mut largest = [f32::NEG_INFINITY; LANES];
    for weights in weights.iter() {
        for l in 0..LANES {
            largest[l] = if weights[l] > largest[l] { weights[l] } else { largest[l] };
        }
    }
    let largest = largest.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    // Apart from the sums, which wait for each other.
    for weight in weights.as_flattened_mut() {
        let exp = exp(*weight - largest);
        *weight = if SHORT { short(exp) } else { exp };
    }
    let mut sums = [0.0f32; LANES];
    for weights in weights {
        for l in 0..LANES {
            sums[l] += weights[l];
        }
    }
    (largest, tree(sums))
}

/// `sums[q][key] = query . key` for the keys of a block: dimensions ascending, one key a lane.
#[inline(always)]
fn dot_block<T: Element, const N: usize, const FUSED: bool>(
    keys: &[[T; KV_BLOCK]],
    queries: [&[f32]; N],
) -> [[f32; KV_BLOCK]; N] {
    let mut sums = [[0.0f32; KV_BLOCK]; N];
    for (line, keys) in keys.chunks(T::KEYS_A_LINE).enumerate() {
        prefetch(keys.as_ptr(), PREFETCH);
        for (i, key) in keys.iter().enumerate() {
            let key = key.map(T::widen);
            for (sums, query) in sums.iter_mut().zip(queries) {
                let query = query[line * T::KEYS_A_LINE + i];
                for l in 0..KV_BLOCK {
                    sums[l] = mul_add::<FUSED>(query, key[l], sums[l]);
                }
            }
        }
    }
    sums
}

/// `sums[q] += Σ weights[q][key] * values[key]`, keys ascending.
#[inline(always)]
fn add_columns<'a, T: Element, const N: usize, const FUSED: bool>(
    values: &[[T; KV_DIMS]],
    weights: [&[f32]; N],
    sums: impl Iterator<Item = &'a mut [f32]>,
) {
    let mut lanes = [[0.0f32; KV_DIMS]; N];
    let mut out: [&mut [f32]; N] = std::array::from_fn(|_| &mut [][..]);
    for ((lanes, out), sums) in lanes.iter_mut().zip(&mut out).zip(sums) {
        lanes.copy_from_slice(sums);
        *out = sums;
    }
    for (key, value) in values.iter().enumerate() {
        if key % T::VALUES_A_LINE == 0 {
            prefetch(value, PREFETCH);
        }
        let value = value.map(T::widen);
        for (lanes, weights) in lanes.iter_mut().zip(weights) {
            let weight = weights[key];
            for l in 0..KV_DIMS {
                lanes[l] = mul_add::<FUSED>(weight, value[l], lanes[l]);
            }
        }
    }
    for (out, lanes) in out.into_iter().zip(&lanes) {
        out.copy_from_slice(lanes);
    }
}

/// Adds the result of the next part to that of all before it.
#[inline(always)]
pub(crate) fn attention_merge(state: &mut [f32], part: &[f32], head_dim: usize) {
    let n_queries = state.len() / (head_dim + 2);
    let (sums, rest) = state.split_at_mut(n_queries * head_dim);
    let (largest, totals) = rest.split_at_mut(n_queries);
    let (part_sums, rest) = part.split_at(n_queries * head_dim);
    let (part_largest, part_totals) = rest.split_at(n_queries);
    for q in 0..n_queries {
        let both = if part_largest[q] > largest[q] { part_largest[q] } else { largest[q] };
        let (old, new) = (exp(largest[q] - both), exp(part_largest[q] - both));
        (largest[q], totals[q]) = (both, totals[q] * old + part_totals[q] * new);
        let head = q * head_dim..(q + 1) * head_dim;
        for (sum, part) in sums[head.clone()].iter_mut().zip(&part_sums[head]) {
            *sum = *sum * old + part * new;
        }
    }
}

/// `out = sum of weighted values / sum of weights`, `[n_queries, head_dim]`.
#[inline(always)]
pub(crate) fn attention_finish(state: &[f32], head_dim: usize, out: &mut [f32]) {
    let (sums, rest) = state.split_at(out.len());
    let totals = &rest[rest.len() / 2..];
    for ((out, sums), total) in out.chunks_exact_mut(head_dim).zip(sums.chunks_exact(head_dim)).zip(totals) {
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = sum / total;
        }
    }
}
