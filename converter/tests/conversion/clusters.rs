//! FlashHead data: bounds that hold, clusters that are built, and refusals of those that cannot be used.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::checkpoint::*;
use samara_converter::{
    Error, FlashHead, Options, Progress, Quiet, SynthFlash, SynthLayout, SynthSpec, SynthTexts, convert,
    plan, synthesise,
};
use samara_format::SamaraFile;
use serde_json::{Value, json};

fn with(flash_head: FlashHead) -> Options {
    Options { flash_head, ..Options::default() }
}

fn build(cluster_size: u64) -> Options {
    with(FlashHead::Build { cluster_size })
}

/// What a file says of its head, all of it dequantised.
struct Head {
    /// `[n_clusters, cluster_size]` rows.
    clusters: Vec<Vec<Vec<f64>>>,
    /// Norm of each row's biases, one for each column, in the same order.
    bias_norms: Vec<Vec<f64>>,
    centroids: Vec<Vec<f64>>,
    centroid_bias_norms: Vec<f64>,
    /// a_hi, a_lo, rho, |C|, magnitude of C, of the rows.
    bounds: Vec<[f32; 6]>,
}

fn value(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

fn dequantised((nibbles, scales, biases): &AffineRow) -> Vec<f64> {
    let groups = scales.iter().zip(biases).map(|(&scale, &bias)| (value(scale), value(bias)));
    let weights = nibbles.chunks(64).zip(groups);
    weights
        .flat_map(|(nibbles, (scale, bias))| nibbles.iter().map(move |&q| f64::from(q) * scale + bias))
        .collect()
}

fn words(file: &SamaraFile, tensor: &str) -> Vec<u32> {
    let tensor = file.index().tensor(tensor).unwrap();
    let bytes = &file.bytes(tensor)[..4 * tensor.parts[0].spec.cols as usize];
    bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

fn norm(values: &[f64]) -> f64 {
    dot(values, values).sqrt()
}

impl Head {
    fn of(path: &Path) -> Self {
        let file = open(path);
        let metadata = file.index().metadata();
        let size = metadata.u64("flash.cluster_size").unwrap() as usize;
        let stored = affine_rows(&file, "head");
        let rows: Vec<Vec<f64>> = stored.iter().map(dequantised).collect();
        let bias_norm = |(_, _, biases): &AffineRow| {
            (64.0 * biases.iter().map(|&bias| value(bias).powi(2)).sum::<f64>()).sqrt()
        };
        let bias_norms: Vec<f64> = stored.iter().map(bias_norm).collect();
        let bounds = words(&file, "head.bounds");
        let bounds: Vec<[f32; 6]> =
            bounds.chunks(6).map(|six| std::array::from_fn(|i| f32::from_bits(six[i]))).collect();
        let centroids = affine_rows(&file, "head.centroids");
        let head = Self {
            clusters: rows.chunks(size).map(<[Vec<f64>]>::to_vec).collect(),
            bias_norms: bias_norms.chunks(size).map(<[f64]>::to_vec).collect(),
            centroid_bias_norms: centroids.iter().map(bias_norm).collect(),
            centroids: centroids.iter().map(dequantised).collect(),
            bounds,
        };
        let n = metadata.u64("flash.n_clusters").unwrap() as usize;
        assert_eq!((head.clusters.len(), head.centroids.len(), head.bounds.len()), (n, n, n));
        assert_eq!(metadata.u64("flash.bound").unwrap(), 1);
        head
    }

    /// The clusters whose bounds do not hold for some state, or whose magnitude is too small.
    fn broken(&self) -> Vec<usize> {
        (0..self.clusters.len()).filter(|&cluster| self.is_broken(cluster)).collect()
    }

    fn is_broken(&self, cluster: usize) -> bool {
        let (rows, centroid) = (&self.clusters[cluster], &self.centroids[cluster]);
        let [a_hi, a_lo, rho, length, of_centroid, magnitude] = self.bounds[cluster].map(f64::from);
        let bound = |x: &[f64]| {
            let s = dot(centroid, x);
            let along = if length > 0.0 { (s / length).powi(2) } else { 0.0 };
            (a_hi * s).max(a_lo * s) + rho * (dot(x, x) - along).max(0.0).sqrt()
        };
        let exceeded = |x: &[f64]| {
            // What this sum itself may round.
            let slack = 1e-13 * norm(x) * magnitude;
            let logits = rows.iter().map(|row| dot(row, x));
            logits.fold(f64::NEG_INFINITY, f64::max) > bound(x) + slack
        };
        let magnitudes = rows.iter().zip(&self.bias_norms[cluster]).map(|(row, bias)| norm(row) + 2.0 * bias);
        self.states(cluster).iter().any(|x| exceeded(x))
            || !(0.0..=1.3e-7 * length).contains(&(length - norm(centroid)))
            || norm(centroid) + 2.0 * self.centroid_bias_norms[cluster] > of_centroid
            || magnitudes.fold(0.0, f64::max) > magnitude
    }

    /// States that come close to the bounds: along the centroid and against it, along what of each row is across it, all
    /// together, and arbitrary ones.
    fn states(&self, cluster: usize) -> Vec<Vec<f64>> {
        let centroid = &self.centroids[cluster];
        let squared = dot(centroid, centroid);
        let mix = |factors: [f64; 2], vectors: [&[f64]; 2]| -> Vec<f64> {
            vectors[0].iter().zip(vectors[1]).map(|(l, r)| factors[0] * l + factors[1] * r).collect()
        };
        let mut states = vec![centroid.clone(), mix([-1.0, 0.0], [centroid, centroid])];
        // Of a large cluster some.
        let every = self.clusters[cluster].len().div_ceil(16);
        for row in self.clusters[cluster].iter().step_by(every) {
            let a = if squared > 0.0 { dot(row, centroid) / squared } else { 0.0 };
            let across = mix([1.0, -a], [row, centroid]);
            states.extend([
                mix([1.0, 0.7], [&across, centroid]),
                mix([1.0, -0.3], [&across, centroid]),
                across,
            ]);
        }
        let mut random = cluster as u64 + 1;
        let mut draw = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 40) as f64 / f64::from(1 << 23) - 1.0
        };
        states.extend((0..4).map(|_| centroid.iter().map(|_| draw()).collect::<Vec<f64>>()));
        states
    }

    /// Mean cosine of rows to the mean direction of their cluster.
    fn mean_cosine(&self) -> f64 {
        let coherence = |rows: &Vec<Vec<f64>>| {
            let mut sum = vec![0.0; rows[0].len()];
            for row in rows {
                let norm = norm(row).max(f64::MIN_POSITIVE);
                sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value / norm);
            }
            norm(&sum) / rows.len() as f64
        };
        self.clusters.iter().map(coherence).sum::<f64>() / self.clusters.len() as f64
    }
}

