//! Attention of one token: parts, and their merging.

use super::super::{
    made::{Made, bf16},
    trial::{Difference, Trial, words, worst},
};
use super::quantized::{POISON, Quantized, rms_norm, unwritten_row};
use crate::error::Error;

/// Sizes of an attention, and where its token is.
#[derive(Clone, Copy, Debug)]
pub(in crate::backend::wgpu::check) struct Attention {
    pub(in crate::backend::wgpu::check) n_heads: usize,
    pub(in crate::backend::wgpu::check) n_kv_heads: usize,
    pub(in crate::backend::wgpu::check) head_dim: usize,
    /// Whether q and k are normed.
    pub(in crate::backend::wgpu::check) normed: bool,
    /// 0 for none.
    pub(in crate::backend::wgpu::check) rope_dim: usize,
    /// 0 for none.
    pub(in crate::backend::wgpu::check) window: usize,
    /// Positions a slot's cache holds.
    pub(in crate::backend::wgpu::check) capacity: usize,
    pub(in crate::backend::wgpu::check) kv_f32: bool,
    pub(in crate::backend::wgpu::check) part_keys: usize,
    pub(in crate::backend::wgpu::check) max_parts: usize,
    /// The token's position.
    pub(in crate::backend::wgpu::check) position: usize,
}

const SLOTS: usize = 2;
const SLOT: usize = 1;
const EPS: [f32; 2] = [1e-6, 1e-5];

impl Attention {
    fn n_keys(&self) -> usize {
        if self.window == 0 { self.position + 1 } else { self.window.min(self.position + 1) }
    }

    fn first(&self) -> usize {
        self.position + 1 - self.n_keys()
    }

    fn n_parts(&self) -> usize {
        let n = self.n_keys();
        let wanted = n.div_ceil(self.part_keys).clamp(1, self.max_parts);
        n.div_ceil(n.div_ceil(wanted).next_multiple_of(32))
    }

    fn head_words(&self) -> usize {
        if self.kv_f32 { self.head_dim } else { self.head_dim / 2 }
    }

    /// Word of an element in `k`, and whether it is the upper half.
    fn k_at(&self, kv_head: usize, position: usize, d: usize) -> (usize, bool) {
        let index = position % self.capacity;
        let w = if self.kv_f32 { d } else { d / 2 };
        let head = (SLOT * self.n_kv_heads + kv_head) * self.capacity * self.head_words();
        (head + index / 32 * 32 * self.head_words() + 32 * w + index % 32, !self.kv_f32 && d % 2 == 1)
    }

    fn v_at(&self, kv_head: usize, position: usize, d: usize) -> (usize, bool) {
        let w = if self.kv_f32 { d } else { d / 2 };
        let head = (SLOT * self.n_kv_heads + kv_head) * self.capacity;
        ((head + position % self.capacity) * self.head_words() + w, !self.kv_f32 && d % 2 == 1)
    }

    fn get(&self, cache: &[u32], (at, upper): (usize, bool)) -> f64 {
        f64::from(if self.kv_f32 {
            f32::from_bits(cache[at])
        } else {
            bf16(if upper { cache[at] >> 16 } else { cache[at] & 0xffff })
        })
    }

    fn put(&self, cache: &mut [u32], (at, upper): (usize, bool), x: f32) {
        cache[at] = match (self.kv_f32, upper) {
            (true, _) => x.to_bits(),
            (false, false) => (cache[at] & 0xffff_0000) | (x.to_bits() >> 16),
            (false, true) => (cache[at] & 0xffff) | (x.to_bits() & 0xffff_0000),
        };
    }

    /// Keys or values of the earlier positions that the token sees; all else is [`POISON`].
    fn cache(&self, made: &mut Made, at: impl Fn(&Self, usize, usize, usize) -> (usize, bool)) -> Vec<u32> {
        let mut cache = vec![POISON; SLOTS * self.n_kv_heads * self.capacity * self.head_words()];
        for kv_head in 0..self.n_kv_heads {
            for position in self.first()..self.position {
                for d in 0..self.head_dim {
                    self.put(&mut cache, at(self, kv_head, position, d), made.value(1.5));
                }
            }
        }
        cache
    }

    /// A head normed by `norm` and rotated.
    fn turned(&self, head: &[f32], norm: &[f32], eps: f32) -> Vec<f64> {
        let x = match self.normed {
            true => rms_norm(head, norm, eps),
            false => head.iter().copied().map(f64::from).collect(),
        };
        let n = self.rope_dim / 2;
        let mut out = x.clone();
        for i in 0..n {
            let (sin, cos) = self.angle(i).sin_cos();
            out[i] = x[i] * cos - x[i + n] * sin;
            out[i + n] = x[i + n] * cos + x[i] * sin;
        }
        out
    }

