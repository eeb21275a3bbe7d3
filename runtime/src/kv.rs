//! The KV cache of one layer: a growing list for full attention, a ring for a sliding window.
//!
//! Both are the same buffer with `position % capacity`: a full layer's capacity is the whole context
//! and never wraps. A ring holds `window - 1 + max_batch` positions, so that a step may write all its
//! keys before its first query reads: the oldest key that query needs is still there. Getting this
//! wrong is easy to miss; a prompt of 511, 512, 513 tokens, then 3, then 600 shows it.

use crate::{
    backend::Limits,
    spec::{AttnSpec, BlockSpec, LayerSpec},
};

/// Keys and values of one layer, all slots. `[slot, kv_head, position % capacity, head_dim]`, f32.
#[derive(Debug)]
pub(crate) struct KvCache {
    k: Vec<f32>,
    v: Vec<f32>,
    n_kv_heads: usize,
    head_dim: usize,
    capacity: usize,
    window: Option<usize>,
    /// Per slot, one past the highest position written since it was last emptied.
    written: Vec<usize>,
}

/// Positions a layer must hold.
fn capacity(window: Option<usize>, context: usize, max_batch: usize) -> usize {
    match window {
        Some(window) => context.min(window - 1 + max_batch),
        None => context,
    }
}

/// Bytes of the caches of all layers among `blocks`.
pub(crate) fn bytes_of(blocks: &[BlockSpec], limits: &Limits) -> u64 {
    let of = |block: &BlockSpec| match block {
        BlockSpec::Layer(LayerSpec { index: _, attn, moe: _ }) => {
            let capacity = capacity(attn.window, limits.context, limits.max_batch) as u64;
            limits.n_slots as u64
                * (attn.n_kv_heads * attn.head_dim) as u64
                * capacity
                * 2
                * size_of::<f32>() as u64
        }
        BlockSpec::Embed(_) | BlockSpec::Head(_) => 0,
    };
    blocks.iter().map(of).sum()
}

impl KvCache {
    pub(crate) fn for_layer(attn: &AttnSpec, limits: &Limits) -> Self {
        let Limits { n_slots, context, max_batch, .. } = *limits;
        KvCache::new(n_slots, attn.n_kv_heads, attn.head_dim, attn.window, context, max_batch)
    }

    fn new(
        n_slots: usize,
        n_kv_heads: usize,
        head_dim: usize,
        window: Option<usize>,
        context: usize,
        max_batch: usize,
    ) -> Self {
        let capacity = capacity(window, context, max_batch);
        let len = n_slots * n_kv_heads * capacity * head_dim;
        KvCache {
            k: vec![0.0; len],
            v: vec![0.0; len],
            n_kv_heads,
            head_dim,
            capacity,
            window,
            written: vec![0; n_slots],
        }
    }

    fn offset(&self, slot: usize, kv_head: usize, position: usize) -> usize {
        ((slot * self.n_kv_heads + kv_head) * self.capacity + position % self.capacity) * self.head_dim
    }

    /// Stores one position. `k` and `v` are `[n_kv_heads, head_dim]`.
    pub(crate) fn write(&mut self, slot: usize, position: usize, k: &[f32], v: &[f32]) {
        let dim = self.head_dim;
        for kv_head in 0..self.n_kv_heads {
            let at = self.offset(slot, kv_head, position);
            let head = kv_head * dim..(kv_head + 1) * dim;
            self.k[at..at + dim].copy_from_slice(&k[head.clone()]);
            self.v[at..at + dim].copy_from_slice(&v[head]);
        }
        self.written[slot] = self.written[slot].max(position + 1);
    }

    /// First key that the query at `position` sees.
    pub(crate) fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Keys and values that the query at `position` sees, oldest first, in at most two runs. Each run
    /// is `(keys, values)`, `[n, head_dim]`.
    pub(crate) fn visible(&self, slot: usize, kv_head: usize, position: usize) -> [(&[f32], &[f32]); 2] {
        let first = self.first_visible(position);
        let n = position + 1 - first;
        let to_wrap = n.min(self.capacity - first % self.capacity);
        let run = |from: usize, n: usize| {
            let at = self.offset(slot, kv_head, from);
            let end = at + n * self.head_dim;
            (&self.k[at..end], &self.v[at..end])
        };
        let second = if n > to_wrap { run(first + to_wrap, n - to_wrap) } else { (&[][..], &[][..]) };
        [run(first, to_wrap), second]
    }

    /// Forgets positions from `len` on; `false` when older keys that position `len` needs are gone.
    pub(crate) fn rewind(&mut self, slot: usize, len: usize) -> bool {
        if len == 0 {
            self.written[slot] = 0;
            return true;
        }
        let oldest_held = self.written[slot].saturating_sub(self.capacity);
        self.first_visible(len) >= oldest_held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes positions `0..n` whose key is the position, in steps of at most `batch`, and checks
    /// after each step that every query of it sees exactly its window.
    fn check(window: Option<usize>, context: usize, max_batch: usize, n: usize, batch: usize) {
        let mut kv = KvCache::new(2, 1, 1, window, context, max_batch);
        let mut position = 0;
        while position < n {
            let end = (position + batch).min(n);
            for p in position..end {
                kv.write(1, p, &[p as f32], &[-(p as f32)]);
            }
            for query in position..end {
                let first = window.map_or(0, |w| (query + 1).saturating_sub(w));
                let expected: Vec<f32> = (first..=query).map(|p| p as f32).collect();
                let seen: Vec<f32> = kv.visible(1, 0, query).iter().flat_map(|(k, _)| k.to_vec()).collect();
                assert_eq!(seen, expected, "window {window:?}, query {query}, batch {batch}");
            }
            position = end;
        }
    }

    #[test]
    fn every_query_sees_its_window() {
        for (window, context, max_batch, n) in [
            (None, 40, 8, 40),
            (Some(1), 40, 8, 40),
            (Some(4), 40, 1, 40),
            (Some(5), 40, 8, 40),
            (Some(100), 40, 8, 40),
        ] {
            for batch in 1..=max_batch {
                check(window, context, max_batch, n, batch);
            }
        }
    }

    #[test]
    fn rewind_refuses_what_the_ring_lost() {
        let mut kv = KvCache::new(1, 1, 1, Some(4), 100, 3);
        for position in 0..20 {
            kv.write(0, position, &[0.0], &[0.0]);
        }
        // Capacity 6: positions 14..20 are held. Position p needs p-3..p.
        for (len, expected) in [(20, true), (17, true), (16, false), (1, false), (0, true)] {
            assert_eq!(kv.rewind(0, len), expected, "len {len}");
            for position in len.max(14)..20 {
                kv.write(0, position, &[0.0], &[0.0]);
            }
            if len == 0 {
                assert!(kv.rewind(0, 0));
            }
        }
    }

    #[test]
    fn slots_do_not_mix() {
        let mut kv = KvCache::new(2, 2, 2, None, 4, 4);
        kv.write(0, 0, &[1.0, 2.0, 3.0, 4.0], &[0.0; 4]);
        kv.write(1, 0, &[5.0, 6.0, 7.0, 8.0], &[0.0; 4]);
        assert_eq!(kv.visible(0, 1, 0)[0].0, [3.0, 4.0]);
        assert_eq!(kv.visible(1, 0, 0)[0].0, [5.0, 6.0]);
    }
}