/// A synthetic checkpoint of clusters of 12.
fn synthetic(dir: &Path) {
    let read = |name: &str| std::fs::read_to_string(fixture(TINY).join(name)).unwrap();
    let (tokenizer, chat_template) = (read("tokenizer.json"), read("chat_template.jinja"));
    let texts = SynthTexts { tokenizer: &tokenizer, chat_template: &chat_template };
    let spec = SynthSpec {
        vocab_size: 4116,
        n_layers: 1,
        flash: Some(SynthFlash { cluster_size: 12, n_probes: 20 }),
        strong_clusters: Some(30),
        ..SynthSpec::tiny(SynthLayout::Mlx2Bit)
    };
    synthesise(&spec, &texts, dir, &Quiet, &AtomicBool::new(false)).unwrap();
}

#[test]
fn bounds_hold_and_planted_faults_are_seen() {
    let dir = tempfile::tempdir().unwrap();
    synthetic(&dir.path().join("synthetic"));
    let models = [dir.path().join("synthetic"), fixture(TINY)];
    for model in if emulated() { &models[..1] } else { &models[..] } {
        let out = dir.path().join("m.samara");
        convert_to(model, &out, &Options { force: true, ..Options::default() }).unwrap();
        let mut head = Head::of(&out);
        assert_eq!(head.broken(), [0; 0], "{}", model.display());
        // A little less than each number is too little: they are not only safe, they are near what is needed.
        let less: [fn(f32) -> f32; 5] = [
            |a| a - 2e-3,
            |a| a + 2e-3,
            |rho| rho * 0.9999,
            |length| length * 1.0001,
            |magnitude| magnitude * 0.9999,
        ];
        for (i, less) in less.into_iter().enumerate() {
            let whole = head.bounds[7];
            head.bounds[7][i] = less(whole[i]);
            assert_eq!(head.broken(), [7], "number {i} of {}", model.display());
            head.bounds[7] = whole;
        }
    }
}

