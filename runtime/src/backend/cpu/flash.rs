//! The logits of a few clusters of the head's rows.

use samara_pool::Chunks;
use samara_simd::{Affine4Rows, Kernels, PANEL_ROWS, QuantizedRow};

use super::{Context, head::MIN_PANELS};
use crate::{
    flash::{Clusters, Found, HeadCounts, HeadKind, HeadMode, Search},
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

    /// Fills `logits`, `[vocab_size]`, of which the `top` largest matter, for the first row of `cx.scratch.act`.
    pub(super) fn forward(
        &mut self,
        cx: &mut Context<'_>,
        kernels: &Kernels,
        weight: &MatrixRef,
        top: usize,
        logits: &mut [f32],
    ) {
        let Flash { mode, clusters, search, read, ranked, counts } = self;
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
                HeadKind::Certified => largest(&out[..end], top, ranked),
                HeadKind::Exact | HeadKind::Flash => f32::NEG_INFINITY,
            }
        });
        cx.clock.lap("head", n_read * size / PANEL_ROWS * panel_bytes);
        counts.tokens += 1;
        counts.certified += u64::from(at_once);

        let token = |row: usize| clusters.token_of.get(row).map_or(row, |token| *token as usize);
        logits.fill(f32::NEG_INFINITY);
        for (cluster, out) in read.iter().zip(out.chunks_exact(size)) {
            let from = *cluster as usize * size;
            out.iter().zip(from..).for_each(|(logit, row)| logits[token(row)] = *logit);
        }
        let n_forced = force(kernels, &rows, act, &clusters.forced, |row, logit| logits[token(row)] = logit);
        let bytes = (n_read * size / PANEL_ROWS + n_forced) * panel_bytes;
        counts.bytes += (fixed_bytes + bytes) as u64;
        cx.clock.lap("logits", 0);
    }
}

/// Gives the logits of `forced` rows, which are ascending. How many panels were read.
fn force(
    kernels: &Kernels,
    rows: &Affine4Rows<'_>,
    act: &QuantizedRow<'_>,
    forced: &[u32],
    mut put: impl FnMut(usize, f32),
) -> usize {
    let mut n = 0;
    for same in forced.chunk_by(|a, b| *a as usize / PANEL_ROWS == *b as usize / PANEL_ROWS) {
        let from = same[0] as usize / PANEL_ROWS * PANEL_ROWS;
        let mut panel = [0.0; PANEL_ROWS];
        kernels.affine4_gemv(rows, act, from..from + PANEL_ROWS, &mut panel);
        same.iter().for_each(|row| put(*row as usize, panel[*row as usize - from]));
        n += 1;
    }
    n
}

/// The `n`-th largest of `logits`; -infinity of fewer. `scratch` is written over.
fn largest(logits: &[f32], n: usize, scratch: &mut Vec<f32>) -> f32 {
    match n {
        1 => logits.iter().copied().fold(f32::NEG_INFINITY, f32::max),
        n if n == 0 || n > logits.len() => f32::NEG_INFINITY,
        n => {
            logits.clone_into(scratch);
            *scratch.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a)).1
        }
    }
}
