//! A head that leaves rows out (`crate::flash` says which): the centroids' scores, the clusters they choose, the logits of those
//! and, where it is to be certified, of all others that may hold one of the largest. Nothing of it comes to the host but logits.

use super::{PANEL_ROWS, constants, parts, rows};
use crate::{
    backend::{
        MAX_CANDIDATES,
        wgpu::{
            device::{Gpu, bytes_of},
            inventory::Buffers,
            ops::{Maker, Op},
            plan::{COUNT_WORDS, FlashPlan, FlashScratch, HeadPlan, Scratch},
        },
    },
    error::Error,
    flash::{HeadCounts, HeadKind, HeadMode, rounding},
    model::Model,
    spec::NormSpec,
};

/// Panels of a workgroup: 32 rows, as many as a maximum has and many a cluster.
const PANELS: usize = 8;

/// The same of centroids, of which there are few.
const CENTROID_PANELS: usize = 8;

/// Dispatches, what they count, and what the host does.
pub(in crate::backend::wgpu) struct Flash {
    pub(in crate::backend::wgpu) mode: HeadMode,
    pub(in crate::backend::wgpu) ops: Vec<Op>,
    pub(in crate::backend::wgpu) scratch: FlashScratch,
    vocab_size: usize,
    /// What `scratch.top` holds.
    top: usize,
    /// Tokens for which every row was read.
    n_exact: u64,
    /// Bytes read for a token at first, for a cluster more, and for every row.
    token_bytes: u64,
    cluster_bytes: u64,
    head_bytes: u64,
}

impl Flash {
    /// Without dispatches. `panel_bytes` are those of 4 rows.
    pub(in crate::backend::wgpu) fn new(model: &Model, plan: &FlashPlan, panel_bytes: u64) -> Self {
        let FlashPlan { mode, clusters, scratch, .. } = plan;
        let vocab_size = clusters.spec.centroids.rows * clusters.spec.cluster_size;
        Flash {
            mode: *mode,
            ops: Vec::new(),
            scratch: *scratch,
            vocab_size,
            top: 0,
            n_exact: 0,
            token_bytes: clusters.fixed_bytes(model) as u64 + first_bytes(plan, panel_bytes),
            cluster_bytes: cluster_bytes(plan, panel_bytes),
            head_bytes: (vocab_size / PANEL_ROWS) as u64 * panel_bytes,
        }
    }

    /// Whether rows are left out when the `top` largest logits matter: as many as a device finds a number for that they reach.
    pub(in crate::backend::wgpu) fn leaves_out(&self, top: usize) -> bool {
        self.mode.kind == HeadKind::Flash || top <= MAX_CANDIDATES && top < self.vocab_size
    }

    /// Tells the next commands how many of the largest logits matter.
    pub(in crate::backend::wgpu) fn write_top(&mut self, gpu: &Gpu, buffers: &Buffers, top: usize) {
        let top = top.clamp(1, MAX_CANDIDATES);
        if self.top != top {
            gpu.queue().write_buffer(&buffers[self.scratch.top], 0, &bytes_of(&[top as u32]));
            self.top = top;
        }
    }

    /// Counts tokens that have every row.
    pub(in crate::backend::wgpu) fn count_exact(&mut self, n: u64) {
        self.n_exact += n;
    }

    /// What was read so far.
    ///
    /// # Errors
    /// A lost device.
    pub(in crate::backend::wgpu) fn counts(&self, gpu: &Gpu, buffers: &Buffers) -> Result<HeadCounts, Error> {
        let words = gpu.read(&buffers[self.scratch.counts], 0, COUNT_WORDS)?;
        let [tokens, certified, low, high] = [0, 1, 2, 3].map(|i| u64::from(words[i]));
        let more = high << 32 | low;
        Ok(HeadCounts {
            tokens: tokens + self.n_exact,
            certified,
            bytes: tokens * self.token_bytes + more * self.cluster_bytes + self.n_exact * self.head_bytes,
        })
    }
}

