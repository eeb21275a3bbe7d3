//! Rotation, the cache, and attention over it.

use half::bf16;

use super::SPARE;
use crate::{
    backend::wgpu::check::{
        made::Made,
        trial::{Difference, Trial, equal, words, worst},
    },
    error::Error,
};

/// The shape of an attention.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Heads {
    pub(in super::super) n_heads: usize,
    pub(in super::super) n_kv_heads: usize,
    pub(in super::super) head_dim: usize,
    /// Dimensions that turn; 0 is none.
    pub(in super::super) rope_dim: usize,
    pub(in super::super) qk_norm: bool,
    /// Keys a query sees; 0 is all.
    pub(in super::super) window: usize,
    /// Positions of a slot in the cache.
    pub(in super::super) capacity: usize,
    pub(in super::super) kv_f32: bool,
}

/// New tokens of a sequence in a step.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Sequence {
    pub(in super::super) slot: usize,
    pub(in super::super) position: usize,
    pub(in super::super) len: usize,
}

impl Heads {
    /// Values of a token's q, k and v.
    fn row(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Words of a head at a position.
    fn elements(&self) -> usize {
        if self.kv_f32 { self.head_dim } else { self.head_dim / 2 }
    }

    /// Words of k, or v, of `n_slots`.
    fn cache(&self, n_slots: usize) -> usize {
        n_slots * self.n_kv_heads * self.capacity * self.elements()
    }

    /// Where a dimension of a key is: its word, and whether that is the word's high half.
    fn key(&self, slot: usize, head: usize, position: usize, d: usize) -> (usize, bool) {
        let at = position % self.capacity;
        let block = (slot * self.n_kv_heads + head) * (self.capacity / 32) + at / 32;
        let (element, high) = self.element(d);
        ((block * self.elements() + element) * 32 + at % 32, high)
    }

    fn value(&self, slot: usize, head: usize, position: usize, d: usize) -> (usize, bool) {
        let row = (slot * self.n_kv_heads + head) * self.capacity + position % self.capacity;
        let (element, high) = self.element(d);
        (row * self.elements() + element, high)
    }

    fn element(&self, d: usize) -> (usize, bool) {
        if self.kv_f32 { (d, false) } else { (d / 2, d % 2 == 1) }
    }

    /// What is in the cache there.
    fn load(&self, cache: &[u32], (word, high): (usize, bool)) -> f32 {
        let word = cache[word];
        match (self.kv_f32, high) {
            (true, _) => f32::from_bits(word),
            (false, true) => f32::from_bits(word & 0xffff_0000),
            (false, false) => f32::from_bits(word << 16),
        }
    }

    fn store(&self, cache: &mut [u32], (word, high): (usize, bool), x: f32) {
        let word = &mut cache[word];
        let half = u32::from(bf16::from_f32(x).to_bits());
        match (self.kv_f32, high) {
            (true, _) => *word = x.to_bits(),
            (false, true) => *word = *word & 0xffff | half << 16,
            (false, false) => *word = *word & 0xffff_0000 | half,
        }
    }

    /// A cache with something everywhere.
    fn made_cache(&self, made: &mut Made, n_slots: usize) -> Vec<u32> {
        let words = (0..self.cache(n_slots)).map(|_| {
            let [low, high] = [made.value(1.0), made.value(1.0)];
            match self.kv_f32 {
                true => low.to_bits(),
                false => low.to_bits() >> 16 | high.to_bits() & 0xffff_0000,
            }
        });
        words.collect()
    }

    fn constants(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("N_KV_HEADS", self.n_kv_heads as f64),
            ("HEAD_DIM", self.head_dim as f64),
            ("KV_F32", f64::from(u8::from(self.kv_f32))),
            ("CAPACITY", self.capacity as f64),
        ]
    }
}

/// `(slot, position)` of every token.
fn tokens(sequences: &[Sequence]) -> impl Iterator<Item = (usize, usize)> + '_ {
    sequences.iter().flat_map(|s| (0..s.len).map(|i| (s.slot, s.position + i)))
}

fn rows_of(sequences: &[Sequence]) -> Vec<u32> {
    let n = tokens(sequences).count() as u32;
    tokens(sequences).flat_map(|(slot, position)| [1, slot as u32, position as u32, n]).collect()
}

fn n_slots(sequences: &[Sequence]) -> usize {
    1 + sequences.iter().map(|sequence| sequence.slot).max().unwrap_or_default()
}

/// (cos, sin) for every position and pair.
fn angles(rope_dim: usize, positions: usize) -> Vec<f32> {
    let half = rope_dim / 2;
    let angle = |p: usize, i: usize| p as f64 * 10_000f64.powf(-2.0 * i as f64 / rope_dim as f64);
    let of = |p: usize| (0..half).flat_map(move |i| [angle(p, i).cos() as f32, angle(p, i).sin() as f32]);
    (0..positions).flat_map(of).collect()
}

