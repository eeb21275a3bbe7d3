//! Sorting head rows into clusters of equal size: balanced spherical k-means.
//!
//! Rows are compared by direction, in sketches: the columns of a row of length 1 are added up into a few sums with random
//! signs, which keeps all angles about as they are and makes a comparison as cheap as it has to be. The start is a tree
//! of halvings along each part's longest direction. Each round then takes the mean of every cluster and hands out the
//! places in it, best pair of row and cluster first; a row whose favourites are full asks again among those that are
//! not. The random numbers are fixed and every sum has one order, so the result depends on the rows alone.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use rayon::prelude::*;

use crate::affine;
use crate::error::Error;
use crate::produce::{RowSet, Slot, UNIT_ROWS};
use crate::recipe::Clusters;
use crate::source::SourceFile;

use super::bounds;

/// Sums of a sketch. On made-up rows of 2048 columns with a structure of topics, 128 sums instead of all columns cost 0.4 %
/// of the rows' mean cosine to their centres, 256 cost 0.2 %.
const SKETCH_DIM: usize = 256;
/// Rounds of means and places. On the trained model of the tests two are enough; on a synthetic head of Maple-Preview's size
/// the mean cosine went 0.30 (halvings alone), 0.38, 0.46, 0.53, 0.57, 0.59, and then 31 rows of 32 were with their own.
const ROUNDS: usize = 6;
/// Clusters that a row asks for at a time.
const ASKED: usize = 16;
/// A turn of asking ends when one row in this many has asked in vain: it asks again before worse pairs take the places
/// that it would get.
const IN_VAIN: usize = 256;
/// Turns of a round, after which rows get any places that are left. Three or four are enough unless very many rows are
/// equal.
const TURNS: usize = 8;
/// Steps of the power iteration that finds a part's longest direction.
const POWER_STEPS: usize = 5;
/// Rows and centres whose products are summed at once: what 16 vector registers hold.
const TILE_ROWS: usize = 4;
const TILE_CENTRES: usize = 8;
/// Rows of one task; a multiple of [`TILE_ROWS`].
const TASK_ROWS: usize = 64;

/// Called with bytes that are done; may stop the work.
pub(crate) type Step<'a> = &'a (dyn Fn(u64) -> Result<(), Error> + Sync);

/// Bytes that [`order`] reports as done.
pub(super) fn work(clusters: &Clusters) -> u64 {
    (clusters.head.len() + ROUNDS * sketch_bytes(clusters)) as u64
}

/// Memory that [`order`] takes, bytes: sketches, and the pairs of rows and clusters.
pub(super) fn memory(clusters: &Clusters) -> u64 {
    (sketch_bytes(clusters) + clusters.order.len() * ASKED.min(clusters.n_clusters()) * size_of::<Pair>())
        as u64
}

fn sketch_bytes(clusters: &Clusters) -> usize {
    clusters.order.len() * SKETCH_DIM.min(clusters.cols) * size_of::<f32>()
}

/// Token ids, cluster by cluster, ascending in each.
pub(super) fn order(clusters: &Clusters, files: &[SourceFile], step: Step<'_>) -> Result<Vec<u32>, Error> {
    let size = clusters.cluster_size;
    let sketches = Sketches::read(clusters, files, step)?;
    let mut order: Vec<u32> = (0..u32::try_from(clusters.order.len()).expect("as many as tokens")).collect();
    sketches.halve(&mut order, size);
    for _ in 0..ROUNDS {
        let places = Places::new(order.len(), size);
        order = places.hand_out(&sketches, &sketches.means(&order, size), step)?;
    }
    Ok(order)
}

/// Rows of length 1 or 0, sketched: `[n, dim]`.
struct Sketches {
    values: Vec<f32>,
    dim: usize,
}