/// Bytes of a cluster's rows.
fn cluster_bytes(plan: &FlashPlan, panel_bytes: u64) -> u64 {
    (plan.clusters.spec.cluster_size / PANEL_ROWS) as u64 * panel_bytes
}

/// Bytes of the rows that are read for every token, whatever it is: those of so many clusters, and the panels of forced rows.
fn first_bytes(plan: &FlashPlan, panel_bytes: u64) -> u64 {
    let same_panel = |a: &u32, b: &u32| *a as usize / PANEL_ROWS == *b as usize / PANEL_ROWS;
    let n_forced = plan.clusters.forced.chunk_by(same_panel).count() as u64;
    plan.mode.n_probes as u64 * cluster_bytes(plan, panel_bytes) + n_forced * panel_bytes
}

/// Dispatches of one token: two more than the exact head has, and two more again to certify.
///
/// # Errors
/// A kernel that does not compile.
pub(in crate::backend::wgpu) fn flash(
    maker: &Maker<'_>,
    scratch: &Scratch,
    head: &HeadPlan,
    plan: &FlashPlan,
) -> Result<Vec<Op>, Error> {
    let FlashScratch { scores, maxima, bound_keys, flags, top, counts } = plan.scratch;
    let centroids = &plan.clusters.spec.centroids;
    let n_clusters = ("N_CLUSTERS", centroids.rows as f64);
    let certified = plan.mode.kind == HeadKind::Certified;
    let NormSpec { weight: _, eps } = head.spec.norm;
    let mut ops =
        rows(maker, scratch, head, (centroids, &plan.centroids), CENTROID_PANELS, [scores, maxima])?;
    ops.push(maker.op(
        "probe",
        &[
            n_clusters,
            ("N_PROBES", plan.mode.n_probes as f64),
            ("CERTIFIED", f64::from(u8::from(certified))),
            ("ROUNDING", rounding(centroids.cols)),
            ("COLS", centroids.cols as f64),
            ("EPS", eps.into()),
        ],
        &[scratch.logit_rows, scratch.h, head.norm, scores, plan.bounds, bound_keys, flags, counts],
        |_| [1, 1, 1],
        |_| 0,
    )?);
    ops.extend(probed(maker, scratch, head, plan, first_bytes(plan, head.panel_bytes))?);
    if certified {
        let rows = ("ROWS", head.spec.weight.rows as f64);
        let buffers = [scratch.logits, scratch.maxima, bound_keys, top, flags, counts];
        ops.push(maker.op("certify", &[rows, n_clusters], &buffers, |_| [1, 1, 1], |_| 0)?);
        // How many are read now, the host does not know.
        ops.extend(probed(maker, scratch, head, plan, 0)?);
    }
    Ok(ops)
}

/// The rows flagged; a dispatch for each buffer of the weight. `bytes` are read by all of them.
fn probed(
    maker: &Maker<'_>,
    scratch: &Scratch,
    head: &HeadPlan,
    plan: &FlashPlan,
    bytes: u64,
) -> Result<Vec<Op>, Error> {
    let weight = &head.spec.weight;
    let all = weight.rows.div_ceil(PANEL_ROWS) as u64;
    parts(weight, &head.weight)
        .map(|(w, range)| {
            let mut given = constants(&head.spec.norm, weight, &range, PANELS).to_vec();
            given.push(("CLUSTER", plan.clusters.spec.cluster_size as f64));
            let groups = range.len().div_ceil(PANELS) as u32;
            let bytes = bytes * range.len() as u64 / all;
            maker.op(
                "flash_rows",
                &given,
                &[
                    scratch.logit_rows,
                    scratch.h,
                    head.norm,
                    w,
                    plan.scratch.flags,
                    plan.forced,
                    scratch.logits,
                    scratch.maxima,
                ],
                move |_| [groups, 1, 1],
                move |_| bytes,
            )
        })
        .collect()
}
