//! From a router's logits to what the experts add.

use super::{Rows, SPARE, plain_rows};
use crate::{
    backend::wgpu::check::{
        made::{Made, Ternary},
        trial::{Difference, Trial, equal, words, worst},
    },
    error::Error,
    model::Model,
    spec::MoeSpec,
};

/// Some experts of a layer, as blocks one after the other.
pub(in super::super) struct Experts {
    /// gate, up, down.
    pub(in super::super) parts: Vec<[Ternary; 3]>,
    /// Words of a block, and of what is before its up and down parts.
    pub(in super::super) block: [usize; 3],
    /// The blocks.
    pub(in super::super) words: Vec<u32>,
    pub(in super::super) n_used: usize,
    pub(in super::super) gate_max: f32,
    pub(in super::super) up_abs_max: f32,
}

impl Experts {
    /// The first `n` experts of a layer. A token uses `n` at most.
    pub(in super::super) fn of(model: &Model, moe: &MoeSpec, n: usize) -> Self {
        let MoeSpec { router, experts, n_used, expert_size, gate_max, up_abs_max, .. } = moe;
        let tensor = &model.file().index().tensors()[*experts];
        let stride = tensor.block_stride as usize / 4;
        let mut words = vec![0; n * stride];
        let shapes = [(*expert_size, router.cols), (*expert_size, router.cols), (router.cols, *expert_size)];
        let parts = (0..n).map(|expert| {
            std::array::from_fn(|i| {
                let part = Ternary::of(model.expert(*experts, expert, i), shapes[i].0, shapes[i].1);
                let at = expert * stride + tensor.parts[i].offset as usize / 4;
                words[at..at + part.words.len()].copy_from_slice(&part.words);
                part
            })
        });
        Experts {
            parts: parts.collect(),
            block: [stride, tensor.parts[1].offset as usize / 4, tensor.parts[2].offset as usize / 4],
            words,
            n_used: n.min(*n_used),
            gate_max: *gate_max,
            up_abs_max: *up_abs_max,
        }
    }

    /// Made-up experts, laid out as in a file.
    #[cfg(test)]
    pub(in super::super) fn made(
        made: &mut Made,
        n: usize,
        hidden: usize,
        size: usize,
        n_used: usize,
    ) -> Self {
        let parts: Vec<_> = (0..n)
            .map(|_| [made.ternary(size, hidden), made.ternary(size, hidden), made.ternary(hidden, size)])
            .collect();
        let [gate, up, down] = parts[0].each_ref().map(|part| part.words.len());
        let stride = (gate + up + down).next_multiple_of(1024);
        let mut words = Vec::with_capacity(n * stride);
        for (i, parts) in (1..).zip(&parts) {
            parts.iter().for_each(|part| words.extend(&part.words));
            words.resize(i * stride, 0);
        }
        Experts { parts, block: [stride, gate, gate + up], words, n_used, gate_max: 3.0, up_abs_max: 2.5 }
    }

    fn hidden(&self) -> usize {
        self.parts[0][0].cols
    }

    fn size(&self) -> usize {
        self.parts[0][0].rows
    }

    /// The blocks in two buffers, the first with `per_split` of them if there is such a number.
    fn split(&self, per_split: Option<usize>) -> [Vec<u32>; 2] {
        let (first, second) = self.words.split_at(per_split.map_or(self.words.len(), |n| n * self.block[0]));
        [first.to_vec(), if second.is_empty() { vec![0; 4] } else { second.to_vec() }]
    }

    /// Constants that both gemms have.
    fn constants(&self, tile: [usize; 2], per_split: Option<usize>) -> Vec<(&'static str, f64)> {
        vec![
            ("BLOCK_WORDS", self.block[0] as f64),
            ("PER_SPLIT", per_split.map_or(f64::from(u32::MAX), |n| n as f64)),
            ("PANELS", tile[0] as f64),
            ("TOKENS", tile[1] as f64),
        ]
    }
}

