//! The logits of a few clusters of the head's rows.

use std::cmp::Reverse;

use samara_pool::Chunks;
use samara_simd::{Affine4Rows, Kernels, PANEL_ROWS, QuantizedRow};

use super::{Context, head::MIN_PANELS};
use crate::{
    flash::{Clusters, Found, HeadCounts, HeadKind, HeadMode, Search, ordered},
    model::Model,
    spec::MatrixRef,
};

/// A head that leaves rows out.
pub(super) struct Flash {
    mode: HeadMode,
    clusters: Clusters,
    search: Search,
    /// Clusters read, in the order of their logits in the scratch.
    read: Vec<u32>,
    /// Forced rows that are in none of them, whose logits follow.
    forced: Vec<u32>,
    /// Logits, to be ranked.
    ranked: Vec<f32>,
    pub(super) counts: HeadCounts,
}

impl Flash {
    pub(super) fn new(model: &Model, clusters: Clusters, mode: HeadMode) -> Self {
        model.will_need(&clusters.spec.centroids);
        let n_clusters = clusters.spec.centroids.rows;
        Flash {
            mode,
            search: Search::new(n_clusters),
            read: Vec::with_capacity(n_clusters),
            forced: Vec::with_capacity(clusters.forced.len()),
            ranked: Vec::with_capacity(n_clusters * clusters.spec.cluster_size),
            counts: HeadCounts::default(),
            clusters,
        }
    }

    /// Whether there are rows to leave out when the `top` largest logits matter.
    pub(super) fn leaves_out(&self, top: usize) -> bool {
        let Clusters { spec, .. } = &self.clusters;
        self.mode.kind == HeadKind::Flash || top < spec.centroids.rows * spec.cluster_size
    }

    /// Reads what it takes for the `top` largest logits of the first row of `cx.scratch.act`. They are the first of `cx.scratch.head`,
    /// as many as this returns.
    pub(super) fn read(
        &mut self,
        cx: &mut Context<'_>,
        kernels: &Kernels,
        weight: &MatrixRef,
        top: usize,
    ) -> usize {
        let Flash { mode, clusters, search, read, forced, ranked, counts } = self;
        let act = &cx.scratch.act.row(0, weight.cols);
        let centroids = &clusters.spec.centroids;
        let part = cx.model.matrix(centroids);
        let rows = Affine4Rows::new(part, centroids.rows, centroids.cols);
        let scores = Chunks::new(&mut search.scores, PANEL_ROWS);
        cx.pool.run(scores, MIN_PANELS, &mut cx.scratch.workers, |_, first, out: &mut [f32]| {
            let from = first * PANEL_ROWS;
            kernels.affine4_gemv(&rows, act, from..from + out.len(), out);
        });
        let fixed_bytes = clusters.fixed_bytes(cx.model);
        cx.clock.lap("centroids", fixed_bytes);

        let part = cx.model.matrix(weight);
        let rows = Affine4Rows::new(part, weight.rows, weight.cols);
        let size = clusters.spec.cluster_size;
        let panel_bytes = part.len() / weight.rows.div_ceil(PANEL_ROWS);
        let min_run = (MIN_PANELS * PANEL_ROWS).div_ceil(size);
        read.clear();
        let (pool, workers, out) = (&mut *cx.pool, &mut cx.scratch.workers, &mut cx.scratch.head);
        let Found { n_read, at_once } = search.run(*mode, clusters, act.norm(), |list| {
            let start = read.len() * size;
            read.extend_from_slice(list);
            let end = read.len() * size;
            pool.run(
                Chunks::new(&mut out[start..end], size),
                min_run,
                workers,
                |_, first, out: &mut [f32]| {
                    let list = &list[first..first + out.len() / size];
                    let mut out = out;
                    // Of clusters that lie together one run, so that memory is read as a stream.
                    let mut runs = list.chunk_by(|a, b| *a + 1 == *b).peekable();
                    while let Some(run) = runs.next() {
                        if let Some(next) = runs.peek() {
                            rows.prefetch(next[0] as usize * size);
                        }
                        let from = run[0] as usize * size;
                        let (own, rest) = out.split_at_mut(run.len() * size);
                        kernels.affine4_gemv(&rows, act, from..from + own.len(), own);
                        out = rest;
                    }
                },
            );
            match mode.kind {
                HeadKind::Certified => nth_largest(&out[..end], top, ranked),
                HeadKind::Exact | HeadKind::Flash => f32::NEG_INFINITY,
            }
        });
        cx.clock.lap("head", n_read * size / PANEL_ROWS * panel_bytes);
        counts.tokens += 1;
        counts.certified += u64::from(at_once);

        forced.clear();
        forced.extend(clusters.forced.iter().filter(|row| !read.contains(&(**row / size as u32))));
        let n_listed = read.len() * size;
        let n_panels = some_rows(kernels, &rows, act, forced, &mut out[n_listed..]);
        let bytes = (n_read * size / PANEL_ROWS + n_panels) * panel_bytes;
        counts.bytes += (fixed_bytes + bytes) as u64;
        n_listed + forced.len()
    }

    /// Token of a row of the head.
    fn token(&self, row: u32) -> u32 {
        self.clusters.token_of.get(row as usize).copied().unwrap_or(row)
    }

