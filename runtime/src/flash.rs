//! FlashHead: which rows of a head are read for a token, and when those are proven to be enough.
//!
//! Rows lie in clusters, each with a centroid. A token's hidden state is multiplied by the centroids; the rows of the clusters that
//! look best are read, and the logits of all others are taken to be -infinity.
//!
//! A certificate says that no row left out can be among the k largest. Let x be the hidden state as the kernels see it, C a
//! cluster's centroid, and w = a C + d one of its rows, with d at a right angle to C. Then w x = a (C x) + d x, and d x is at most |d|
//! times the length of what of x is at a right angle to C (Cauchy and Schwarz). The file has the range of a and the largest |d|
//! of each cluster, so a score bounds its logits from above. A cluster whose bound is below the k-th largest logit computed
//! is left out rightly; others are read, and the bound is looked at again.

use std::{fmt, str::FromStr};

use crate::{
    error::Error,
    model::Model,
    spec::{FlashSpec, HeadSpec},
};

/// How the logits of a decoded token are computed. Prompts and steps of several tokens have the exact head.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum HeadKind {
    /// Every row of the head.
    #[default]
    Exact,
    /// The rows of the clusters that score best; other tokens cannot come.
    Flash,
    /// As many rows as it takes to prove that the largest logits are those of the exact head.
    Certified,
}

impl HeadKind {
    /// Every kind.
    pub const ALL: [HeadKind; 3] = [HeadKind::Exact, HeadKind::Flash, HeadKind::Certified];

    /// As in `--head`.
    pub fn name(self) -> &'static str {
        match self {
            HeadKind::Exact => "exact",
            HeadKind::Flash => "flash",
            HeadKind::Certified => "certified",
        }
    }
}

impl fmt::Display for HeadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HeadKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = HeadKind::ALL.into_iter().find(|kind| kind.name() == text);
        named.ok_or_else(|| format!("{text:?} is no kind of head: give exact, flash or certified"))
    }
}

/// A kind of head, and how many clusters it reads at first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadMode {
    /// The kind.
    pub kind: HeadKind,
    /// From 1 to the number of clusters; 0 for the exact head.
    pub n_probes: usize,
}

impl HeadMode {
    /// Every row.
    pub const EXACT: HeadMode = HeadMode { kind: HeadKind::Exact, n_probes: 0 };

    /// What a model's head can do of what is wished: `n_probes` clusters, or as many as the file says.
    ///
    /// # Errors
    /// A file without FlashHead data, or without those of a certificate; a number of probes out of range.
    pub(crate) fn of(
        kind: HeadKind,
        n_probes: Option<usize>,
        flash: Option<&FlashSpec>,
    ) -> Result<Self, Error> {
        let flash = match (kind, flash) {
            (HeadKind::Exact, _) => return Ok(HeadMode::EXACT),
            (_, Some(flash)) => flash,
            (_, None) => return Err(Error::NoFlashHead { head: kind.name() }),
        };
        if kind == HeadKind::Certified && flash.bounds.is_none() {
            return Err(Error::NoCertificate);
        }
        let (found, n_clusters) = (n_probes.unwrap_or(flash.n_probes), flash.centroids.rows);
        if found == 0 || found > n_clusters {
            return Err(Error::Probes { found, n_clusters });
        }
        Ok(HeadMode { kind, n_probes: found })
    }
}

/// What was read for tokens whose logits were not all computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadCounts {
    /// Tokens.
    pub tokens: u64,
    /// Tokens for which the clusters read at first were proven to be enough.
    pub certified: u64,
    /// Bytes of the head, its centroids and bounds that were read.
    pub bytes: u64,
}

