//! A head that leaves rows out (`crate::flash` says which): the centroids' scores, the clusters they choose, the logits of those
//! and, where it is to be certified, of all others that may hold one of the largest. Nothing of it comes to the host but logits.

use super::{PANEL_ROWS, constants, parts};
use crate::{
    backend::{
        MAX_CANDIDATES,
        wgpu::{
            device::{Gpu, bytes_of},
            inventory::Buffers,
            ops::{Maker, Op},
            plan::{COUNT_WORDS, FlashPlan, FlashScratch, HeadPlan, MAXIMUM_ROWS, Scratch},
        },
    },
    error::Error,
    flash::{HeadCounts, HeadKind, HeadMode, rounding},
    model::Model,
};

/// Panels of a workgroup: 32 rows, as many as a maximum has and many a cluster.
const PANELS: usize = MAXIMUM_ROWS / PANEL_ROWS;

/// The same of centroids, of which there are few.
const CENTROID_PANELS: usize = 8;

/// Clusters that a workgroup of `probe` ranks.
pub(in crate::backend::wgpu) const PROBE_CLUSTERS: usize = 16;

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

/// Bytes of the rows that are read for every token, whatever it is: those of so many clusters, and the panels of forced rows, some of
/// which may be in those clusters and are read once.
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
    let FlashScratch { keys, probed, top, counts } = plan.scratch;
    let n_clusters = plan.clusters.spec.centroids.rows;
    let n_probes = plan.mode.n_probes;
    let certified = plan.mode.kind == HeadKind::Certified;
    let rows = ("ROWS", head.spec.weight.rows as f64);
    let clusters = ("N_CLUSTERS", n_clusters as f64);
    let mut ops = centroids(maker, scratch, head, plan)?;
    let forced = ("N_FORCED", plan.n_forced as f64);
    ops.push(maker.op(
        "probe",
        &[clusters, ("N_PROBES", n_probes as f64), forced, rows],
        &[keys, probed, scratch.logits, scratch.maxima, counts],
        move |_| [n_clusters.div_ceil(PROBE_CLUSTERS) as u32, 1, 1],
        |_| 0,
    )?);
    let first = first_bytes(plan, head.panel_bytes);
    ops.extend(flash_rows(maker, scratch, head, plan, (n_probes, plan.n_forced), first)?);
    if certified {
        let buffers = [scratch.logits, scratch.maxima, keys, top, probed, counts];
        ops.push(maker.op("certify", &[rows, clusters], &buffers, |_| [1, 1, 1], |_| 0)?);
        // How many are read now, the host does not know.
        ops.extend(flash_rows(maker, scratch, head, plan, (n_clusters, 0), 0)?);
    }
    Ok(ops)
}

/// What clusters are ranked by; a dispatch for each buffer of the centroids.
fn centroids(
    maker: &Maker<'_>,
    scratch: &Scratch,
    head: &HeadPlan,
    plan: &FlashPlan,
) -> Result<Vec<Op>, Error> {
    let weight = &plan.clusters.spec.centroids;
    let panel_bytes = head.panel_bytes;
    parts(weight, &plan.centroids)
        .map(|(w, range)| {
            let mut given = constants(&head.spec.norm, weight, &range, CENTROID_PANELS).to_vec();
            given.push(("CERTIFIED", f64::from(u8::from(plan.mode.kind == HeadKind::Certified))));
            given.push(("ROUNDING", rounding(weight.cols)));
            let n = range.len();
            maker.op(
                "centroids",
                &given,
                &[scratch.logit_rows, scratch.h, head.norm, w, plan.bounds, plan.scratch.keys],
                move |_| [n.div_ceil(CENTROID_PANELS) as u32, 1, 1],
                move |_| n as u64 * panel_bytes,
            )
        })
        .collect()
}

/// The rows of at most so many clusters listed, and of so many blocks with rows always computed; a dispatch for each buffer of the
/// weight. `bytes` are read by all of them.
fn flash_rows(
    maker: &Maker<'_>,
    scratch: &Scratch,
    head: &HeadPlan,
    plan: &FlashPlan,
    (n_clusters, n_forced): (usize, usize),
    bytes: u64,
) -> Result<Vec<Op>, Error> {
    let weight = &head.spec.weight;
    let all = weight.rows.div_ceil(PANEL_ROWS) as u64;
    let size = plan.clusters.spec.cluster_size;
    let shares = shares(size);
    let groups = n_clusters * shares + n_forced;
    let grid = [groups.min(1 << 15) as u32, groups.div_ceil(1 << 15) as u32, 1];
    parts(weight, &head.weight)
        .map(|(w, range)| {
            let mut given = constants(&head.spec.norm, weight, &range, PANELS).to_vec();
            given.extend([("CLUSTER", size as f64), ("SHARES", shares as f64)]);
            let bytes = bytes * range.len() as u64 / all;
            let FlashScratch { probed, .. } = plan.scratch;
            let Scratch { logit_rows, h, logits, maxima, .. } = *scratch;
            maker.op(
                "flash_rows",
                &given,
                &[logit_rows, h, head.norm, w, probed, plan.forced, logits, maxima],
                move |_| grid,
                move |_| bytes,
            )
        })
        .collect()
}

/// Blocks of 32 rows that a cluster of `size` rows, a multiple of 4, has a share of, at most.
pub(in crate::backend::wgpu) fn shares(size: usize) -> usize {
    // The last of 32 rows that a cluster begins with: clusters begin at multiples of what divides both.
    let step = 1 << size.trailing_zeros().min(5);
    (MAXIMUM_ROWS - step + size).div_ceil(MAXIMUM_ROWS)
}