/// Experts for each of `n` tokens, different ones, some far more often than others.
pub(in super::super) fn choice(made: &mut Made, n: usize, n_experts: usize, n_used: usize) -> Vec<u32> {
    let mut chosen = Vec::new();
    for _ in 0..n {
        let mut own: Vec<u32> = Vec::new();
        while own.len() < n_used {
            let expert = made.below(n_experts).min(made.below(n_experts)) as u32;
            if !own.contains(&expert) {
                own.push(expert);
            }
        }
        chosen.extend(own);
    }
    chosen
}

/// Pairs by expert, and the tiles of at most `tokens` of them; with room for as many as there could be.
fn sorted(chosen: &[u32], n_experts: usize, tokens: usize) -> (Vec<u32>, Vec<u32>) {
    let mut pairs: Vec<u32> = (0..chosen.len() as u32).collect();
    pairs.sort_by_key(|pair| chosen[*pair as usize]);
    let mut tiles = vec![0; 4];
    let mut first = 0;
    for of_one in pairs.chunk_by(|a, b| chosen[*a as usize] == chosen[*b as usize]) {
        for tile in of_one.chunks(tokens) {
            tiles.extend([chosen[tile[0] as usize], first, tile.len() as u32, 0]);
            first += tile.len() as u32;
        }
    }
    tiles[0] = (tiles.len() / 4 - 1) as u32;
    tiles.resize(4 * (1 + most_tiles(chosen.len(), n_experts, tokens)), 0);
    (pairs, tiles)
}

/// Most tiles that there can be.
fn most_tiles(pairs: usize, n_experts: usize, tokens: usize) -> usize {
    pairs.min(n_experts + pairs / tokens)
}

/// Logits `[n_tokens, n_experts]`; those of the last token may hold one that is no number.
pub(in super::super) fn route(
    trial: &Trial<'_>,
    n_experts: usize,
    n_used: usize,
    norm_topk: bool,
    n_tokens: usize,
    bad: bool,
) -> Result<Difference, Error> {
    let mut made = Made::new(n_tokens as u64);
    let mut logits = made.values(n_tokens * n_experts, 4.0);
    if n_experts > 5 {
        logits[5] = logits[2]; // a tie
    }
    if bad {
        let last = logits.len() - 1;
        logits[last - made.below(n_experts)] = f32::NAN;
    }
    let n_pairs = n_tokens * n_used;
    let mut buffers = [
        words(&logits),
        vec![0; 2 * (n_pairs + SPARE)],
        vec![0; n_pairs + SPARE],
        vec![0; n_experts],
        vec![0, 9],
    ];
    let constants = [
        ("N_EXPERTS", n_experts as f64),
        ("N_USED", n_used as f64),
        ("NORM_TOPK", f64::from(u8::from(norm_topk))),
    ];
    trial.run("route", &constants, &mut buffers, [n_tokens as u32, 1, 1])?;
    let [_, chosen, slots, counts, status] = &buffers;
    let mut found = equal(status.as_slice(), &[if bad { 9 } else { 0 }, 9]);
    let good = n_tokens - usize::from(bad);
    for (token, logits) in logits.chunks_exact(n_experts).enumerate().take(good) {
        let largest = f64::from(logits.iter().fold(f32::MIN, |a, b| a.max(*b)));
        let weight = |i: &usize| (f64::from(logits[*i]) - largest).exp();
        let total: f64 = (0..n_experts).map(|i| weight(&i)).sum();
        let mut order: Vec<usize> = (0..n_experts).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        order.truncate(n_used);
        let of_best: f64 = order.iter().map(|i| weight(i) / total).sum();
        for (expert, own) in order.iter().zip(chosen[2 * token * n_used..].chunks(2)) {
            let expected = weight(expert) / total / if norm_topk { of_best + 1e-20 } else { 1.0 };
            let difference = (f64::from(f32::from_bits(own[1])) - expected).abs();
            found = found.max(equal(own[0] as usize, *expert));
            found = found.max(if difference.is_finite() { difference } else { f64::INFINITY });
        }
    }
    // Each pair has a place of its own among its expert's.
    let mut places: Vec<(u32, u32)> = Vec::new();
    for (pair, slot) in chosen[..2 * n_pairs].chunks(2).zip(slots) {
        places.push((pair[0], *slot));
    }
    places.sort_unstable();
    let mut expected = Vec::new();
    for (expert, count) in (0..).zip(counts) {
        expected.extend((0..*count).map(|slot| (expert, slot)));
    }
    found = found.max(equal(places, expected));
    found = found.max(equal(slots[n_pairs..].iter().all(|slot| *slot == 0), true));
    Ok(Difference::of("route", found))
}