#[test]
fn synthetic_rows_outside_of_strong_clusters_are_short() {
    let dir = tempfile::tempdir().unwrap();
    synthetic(&dir.path().join("model"));
    let out = dir.path().join("m.samara");
    convert_to(&dir.path().join("model"), &out, &Options::default()).unwrap();
    let lengths: Vec<f32> = Head::of(&out).bounds.iter().map(|bounds| bounds[3]).collect();
    let (strong, weak) = lengths.split_at(30);
    assert!(
        strong.iter().all(|&length| length > 1.0) && weak.iter().all(|&length| length < 0.25),
        "{lengths:?}"
    );
}

/// A conversion of the trained model with built clusters.
fn built(options: &Options) -> (Copy, Head) {
    let copy = Copy::of(TINY);
    copy.convert(options).unwrap();
    let head = Head::of(&copy.out("m.samara"));
    (copy, head)
}

#[test]
fn built_clusters_are_equal_in_size_and_closer_than_others() {
    let (copy, head) = built(&build(32));
    let file = open(&copy.out("m.samara"));
    let metadata = file.index().metadata();
    let number = |key: &str| metadata.u64(key).unwrap();
    assert_eq!(
        (number("flash.n_clusters"), number("flash.cluster_size"), number("flash.n_probes")),
        (128, 32, 14)
    );
    // Both stop tokens and </think>.
    assert_eq!(metadata.u64s("flash.force_tokens").unwrap(), [3990, 3992, 3998]);
    let map = words(&file, "head.token_map");
    let mut sorted = map.clone();
    sorted.sort_unstable();
    assert!(sorted.into_iter().eq(0..4096), "a permutation");

    assert_eq!(head.broken(), [0; 0]);
    for (rows, centroid) in head.clusters.iter().zip(&head.centroids) {
        let largest = rows.iter().map(|row| norm(row)).fold(0.0, f64::max);
        assert!((norm(centroid) / largest - 1.0).abs() < 0.05, "centroids are as long as the longest row");
    }
    // The rows are the checkpoint's, bit for bit, in another order.
    let plain = copy.out("plain.samara");
    convert_to(&copy.model(), &plain, &with(FlashHead::None)).unwrap();
    let by_token = affine_rows(&open(&plain), "head");
    let rows = affine_rows(&file, "head");
    assert!(rows.iter().zip(&map).all(|(row, &token)| *row == by_token[token as usize]));

    let theirs = copy.out("theirs.samara");
    convert_to(&copy.model(), &theirs, &Options::default()).unwrap();
    let theirs = Head::of(&theirs).mean_cosine();
    let by_token: Vec<Vec<f64>> = by_token.iter().map(dequantised).collect();
    let clusters = by_token.chunks(32).map(<[Vec<f64>]>::to_vec).collect();
    let in_token_order =
        Head { clusters, bias_norms: vec![], centroids: vec![], centroid_bias_norms: vec![], bounds: vec![] }
            .mean_cosine();
    let ours = head.mean_cosine();
    println!(
        "mean cosine to the centre: {ours:.4} built, {theirs:.4} the checkpoint's, {in_token_order:.4} by token"
    );
    assert!(ours > in_token_order + 0.01 && ours > theirs, "{ours} {theirs} {in_token_order}");
}

#[test]
fn clusters_that_were_planted_are_found() {
    // An emulated machine takes as long as for all other tests of building together; what it builds is compared below.
    if emulated() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    synthetic(&model);
    let map = |name: &str, options: &Options| {
        let out = dir.path().join(name);
        convert_to(&model, &out, options).unwrap();
        words(&open(&out), "head.token_map")
    };
    let mut planted = vec![0; 4116];
    for (i, token) in map("planted.samara", &Options::default()).into_iter().enumerate() {
        planted[token as usize] = i / 12;
    }
    let most = |tokens: &[u32]| {
        let count =
            |cluster: usize| tokens.iter().filter(|&&token| planted[token as usize] == cluster).count();
        tokens.iter().map(|&token| count(planted[token as usize])).max().unwrap()
    };
    let found: usize = map("built.samara", &build(12)).chunks(12).map(most).sum();
    println!("{found} of 4116 rows are with most of their cluster");
    // Rows of a cluster have a cosine of 0.36, others one of 0.09 at random; in token order a tenth would be found.
    assert!(found > 4116 * 3 / 4, "{found}");
}

