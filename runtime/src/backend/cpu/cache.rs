//! The KV cache as the attention kernels read it: parts of [`KV_PART`] positions that are never split by the
//! ring's end, so that a score does not depend on where a position happens to be stored.

use samara_pool::{Chunks, Pool};
use samara_simd::{
    KV_BLOCK, KV_DIMS, KV_LEAST, KV_PART, Kv, KvSlice, put_q8_key, put_q8_value, q8_dims, value_at,
};

use super::scratch::Worker;
use crate::{
    backend::{Limits, Step},
    kv::{KvType, Ring},
    spec::{AttnSpec, BlockSpec, LayerSpec},
};

/// Keys and values of one layer, all slots: `[slot, kv_head, block]`, blocks of 16 positions as the kernels want them;
/// scales `[slot, kv_head, position]`.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) ring: Ring,
    n_kv_heads: usize,
    head_dim: usize,
    kv: KvType,
    store: Store,
}

#[derive(Debug)]
enum Store {
    F32 { keys: Vec<f32>, values: Vec<f32> },
    Bf16 { keys: Vec<u16>, values: Vec<u16> },
    Q8 { keys: Vec<u8>, key_scales: Vec<f32>, values: Vec<u8>, value_scales: Vec<f32> },
}

/// Positions that a layer holds: whole parts.
fn capacity(attn: &AttnSpec, limits: &Limits) -> usize {
    Ring::positions(attn.window, limits.context, limits.max_batch).next_multiple_of(KV_PART)
}

/// Bytes of the caches of all layers among `blocks`.
pub(super) fn bytes_of(blocks: &[BlockSpec], limits: &Limits) -> u64 {
    let of = |block: &BlockSpec| match block {
        BlockSpec::Layer(LayerSpec { index: _, attn, moe: _ }) => {
            let heads = limits.n_slots * attn.n_kv_heads * capacity(attn, limits);
            2 * (heads * limits.kv.head_bytes(attn.head_dim)) as u64
        }
        BlockSpec::Embed(_) | BlockSpec::Head(_) => 0,
    };
    blocks.iter().map(of).sum()
}

impl Cache {
    pub(super) fn new(attn: &AttnSpec, limits: &Limits) -> Self {
        let ring = Ring::new(limits.n_slots, attn.window, capacity(attn, limits));
        let positions = limits.n_slots * attn.n_kv_heads * ring.capacity();
        let len = positions * attn.head_dim;
        let store = match limits.kv {
            KvType::F32 => Store::F32 { keys: vec![0.0; len], values: vec![0.0; len] },
            KvType::Bf16 => Store::Bf16 { keys: vec![0; len], values: vec![0; len] },
            KvType::Q8 => Store::Q8 {
                keys: vec![0; positions * q8_dims(attn.head_dim)],
                key_scales: vec![0.0; positions],
                values: vec![0; positions * q8_dims(attn.head_dim)],
                value_scales: vec![0.0; positions],
            },
        };
        Cache { ring, n_kv_heads: attn.n_kv_heads, head_dim: attn.head_dim, kv: limits.kv, store }
    }

    /// Stores the step's positions. `keys` and `values` are `[n_kv_heads, n_tokens, head_dim]`.
    pub(super) fn write(
        &mut self,
        pool: &mut Pool,
        workers: &mut [Worker],
        step: &Step<'_>,
        keys: &[f32],
        values: &[f32],
    ) {
        let Cache { ring, n_kv_heads, head_dim, kv: _, store } = self;
        let (n_kv_heads, head_dim, n_tokens) = (*n_kv_heads, *head_dim, step.n_tokens());
        step.tokens().for_each(|(slot, position, _)| ring.wrote(slot, position));
        let (capacity, n_heads_in_all) = (ring.capacity(), n_kv_heads * ring.n_slots());
        // Runs of heads of all slots. One position is not worth waking anybody.
        let min_run = if n_tokens == 1 { n_heads_in_all } else { 1 };
        let rows = |first: usize, heads: usize| {
            step.tokens().enumerate().flat_map(move |(i, (slot, position, _))| {
                let here = (slot * n_kv_heads..(slot + 1) * n_kv_heads).enumerate();
                here.filter(move |(_, head)| (first..first + heads).contains(head)).map(
                    move |(kv_head, head)| {
                        let from = (kv_head * n_tokens + i) * head_dim;
                        (from..from + head_dim, (head - first) * capacity + position % capacity)
                    },
                )
            })
        };
        let len = capacity * head_dim;
        match store {
            Store::F32 { keys: k, values: v } => {
                let parts = (Chunks::new(k, len), Chunks::new(v, len));
                pool.run(parts, min_run, workers, |_, first, (k, v): (&mut [f32], &mut [f32])| {
                    for (from, at) in rows(first, k.len() / len) {
                        put_key(&keys[from.clone()], at, k, |x| x);
                        put_value(&values[from], at, v, |x| x);
                    }
                });
            }
            Store::Bf16 { keys: k, values: v } => {
                let parts = (Chunks::new(k, len), Chunks::new(v, len));
                pool.run(parts, min_run, workers, |_, first, (k, v): (&mut [u16], &mut [u16])| {
                    for (from, at) in rows(first, k.len() / len) {
                        put_key(&keys[from.clone()], at, k, bf16);
                        put_value(&values[from], at, v, bf16);
                    }
                });
            }
            Store::Q8 { keys: k, key_scales, values: v, value_scales } => {
                let len = capacity * q8_dims(head_dim);
                let parts = (
                    (Chunks::new(k, len), Chunks::new(key_scales, capacity)),
                    (Chunks::new(v, len), Chunks::new(value_scales, capacity)),
                );
                type Half<'a> = (&'a mut [u8], &'a mut [f32]);
                pool.run(
                    parts,
                    min_run,
                    workers,
                    |_, first, ((k, k_scales), (v, v_scales)): (Half<'_>, Half<'_>)| {
                        for (from, at) in rows(first, k_scales.len() / capacity) {
                            let part = at / KV_PART * KV_PART * q8_dims(head_dim)..;
                            let (k, v) = (&mut k[part.clone()], &mut v[part]);
                            k_scales[at] = put_q8_key(&keys[from.clone()], at % KV_PART, k);
                            v_scales[at] = put_q8_value(&values[from], at % KV_PART, v);
                        }
                    },
                );
            }
        }
    }

