//! A head that leaves rows out, with the pipelines of a segment: each step of it against what it was given.

use samara_simd::PANEL_ROWS;

use super::{
    HEAD_TOLERANCE, Host,
    decode::{Affine, Row, key_bits, length},
    made::Made,
    relative,
    trial::{Difference, equal},
};
use crate::{
    backend::wgpu::{inventory::BufferId, plan::MAXIMUM_ROWS, segment::GpuSegment},
    error::Error,
    flash::{Bound, Clusters, HeadKind, HeadMode, rounding},
    spec::{BlockSpec, HeadSpec},
};

/// How far a bound may be from the same in f64, relative to the largest that it could be. An int8 that is rounded the other way
/// changes the state's length by less.
const BOUND_TOLERANCE: f64 = 1e-3;

/// What the kernels left, and what is expected of them.
struct Found<'a> {
    mode: HeadMode,
    clusters: &'a Clusters,
    /// Whether what was left out was looked at again.
    certified: bool,
    /// f32 `[n_clusters]`: the centroids' scores on the CPU.
    scores: Vec<f32>,
    /// f32 `[n_clusters]`, of the device: bounds, or scores where none are needed.
    keys: Vec<f32>,
    /// `[n_clusters]`: the pass in which a cluster was read, or 0.
    flags: Vec<u32>,
    /// What the last pass was told to read: `[n_clusters]`, of which so many count, and so many blocks with forced rows.
    listed: Vec<u32>,
    /// f32 `[vocab_size]` by row: the device's logits, and every one on the CPU.
    logits: [Vec<f32>; 2],
    /// The device's, one for 32 rows.
    maxima: Vec<f32>,
    /// Length of the hidden state.
    length: f64,
}

/// Runs the head of a segment on a made-up hidden state, the largest logit of which matters. The first kernel that is wrong, if the
/// segment's head leaves rows out.
///
/// # Errors
/// A lost device, or a CPU on which no thread can start.
pub(super) fn wrong(
    segment: &mut GpuSegment,
    cpu: &Host<'_>,
    spec: &HeadSpec,
) -> Result<Option<Difference>, Error> {
    let HeadSpec { norm, weight, token_map: _, flash: _ } = spec;
    let Some(head) = segment.head.as_ref().and_then(|head| head.flash.as_ref()) else { return Ok(None) };
    let (mode, scratch) = (head.mode, head.scratch);
    let Some(clusters) = Clusters::of(cpu.model, spec, mode)? else { return Ok(None) };
    let n_clusters = clusters.spec.centroids.rows;
    // Like a row, so that not all others come into question.
    let first = Affine::of(cpu.model.matrix(weight), PANEL_ROWS, weight.cols).weights;
    let largest = first.iter().fold(f64::MIN_POSITIVE, |most, w| most.max(w.abs()));
    let noise = Made::new(1).values(weight.cols, 0.1);
    let h: Vec<f32> = first.iter().zip(noise).map(|(w, noise)| (w / largest) as f32 + noise).collect();
    let norm_weight = cpu.model.vector(&norm.weight);
    let row = Row { h: &h, norm: &norm_weight, eps: norm.eps };
    let by_token = cpu.run(&[&[0]], &mut h.clone())?;
    let exact: Vec<f32> = match &clusters.token_of[..] {
        [] => by_token,
        token_of => token_of.iter().map(|token| by_token[*token as usize]).collect(),
    };
    // Centroids are a head of their own.
    let centroids = HeadSpec { norm: *norm, weight: clusters.spec.centroids, token_map: None, flash: None };
    let mut scores = Host { block: &BlockSpec::Head(centroids), ..*cpu }.run(&[&[0]], &mut h.clone())?;
    scores.truncate(n_clusters);

    segment.leave_out(Some(1), 0);
    // Without certifying, then with it.
    for whole in [false, true] {
        segment.run_alone(&[(0, 0, 0)], &h, 1, |segment, _| {
            let ops = segment.head.iter().flat_map(|head| &head.flash).flat_map(|flash| &flash.ops);
            ops.take_while(|op| whole || op.kernel() != "certify").collect()
        })?;
        let mut flags = segment.words(scratch.probed, 2 * n_clusters + 2)?;
        let listed = flags.split_off(n_clusters);
        let found = Found {
            mode,
            clusters: &clusters,
            certified: whole && mode.kind == HeadKind::Certified,
            length: length(&row),
            scores: scores.clone(),
            keys: ordered(segment, scratch.keys, n_clusters)?,
            flags,
            listed,
            logits: [segment.floats(segment.scratch.logits, weight.rows)?, exact.clone()],
            maxima: ordered(segment, segment.scratch.maxima, weight.rows.div_ceil(MAXIMUM_ROWS))?,
        };
        if let Some(wrong) = found.differences().into_iter().find(|difference| !difference.is_small()) {
            return Ok(Some(wrong));
        }
    }
    segment.clear(scratch.counts)?;
    Ok(None)
}