#[test]
fn built_clusters_are_the_same_from_any_number_of_threads_and_either_layout() {
    let (copy, _) = built(&Options { threads: 1, ..build(64) });
    let one = std::fs::read(copy.out("m.samara")).unwrap();
    // The rest would take an emulated machine half a minute.
    let others: &[usize] = if emulated() { &[2] } else { &[2, 5] };
    for &threads in others {
        let out = copy.out(&format!("{threads}.samara"));
        convert_to(&copy.model(), &out, &Options { threads, ..build(64) }).unwrap();
        assert!(std::fs::read(out).unwrap() == one, "{threads} threads");
    }
    if emulated() {
        return;
    }
    let (mlx, hf) = (copy.out("mlx.samara"), copy.out("hf.samara"));
    convert_to(&fixture(STRESS_MLX), &mlx, &build(16)).unwrap();
    convert_to(&fixture(STRESS_HF), &hf, &build(16)).unwrap();
    assert_eq!(open(&mlx).index().tensors(), open(&hf).index().tensors());
}

#[test]
fn rows_of_zeros_and_equal_rows_have_places() {
    let copy = Copy::of(STRESS_HF);
    copy.edit_tensor("lm_head.weight", |bytes| {
        let row = 2 * 128;
        bytes[100 * row..400 * row].fill(0);
        for i in 1000..3000 {
            bytes.copy_within(999 * row..1000 * row, i * row);
        }
    });
    let sizes = [4096, 32];
    for &cluster_size in if emulated() { &sizes[..1] } else { &sizes[..] } {
        copy.convert(&Options { force: true, ..build(cluster_size) }).unwrap();
        let head = Head::of(&copy.out("m.samara"));
        assert_eq!(head.broken(), [0; 0], "{cluster_size}");
    }
    // It would take an emulated machine a minute.
    if emulated() {
        return;
    }
    copy.edit_tensor("lm_head.weight", |bytes| bytes.fill(0));
    // More equal rows than all turns of asking place.
    copy.convert(&Options { force: true, ..build(4) }).unwrap();
    let head = Head::of(&copy.out("m.samara"));
    assert!(head.broken().is_empty() && head.bounds.iter().all(|bounds| *bounds == [0.0; 6]));
}

/// Progress that asks for a stop when a phase begins.
struct StopAt<'a> {
    phase: &'static str,
    cancel: &'a AtomicBool,
}

impl Progress for StopAt<'_> {
    fn phase(&self, name: &'static str, _total: u64) {
        self.cancel.store(name == self.phase, Ordering::Relaxed);
    }
    fn advance(&self, _bytes: u64) {}
    fn message(&self, _text: &str) {}
}

#[test]
fn a_conversion_that_builds_clusters_resumes_to_the_same_bytes() {
    // A conversion that builds takes an emulated machine five seconds; other tests of resuming are run there.
    if emulated() {
        return;
    }
    let (copy, _) = built(&build(32));
    let whole = std::fs::read(copy.out("m.samara")).unwrap();
    let planned = plan(&copy.model(), &build(32)).unwrap();
    let out = copy.out("again.samara");
    let mut options = build(32);
    for phase in ["cluster", "convert", "verify"] {
        let cancel = AtomicBool::new(false);
        let stopped = convert(&planned, &out, &options, &StopAt { phase, cancel: &cancel }, &cancel);
        assert!(matches!(&stopped, Err(Error::Cancelled { kept: Some(_) })), "{phase}: {stopped:?}");
        options.resume = true;
    }
    let other = convert_to(&copy.model(), &out, &Options { resume: true, ..build(64) });
    assert!(
        matches!(&other, Err(Error::StaleJournal { reason, .. }) if reason.contains("another choice of FlashHead data")),
        "{other:?}"
    );
    convert_to(&copy.model(), &out, &options).unwrap();
    assert!(std::fs::read(out).unwrap() == whole);
}