impl Sketches {
    fn read(clusters: &Clusters, files: &[SourceFile], step: Step<'_>) -> Result<Self, Error> {
        let (n, cols) = (clusters.order.len(), clusters.cols);
        let dim = SKETCH_DIM.min(cols);
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        let signs: Vec<f64> = (0..cols).map(|_| if rng.next_u32() & 1 == 0 { 1.0 } else { -1.0 }).collect();
        let mut values = vec![0.0; n * dim];
        let read = |(slot, row): &mut (Slot, Vec<f64>), (i, sketches): (usize, &mut [f32])| {
            let rows = RowSet::Range(i * UNIT_ROWS, sketches.len() / dim);
            let used = slot.read_affine(&clusters.head, cols, rows, files)?;
            for ((nibbles, scales, biases), sketch) in
                slot.affine_rows(cols).zip(sketches.chunks_exact_mut(dim))
            {
                affine::dequantise(nibbles, scales, biases, row);
                fold(row, &signs, sketch);
            }
            step(used)
        };
        let state = || (Slot::default(), vec![0.0; cols]);
        values
            .par_chunks_mut(UNIT_ROWS * dim)
            .enumerate()
            .map_init(state, read)
            .collect::<Result<(), Error>>()?;
        Ok(Self { values, dim })
    }

    fn row(&self, token: u32) -> &[f32] {
        &self.values[token as usize * self.dim..][..self.dim]
    }

    /// Orders `tokens` so that clusters of `size` are parts of a tree of halvings.
    fn halve(&self, tokens: &mut [u32], size: usize) {
        let n_clusters = tokens.len() / size;
        if n_clusters < 2 {
            return tokens.sort_unstable();
        }
        let direction = self.longest_direction(tokens);
        let mut places: Vec<(f32, u32)> =
            tokens.iter().map(|&token| (dot(self.row(token), &direction), token)).collect();
        places.sort_unstable_by(|left, right| left.0.total_cmp(&right.0).then(left.1.cmp(&right.1)));
        tokens.iter_mut().zip(places).for_each(|(token, (_, placed))| *token = placed);
        let (left, right) = tokens.split_at_mut(n_clusters / 2 * size);
        rayon::join(|| self.halve(left, size), || self.halve(right, size));
    }

    /// The direction, `[dim]`, in which rows differ most from their mean, by some steps of the power iteration from the
    /// row that differs most.
    fn longest_direction(&self, tokens: &[u32]) -> Vec<f32> {
        let mut mean = self.sum(tokens);
        mean.iter_mut().for_each(|value| *value /= tokens.len() as f32);
        let apart =
            |token: u32| -> Vec<f32> { self.row(token).iter().zip(&mean).map(|(x, m)| x - m).collect() };
        let distance = |&token: &u32| dot(&apart(token), &apart(token));
        let farthest = tokens.iter().copied().max_by(|a, b| distance(a).total_cmp(&distance(b)));
        let mut direction = farthest.map_or_else(|| mean.clone(), apart);
        for _ in 0..POWER_STEPS {
            let offset = dot(&mean, &direction);
            let mut next = vec![0.0; self.dim];
            for &token in tokens {
                let row = self.row(token);
                let along = dot(row, &direction) - offset;
                next.iter_mut().zip(row).for_each(|(next, x)| *next += along * x);
            }
            normalise(&mut next);
            direction = next;
        }
        direction
    }

    fn sum(&self, tokens: &[u32]) -> Vec<f32> {
        let mut sum = vec![0.0; self.dim];
        for &token in tokens {
            sum.iter_mut().zip(self.row(token)).for_each(|(sum, x)| *sum += x);
        }
        sum
    }

    /// The direction of each cluster's mean, `[n_clusters, dim]`.
    fn means(&self, order: &[u32], size: usize) -> Vec<f32> {
        let mean = |tokens: &[u32]| {
            let mut sum = self.sum(tokens);
            normalise(&mut sum);
            sum
        };
        order.par_chunks_exact(size).flat_map_iter(mean).collect()
    }
}