    /// Takes `len` positions as stored. All are written, so that reading them is reading memory.
    pub(super) fn pretend(&mut self, slot: usize, len: usize) {
        let positions = self.n_kv_heads * self.ring.capacity();
        let of = |per: usize| slot * positions * per..(slot + 1) * positions * per;
        let (elements, bytes, scales) = (of(self.head_dim), of(q8_dims(self.head_dim)), of(1));
        const SMALL: f32 = 0.01;
        const Q8_ONE: u8 = 129;
        match &mut self.store {
            Store::F32 { keys, values } => {
                keys[elements.clone()].fill(SMALL);
                values[elements].fill(SMALL);
            }
            Store::Bf16 { keys, values } => {
                keys[elements.clone()].fill(bf16(SMALL));
                values[elements].fill(bf16(SMALL));
            }
            Store::Q8 { keys, key_scales, values, value_scales } => {
                keys[bytes.clone()].fill(Q8_ONE);
                values[bytes].fill(Q8_ONE);
                key_scales[scales.clone()].fill(SMALL);
                value_scales[scales].fill(SMALL);
            }
        }
        if let Some(last) = len.checked_sub(1) {
            self.ring.wrote(slot, last);
        }
    }

    /// Bytes of all heads' keys and values of one position.
    pub(super) fn bytes_per_position(&self) -> usize {
        2 * self.n_kv_heads * self.kv.head_bytes(self.head_dim)
    }

    /// Positions `KV_PART * part..` of one head, up to but without `end`.
    pub(super) fn part(&self, slot: usize, kv_head: usize, part: usize, end: usize) -> KvSlice<'_> {
        let first = part * KV_PART;
        let n_keys = (end - first).min(KV_PART);
        let at = (slot * self.n_kv_heads + kv_head) * self.ring.capacity() + self.ring.index(first);
        let positions = at..at + n_keys.next_multiple_of(KV_BLOCK);
        let dims = q8_dims(self.head_dim);
        let elements = positions.start * self.head_dim..positions.end * self.head_dim;
        let kv = match &self.store {
            Store::F32 { keys, values } => {
                Kv::F32 { keys: &keys[elements.clone()], values: &values[elements] }
            }
            Store::Bf16 { keys, values } => {
                Kv::Bf16 { keys: &keys[elements.clone()], values: &values[elements] }
            }
            Store::Q8 { keys, key_scales, values, value_scales } => Kv::Q8 {
                keys: &keys[positions.start * dims..positions.end * dims],
                key_scales: &key_scales[positions.clone()],
                values: &values[at * dims..(at + KV_PART) * dims],
                value_scales: &value_scales[positions],
            },
        };
        KvSlice { kv, n_keys, head_dim: self.head_dim }
    }
}

/// Puts one value, `[head_dim]`, at position `at` of its head's blocks.
fn put_value<T>(value: &[f32], at: usize, blocks: &mut [T], convert: impl Fn(f32) -> T) {
    for (i, x) in value.chunks(KV_DIMS).enumerate() {
        let out = &mut blocks[value_at(at, i * KV_DIMS, value.len())..][..x.len()];
        out.iter_mut().zip(x).for_each(|(out, &x)| *out = convert(x));
    }
}

/// Puts one key, `[head_dim]`, at position `at` of its head's blocks.
fn put_key<T>(key: &[f32], at: usize, blocks: &mut [T], convert: impl Fn(f32) -> T) {
    let block = &mut blocks[at / KV_BLOCK * KV_BLOCK * key.len()..][..KV_BLOCK * key.len()];
    for (out, &x) in block[at % KV_BLOCK..].iter_mut().step_by(KV_BLOCK).zip(key) {
        *out = convert(x);
    }
}

/// Nearest bf16; zero below [`KV_LEAST`].
fn bf16(x: f32) -> u16 {
    half::bf16::from_f32(if x.abs() < KV_LEAST { 0.0 } else { x }).to_bits()
}