/// Values that a kernel has written by their order.
fn ordered(segment: &GpuSegment, buffer: BufferId, n: usize) -> Result<Vec<f32>, Error> {
    Ok(segment.words(buffer, n)?.into_iter().map(|key| f32::from_bits(key_bits(key))).collect())
}

impl Found<'_> {
    /// Of each kernel, what others go by first.
    fn differences(&self) -> Vec<Difference> {
        let of = |kernel, found, allowed| Difference { kernel, found, allowed };
        let [found, expected] = &self.logits;
        let size = self.clusters.spec.cluster_size;
        let computed = |row: usize| self.flags[row / size] != 0 || self.is_forced(row);
        let (read, left): (Vec<usize>, Vec<usize>) = (0..found.len()).partition(|row| computed(*row));
        let only = |logits: &[f32]| -> Vec<f32> { read.iter().map(|row| logits[*row]).collect() };
        let no_others = left.iter().all(|row| found[*row] == f32::NEG_INFINITY);
        let maxima = found.chunks(MAXIMUM_ROWS).map(|l| l.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let same_maxima = maxima.eq(self.maxima.iter().copied());
        let zeros = || std::iter::repeat(0.0);
        let (keys, allowed) = match self.mode.kind {
            HeadKind::Certified => (self.worst_bound(), BOUND_TOLERANCE),
            HeadKind::Exact | HeadKind::Flash => {
                (relative(&self.keys, &self.scores, zeros()), HEAD_TOLERANCE)
            }
        };
        vec![
            of("centroids", keys, allowed),
            of("probe", equal(self.best_are_probed(), true), 0.0),
            of("certify", equal(self.open_are_read(), true), 0.0),
            of(if self.certified { "certify" } else { "probe" }, equal(self.flagged_are_listed(), true), 0.0),
            of("flash_rows", relative(&only(found), &only(expected), zeros()), HEAD_TOLERANCE),
            of("flash_rows", equal((no_others, same_maxima), (true, true)), 0.0),
        ]
    }

    fn is_forced(&self, row: usize) -> bool {
        self.clusters.forced.contains(&(row as u32))
    }

    fn worst_bound(&self) -> f64 {
        let rounding = rounding(self.clusters.spec.centroids.cols);
        let bounds = self.clusters.bounds.iter().zip(&self.scores).zip(&self.keys);
        let off = |((bound, score), key): ((&Bound, &f32), &f32)| {
            let expected = bound.of(*score, self.length, rounding);
            let most = f64::from(bound.high.abs().max(bound.low.abs())) * f64::from(score.abs())
                + self.length * f64::from(bound.row_magnitude);
            let off = (f64::from(*key) - expected).abs() / most.max(f64::MIN_POSITIVE);
            if off.is_finite() { off } else { f64::INFINITY }
        };
        bounds.map(off).fold(0.0, f64::max)
    }

    /// Whether as many clusters as should be are probed, and none whose key is below that of another.
    fn best_are_probed(&self) -> bool {
        let keys = |probed: bool| {
            let all = self.keys.iter().zip(&self.flags);
            all.filter(move |(_, flag)| (**flag == 1) == probed).map(|(key, _)| *key)
        };
        let least = keys(true).fold(f32::INFINITY, f32::min);
        keys(true).count() == self.mode.n_probes && keys(false).all(|key| key <= least)
    }

    /// Whether the list of the last pass has the clusters flagged for it, and all of those.
    fn flagged_are_listed(&self) -> bool {
        let n_clusters = self.flags.len();
        let same_block = |a: &u32, b: &u32| *a as usize / MAXIMUM_ROWS == *b as usize / MAXIMUM_ROWS;
        let (number, n_forced) =
            if self.certified { (2, 0) } else { (1, self.clusters.forced.chunk_by(same_block).count()) };
        let flagged = (0..).zip(&self.flags).filter(|(_, flag)| **flag == number).map(|(i, _)| i);
        let mut listed = self.listed[..n_clusters.min(self.listed[n_clusters] as usize)].to_vec();
        listed.sort_unstable();
        flagged.eq(listed) && self.listed[n_clusters + 1] as usize == n_forced
    }

    /// Whether clusters are read in the second pass if, and only if, they may hold the largest logit.
    fn open_are_read(&self) -> bool {
        let size = self.clusters.spec.cluster_size;
        let first = self.logits[0]
            .iter()
            .enumerate()
            .filter(|(row, _)| self.flags[row / size] == 1 || self.is_forced(*row));
        let reached = first.fold(f32::NEG_INFINITY, |most, (_, logit)| most.max(*logit));
        let open = |(key, flag): (&f32, &u32)| self.certified && *flag != 1 && *key >= reached;
        self.keys.iter().zip(&self.flags).all(|both| open(both) == (*both.1 == 2))
    }
}