/// A head, normed and turned.
fn turned(x: &[f32], norm: Option<(&[f32], f64)>, turns: &[f32]) -> Vec<f64> {
    let mut x: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    if let Some((norm, eps)) = norm {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        x.iter_mut().zip(norm).for_each(|(x, norm)| *x *= f64::from(*norm) / (mean + eps).sqrt());
    }
    let half = turns.len() / 2;
    for i in 0..half {
        let (cos, sin) = (f64::from(turns[2 * i]), f64::from(turns[2 * i + 1]));
        (x[i], x[i + half]) = (x[i] * cos - x[i + half] * sin, x[i + half] * cos + x[i] * sin);
    }
    x
}

/// How far a cached value may be from the exact one because it is rounded.
fn rounding(x: f64, kv_f32: bool) -> f64 {
    if kv_f32 || x == 0.0 { 0.0 } else { 2f64.powf(x.abs().log2().floor() - 8.0) }
}

pub(in super::super) fn rope_append(
    trial: &Trial<'_>,
    heads: &Heads,
    sequences: &[Sequence],
) -> Result<Difference, Error> {
    let Heads { n_heads, n_kv_heads, head_dim, rope_dim, qk_norm, kv_f32, .. } = *heads;
    let n_tokens = tokens(sequences).count();
    let mut made = Made::new(n_tokens as u64);
    let qkv = made.values((n_tokens + SPARE) * heads.row(), 1.5);
    let norms = made.norm(2 * head_dim);
    let eps = [1e-6, 1e-5];
    let positions = 1 + tokens(sequences).map(|(_, position)| position).max().unwrap_or_default();
    let rope = angles(rope_dim, positions);
    let k = heads.made_cache(&mut made, n_slots(sequences));
    let v = heads.made_cache(&mut made, n_slots(sequences));
    let mut expected: Vec<f64> = qkv.iter().map(|x| f64::from(*x)).collect();
    let (mut expected_k, mut expected_v) = (k.clone(), v.clone());
    let mut keys = Vec::new();
    for (token, (slot, position)) in tokens(sequences).enumerate() {
        let turns = &rope[position * rope_dim..][..rope_dim];
        for head in 0..n_heads + 2 * n_kv_heads {
            let at = token * heads.row() + head * head_dim;
            let x = &qkv[at..][..head_dim];
            let norm = |i: usize| qk_norm.then(|| (&norms[i * head_dim..][..head_dim], eps[i]));
            if head < n_heads {
                expected[at..][..head_dim].copy_from_slice(&turned(x, norm(0), turns));
            } else if head < n_heads + n_kv_heads {
                for (d, x) in turned(x, norm(1), turns).into_iter().enumerate() {
                    let place = heads.key(slot, head - n_heads, position, d);
                    keys.push((place, x));
                    heads.store(&mut expected_k, place, 0.0);
                }
            } else {
                for (d, x) in x.iter().enumerate() {
                    let place = heads.value(slot, head - n_heads - n_kv_heads, position, d);
                    heads.store(&mut expected_v, place, *x);
                }
            }
        }
    }
    let mut buffers = [rows_of(sequences), words(&qkv), words(&norms), words(&rope), k, v];
    if rope_dim == 0 {
        buffers[3] = vec![0; 4];
    }
    let mut constants = heads.constants();
    constants.extend([
        ("N_HEADS", n_heads as f64),
        ("QK_NORM", f64::from(u8::from(qk_norm))),
        ("Q_EPS", eps[0]),
        ("K_EPS", eps[1]),
        ("ROPE_DIM", rope_dim as f64),
    ]);
    let grid = [n_tokens as u32, (n_heads + 2 * n_kv_heads).div_ceil(8) as u32, 1];
    trial.run("rope_append", &constants, &mut buffers, grid)?;
    let [_, qkv, _, _, mut k, v] = buffers;
    let mut found = worst(&qkv, &expected).max(equal(v, expected_v));
    let largest = keys.iter().fold(0.0f64, |largest, (_, x)| largest.max(x.abs()));
    for (place, x) in &keys {
        let excess = (f64::from(heads.load(&k, *place)) - x).abs() - rounding(*x, kv_f32);
        found = found.max(if excess.is_nan() { f64::INFINITY } else { excess / largest });
    }
    for (place, _) in &keys {
        heads.store(&mut k, *place, 0.0);
    }
    Ok(Difference::of("rope_append", found.max(equal(k, expected_k))))
}

/// Inputs and results of [`attention_prefill`], and what was expected.
pub(in super::super) struct Attention {
    heads: Heads,
    qkv: Vec<f32>,
    k: Vec<u32>,
    v: Vec<u32>,
}

