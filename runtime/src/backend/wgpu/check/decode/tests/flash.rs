//! The kernels of a head that leaves rows out.

use super::{
    super::super::{
        decode::quantized::worst_within,
        trial::{equal, floats, words},
    },
    *,
};
use crate::{
    backend::wgpu::head::{PROBE_CLUSTERS, shares},
    flash::{Bound, rounding},
};

/// Bits of f32 with keys.
fn values(keys: &[u32]) -> Vec<u32> {
    keys.iter().map(|key| key_bits(*key)).collect()
}

/// What `probe` makes of clusters with these scores: the best, of equal ones those that come first, are listed.
fn probe(trial: &Trial<'_>, scores: &[f32], n_probes: usize) -> Result<Difference, Error> {
    const ROWS: usize = 1300;
    let n = scores.len();
    let mut keys: Vec<u32> = scores.iter().map(|score| order_key(score.to_bits())).collect();
    keys.resize(n.next_multiple_of(4), 0);
    let mut buffers =
        [keys, vec![9; 2 * n + 2], vec![9; ROWS], vec![9; ROWS.div_ceil(32) + 1], vec![6, 5, 5, 5]];
    let constants =
        [("N_CLUSTERS", n as f64), ("N_PROBES", n_probes as f64), ("N_FORCED", 3.0), ("ROWS", ROWS as f64)];
    trial.run("probe", &constants, &mut buffers, [n.div_ceil(PROBE_CLUSTERS) as u32, 1, 1])?;
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).expect("numbers"));
    order.truncate(n_probes);
    let mut probed = vec![0; n];
    order.iter().for_each(|cluster| probed[*cluster] = 1);
    probed.extend(order.iter().map(|cluster| *cluster as u32));
    probed.resize(2 * n, 9);
    probed.extend([n_probes as u32, 3]);
    let none = order_key(f32::NEG_INFINITY.to_bits());
    let maxima = [vec![none; ROWS.div_ceil(32)], vec![9]].concat();
    let expected = [probed, vec![f32::NEG_INFINITY.to_bits(); ROWS], maxima, vec![7, 5, 5, 5]];
    Ok(Difference { kernel: "probe", found: equal(&buffers[1..], &expected), allowed: 0.0 })
}

#[test]
fn the_best_clusters_are_probed_and_of_equal_ones_the_first() {
    over("probe", [(1, 1), (5, 2), (130, 14), (4748, 512)], |trial, (n, n_probes)| {
        let mut made = Made::new(n as u64);
        let scores = made.values(n, 20.0);
        let few: Vec<f32> = scores.iter().map(|x| (x / 8.0).round() * 8.0).collect();
        let zeros = (0..n).map(|i| if i % 3 == 0 { -0.0 } else { 0.0 }).collect();
        let below = scores.iter().map(|x| -1.0 - x.abs()).collect();
        for (what, scores) in [
            ("spread", scores),
            ("few values", few),
            ("zeros", zeros),
            ("below 0", below),
            ("equal", vec![3.5; n]),
        ] {
            small(&format!("{n_probes} of {n}, {what}"), trial, probe(trial, &scores, n_probes));
        }
    });
}

/// What `centroids` leaves: keys of scores or, if there are any, of bounds.
fn centroids(
    trial: &Trial<'_>,
    w: &Affine,
    row: &Row<'_>,
    bounds: &[Bound],
    split: usize,
) -> Result<Vec<u32>, Error> {
    let of = |b: &Bound| [b.high, b.low, b.radius, b.norm, b.centroid_magnitude, b.row_magnitude];
    let mut bound_words = words(&bounds.iter().flat_map(of).collect::<Vec<f32>>());
    bound_words.resize(bound_words.len().max(4), 0);
    let certified = ("CERTIFIED", f64::from(u8::from(!bounds.is_empty())));
    let own = [certified, ("ROUNDING", rounding(w.cols))];
    let keys = vec![0x1234; w.rows.next_multiple_of(4)];
    let [keys] = in_parts(trial, "centroids", (w, row), &own, &[bound_words], [keys], (split, None))?;
    Ok(keys)
}

