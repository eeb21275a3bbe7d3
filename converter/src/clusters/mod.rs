//! FlashHead data made by the converter: clusters of head rows, their centroids, and bounds on the logits of each.
//!
//! Everything is computed from the 4-bit rows as they are written, so it holds for what a runtime reads, and in f64 by
//! one thread for a cluster, so it does not depend on the number of threads.

mod balance;
mod bounds;

use crate::affine;
use crate::error::Error;
use crate::produce::{RowSet, Slot, UNIT_ROWS, affine_memory};
use crate::recipe::Clusters;
use crate::source::SourceFile;

pub(crate) use self::balance::Step;
use self::bounds::Bound;
pub(crate) use self::bounds::N_WORDS;

/// Clusters whose centroids are looked at before a conversion.
const LOOKED_AT: usize = 64;
/// How far a scaled centroid's length may be from its cluster's largest row norm, as a share of it. Rounding to 4 bits
/// makes 3.4 % at most in the trained model of the tests. Centroids of unit length are as far off as the rows are.
const LENGTH_TOLERANCE: f64 = 0.25;

impl Clusters {
    /// How many units a tensor made of the clusters is cut into.
    pub(crate) fn n_units(&self) -> usize {
        self.n_clusters().div_ceil(self.unit_clusters())
    }

    /// Memory of one unit's slot without its output, bytes: source, nibbles and f64 values of some rows.
    pub(crate) fn unit_memory(&self) -> u64 {
        let row = self.head.len() / self.order.len() + 4 * size_of::<f64>() * self.cols;
        affine_memory(self.cols) + (UNIT_ROWS * row) as u64
    }

    /// Clusters in one unit: whole panels of centroids, of about [`UNIT_ROWS`] rows.
    fn unit_clusters(&self) -> usize {
        (UNIT_ROWS / self.cluster_size).max(1).next_multiple_of(samara_format::layout::PANEL_ROWS)
    }

    fn unit(&self, index: usize) -> std::ops::Range<usize> {
        let first = index * self.unit_clusters();
        first..self.n_clusters().min(first + self.unit_clusters())
    }

    /// Makes unit `index` of the centroids in `slot.out`. Returns the source bytes used.
    pub(crate) fn centroids_unit(
        &self,
        files: &[SourceFile],
        index: usize,
        slot: &mut Slot,
    ) -> Result<u64, Error> {
        let mut centroids = Vec::new();
        let mut source_len = 0;
        for cluster in self.unit(index) {
            let (centroid, used) = self.scaled_centroid(files, cluster, slot)?;
            centroids.extend(centroid);
            source_len += used;
        }
        slot.quantise(&centroids);
        slot.pack_affine(self.cols);
        Ok(source_len)
    }

    /// Makes unit `index` of the bounds in `slot.out`. Returns the source bytes used.
    pub(crate) fn bounds_unit(
        &self,
        files: &[SourceFile],
        index: usize,
        slot: &mut Slot,
    ) -> Result<u64, Error> {
        let mut out = Vec::new();
        let mut source_len = 0;
        let mut centroid = vec![0.0; self.cols];
        for cluster in self.unit(index) {
            source_len += self.stored_centroid(files, cluster, slot, &mut centroid)?;
            let mut bound = Bound::new(&centroid, &slot.biases);
            source_len += self.each_row(files, cluster, slot, |row, biases| bound.add(row, biases))?;
            out.extend(bound.words().iter().flat_map(|word| word.to_le_bytes()));
        }
        slot.out = out;
        Ok(source_len)
    }

