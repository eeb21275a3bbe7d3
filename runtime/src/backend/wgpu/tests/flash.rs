//! Heads that leave rows out, against the exact one of the same segment.

use samara_format::{Affine4Layout, FileLayout, PartSpec, TensorSpec, Writer};

use super::*;
use crate::{
    flash::{Bound, HeadCounts},
    spec::{HeadSpec, MatrixRef},
};

/// The model's head.
fn spec(model: &Model) -> &HeadSpec {
    let Some(BlockSpec::Head(head)) = model.architecture().blocks.last() else { panic!("a head") };
    head
}

/// A row of an AFFINE4 matrix.
struct Row {
    weights: Vec<f64>,
    /// Length of the biases of all columns.
    biases: f64,
}

impl Row {
    /// What rounding errors of a product with it are a multiple of.
    fn magnitude(&self) -> f64 {
        dot(&self.weights, &self.weights).sqrt() + 2.0 * self.biases
    }
}

fn rows_of(model: &Model, m: &MatrixRef) -> Vec<Row> {
    let layout = Affine4Layout::new(m.rows, m.cols).expect("a matrix of a file");
    let (mut nibbles, mut scales) = (vec![0; m.cols], vec![0; m.cols / 64]);
    let mut biases = scales.clone();
    let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
    let row = |row| {
        layout.unpack_row(model.matrix(m), row, &mut nibbles, &mut scales, &mut biases);
        let weights = nibbles.iter().enumerate();
        let weights = weights.map(|(i, q)| f64::from(*q) * value(scales[i / 64]) + value(biases[i / 64]));
        let biases: Vec<f64> = biases.iter().map(|bias| 8.0 * value(*bias)).collect();
        Row { weights: weights.collect(), biases: dot(&biases, &biases).sqrt() }
    };
    (0..m.rows).map(row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The trained model in a file with bounds, made from its rows and then changed.
fn bounded(change: impl Fn(&mut Bound)) -> Arc<Model> {
    let model = tiny();
    let head = spec(&model);
    let flash = head.flash.as_ref().expect("clusters");
    let rows = rows_of(&model, &head.weight);
    let up = |x: f64| (x as f32).next_up();
    let bounds = rows_of(&model, &flash.centroids).into_iter().zip(rows.chunks(flash.cluster_size));
    let bounds = bounds.flat_map(|(centroid, rows)| {
        let c = &centroid.weights;
        let along = |row: &Row| dot(&row.weights, c) / dot(c, c);
        let across = |row: &Row| {
            let a = along(row);
            let rest: Vec<f64> = row.weights.iter().zip(c).map(|(w, c)| w - a * c).collect();
            dot(&rest, &rest).sqrt()
        };
        let most = |of: &dyn Fn(&Row) -> f64| rows.iter().map(of).fold(f64::MIN, f64::max);
        let mut bound = Bound {
            high: up(most(&along)),
            low: -up(most(&|row| -along(row))),
            radius: up(most(&across)),
            norm: up(dot(c, c).sqrt()),
            centroid_magnitude: up(centroid.magnitude()),
            row_magnitude: up(most(&Row::magnitude)),
        };
        change(&mut bound);
        let Bound { high, low, radius, norm, centroid_magnitude, row_magnitude } = bound;
        [high, low, radius, norm, centroid_magnitude, row_magnitude]
    });
    let bounds: Vec<u8> = bounds.flat_map(f32::to_le_bytes).collect();
    rewritten(&model, "head.bounds", &bounds)
}

/// The model with U32 tensor `name` replaced or added.
fn rewritten(model: &Model, name: &str, bytes: &[u8]) -> Arc<Model> {
    let file = model.file();
    let mut metadata = file.index().metadata().clone();
    metadata.insert("flash.bound", 1u64);
    let kept: Vec<_> = file.index().tensors().iter().filter(|tensor| tensor.name != name).collect();
    let mut specs: Vec<TensorSpec> = kept
        .iter()
        .map(|tensor| TensorSpec {
            name: tensor.name.clone(),
            n_blocks: tensor.n_blocks,
            parts: tensor.parts.iter().map(|part| part.spec.clone()).collect::<Vec<PartSpec>>(),
        })
        .collect();
    specs.push(TensorSpec::single(name, samara_format::Dtype::U32, 1, bytes.len() as u64 / 4));
    let layout = FileLayout::new(metadata, specs, 0).expect("a sound plan");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("model.samara");
    let mut writer = Writer::create(&path, layout, false).expect("begins");
    for bytes in kept.iter().map(|tensor| file.bytes(tensor)).chain([bytes]) {
        let mut tensor = writer.tensor().expect("the next");
        tensor.append(bytes).expect("fits");
        tensor.finish().expect("complete");
    }
    writer.finish().expect("a file");
    Arc::new(Model::open(&path, Access::Read).expect("opens"))
}

/// The head of `model` alone.
fn head(backend: &GpuBackend, model: &Arc<Model>, kind: HeadKind, n_probes: usize) -> GpuSegment {
    let blocks = &model.architecture().blocks;
    let limits = Limits { head: HeadMode { kind, n_probes }, ..LIMITS };
    let segment = make(backend, model, &blocks[blocks.len() - 1..], &limits).expect("compiles");
    assert!(segment.notices.is_empty(), "{:?}", segment.notices);
    segment
}

/// Hidden states, `[n, hidden_size]`: of each two one at random, and one near a row of the head.
fn states(model: &Model, n: usize) -> Vec<Vec<f32>> {
    let rows = rows_of(model, &spec(model).weight);
    let noise = |i: usize, j: usize| {
        let mixed = (i * 1000 + j + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let state = |i: usize| {
        let row = &rows[i * 977 % rows.len()].weights;
        let largest = row.iter().fold(0.0, |most: f64, w| most.max(w.abs()));
        let near = |j: usize| (row[j] / largest) as f32 + 0.3 * noise(i, j);
        (0..row.len()).map(|j| if i.is_multiple_of(2) { noise(i, j) } else { near(j) }).collect()
    };
    (0..n).map(state).collect()
}

/// The logits of a state by a segment that is a head alone, of which the `top` largest matter, and then all of them.
fn both(segment: &mut GpuSegment, io: &mut Activations, state: &[f32], top: usize) -> [Vec<f32>; 2] {
    let vocab_size = segment.head.as_ref().expect("a head").vocab_size;
    io.hidden[..state.len()].copy_from_slice(state);
    let sequence = Sequence { slot: 0, position: 0, tokens: &[0], logits: Logits::Top(top) };
    segment.forward(&Step { sequences: &[sequence] }, io).expect("runs");
    let some = io.logits[..vocab_size].to_vec();
    segment.head_again(None, io).expect("runs");
    [some, io.logits[..vocab_size].to_vec()]
}

/// Tokens whose logits were computed. Asserts that they are those of the exact head, bit for bit.
fn computed([some, all]: &[Vec<f32>; 2]) -> Vec<u32> {
    let computed: Vec<u32> =
        (0..).zip(some).filter(|(_, l)| **l > f32::NEG_INFINITY).map(|(t, _)| t).collect();
    let bits = |logits: &[f32]| computed.iter().map(|t| logits[*t as usize].to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(some), bits(all));
    computed
}

/// Of `states` those for which the `top` likeliest are not those of the exact head.
fn wrong(segment: &mut GpuSegment, io: &mut Activations, states: &[Vec<f32>], top: usize) -> usize {
    let differ = |state: &&Vec<f32>| {
        let both = both(segment, io, state, top);
        computed(&both);
        ranked(&both[0], top) != ranked(&both[1], top)
    };
    states.iter().filter(differ).count()
}

#[test]
fn clusters_that_score_best_are_read() {
    let Some(backend) = gpu() else { return };
    let model = tiny();
    let (vocab_size, flash) = (spec(&model).weight.rows, spec(&model).flash.as_ref().expect("clusters"));
    let mut io = io(&model, &LIMITS);
    let states = states(&model, 6);
    for n_probes in [1, 14, 128] {
        let mut segment = head(&backend, &model, HeadKind::Flash, n_probes);
        for state in &states {
            let computed = computed(&both(&mut segment, &mut io, state, 1));
            assert!(flash.force_tokens.iter().all(|token| computed.contains(token)), "{n_probes}");
            let n = (n_probes * flash.cluster_size).min(vocab_size);
            assert!((n..=n + flash.force_tokens.len()).contains(&computed.len()), "{}", computed.len());
        }
        let panel = (model.matrix(&spec(&model).weight).len() / vocab_size * 4) as u64;
        let fixed = model.matrix(&flash.centroids).len() as u64;
        let row_of = model.row_of(spec(&model).token_map.as_ref().expect("a map")).expect("a sound one");
        let mut forced: Vec<u32> =
            flash.force_tokens.iter().map(|token| row_of[*token as usize] / 4).collect();
        forced.sort_unstable();
        forced.dedup();
        let n_panels = (n_probes * flash.cluster_size / 4 + forced.len()) as u64;
        let bytes = 6 * (fixed + n_panels * panel);
        assert_eq!(segment.head_counts(), Some(HeadCounts { tokens: 6, certified: 0, bytes }));
        // What is no number is an error, though most logits are left out.
        io.hidden[3] = f32::NAN;
        let sequence = Sequence { slot: 0, position: 0, tokens: &[0], logits: Logits::Top(1) };
        let error = segment.forward(&Step { sequences: &[sequence] }, &mut io).expect_err("no number");
        assert!(matches!(error, Error::NonFiniteHead), "{error}");
    }
}

#[test]
fn what_is_certified_is_exact() {
    let Some(backend) = gpu() else { return };
    let model = bounded(|_| {});
    let mut io = io(&model, &LIMITS);
    let states = states(&model, 150);
    let n = states.len() as u64;
    let mut segment = head(&backend, &model, HeadKind::Certified, 40);
    for top in [1, 20, 64] {
        assert_eq!(wrong(&mut segment, &mut io, &states, top), 0, "{top}");
    }
    let counts = segment.head_counts().expect("it counts");
    println!("{counts:?}");
    assert_eq!(counts.tokens, 3 * n);
    assert!((1..3 * n).contains(&counts.certified), "{counts:?}");
    // More than the device ranks, and all: the exact head.
    let bytes = model.matrix(&spec(&model).weight).len() as u64;
    for top in [65, 5000] {
        let both = both(&mut segment, &mut io, &states[0], top);
        assert_eq!(both[0], both[1], "{top}");
    }
    let exact = HeadCounts { tokens: 2, certified: 0, bytes: 2 * bytes };
    assert_eq!(segment.head_counts(), Some(counts.plus(exact)));
    // Too small a radius is seen by this.
    let faulty = bounded(|bound| bound.radius = 0.0);
    let mut segment = head(&backend, &faulty, HeadKind::Certified, 1);
    let found = wrong(&mut segment, &mut io, &states, 20);
    println!("without radius {found} of {n} wrong");
    assert!(found > 0);
}

#[test]
fn decoding_ahead_leaves_out_the_same() {
    let Some(backend) = gpu() else { return };
    let model = bounded(|_| {});
    let prompt = text(20);
    let mut io = io(&model, &LIMITS);
    let vocab_size = model.architecture().vocab_size;
    const STEPS: usize = 12;
    for (kind, n_probes, top_k) in [(HeadKind::Certified, 14, 20), (HeadKind::Flash, 1, 64)] {
        let limits = Limits { head: HeadMode { kind, n_probes }, ..LIMITS };
        let mut segment = make(&backend, &model, &model.architecture().blocks, &limits).expect("compiles");
        assert!(segment.notices.is_empty(), "{:?}", segment.notices);
        let step = |segment: &mut GpuSegment, io: &mut Activations, position: usize, tokens: &[u32]| {
            let sequence = Sequence { slot: 1, position, tokens, logits: Logits::Top(top_k) };
            segment.forward(&Step { sequences: &[sequence] }, io).expect("runs");
        };
        let (mut token, mut expected) = (prompt[19], Vec::new());
        step(&mut segment, &mut io, 0, &prompt[..19]);
        assert_eq!(segment.head_counts(), Some(HeadCounts::default()), "a prompt has the exact head");
        for i in 0..STEPS {
            step(&mut segment, &mut io, 19 + i, &[token]);
            let mut candidates = ranked(&io.logits[..vocab_size], top_k);
            candidates.retain(|(_, logit)| *logit > f32::NEG_INFINITY);
            token = candidates[0].0;
            expected.push(Drawn { token, candidates });
        }
        let stepwise = segment.head_counts().expect("it counts");
        assert_eq!(stepwise.tokens, STEPS as u64);
        assert!(Segment::rewind(&mut segment, 1, 0));
        step(&mut segment, &mut io, 0, &prompt[..19]);
        let draw = Draw { temperature: 0.0, top_k, top_p: 1.0, min_p: 0.0 };
        segment.begin(1, 19, prompt[19], &draw).expect("begins");
        let before = segment.counters.dispatches;
        segment.queue(&[0.5; STEPS]).expect("queues");
        let got: Vec<Drawn> = (0..STEPS).map(|_| segment.next().expect("a step")).collect();
        assert_eq!(got, expected, "{kind}");
        let added = if kind == HeadKind::Certified { 4 } else { 2 };
        let each = 1 + 7 * (model.architecture().blocks.len() as u64 - 2) + 2 + added;
        assert_eq!(segment.counters.dispatches - before, STEPS as u64 * each, "{kind}");
        assert_eq!(segment.head_counts(), Some(stepwise.plus(stepwise)), "{kind}");
    }
}

#[test]
fn a_wrong_kernel_of_such_a_head_is_named() {
    let Some(gpu) = any().map(|gpu| gpu.faulty()) else { return };
    let model = bounded(|_| {});
    let blocks = &model.architecture().blocks;
    let limits = Limits { head: HeadMode { kind: HeadKind::Certified, n_probes: 14 }, ..LIMITS };
    for (kernel, constant, value) in [
        ("probe", "N_PROBES", 15.0),
        ("centroids", "ROUNDING", 0.1),
        ("flash_rows", "CLUSTER", 64.0),
        ("certify", "N_CLUSTERS", 100.0),
    ] {
        let backend = GpuBackend::new(Arc::clone(&gpu));
        gpu.plant(Fault { kernel, constant, value, variants: Variant::ALL.to_vec() });
        let error = make(&backend, &model, &blocks[9..], &limits)
            .err()
            .unwrap_or_else(|| panic!("{kernel} {constant}"));
        assert!(error.to_string().contains(&format!("kernel {kernel}/")), "{kernel} {constant}: {error}");
    }
}