/// `tokens` is those of a tile.
pub(in super::super) fn sort_pairs(
    trial: &Trial<'_>,
    n_experts: usize,
    n_used: usize,
    tokens: usize,
    n_tokens: usize,
) -> Result<Difference, Error> {
    let mut made = Made::new(n_tokens as u64);
    let experts = choice(&mut made, n_tokens, n_experts, n_used);
    let (pairs, tiles) = sorted(&experts, n_experts, tokens);
    let mut counts = vec![0; n_experts];
    let mut slots = Vec::new();
    for expert in &experts {
        slots.push(counts[*expert as usize]);
        counts[*expert as usize] += 1;
    }
    let n_pairs = experts.len();
    let chosen = experts.iter().flat_map(|expert| [*expert, 0]).collect();
    let mut buffers = [
        plain_rows(n_tokens),
        counts,
        chosen,
        slots,
        vec![0; n_pairs + SPARE],
        vec![0; tiles.len() + 4 * SPARE],
    ];
    let constants = [("N_EXPERTS", n_experts as f64), ("N_USED", n_used as f64), ("TOKENS", tokens as f64)];
    trial.run("sort_pairs", &constants, &mut buffers, [n_pairs.div_ceil(256) as u32, 1, 1])?;
    let found = equal(&buffers[4][..n_pairs], &*pairs).max(equal(&buffers[5][..tiles.len()], &*tiles));
    let spare = buffers[4][n_pairs..].iter().chain(&buffers[5][tiles.len()..]).all(|word| *word == 0);
    Ok(Difference::of("sort_pairs", found.max(equal(spare, true))))
}

pub(in super::super) fn experts_in_gemm(
    trial: &Trial<'_>,
    experts: &Experts,
    n_tokens: usize,
    tile: [usize; 2],
    per_split: Option<usize>,
) -> Result<Difference, Error> {
    let (hidden, size, n_experts) = (experts.hidden(), experts.size(), experts.parts.len());
    let mut made = Made::new(n_tokens as u64);
    // Large enough for the bounds of gate and up to matter.
    let x = Rows::of(&made.values(n_tokens * hidden, 40.0), hidden);
    let chosen = choice(&mut made, n_tokens, n_experts, experts.n_used);
    let (pairs, tiles) = sorted(&chosen, n_experts, tile[1]);
    let mut expected = Vec::new();
    for pair in &pairs {
        let token = *pair as usize / experts.n_used;
        let [gate, up, _] = &experts.parts[chosen[*pair as usize] as usize];
        let x = &x.values[token * hidden..][..hidden];
        expected.extend(gate.times(x).into_iter().zip(up.times(x)).map(|(gate, up)| {
            let gate = gate.min(f64::from(experts.gate_max));
            let bound = f64::from(experts.up_abs_max);
            gate / (1.0 + (-gate).exp()) * up.clamp(-bound, bound)
        }));
    }
    let [x0, x1] = experts.split(per_split);
    let n_tiles = tiles.len() / 4 - 1;
    let out = vec![0; (pairs.len() + SPARE) * size];
    let mut buffers = [x.xq, x.xs, x0, x1, pairs, tiles, out];
    let mut constants = experts.constants(tile, per_split);
    constants.extend([
        ("COLS", hidden as f64),
        ("EXPERT_SIZE", size as f64),
        ("N_USED", experts.n_used as f64),
        ("UP_AT", experts.block[1] as f64),
        ("GATE_MAX", f64::from(experts.gate_max)),
        ("UP_ABS_MAX", f64::from(experts.up_abs_max)),
    ]);
    let grid = [size.div_ceil(2 * tile[0]) as u32, n_tiles as u32, 1];
    trial.run("experts_in_gemm", &constants, &mut buffers, grid)?;
    let (act, spare) = buffers[6].split_at(expected.len());
    let found = worst(act, &expected).max(equal(spare.iter().all(|word| *word == 0), true));
    Ok(Difference::of("experts_in_gemm", found))
}