/// Sums the columns of `row`, scaled to length 1, into `sketch`: column j with its sign into sum j modulo dim.
fn fold(row: &[f64], signs: &[f64], sketch: &mut [f32]) {
    let norm = bounds::norm(row);
    let scale = if norm > 0.0 { norm.recip() } else { 0.0 };
    for (row, signs) in row.chunks(sketch.len()).zip(signs.chunks(sketch.len())) {
        for (sum, (value, sign)) in sketch.iter_mut().zip(row.iter().zip(signs)) {
            *sum += (scale * sign * value) as f32;
        }
    }
}

/// Scales to length 1; leaves zeros.
fn normalise(values: &mut [f32]) {
    let norm = dot(values, values).sqrt();
    if norm > 0.0 {
        values.iter_mut().for_each(|value| *value /= norm);
    }
}

/// Sixteen sums side by side, added in the end; lengths are multiples of 64.
fn dot(left: &[f32], right: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for (left, right) in left.chunks_exact(16).zip(right.chunks_exact(16)) {
        sums.iter_mut().zip(left.iter().zip(right)).for_each(|(sum, (left, right))| *sum += left * right);
    }
    sums.iter().sum()
}

/// A row that asks for a cluster, and how close they are.
#[derive(Debug, Clone, Copy)]
struct Pair {
    cosine: f32,
    token: u32,
    cluster: u32,
}

impl Pair {
    /// No cluster: comes after all others.
    const NONE: Self = Self { cosine: f32::NEG_INFINITY, token: 0, cluster: u32::MAX };

    /// Closest first.
    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        let ids = |pair: &Self| (pair.token, pair.cluster);
        other.cosine.total_cmp(&self.cosine).then_with(|| ids(self).cmp(&ids(other)))
    }
}

/// Who has a place where.
struct Places {
    size: usize,
    /// Cluster of each token, once it has one.
    cluster_of: Vec<Option<u32>>,
    /// Places left in each cluster.
    left: Vec<usize>,
}

impl Places {
    fn new(n_tokens: usize, size: usize) -> Self {
        Self { size, cluster_of: vec![None; n_tokens], left: vec![size; n_tokens / size] }
    }

    /// Gives every token a place. `centres`: `[n_clusters, dim]`. Returns the tokens, cluster by cluster.
    fn hand_out(mut self, sketches: &Sketches, centres: &[f32], step: Step<'_>) -> Result<Vec<u32>, Error> {
        let mut waiting: Vec<u32> = (0..).take(self.cluster_of.len()).collect();
        for turn in 0..TURNS {
            let open: Vec<u32> =
                (0..).zip(&self.left).filter(|(_, left)| **left > 0).map(|(i, _)| i).collect();
            let row_bytes = if turn == 0 { sketches.dim * size_of::<f32>() } else { 0 };
            let done = |rows: usize| step((rows * row_bytes) as u64);
            let pairs = closest_pairs(sketches, centres, &waiting, &open, &done)?;
            self.take_turn(&pairs, pairs.len() / waiting.len(), waiting.len() / IN_VAIN);
            waiting.retain(|&token| self.cluster_of[token as usize].is_none());
            if waiting.is_empty() {
                break;
            }
        }
        let places = (0..).zip(&self.left).flat_map(|(cluster, &left)| std::iter::repeat_n(cluster, left));
        for (token, cluster) in waiting.into_iter().zip(places) {
            self.cluster_of[token as usize] = Some(cluster);
        }
        Ok(self.in_order())
    }

    /// Hands out places in the order of `pairs`, of which each token has `asked`, until more than `patience` tokens were
    /// refused by all clusters that they asked for.
    fn take_turn(&mut self, pairs: &[Pair], asked: usize, patience: usize) {
        let mut refusals = vec![0; self.cluster_of.len()];
        let mut in_vain = 0;
        for pair in pairs {
            let (token, left) = (pair.token as usize, &mut self.left[pair.cluster as usize]);
            if self.cluster_of[token].is_some() {
                continue;
            }
            if *left > 0 {
                self.cluster_of[token] = Some(pair.cluster);
                *left -= 1;
                continue;
            }
            refusals[token] += 1;
            in_vain += usize::from(refusals[token] == asked);
            if in_vain > patience {
                return;
            }
        }
    }