    /// The centroid of `cluster` as a runtime reads it, `[cols]`; its biases are the slot's. Returns the source bytes used beyond
    /// the rows'.
    fn stored_centroid(
        &self,
        files: &[SourceFile],
        cluster: usize,
        slot: &mut Slot,
        out: &mut [f64],
    ) -> Result<u64, Error> {
        let used = match &self.centroids {
            Some(source) => slot.read_affine(source, self.cols, RowSet::Range(cluster, 1), files)?,
            None => {
                let (centroid, _) = self.scaled_centroid(files, cluster, slot)?;
                slot.quantise(&centroid);
                0
            }
        };
        slot.affine_rows(self.cols).for_each(|(nibbles, scales, biases)| {
            affine::dequantise(nibbles, scales, biases, out);
        });
        Ok(used)
    }

    /// The mean direction of a cluster's rows times the largest norm among them, `[cols]`, and the source bytes used.
    fn scaled_centroid(
        &self,
        files: &[SourceFile],
        cluster: usize,
        slot: &mut Slot,
    ) -> Result<(Vec<f32>, u64), Error> {
        let mut sum = vec![0.0; self.cols];
        let mut largest = 0.0_f64;
        let used = self.each_row(files, cluster, slot, |row, _| {
            let norm = bounds::norm(row);
            largest = largest.max(norm);
            // A row of zeros has no direction.
            let weight = if norm > 0.0 { norm.recip() } else { 0.0 };
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
        })?;
        let norm = bounds::norm(&sum);
        let scale = if norm > 0.0 { largest / norm } else { 0.0 };
        Ok((sum.iter().map(|value| (scale * value) as f32).collect(), used))
    }

    /// Calls `visit` with the weights, `[cols]`, and the biases, `[cols / 64]`, bf16 bits, of each row of a cluster.
    /// Returns the source bytes used.
    fn each_row(
        &self,
        files: &[SourceFile],
        cluster: usize,
        slot: &mut Slot,
        mut visit: impl FnMut(&[f64], &[u16]),
    ) -> Result<u64, Error> {
        let mut row = vec![0.0; self.cols];
        let mut source_len = 0;
        for tokens in self.tokens(cluster).chunks(UNIT_ROWS) {
            source_len += slot.read_affine(&self.head, self.cols, RowSet::Listed(tokens), files)?;
            for (nibbles, scales, biases) in slot.affine_rows(self.cols) {
                affine::dequantise(nibbles, scales, biases, &mut row);
                visit(&row, biases);
            }
        }
        Ok(source_len)
    }

    /// Sorts the rows into clusters, whatever their order was. Returns token ids, cluster by cluster.
    pub(crate) fn build(&self, files: &[SourceFile], step: Step<'_>) -> Result<Vec<u32>, Error> {
        balance::order(self, files, step)
    }

    /// Bytes that [`Self::build`] reports as done.
    pub(crate) fn build_work(&self) -> u64 {
        balance::work(self)
    }

    /// Memory that [`Self::build`] takes, bytes.
    pub(crate) fn build_memory(&self) -> u64 {
        balance::memory(self)
    }

    /// Refuses centroids of the source that are not scaled, by looking at some.
    ///
    /// A runtime takes the clusters whose centroids score highest. That is the best guess only if a centroid is as long
    /// as the longest row of its cluster; with others the file would work, and be wrong more often.
    pub(crate) fn check_scaled(&self, files: &[SourceFile]) -> Result<(), Error> {
        let n = self.n_clusters();
        let looked_at = n.min(LOOKED_AT);
        let mut slot = Slot::default();
        let mut centroid = vec![0.0; self.cols];
        let mut off = 0;
        for cluster in (0..looked_at).map(|i| i * n / looked_at) {
            self.stored_centroid(files, cluster, &mut slot, &mut centroid)?;
            let mut largest = 0.0_f64;
            self.each_row(files, cluster, &mut slot, |row, _| largest = largest.max(bounds::norm(row)))?;
            off += usize::from((bounds::norm(&centroid) - largest).abs() > LENGTH_TOLERANCE * largest);
        }
        if 2 * off > looked_at { Err(Error::CentroidsNotScaled { off, looked_at }) } else { Ok(()) }
    }
}