impl Attention {
    /// Queries of a step, and a cache that holds the sequences to their ends. Where it holds nothing yet it is NaN.
    fn made(heads: &Heads, sequences: &[Sequence]) -> Self {
        let mut made = Made::new(7);
        let qkv = made.values(tokens(sequences).count() * heads.row(), 1.5);
        let mut k = heads.made_cache(&mut made, n_slots(sequences));
        let mut v = heads.made_cache(&mut made, n_slots(sequences));
        for slot in 0..n_slots(sequences) {
            let end = sequences.iter().filter(|s| s.slot == slot).map(|s| s.position + s.len).max();
            for position in end.unwrap_or(0)..heads.capacity {
                for head in 0..heads.n_kv_heads {
                    for d in 0..heads.head_dim {
                        heads.store(&mut k, heads.key(slot, head, position, d), f32::NAN);
                        heads.store(&mut v, heads.value(slot, head, position, d), f32::NAN);
                    }
                }
            }
        }
        Attention { heads: *heads, qkv, k, v }
    }

    /// The GPU's result for a step's rows, whose queries begin at token `first`.
    fn run(&self, trial: &Trial<'_>, sequences: &[Sequence], first: usize) -> Result<Vec<u32>, Error> {
        let Heads { n_heads, n_kv_heads, head_dim, window, .. } = self.heads;
        let n_tokens = tokens(sequences).count();
        let row = self.heads.row();
        let mut buffers = [
            rows_of(sequences),
            words(&self.qkv[first * row..][..n_tokens * row]),
            self.k.clone(),
            self.v.clone(),
            vec![0; (n_tokens + SPARE) * n_heads * head_dim],
        ];
        let mut constants = self.heads.constants();
        constants.extend([("GROUP", (n_heads / n_kv_heads) as f64), ("WINDOW", window as f64)]);
        let queries = 32 / (n_heads / n_kv_heads);
        let grid = [n_tokens.div_ceil(queries) as u32, n_kv_heads as u32, 1];
        trial.run("attention_prefill", &constants, &mut buffers, grid)?;
        let [.., out] = buffers;
        Ok(out)
    }

    /// `[n_tokens, n_heads, head_dim]`.
    fn expected(&self, sequences: &[Sequence]) -> Vec<f64> {
        let heads = &self.heads;
        let Heads { n_heads, n_kv_heads, head_dim, window, .. } = *heads;
        let mut out = Vec::new();
        for (token, (slot, position)) in tokens(sequences).enumerate() {
            let first = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
            for head in 0..n_heads {
                let kv_head = head / (n_heads / n_kv_heads);
                let q = &self.qkv[token * heads.row() + head * head_dim..][..head_dim];
                let scores = (first..=position).map(|p| {
                    let key = |d| f64::from(heads.load(&self.k, heads.key(slot, kv_head, p, d)));
                    q.iter().enumerate().map(|(d, q)| f64::from(*q) * key(d)).sum::<f64>()
                        / (head_dim as f64).sqrt()
                });
                let scores: Vec<f64> = scores.collect();
                let largest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sums = vec![0.0; head_dim];
                for (p, weight) in (first..).zip(&weights) {
                    for (d, sum) in sums.iter_mut().enumerate() {
                        let value = heads.load(&self.v, heads.value(slot, kv_head, p, d));
                        *sum += weight / total * f64::from(value);
                    }
                }
                out.extend(sums);
            }
        }
        out
    }
}

pub(in super::super) fn attention_prefill(
    trial: &Trial<'_>,
    heads: &Heads,
    sequences: &[Sequence],
) -> Result<Difference, Error> {
    let case = Attention::made(heads, sequences);
    let out = case.run(trial, sequences, 0)?;
    let expected = case.expected(sequences);
    let (out, spare) = out.split_at(expected.len());
    let found = worst(out, &expected).max(equal(spare.iter().all(|word| *word == 0), true));
    Ok(Difference::of("attention_prefill", found))
}

/// Whether the rows of one sequence are the same bits when it is cut into steps of these lengths.
#[cfg(test)]
pub(super) fn cuts_do_not_matter(
    trial: &Trial<'_>,
    heads: &Heads,
    sequence: Sequence,
    cuts: &[usize],
) -> Result<bool, Error> {
    let case = Attention::made(heads, &[sequence]);
    let whole = case.run(trial, &[sequence], 0)?;
    let width = heads.n_heads * heads.head_dim;
    let mut pieces: Vec<u32> = Vec::new();
    let mut done = 0;
    for len in cuts {
        let piece = Sequence { position: sequence.position + done, len: *len, ..sequence };
        pieces.extend(&case.run(trial, &[piece], done)?[..len * width]);
        done += len;
    }
    Ok(pieces == whole[..done * width])
}
