//! The reference's KV cache: f32, one position after the other.

use crate::{
    backend::Limits,
    kv::Ring,
    spec::{AttnSpec, BlockSpec, LayerSpec},
};

/// Keys and values of one layer, all slots. `[slot, kv_head, position % capacity, head_dim]`, f32.
#[derive(Debug)]
pub(super) struct KvCache {
    k: Vec<f32>,
    v: Vec<f32>,
    n_kv_heads: usize,
    head_dim: usize,
    ring: Ring,
}

/// Bytes of the caches of all layers among `blocks`.
pub(super) fn bytes_of(blocks: &[BlockSpec], limits: &Limits) -> u64 {
    let of = |block: &BlockSpec| match block {
        BlockSpec::Layer(LayerSpec { index: _, attn, moe: _ }) => {
            let capacity = Ring::positions(attn.window, limits.context, limits.max_batch);
            (2 * size_of::<f32>() * limits.n_slots * attn.n_kv_heads * attn.head_dim * capacity) as u64
        }
        BlockSpec::Embed(_) | BlockSpec::Head(_) => 0,
    };
    blocks.iter().map(of).sum()
}

impl KvCache {
    pub(super) fn for_layer(attn: &AttnSpec, limits: &Limits) -> Self {
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
        let ring = Ring::new(n_slots, window, Ring::positions(window, context, max_batch));
        let len = n_slots * n_kv_heads * ring.capacity() * head_dim;
        KvCache { k: vec![0.0; len], v: vec![0.0; len], n_kv_heads, head_dim, ring }
    }

    fn offset(&self, slot: usize, kv_head: usize, position: usize) -> usize {
        ((slot * self.n_kv_heads + kv_head) * self.ring.capacity() + self.ring.index(position))
            * self.head_dim
    }

    /// Stores one position. `k` and `v` are `[n_kv_heads, head_dim]`.
    pub(super) fn write(&mut self, slot: usize, position: usize, k: &[f32], v: &[f32]) {
        let dim = self.head_dim;
        for kv_head in 0..self.n_kv_heads {
            let at = self.offset(slot, kv_head, position);
            let head = kv_head * dim..(kv_head + 1) * dim;
            self.k[at..at + dim].copy_from_slice(&k[head.clone()]);
            self.v[at..at + dim].copy_from_slice(&v[head]);
        }
        self.ring.wrote(slot, position);
    }

    /// Keys and values that the query at `position` sees, oldest first, in at most two runs. Each run
    /// is `(keys, values)`, `[n, head_dim]`.
    pub(super) fn visible(&self, slot: usize, kv_head: usize, position: usize) -> [(&[f32], &[f32]); 2] {
        let first = self.ring.first_visible(position);
        let n = position + 1 - first;
        let to_wrap = n.min(self.ring.capacity() - self.ring.index(first));
        let run = |from: usize, n: usize| {
            let at = self.offset(slot, kv_head, from);
            let end = at + n * self.head_dim;
            (&self.k[at..end], &self.v[at..end])
        };
        let second = if n > to_wrap { run(first + to_wrap, n - to_wrap) } else { (&[][..], &[][..]) };
        [run(first, to_wrap), second]
    }

    /// As [`Ring::rewind`].
    pub(super) fn rewind(&mut self, slot: usize, len: usize) -> bool {
        self.ring.rewind(slot, len)
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
    fn slots_do_not_mix() {
        let mut kv = KvCache::new(2, 2, 2, None, 4, 4);
        kv.write(0, 0, &[1.0, 2.0, 3.0, 4.0], &[0.0; 4]);
        kv.write(1, 0, &[5.0, 6.0, 7.0, 8.0], &[0.0; 4]);
        assert_eq!(kv.visible(0, 1, 0)[0].0, [3.0, 4.0]);
        assert_eq!(kv.visible(1, 0, 0)[0].0, [5.0, 6.0]);
    }
}