    /// Row of logit `i` of those read.
    fn row(&self, i: usize) -> u32 {
        let size = self.clusters.spec.cluster_size;
        match self.read.get(i / size) {
            Some(cluster) => *cluster * size as u32 + (i % size) as u32,
            None => self.forced[i - self.read.len() * size],
        }
    }

    /// Fills `logits`, `[vocab_size]` by token, with those `read`; others are -infinity.
    pub(super) fn scatter(&self, read: &[f32], logits: &mut [f32]) {
        logits.fill(f32::NEG_INFINITY);
        let size = self.clusters.spec.cluster_size;
        let (listed, forced) = read.split_at(self.read.len() * size);
        let mut put = |row: u32, logit: &f32| logits[self.token(row) as usize] = *logit;
        for (cluster, read) in self.read.iter().zip(listed.chunks_exact(size)) {
            read.iter().zip(*cluster * size as u32..).for_each(|(logit, row)| put(row, logit));
        }
        forced.iter().zip(&self.forced).for_each(|(logit, row)| put(*row, logit));
    }

    /// The `n` largest of those `read`, as [`Activations::best`](crate::Activations::best) has them.
    pub(super) fn best(&mut self, read: &[f32], n: usize, best: &mut Vec<(u32, f32)>) {
        let least = nth_largest(read, n, &mut self.ranked);
        take_best(read, least, |i| self.token(self.row(i)), best);
        best.truncate(n);
    }
}

/// Those of `logits` that are not below `least`, in rank order, each with its token.
fn take_best(logits: &[f32], least: f32, token: impl Fn(usize) -> u32, best: &mut Vec<(u32, f32)>) {
    // What is no number is among them.
    let enough = |logit: f32| logit >= least || logit.is_nan();
    for (chunk, logits) in logits.chunks(LANES).enumerate() {
        if logits.iter().fold(false, |any, logit| any | enough(*logit)) {
            let all = (chunk * LANES..).zip(logits).filter(|(_, logit)| enough(**logit));
            best.extend(all.map(|(i, logit)| (token(i), *logit)));
        }
    }
    best.sort_unstable_by_key(|(token, logit)| (Reverse(rank_key(*logit)), *token));
}

/// Logits of `rows`, ascending, to the beginning of `out`. How many panels were read.
fn some_rows(
    kernels: &Kernels,
    weight: &Affine4Rows<'_>,
    act: &QuantizedRow<'_>,
    rows: &[u32],
    out: &mut [f32],
) -> usize {
    let (mut n, mut out) = (0, out.iter_mut());
    for same in rows.chunk_by(|a, b| *a as usize / PANEL_ROWS == *b as usize / PANEL_ROWS) {
        let from = same[0] as usize / PANEL_ROWS * PANEL_ROWS;
        let mut panel = [0.0; PANEL_ROWS];
        kernels.affine4_gemv(weight, act, from..from + PANEL_ROWS, &mut panel);
        same.iter().zip(&mut out).for_each(|(row, out)| *out = panel[*row as usize - from]);
        n += 1;
    }
    n
}

/// Elements of a look at many at once.
const LANES: usize = 16;

/// Orders as values do; -0 is 0, and what is no number is above all.
fn rank_key(x: f32) -> u32 {
    if x.is_nan() { u32::MAX } else { ordered(x + 0.0) }
}

/// The largest of `x`, apart from what is no number; -infinity of none.
fn largest(x: &[f32]) -> f32 {
    let mut most = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    let larger = |most: f32, x: f32| if x > most { x } else { most };
    for chunk in chunks {
        most = std::array::from_fn(|i| larger(most[i], chunk[i]));
    }
    most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// The `n`-th largest of `logits`; -infinity of fewer. `scratch` is written over.
fn nth_largest(logits: &[f32], n: usize, scratch: &mut Vec<f32>) -> f32 {
    match n {
        1 => largest(logits),
        n if n == 0 || n > logits.len() => f32::NEG_INFINITY,
        n => {
            logits.clone_into(scratch);
            *scratch.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a)).1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_in_rank_order_and_what_is_no_number_is_among_them() {
        let mut logits: Vec<f32> = (0..100).map(|i| (i * 37 % 100) as f32 - 90.0).collect();
        (logits[3], logits[50], logits[70]) = (9.0, -0.0, 0.0);
        let found = |logits: &[f32], n: usize| {
            let (mut best, mut scratch) = (Vec::new(), Vec::new());
            let least = nth_largest(logits, n, &mut scratch);
            take_best(logits, least, |i| 1000 - i as u32, &mut best);
            best.truncate(n);
            best
        };
        for n in [1, 2, 5, 13, 14, 64, 100, 101] {
            let mut all: Vec<(u32, f32)> = (0..100).map(|i| (1000 - i, logits[i as usize])).collect();
            all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("numbers").then(a.0.cmp(&b.0)));
            all.truncate(n);
            assert_eq!(found(&logits, n), all, "{n}");
        }
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            logits[60] = bad;
            for n in [1, 3] {
                let best = found(&logits, n);
                assert_eq!(
                    (best.len(), best[0].0, best[0].1.to_bits()),
                    (n, 940, bad.to_bits()),
                    "{bad} {n}"
                );
            }
        }
    }
}