impl HeadCounts {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        HeadCounts {
            tokens: self.tokens + other.tokens,
            certified: self.certified + other.certified,
            bytes: self.bytes + other.bytes,
        }
    }

    /// What came after `before`.
    #[must_use]
    pub fn minus(self, before: Self) -> Self {
        HeadCounts {
            tokens: self.tokens - before.tokens,
            certified: self.certified - before.certified,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// What bounds the logits of a cluster: of rows w = a C + d.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bound {
    /// Largest a.
    pub(crate) high: f32,
    /// Smallest a.
    pub(crate) low: f32,
    /// Largest |d|.
    pub(crate) radius: f32,
    /// |C|.
    pub(crate) norm: f32,
    /// At least |C|, and what rounding errors of its score are a multiple of.
    pub(crate) centroid_magnitude: f32,
    /// At least each |w|, and what rounding errors of logits are a multiple of.
    pub(crate) row_magnitude: f32,
}

impl Bound {
    /// Words of a cluster in `head.bounds`.
    pub(crate) const WORDS: usize = 6;

    /// What no logit of the cluster exceeds as a kernel computes it in f32, given the centroid's score so computed.
    ///
    /// `length` is |x| and `rounding` a bound of the relative error of a dot product: of each sum of products p computed in
    /// f32 with n roundings on the way of any p, the error is at most n 2^-24 times the sum of |p| (Higham, "Accuracy and
    /// Stability of Numerical Algorithms", chapter 3).
    pub(crate) fn of(&self, score: f32, length: f64, rounding: f64) -> f64 {
        let [high, low, radius, norm] = [self.high, self.low, self.radius, self.norm].map(f64::from);
        let score = f64::from(score);
        let error = |magnitude: f32| rounding * length * f64::from(magnitude);
        let score_error = error(self.centroid_magnitude);
        let along = if norm > 0.0 { (score.abs() - score_error).max(0.0) / norm } else { 0.0 };
        let across = (length * length - along * along).max(0.0).sqrt();
        let most = (high * score).max(low * score) + high.abs().max(low.abs()) * score_error;
        most + radius * across + error(self.row_magnitude)
    }
}

/// The bound of the relative error of a dot product of `n` elements: each element takes part in fewer than n roundings, since
/// integers are summed exactly. Some are left for the arithmetic of bounds themselves.
pub(crate) fn rounding(n: usize) -> f64 {
    (n + 64) as f64 * 2f64.powi(-24)
}

/// A head's clusters, as whoever computes on the host needs them.
#[derive(Debug)]
pub(crate) struct Clusters {
    pub(crate) spec: FlashSpec,
    /// Token of each row of the head; empty when rows are in token order.
    pub(crate) token_of: Vec<u32>,
    /// Rows of the tokens that are always scored, ascending.
    pub(crate) forced: Vec<u32>,
    /// Of each cluster; empty where none are needed.
    pub(crate) bounds: Vec<Bound>,
}

impl Clusters {
    /// What `mode` needs of a head's clusters; `None` if it reads every row.
    ///
    /// # Errors
    /// A bad token map, or bounds that cannot be.
    pub(crate) fn of(model: &Model, head: &HeadSpec, mode: HeadMode) -> Result<Option<Self>, Error> {
        let HeadSpec { norm: _, weight, token_map, flash } = head;
        let Some(spec) = flash.as_ref().filter(|_| mode.kind != HeadKind::Exact) else { return Ok(None) };
        let token_of = token_map.as_ref().map(|map| model.token_map(map)).transpose()?.unwrap_or_default();
        let token = |row: u32| token_of.get(row as usize).copied().unwrap_or(row);
        let forced = (0..weight.rows as u32).filter(|&row| spec.force_tokens.contains(&token(row))).collect();
        let bounds = match &spec.bounds {
            Some(bounds) if mode.kind == HeadKind::Certified => model.bounds(bounds)?,
            _ => Vec::new(),
        };
        Ok(Some(Clusters { spec: spec.clone(), token_of, forced, bounds }))
    }

    /// Bytes of the centroids and what else is read for every token.
    pub(crate) fn fixed_bytes(&self, model: &Model) -> usize {
        model.matrix(&self.spec.centroids).len() + 4 * Bound::WORDS * self.bounds.len()
    }
}

/// A cluster and what it is ranked by, as a number: larger keys are larger, and of equal keys the lower index is. Sorting and
/// selecting numbers takes no branches.
fn ranked(key: f32, index: u32) -> u64 {
    u64::from(ordered(key)) << 32 | u64::from(!index)
}

/// The cluster.
fn index_of(ranked: u64) -> u32 {
    !(ranked as u32)
}

/// Whether its key is at least `key`.
fn reaches(ranked: u64, key: f32) -> bool {
    (ranked >> 32) as u32 >= ordered(key)
}

/// Bits that compare as the numbers do; NaN without a sign is above all.
pub(crate) fn ordered(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Puts the `n` largest first, and their clusters in `list`, ascending.
fn take_best(order: &mut [u64], n: usize, list: &mut Vec<u32>) {
    if n > 0 && n < order.len() {
        order.select_nth_unstable_by(n - 1, |a, b| b.cmp(a));
    }
    list.clear();
    list.extend(order[..n].iter().map(|ranked| index_of(*ranked)));
    list.sort_unstable();
}

/// Which clusters are read for one token, and what it takes to find out; used again for the next.
#[derive(Debug)]
pub(crate) struct Search {
    /// Score of each cluster's centroid, f32 as a kernel computes it.
    pub(crate) scores: Vec<f32>,
    /// Clusters ranked by score or bound; those read come first.
    order: Vec<u64>,
    /// Clusters to be read.
    list: Vec<u32>,
}

/// How a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Clusters read.
    pub(crate) n_read: usize,
    /// Whether those read at first were proven to be enough.
    pub(crate) at_once: bool,
}

impl Search {
    pub(crate) fn new(n_clusters: usize) -> Self {
        let (order, list) = (Vec::with_capacity(n_clusters), Vec::with_capacity(n_clusters));
        Search { scores: vec![0.0; n_clusters], order, list }
    }

    /// Chooses clusters by `self.scores` and has `read` compute the logits of their rows. `read` is called with clusters that it
    /// has not had, ascending, and returns a number that as many logits as matter reach, as near to the least of those as it can
    /// tell; -infinity while there are fewer. `length` is that of the hidden state as the kernels see it.
    pub(crate) fn run(
        &mut self,
        mode: HeadMode,
        clusters: &Clusters,
        length: f64,
        mut read: impl FnMut(&[u32]) -> f32,
    ) -> Found {
        let Search { scores, order, list } = self;
        let certified = mode.kind == HeadKind::Certified;
        let rounding = rounding(clusters.spec.centroids.cols);
        order.clear();
        if certified {
            // What is read anyway if it may hold one of the largest logits comes first.
            let bounds = clusters.bounds.iter().zip(&*scores);
            let bounds = bounds.map(|(bound, score)| bound.of(*score, length, rounding));
            // To f32, and not below.
            order.extend(bounds.zip(0..).map(|(bound, index)| ranked((bound as f32).next_up(), index)));
        } else {
            order.extend(scores.iter().zip(0..).map(|(score, index)| ranked(*score, index)));
        }
        take_best(order, mode.n_probes, list);
        let (mut n_read, mut at_once) = (mode.n_probes, true);
        let mut reached = read(list);
        if !certified {
            return Found { n_read, at_once: false };
        }
        loop {
            let rest = &mut order[n_read..];
            let open = partition(rest, |cluster| reaches(cluster, reached));
            if open == 0 {
                return Found { n_read, at_once };
            }
            at_once = false;
            // As many again as so far: what they hold may close the others. Most of all are read faster in one go.
            let n = if 2 * open > scores.len() { open } else { open.min(n_read) };
            take_best(&mut rest[..open], n, list);
            reached = read(list);
            n_read += n;
        }
    }
}

/// Puts what `first` is true of first; how many that are.
fn partition(order: &mut [u64], first: impl Fn(u64) -> bool) -> usize {
    let mut n = 0;
    for i in 0..order.len() {
        if first(order[i]) {
            order.swap(i, n);
            n += 1;
        }
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_ties_go_to_the_lower_index() {
        let keys = [1.0, 5.0, -3.0, 5.0, 5.0, f32::NEG_INFINITY];
        for (n, wanted) in [(1, vec![1]), (2, vec![1, 3]), (4, vec![0, 1, 3, 4]), (6, vec![0, 1, 2, 3, 4, 5])]
        {
            let mut order: Vec<u64> = (0..6).rev().map(|i| ranked(keys[i as usize], i)).collect();
            let mut list = Vec::new();
            take_best(&mut order, n, &mut list);
            assert_eq!(list, wanted, "{n}");
        }
        let of = |key: f32| keys.iter().filter(|k| reaches(ranked(**k, 7), key)).count();
        assert_eq!([5.1, 5.0, -0.0, -3.0, f32::NEG_INFINITY].map(of), [0, 3, 4, 5, 6]);
    }

    #[test]
    fn a_bound_holds_and_is_reached() {
        // C = (2, 0); rows (3, 1) and (-1, 0.5): a = 1.5 and -0.5, |d| up to 1.
        let bound = Bound {
            high: 1.5,
            low: -0.5,
            radius: 1.0,
            norm: 2.0,
            centroid_magnitude: 2.0,
            row_magnitude: 10f32.sqrt(),
        };
        for turn in 0..100 {
            let (sin, cos) = (f64::from(turn) * 0.1).sin_cos();
            let x = [5.0 * cos, 5.0 * sin];
            let most = bound.of((2.0 * x[0]) as f32, 5.0, rounding(2));
            for row in [[3.0, 1.0], [-1.0, 0.5]] {
                assert!(row[0] * x[0] + row[1] * x[1] <= most, "{row:?} and {x:?}: {most}");
            }
        }
        let most = bound.of(8.0, 5.0, 0.0);
        assert_eq!(most, 1.5 * 8.0 + 3.0, "x = (4, 3), the row (3, 1) reaches it");
    }
}