    fn angle(&self, i: usize) -> f64 {
        self.position as f64 * 10_000f64.powf(-2.0 * i as f64 / self.rope_dim as f64)
    }

    /// The table of turns, right for the token's position alone.
    fn rope(&self) -> Vec<u32> {
        let n = self.rope_dim / 2;
        let mut table = vec![POISON; 2 * n * (self.position + 1) + 4];
        for i in 0..n {
            let (sin, cos) = self.angle(i).sin_cos();
            let at = 2 * (self.position * n + i);
            (table[at], table[at + 1]) = ((cos as f32).to_bits(), (sin as f32).to_bits());
        }
        table
    }

    /// softmax(q k / sqrt(head_dim)) v for each head, `[n_heads, head_dim]`, with the new key and value as they are in the caches.
    fn expected(&self, queries: &[Vec<f64>], k: &[u32], v: &[u32]) -> Vec<f64> {
        let group = self.n_heads / self.n_kv_heads;
        let mut out = Vec::new();
        for (head, q) in queries.iter().enumerate() {
            let kv_head = head / group;
            let scores: Vec<f64> = (self.first()..=self.position)
                .map(|position| {
                    let dot: f64 =
                        (0..self.head_dim).map(|d| q[d] * self.get(k, self.k_at(kv_head, position, d))).sum();
                    dot / (self.head_dim as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..self.head_dim).map(|d| {
                let values = (self.first()..=self.position)
                    .map(|position| self.get(v, self.v_at(kv_head, position, d)));
                values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / total
            }));
        }
        out
    }

    fn states_len(&self) -> usize {
        self.max_parts * self.n_heads * (self.head_dim + 2)
    }

    /// The parts in `states` as one: `[n_heads, head_dim]`.
    fn merged(&self, states: &[u32]) -> Vec<f64> {
        let at = |i: usize| f64::from(f32::from_bits(states[i]));
        let pairs = self.max_parts * self.n_heads * self.head_dim;
        let mut out = vec![0.0; self.n_heads * self.head_dim];
        for (head, out) in out.chunks_exact_mut(self.head_dim).enumerate() {
            let pair = |part: usize| pairs + 2 * (part * self.n_heads + head);
            let parts = 0..self.n_parts();
            let largest = parts.clone().map(|part| at(pair(part))).fold(f64::NEG_INFINITY, f64::max);
            let mut total = 0.0;
            for part in parts {
                let factor = (at(pair(part)) - largest).exp();
                total += factor * at(pair(part) + 1);
                for (d, out) in out.iter_mut().enumerate() {
                    *out += factor * at((part * self.n_heads + head) * self.head_dim + d);
                }
            }
            out.iter_mut().for_each(|out| *out /= total);
        }
        out
    }

    /// Constants of kernels that know about parts.
    fn parts(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("N_HEADS", self.n_heads as f64),
            ("HEAD_DIM", self.head_dim as f64),
            ("WINDOW", self.window as f64),
            ("PART_KEYS", self.part_keys as f64),
            ("MAX_PARTS", self.max_parts as f64),
        ]
    }

    fn rows(&self) -> Vec<u32> {
        vec![0, SLOT as u32, self.position as u32, 0]
    }

    /// Made-up states of all parts that there are.
    fn states(&self, made: &mut Made) -> Vec<u32> {
        let mut states = vec![POISON; self.states_len()];
        let sums = self.n_parts() * self.n_heads * self.head_dim;
        states[..sums].copy_from_slice(&words(&made.values(sums, 2.0)));
        let pairs = self.max_parts * self.n_heads * self.head_dim;
        for pair in states[pairs..][..2 * self.n_parts() * self.n_heads].as_chunks_mut::<2>().0 {
            *pair = [made.value(3.0).to_bits(), (1.0 + made.value(1.0).abs()).to_bits()];
        }
        states
    }
}

