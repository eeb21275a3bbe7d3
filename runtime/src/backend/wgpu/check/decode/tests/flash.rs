//! The kernels of a head that leaves rows out.

use super::{
    super::super::trial::{equal, floats, words},
    *,
};
use crate::flash::{Bound, rounding};

/// What `probe` flags, and the bounds that it leaves, if it is given some, for a hidden state.
fn probed(
    trial: &Trial<'_>,
    row: &Row<'_>,
    scores: &[f32],
    bounds: &[Bound],
    n_probes: usize,
) -> Result<(Vec<u32>, Vec<u32>), Error> {
    let n = scores.len();
    let fours = n.next_multiple_of(4);
    // What is past the end must not count.
    let mut padded = scores.to_vec();
    padded.resize(fours, f32::INFINITY);
    let of = |b: &Bound| [b.high, b.low, b.radius, b.norm, b.centroid_magnitude, b.row_magnitude];
    let mut bound_words = words(&bounds.iter().flat_map(of).collect::<Vec<f32>>());
    bound_words.resize(bound_words.len().max(4), 0);
    let mut buffers = [
        vec![0],
        words(row.h),
        words(row.norm),
        words(&padded),
        bound_words,
        vec![0; fours],
        vec![9; n + 1],
        vec![6, 0, 0, 0],
    ];
    let constants = [
        ("N_CLUSTERS", n as f64),
        ("N_PROBES", n_probes as f64),
        ("CERTIFIED", f64::from(u8::from(!bounds.is_empty()))),
        ("ROUNDING", rounding(row.h.len())),
        ("COLS", row.h.len() as f64),
        ("EPS", row.eps.into()),
    ];
    trial.run("probe", &constants, &mut buffers, [1, 1, 1])?;
    let [.., keys, flags, counts] = buffers;
    assert_eq!((flags[n], &counts[..]), (1, &[7, 0, 0, 0][..]), "the pass, and the tokens");
    Ok((flags[..n].to_vec(), keys))
}

/// `probe` without bounds: the best scores, of equal ones those that come first.
fn probe(trial: &Trial<'_>, scores: &[f32], n_probes: usize) -> Result<Difference, Error> {
    let row = Row { h: &[1.0; 64], norm: &[1.0; 64], eps: 1e-6 };
    let (flags, _) = probed(trial, &row, scores, &[], n_probes)?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).expect("numbers"));
    let mut expected = vec![0; scores.len()];
    order[..n_probes].iter().for_each(|cluster| expected[*cluster] = 1);
    Ok(Difference { kernel: "probe", found: equal(flags, expected), allowed: 0.0 })
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