pub(in super::super) fn experts_out_gemm(
    trial: &Trial<'_>,
    experts: &Experts,
    n_tokens: usize,
    tile: [usize; 2],
    per_split: Option<usize>,
) -> Result<Difference, Error> {
    let (hidden, size, n_experts) = (experts.hidden(), experts.size(), experts.parts.len());
    let mut made = Made::new(n_tokens as u64);
    let n_pairs = n_tokens * experts.n_used;
    let x = Rows::of(&made.values(n_pairs * size, 2.0), size);
    let chosen = choice(&mut made, n_tokens, n_experts, experts.n_used);
    let (pairs, tiles) = sorted(&chosen, n_experts, tile[1]);
    let mut expected = vec![0.0; n_pairs * hidden];
    for (place, pair) in pairs.iter().enumerate() {
        let [_, _, down] = &experts.parts[chosen[*pair as usize] as usize];
        let y = down.times(&x.values[place * size..][..size]);
        expected[*pair as usize * hidden..][..hidden].copy_from_slice(&y);
    }
    let [x0, x1] = experts.split(per_split);
    let n_tiles = tiles.len() / 4 - 1;
    let out = vec![0; (n_pairs + SPARE) * hidden];
    let mut buffers = [x.xq, x.xs, x0, x1, pairs, tiles, out];
    let mut constants = experts.constants(tile, per_split);
    constants.extend([("COLS", size as f64), ("ROWS", hidden as f64), ("DOWN_AT", experts.block[2] as f64)]);
    let grid = [hidden.div_ceil(4 * tile[0]) as u32, n_tiles as u32, 1];
    trial.run("experts_out_gemm", &constants, &mut buffers, grid)?;
    let (y, spare) = buffers[6].split_at(expected.len());
    let found = worst(y, &expected).max(equal(spare.iter().all(|word| *word == 0), true));
    Ok(Difference::of("experts_out_gemm", found))
}

pub(in super::super) fn combine(
    trial: &Trial<'_>,
    cols: usize,
    n_used: usize,
    n_tokens: usize,
) -> Result<Difference, Error> {
    let mut made = Made::new(n_tokens as u64);
    let weights = made.values(n_tokens * n_used, 0.5);
    let y = made.values(n_tokens * n_used * cols, 2.0);
    let h = made.values((n_tokens + SPARE) * cols, 3.0);
    let mut expected: Vec<f64> = h.iter().map(|h| f64::from(*h)).collect();
    for (pair, (y, weight)) in y.chunks_exact(cols).zip(&weights).enumerate() {
        let h = &mut expected[pair / n_used * cols..][..cols];
        h.iter_mut().zip(y).for_each(|(h, y)| *h += f64::from(*weight) * f64::from(*y));
    }
    let chosen = weights.iter().flat_map(|weight| [0, weight.to_bits()]).collect();
    let mut buffers = [chosen, words(&y), words(&h)];
    let constants = [("COLS", cols as f64), ("N_USED", n_used as f64)];
    trial.run("combine", &constants, &mut buffers, [n_tokens as u32, 1, 1])?;
    Ok(Difference::of("combine", worst(&buffers[2], &expected)))
}