/// Runs a kernel with the head's arithmetic in dispatches of `split` panels of a weight, with constants and buffers of its own between
/// those of all and `out`. A dispatch has a workgroup for 8 panels, or as many as are given.
fn in_parts<const N: usize>(
    trial: &Trial<'_>,
    kernel: &str,
    (w, row): (&Affine, &Row<'_>),
    constants: &[(&'static str, f64)],
    own: &[Vec<u32>],
    mut out: [Vec<u32>; N],
    (split, groups): (usize, Option<usize>),
) -> Result<[Vec<u32>; N], Error> {
    for range in w.splits(split) {
        let mut buffers = vec![vec![0], words(row.h), words(row.norm), w.part(&range)];
        buffers.extend(own.iter().cloned().chain(out));
        let groups = groups.unwrap_or(range.len().div_ceil(8)) as u32;
        let all = [&w.constants(row.eps, &range, 8), constants].concat();
        trial.run(kernel, &all, &mut buffers, [groups, 1, 1])?;
        out = buffers.split_off(4 + own.len()).try_into().expect("as many as there were");
    }
    Ok(out)
}

/// `centroids` without bounds.
fn scores(trial: &Trial<'_>, w: &Affine, row: &Row<'_>) -> Result<Difference, Error> {
    let keys = centroids(trial, w, row, &[], 1000)?;
    let exact = Quantized::of(&row.normed()).times(&w.weights);
    Ok(Difference::of("centroids", worst_within(&values(&keys[..w.rows]), &exact)))
}

#[test]
fn scores_are_those_of_centroids_and_bounds_at_least_those_of_the_definition() {
    const N: usize = 131;
    each_variant("centroids", |trial| {
        let made = &mut Made::new(5);
        let w = Affine::made(made, N, 192);
        let (h, norm) = (made.values(192, 2.0), made.norm(192));
        // |x| as it is, and so small that its square is nothing.
        for scale in [1.0, 1e-24] {
            let norm: Vec<f32> = norm.iter().map(|w| w * scale).collect();
            let row = Row { h: &h, norm: &norm, eps: 1e-6 };
            let length = length(&row);
            small("scores", trial, scores(trial, &w, &row));
            let keys = centroids(trial, &w, &row, &[], 24).expect("it runs");
            let (scores, rest) = keys.split_at(N);
            assert_eq!(rest, [0], "filled up");
            let scores = floats(&values(scores));
            let mut bound = |(i, score): (usize, &f32)| {
                let (a, b) = (made.value(1.0), made.value(1.0));
                let radius = made.value(0.5).abs();
                let row_magnitude = radius + made.value(1.0).abs();
                // A score is at most |C| |x|, which some reach.
                let norm = (f64::from(score.abs()) / length / [1.0, 0.3, 0.7, 1e-6][i % 4]) as f32;
                Bound {
                    high: a.max(b),
                    low: a.min(b),
                    radius,
                    norm,
                    centroid_magnitude: 2.0 * norm,
                    row_magnitude,
                }
            };
            let mut bounds: Vec<Bound> = scores.iter().enumerate().map(&mut bound).collect();
            (bounds[7].norm, bounds[8].radius) = (0.0, 0.0);
            let keys = centroids(trial, &w, &row, &bounds, 1000).expect("it runs");
            for ((bound, score), found) in bounds.iter().zip(&scores).zip(floats(&values(&keys))) {
                let expected = bound.of(*score, length, rounding(192));
                let most = f64::from(bound.high.abs().max(bound.low.abs()).max(bound.row_magnitude)) * length;
                let over = (f64::from(found) - expected) / (most * f64::from(bound.norm.max(1.0)));
                // Where all of x is along C, the root of what f32 rounds is left.
                let allowed = if scale == 1.0 { 5e-3 } else { f64::INFINITY };
                assert!(
                    (0.0..=allowed).contains(&over),
                    "{}, {bound:?}, {score}: {found} {expected}",
                    trial.variant
                );
            }
        }
    });
}

/// What `head` makes of every row, and `flash_rows` of clusters flagged 1 and then of those flagged 2, in dispatches of `split` panels.
/// `flags`: `[rows / cluster]`.
fn flash_rows(
    trial: &Trial<'_>,
    w: &Affine,
    row: &Row<'_>,
    (cluster, split): (usize, usize),
    flags: &[u32],
    forced: &[usize],
) -> Result<Difference, Error> {
    let n_blocks = w.rows.div_ceil(32);
    let nothing = |bits: [u32; 2]| [vec![bits[0]; w.rows], vec![bits[1]; n_blocks]];
    let [exact, _] = in_parts(trial, "head", (w, row), &[], &[], nothing([0, 0]), (split, None))?;
    let mut blocks: Vec<[u32; 2]> = (0..n_blocks as u32).map(|block| [block, 0]).collect();
    forced.iter().for_each(|row| blocks[row / 32][1] |= 1 << (row % 32));
    blocks.retain(|[_, bits]| *bits != 0);
    let none = f32::NEG_INFINITY.to_bits();
    let (mut out, mut right) = (nothing([none, order_key(none)]), true);
    for (number, n_forced) in [(1, blocks.len()), (2, 0)] {
        let list = (0..).zip(flags).filter(|(_, flag)| **flag == number).map(|(cluster, _)| cluster);
        let mut probed: Vec<u32> = flags.iter().map(|flag| if *flag <= number { *flag } else { 0 }).collect();
        probed.extend(list);
        let n_listed = probed.len() - flags.len();
        probed.resize(2 * flags.len(), 9);
        probed.extend([n_listed as u32, n_forced as u32]);
        let constants = [("CLUSTER", cluster as f64), ("SHARES", shares(cluster) as f64)];
        // As many workgroups as could be needed.
        let groups = Some(flags.len() * shares(cluster) + n_forced);
        let own = [probed, blocks.concat()];
        out = in_parts(trial, "flash_rows", (w, row), &constants, &own, out, (split, groups))?;
        let computed = |row: &usize| (1..=number).contains(&flags[row / cluster]) || forced.contains(row);
        let expected: Vec<u32> =
            (0..w.rows).map(|row| if computed(&row) { exact[row] } else { none }).collect();
        right &= out == [expected.clone(), maxima_of(&expected)];
    }
    Ok(Difference { kernel: "flash_rows", found: equal(right, true), allowed: 0.0 })
}

#[test]
fn a_cluster_has_a_share_of_no_more_blocks_than_are_planned() {
    for size in (4..=200).step_by(4) {
        let blocks = |cluster: usize| (cluster * size + size - 1) / 32 - cluster * size / 32 + 1;
        assert_eq!((0..64).map(blocks).max(), Some(shares(size)), "{size}");
    }
}

#[test]
fn rows_of_clusters_have_the_bits_of_the_head() {
    // Clusters of a block, of several, across blocks, and blocks that are not full; in one buffer and in two.
    let sizes = [(128, 32, 1000), (300, 12, 40), (168, 4, 1000), (320, 64, 24)];
    over("flash_rows", sizes, |trial, (rows, cluster, split)| {
        let made = &mut Made::new(rows as u64);
        let w = Affine::made(made, rows, 192);
        let (h, norm) = (made.values(192, 2.0), made.norm(192));
        let row = Row { h: &h, norm: &norm, eps: 1e-6 };
        let flags: Vec<u32> = (0..rows / cluster).map(|_| made.below(4).min(2) as u32).collect();
        let forced = [0, rows / 2, rows - 1];
        let found = flash_rows(trial, &w, &row, (cluster, split), &flags, &forced);
        small(&format!("{rows} rows by {cluster}, {split}"), trial, found);
    });
}

#[test]
fn planted_faults_are_seen() {
    let Some(gpu) = any() else { return };
    let made = &mut Made::new(11);
    let best = made.values(130, 10.0);
    seen(&gpu, Fault::Constant("probe", "N_PROBES", 15.0), |trial| probe(trial, &best, 14));
    let w = Affine::made(made, 128, 192);
    let (h, norm) = (made.values(192, 2.0), made.norm(192));
    let row = Row { h: &h, norm: &norm, eps: 1e-6 };
    // A scale of a centroid.
    seen(&gpu, Fault::Bits("centroids", 3, 0, 1 << 12), |trial| scores(trial, &w, &row));
    // A cluster listed, how many they are, a forced row.
    for fault in [
        Fault::Bits("flash_rows", 4, 4, 1),
        Fault::Bits("flash_rows", 4, 8, 1),
        Fault::Bits("flash_rows", 5, 1, 1 << 9),
    ] {
        seen(&gpu, fault, |trial| flash_rows(trial, &w, &row, (32, 100), &[1, 0, 2, 0], &[40]));
    }
}