    fn in_order(&self) -> Vec<u32> {
        let mut next: Vec<usize> = (0..self.left.len()).map(|cluster| cluster * self.size).collect();
        let mut order = vec![0; self.cluster_of.len()];
        for (token, cluster) in (0..).zip(&self.cluster_of) {
            let next = &mut next[cluster.expect("every token has a place") as usize];
            order[*next] = token;
            *next += 1;
        }
        order
    }
}

/// For each of `tokens` the [`ASKED`] clusters of `open` whose centres are closest; all pairs, closest first.
fn closest_pairs(
    sketches: &Sketches,
    centres: &[f32],
    tokens: &[u32],
    open: &[u32],
    done: &(dyn Fn(usize) -> Result<(), Error> + Sync),
) -> Result<Vec<Pair>, Error> {
    let tiles = tiles(centres, open, sketches.dim);
    let asked = ASKED.min(open.len());
    let mut pairs = vec![Pair::NONE; tokens.len() * asked];
    let find = |(tokens, pairs): (&[u32], &mut [Pair])| {
        for (tile, clusters) in tiles.chunks_exact(sketches.dim).zip(open.chunks(TILE_CENTRES)) {
            let groups = tokens.chunks(TILE_ROWS).zip(pairs.chunks_mut(TILE_ROWS * asked));
            for (tokens, pairs) in groups {
                let rows = std::array::from_fn(|i| sketches.row(tokens[i.min(tokens.len() - 1)]));
                let cosines = products(rows, tile);
                for ((&token, best), cosines) in tokens.iter().zip(pairs.chunks_exact_mut(asked)).zip(cosines)
                {
                    for (&cluster, cosine) in clusters.iter().zip(cosines) {
                        keep(best, Pair { cosine, token, cluster });
                    }
                }
            }
        }
        done(tokens.len())
    };
    tokens.par_chunks(TASK_ROWS).zip(pairs.par_chunks_mut(TASK_ROWS * asked)).try_for_each(find)?;
    pairs.par_sort_unstable_by(Pair::compare);
    Ok(pairs)
}

/// Centres of the clusters `open` in tiles of [`TILE_CENTRES`], `[n_tiles, dim, TILE_CENTRES]`, filled up with zeros.
fn tiles(centres: &[f32], open: &[u32], dim: usize) -> Vec<[f32; TILE_CENTRES]> {
    let mut tiles = vec![[0.0; TILE_CENTRES]; open.len().div_ceil(TILE_CENTRES) * dim];
    for (i, &cluster) in open.iter().enumerate() {
        let tile = &mut tiles[i / TILE_CENTRES * dim..][..dim];
        let centre = &centres[cluster as usize * dim..][..dim];
        tile.iter_mut().zip(centre).for_each(|(column, value)| column[i % TILE_CENTRES] = *value);
    }
    tiles
}

/// Products of rows, each `[dim]`, with the centres of a tile; f32, columns ascending.
fn products(rows: [&[f32]; TILE_ROWS], tile: &[[f32; TILE_CENTRES]]) -> [[f32; TILE_CENTRES]; TILE_ROWS] {
    let rows = rows.map(|row| &row[..tile.len()]);
    let mut sums = [[0.0; TILE_CENTRES]; TILE_ROWS];
    for (column, centres) in tile.iter().enumerate() {
        for (sums, row) in sums.iter_mut().zip(rows) {
            let value = row[column];
            sums.iter_mut().zip(centres).for_each(|(sum, centre)| *sum += value * centre);
        }
    }
    sums
}

/// Keeps `best`, sorted by cosine, the best there were; of equals the earlier.
fn keep(best: &mut [Pair], pair: Pair) {
    let Some(last) = best.last() else { return };
    if pair.cosine > last.cosine {
        let place = best.partition_point(|kept| kept.cosine >= pair.cosine);
        best[place..].rotate_right(1);
        best[place] = pair;
    }
}