#[test]
fn progress_of_building_ends_where_it_said() {
    #[derive(Default)]
    struct Sum(std::sync::Mutex<Vec<(&'static str, u64, u64)>>);
    impl Progress for Sum {
        fn phase(&self, name: &'static str, total: u64) {
            self.0.lock().unwrap().push((name, total, 0));
        }
        fn advance(&self, bytes: u64) {
            self.0.lock().unwrap().last_mut().unwrap().2 += bytes;
        }
        fn message(&self, _text: &str) {}
    }
    let copy = Copy::of(STRESS_HF);
    let planned = plan(&copy.model(), &build(32)).unwrap();
    let progress = Sum::default();
    convert(&planned, &copy.out("m.samara"), &build(32), &progress, &AtomicBool::new(false)).unwrap();
    let phases = progress.0.into_inner().unwrap();
    assert_eq!(
        phases.iter().map(|phase| phase.0).collect::<Vec<_>>(),
        ["hash", "cluster", "convert", "verify"]
    );
    assert!(phases.iter().all(|(_, total, done)| total == done && *done > 0), "{phases:?}");
}

#[test]
fn without_flashhead_data_the_head_is_in_token_order() {
    let copy = Copy::of(TINY);
    // Nothing of what is left out has to be right, or there.
    copy.edit_config(|config| drop(config.remove("flash_head")));
    copy.edit_tensor("lm_head_flash.token_map", |bytes| bytes.fill(0));
    assert!(matches!(copy.plan_error(), Error::ConfigMissing { .. }));
    let planned = plan(&copy.model(), &with(FlashHead::None)).unwrap();
    let notes = planned.summary().notes.join("; ");
    assert!(notes.contains("left out by option: the head is stored in token order"), "{notes}");
    copy.convert(&with(FlashHead::None)).unwrap();
    let file = open(&copy.out("m.samara"));
    assert!(file.index().metadata().iter().all(|(key, _)| !key.starts_with("flash.")));
    assert!(file.index().tensors().iter().all(|tensor| !tensor.name.starts_with("head.")));

    let planned = plan(&copy.model(), &build(32)).unwrap();
    let notes = planned.summary().notes.join("; ");
    assert!(notes.contains("are built: 128 clusters of 32 tokens, in place of the checkpoint's"), "{notes}");
    let planned = plan(&fixture(STRESS_MLX), &Options::default()).unwrap();
    let notes = planned.summary().notes.join("; ");
    assert!(notes.contains("in token order; the flash-head option `build` makes some"), "{notes}");
}

#[test]
fn flashhead_data_that_cannot_be_used_are_refused() {
    let config = |key: &'static str, value: Value, wanted: &[&str]| {
        let copy = Copy::of(TINY);
        copy.edit_config(|config| config["flash_head"][key] = value);
        refused(&copy, wanted);
        // It would take an emulated machine half a minute in all, and the last of these is converted there too.
        if !emulated() {
            copy.convert(&build(32)).unwrap();
        }
    };
    config("scaled_centroids", json!(false), &["flash_head.scaled_centroids = false"]);
    config("n_clusters", json!(127), &["flash_head.n_clusters = 127", "the 4096 tokens exactly"]);
    config("n_probes", json!(129), &["flash_head.n_probes = 129"]);
    config("force_tokens", json!([4096]), &["flash_head.force_tokens = [4096]"]);
    config(
        "force_tokens",
        json!(null),
        &["force_tokens = [] lacks the stop token(s) [3990, 3992]", "never end"],
    );
    config(
        "force_tokens",
        json!([3992, 3998]),
        &["[3992, 3998] lacks the stop token(s) [3990]", "built anew or left out"],
    );
    let copy = Copy::of(TINY);
    copy.edit_config(|config| {
        config["flash_head"]["n_clusters"] = json!(2048);
        config["flash_head"]["cluster_size"] = json!(2);
    });
    refused(&copy, &["flash_head.cluster_size = 2", "panels of 4", "built anew"]);

    // Lengths of 1, as of centroids that were not scaled: every group's scale and bias over the row's length.
    let copy = Copy::of(TINY);
    for part in ["scales", "biases"] {
        copy.edit_tensor(&format!("lm_head_flash.centroids.{part}"), |bytes| {
            for pair in bytes.chunks_mut(2) {
                let shorter = half_of(half_of(u16::from_le_bytes([pair[0], pair[1]])));
                pair.copy_from_slice(&shorter.to_le_bytes());
            }
        });
    }
    refused(&copy, &["lm_head_flash.centroids: 64 of 64", "not scaled", "built anew or left out"]);
    copy.convert(&build(32)).unwrap();
}

/// Half of a bf16 value that is not very small.
fn half_of(bits: u16) -> u16 {
    if bits & 0x7fff > 0x80 { bits - 0x80 } else { bits }
}

#[test]
fn sizes_of_clusters_that_are_not_possible_are_refused() {
    let check = |size: u64, advice: &str| {
        let error = plan(&fixture(TINY), &build(size)).unwrap_err();
        let message = error.to_string();
        assert!(matches!(error, Error::ClusterSize { .. }) && message.contains(advice), "{message}");
    };
    check(0, "4 is possible");
    check(2, "a cluster size of 2 is not possible");
    check(33, "; 32 is possible");
    check(48, "; 32 is possible");
    check(100_000, "; 4096 is possible");
}