/// `attention`: what its parts are together, and what it adds to the cache.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn attention(
    trial: &Trial<'_>,
    a: &Attention,
    seed: u64,
) -> Result<Difference, Error> {
    let made = &mut Made::new(seed);
    let (q_len, kv_len) = (a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim);
    let qkv = made.values(q_len + 2 * kv_len, 2.0);
    let norms = made.norm(2 * a.head_dim);
    let (q_norm, k_norm) = norms.split_at(a.head_dim);
    let (k, v) = (a.cache(made, Attention::k_at), a.cache(made, Attention::v_at));
    let mut buffers =
        [a.rows(), words(&qkv), words(&norms), a.rope(), k.clone(), v.clone(), vec![POISON; a.states_len()]];
    let own = [
        ("N_KV_HEADS", a.n_kv_heads as f64),
        ("QK_NORM", f64::from(u8::from(a.normed))),
        ("Q_EPS", EPS[0].into()),
        ("K_EPS", EPS[1].into()),
        ("ROPE_DIM", a.rope_dim as f64),
        ("CAPACITY", a.capacity as f64),
        ("KV_F32", f64::from(u8::from(a.kv_f32))),
    ];
    let constants = [a.parts(), own.to_vec()].concat();
    // One part more than there are: it must do nothing.
    let grid = [a.n_kv_heads as u32, a.n_parts() as u32 + 1, 1];
    trial.run("attention", &constants, &mut buffers, grid)?;

    let heads = |from: usize, n: usize| qkv[from..][..n * a.head_dim].chunks_exact(a.head_dim);
    let queries: Vec<_> = heads(0, a.n_heads).map(|q| a.turned(q, q_norm, EPS[0])).collect();
    let keys: Vec<_> = heads(q_len, a.n_kv_heads).map(|k| a.turned(k, k_norm, EPS[1])).collect();
    let values: Vec<Vec<f64>> =
        heads(q_len + kv_len, a.n_kv_heads).map(|v| v.iter().copied().map(f64::from).collect()).collect();
    let [_, _, _, _, k_after, v_after, states] = &buffers;
    let appended = appended(a, [&k, k_after], &keys, Attention::k_at).max(appended(
        a,
        [&v, v_after],
        &values,
        Attention::v_at,
    ));
    let states_found: Vec<u32> = a.merged(states).iter().map(|x| (*x as f32).to_bits()).collect();
    let mixed = worst(&states_found, &a.expected(&queries, k_after, v_after));
    Ok(Difference::of("attention", appended.max(mixed).max(others_untouched(a, states))))
}

/// How far the new elements are from `expected`, beyond half a unit of bf16; infinity if any other word has changed.
fn appended(
    a: &Attention,
    [before, after]: [&[u32]; 2],
    expected: &[Vec<f64>],
    at: impl Fn(&Attention, usize, usize, usize) -> (usize, bool),
) -> f64 {
    let mut put_back = after.to_vec();
    let mut worst = 0.0f64;
    for (kv_head, expected) in expected.iter().enumerate() {
        for (d, expected) in expected.iter().enumerate() {
            let place = at(a, kv_head, a.position, d);
            let rounding = if a.kv_f32 { 0.0 } else { expected.abs() * (-8f64).exp2() * 1.001 };
            let beyond = (a.get(after, place) - expected).abs() - rounding;
            worst = worst.max(if beyond.is_finite() { beyond } else { f64::INFINITY });
            put_back[place.0] = before[place.0];
        }
    }
    if put_back == before { worst } else { f64::INFINITY }
}

/// 0 if parts that do not exist were left alone.
fn others_untouched(a: &Attention, states: &[u32]) -> f64 {
    let (sums, pairs) = states.split_at(a.max_parts * a.n_heads * a.head_dim);
    let left = |words: &[u32], part: usize| words[a.n_parts() * part..].iter().all(|word| *word == POISON);
    if left(sums, a.n_heads * a.head_dim) && left(pairs, 2 * a.n_heads) { 0.0 } else { f64::INFINITY }
}

/// The row that `attention_merge` makes of states.
///
/// # Errors
/// Those of the device.
fn merged_row(trial: &Trial<'_>, a: &Attention, states: Vec<u32>) -> Result<Vec<u32>, Error> {
    let cols = a.n_heads * a.head_dim;
    let mut buffers = [a.rows(), states, unwritten_row(cols)];
    trial.run("attention_merge", &a.parts(), &mut buffers, [cols.div_ceil(256) as u32, 1, 1])?;
    let [_, _, q] = buffers;
    Ok(q)
}

/// `attention_merge` of made-up states.
///
/// # Errors
/// Those of the device.
pub(in crate::backend::wgpu::check) fn attention_merge(
    trial: &Trial<'_>,
    a: &Attention,
    seed: u64,
) -> Result<Difference, Error> {
    let states = a.states(&mut Made::new(seed));
    let expected = Quantized::of(&a.merged(&states));
    let q = merged_row(trial, a, states)?;
    Ok(Difference::of("attention_merge", expected.worst_written(&q)))
}

/// The same, with `bad` among the sums of a head and the weights of the last: no more than theirs is lost.
///
/// # Errors
/// Those of the device.
#[cfg(test)]
pub(super) fn attention_merge_of(
    trial: &Trial<'_>,
    a: &Attention,
    bad: f32,
    seed: u64,
) -> Result<Difference, Error> {
    let mut states = a.states(&mut Made::new(seed));
    states[a.head_dim + 3] = bad.to_bits();
    states[a.max_parts * a.n_heads * a.head_dim + 2 * a.n_heads - 1] = bad.to_bits();
    let expected = Quantized::of(&a.merged(&states));
    let q = merged_row(trial, a, states)?;
    Ok(Difference::of("attention_merge", expected.worst_written(&q)))
}