#[test]
fn bounds_are_those_of_the_definition_or_a_little_more() {
    const N: usize = 131;
    each_variant("probe", |trial| {
        let made = &mut Made::new(5);
        let (h, norm) = (made.values(192, 2.0), made.norm(192));
        // |x| as it is, and so small that its square is nothing.
        for scale in [1.0, 1e-24] {
            let norm: Vec<f32> = norm.iter().map(|w| w * scale).collect();
            let row = Row { h: &h, norm: &norm, eps: 1e-6 };
            let length = length(&row);
            let mut bound = || {
                let (a, b, norm) = (made.value(1.0), made.value(1.0), made.value(1.0).abs());
                let radius = made.value(0.5).abs();
                let row_magnitude = radius + made.value(1.0).abs();
                Bound {
                    high: a.max(b),
                    low: a.min(b),
                    radius,
                    norm,
                    centroid_magnitude: 2.0 * norm,
                    row_magnitude,
                }
            };
            let mut bounds: Vec<Bound> = (0..N).map(|_| bound()).collect();
            (bounds[7].norm, bounds[8].radius) = (0.0, 0.0);
            // Of no cluster more than |C| |x|, which some reach.
            let score = |(i, bound): (usize, &Bound)| {
                (f64::from(bound.norm) * length * [1.0, -1.0, 0.3, -0.7, 0.0][i % 5]) as f32
            };
            let scores: Vec<f32> = bounds.iter().enumerate().map(score).collect();
            let (_, keys) = probed(trial, &row, &scores, &bounds, 9).expect("it runs");
            let value = |key: u32| if key >> 31 == 1 { key ^ (1 << 31) } else { !key };
            let found = floats(&keys.into_iter().map(value).collect::<Vec<_>>());
            for ((bound, score), found) in bounds.iter().zip(&scores).zip(found) {
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

/// What `head` makes of every row, and `flash_rows` of clusters flagged, in dispatches of `split` panels. `flags`: `[rows / cluster]`.
fn flash_rows(
    trial: &Trial<'_>,
    w: &Affine,
    row: &Row<'_>,
    (cluster, split): (usize, usize),
    flags: &[u32],
    forced: &[usize],
) -> Result<Difference, Error> {
    let (n_panels, n_blocks) = (w.rows.div_ceil(4), w.rows.div_ceil(32));
    let run = |kernel: &str, own: &[Vec<u32>], mut out: [Vec<u32>; 2]| {
        for first in (0..n_panels).step_by(split) {
            let end = n_panels.min(first + split);
            let panel = w.words.len() / n_panels;
            let part = w.words[first * panel..end * panel].to_vec();
            let mut buffers = vec![vec![0], words(row.h), words(row.norm), part];
            buffers.extend(own.iter().cloned().chain(out));
            let mut constants = vec![
                ("COLS", w.cols as f64),
                ("ROWS", w.rows as f64),
                ("EPS", row.eps.into()),
                ("FIRST_PANEL", first as f64),
                ("END_PANEL", end as f64),
                ("PANELS", 8.0),
            ];
            if kernel == "flash_rows" {
                constants.push(("CLUSTER", cluster as f64));
            }
            trial.run(kernel, &constants, &mut buffers, [(end - first).div_ceil(8) as u32, 1, 1])?;
            let maxima = buffers.pop().expect("the last");
            out = [buffers.pop().expect("the last but one"), maxima];
        }
        Ok::<_, Error>(out)
    };
    let nothing = || [vec![0x1234; w.rows], vec![0x1234; n_blocks]];
    let [exact, _] = run("head", &[], nothing())?;
    let mut bits = vec![0; n_blocks];
    forced.iter().for_each(|row| bits[row / 32] |= 1 << (row % 32));
    let (mut out, mut right) = (nothing(), true);
    for number in [1, 2] {
        let own = [[flags, &[number]].concat(), bits.clone()];
        out = run("flash_rows", &own, out)?;
        let computed = |row: &usize| (1..=number).contains(&flags[row / cluster]) || forced.contains(row);
        let expected =
            (0..w.rows).map(|row| if computed(&row) { exact[row] } else { f32::NEG_INFINITY.to_bits() });
        let expected: Vec<u32> = expected.collect();
        let most = |l: &[u32]| l.iter().copied().map(order_key).fold(0, u32::max);
        right &= out == [expected.clone(), expected.chunks(32).map(most).collect()];
    }
    Ok(Difference { kernel: "flash_rows", found: equal(right, true), allowed: 0.0 })
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
    let scores = made.values(130, 10.0);
    seen(&gpu, Fault::Constant("probe", "N_PROBES", 15.0), |trial| probe(trial, &scores, 14));
    let w = Affine::made(made, 128, 192);
    let (h, norm) = (made.values(192, 2.0), made.norm(192));
    let row = Row { h: &h, norm: &norm, eps: 1e-6 };
    // A flag, a forced row.
    for fault in [Fault::Bits("flash_rows", 4, 1, 1), Fault::Bits("flash_rows", 5, 1, 1 << 8)] {
        seen(&gpu, fault, |trial| flash_rows(trial, &w, &row, (32, 100), &[1, 0, 2, 0], &[40]));
    }
}
