//! Whole segments on a device against the definition.

mod flash;

use std::{
    path::Path,
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

use safetensors::SafeTensors;
use samara_converter::{Options, Quiet, convert, plan};
use samara_format::Access;
use samara_shaders::Variant;
use samara_simd::Kernels;

use super::{
    backend::GpuBackend,
    device::{Fault, Gpu, any, breakable},
    plan::Plan,
    segment::GpuSegment,
    weights::Split,
};
use crate::{
    backend::{
        Activations, Ahead, Backend, Draw, Drawn, Footprint, KernelId, Limits, Logits, Placed, Segment,
        Sequence, Step, cpu::Cpu, reference::Reference,
    },
    error::Error,
    flash::{HeadKind, HeadMode},
    kv::KvType,
    model::Model,
    score::divergence,
    spec::BlockSpec,
};

const LIMITS: Limits = Limits {
    threads: 1,
    fewer_threads: false,
    n_slots: 2,
    context: 512,
    max_batch: 64,
    max_logit_rows: 64,
    kv: KvType::F32,
    head: HeadMode::EXACT,
};

fn open(name: &str) -> Arc<Model> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("model.samara");
    let options = Options::default();
    let plan = plan(&fixtures.join(name), &options).expect("a sound checkpoint");
    convert(&plan, &path, &options, &Quiet, &AtomicBool::new(false)).expect("converts");
    // Read, not mapped: the folder goes away here.
    Arc::new(Model::open(&path, Access::Read).expect("opens"))
}

/// The trained model.
fn tiny() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    Arc::clone(MODEL.get_or_init(|| open("tiny-maple-2bit")))
}

fn gpu() -> Option<GpuBackend> {
    any().map(GpuBackend::new)
}

/// What `placed` is made of.
fn placed<'a>(blocks: &'a [BlockSpec], kernels: &'a [Vec<KernelId>]) -> Vec<Placed<'a>> {
    blocks.iter().zip(kernels.iter().map(Vec::as_slice)).collect()
}

fn kernels(backend: &dyn Backend, blocks: &[BlockSpec]) -> Vec<Vec<KernelId>> {
    blocks.iter().map(|block| backend.supports(block).expect("supported")).collect()
}

fn compile(
    backend: &dyn Backend,
    model: &Arc<Model>,
    blocks: &[BlockSpec],
    limits: &Limits,
) -> Box<dyn Segment> {
    let kernels = kernels(backend, blocks);
    backend.compile(model, &placed(blocks, &kernels), limits, &mut |_, _| {}).expect("compiles")
}

fn make(
    backend: &GpuBackend,
    model: &Arc<Model>,
    blocks: &[BlockSpec],
    limits: &Limits,
) -> Result<GpuSegment, Error> {
    let kernels = kernels(backend, blocks);
    backend.make(model, &placed(blocks, &kernels), limits, &mut |_, _| {})
}

fn io(model: &Model, limits: &Limits) -> Activations {
    Activations::new(model.architecture(), limits.max_batch, limits.max_logit_rows)
}

/// Token ids of a text that the trained model knows.
fn text(n: usize) -> Vec<u32> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/golden/tiny-maple.safetensors");
    let bytes = std::fs::read(path).expect("a golden file");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let texts = (0..).map_while(|j| tensors.tensor(&format!("{j}.ids")).ok());
    let ids = texts.flat_map(|ids| ids.data().as_chunks::<4>().0.to_vec());
    ids.map(u32::from_le_bytes).take(n).collect()
}

/// Logits of all tokens, run in steps of these lengths one after the other.
fn logits(model: &Model, segments: &mut [Box<dyn Segment>], tokens: &[u32], steps: &[usize]) -> Vec<f32> {
    let mut io = io(model, &LIMITS);
    let vocab_size = model.architecture().vocab_size;
    let (mut all, mut position) = (Vec::new(), 0);
    for &n in steps {
        let sequence =
            Sequence { slot: 1, position, tokens: &tokens[position..position + n], logits: Logits::All };
        for segment in segments.iter_mut() {
            segment.forward(&Step { sequences: &[sequence] }, &mut io).expect("runs");
        }
        all.extend_from_slice(&io.logits[..n * vocab_size]);
        position += n;
    }
    all
}

fn mean_kl(model: &Model, exact: &[f32], got: &[f32]) -> f64 {
    let vocab_size = model.architecture().vocab_size;
    let rows = exact.chunks_exact(vocab_size).zip(got.chunks_exact(vocab_size));
    let n = rows.len();
    rows.map(|(p, q)| divergence(p, q).kl).sum::<f64>() / n as f64
}

/// What the definition says of 64 tokens, and how far the CPU is from that.
fn exact() -> (&'static [f32], f64) {
    static EXACT: OnceLock<(Vec<f32>, f64)> = OnceLock::new();
    let (exact, on_cpu) = EXACT.get_or_init(|| {
        let model = tiny();
        let run = |backend: &dyn Backend| {
            let mut segments = [compile(backend, &model, &model.architecture().blocks, &LIMITS)];
            logits(&model, &mut segments, &text(64), &[64])
        };
        let exact = run(&Reference);
        let on_cpu = mean_kl(&model, &exact, &run(&Cpu::new(Kernels::detect())));
        println!("on the CPU: mean KL {on_cpu:.3e}");
        (exact, on_cpu)
    });
    (exact, *on_cpu)
}

/// Asserts that logits are as close as those of the CPU, nearly: some roundings to int8 differ.
fn assert_close(what: &str, got: &[f32]) {
    let (exact, on_cpu) = exact();
    let kl = mean_kl(&tiny(), &exact[..got.len()], got);
    println!("{what}: mean KL {kl:.3e}");
    assert!(kl <= 3.0 * on_cpu, "{what}: mean KL {kl}, on the CPU {on_cpu}");
}

#[test]
fn a_model_is_close_to_the_definition() {
    let Some(backend) = gpu() else { return };
    let model = tiny();
    let blocks = &model.architecture().blocks;
    for (steps, kv) in [
        (&[64][..], KvType::F32),
        (&[1, 3, 9, 1, 50], KvType::F32),
        (&[30, 34], KvType::Bf16),
        (&[1; 40], KvType::F32),
        (&[1; 12], KvType::Bf16),
    ] {
        let mut segments = [compile(&backend, &model, blocks, &Limits { kv, ..LIMITS })];
        assert!(segments[0].notices().is_empty(), "{:?}", segments[0].notices());
        let got = logits(&model, &mut segments, &text(64), steps);
        assert_close(&format!("steps of {}, ..., {kv}", steps[0]), &got);
    }
}

#[test]
fn segments_hand_over_to_each_other() {
    let model = tiny();
    let blocks = &model.architecture().blocks;
    let cpu = Cpu::new(Kernels::detect());
    let Some(gpu) = gpu() else { return };
    let mut segments = [
        compile(&gpu, &model, &blocks[..3], &LIMITS),
        compile(&cpu, &model, &blocks[3..5], &LIMITS),
        compile(&gpu, &model, &blocks[5..8], &LIMITS),
        compile(&cpu, &model, &blocks[8..9], &LIMITS),
        compile(&gpu, &model, &blocks[9..], &LIMITS),
    ];
    assert!(segments.iter_mut().all(|segment| segment.ahead().is_none()));
    assert_close("five segments", &logits(&model, &mut segments, &text(64), &[20, 1, 1, 7]));
}

#[test]
fn short_buffers_split_what_is_long() {
    let model = tiny();
    let blocks = &model.architecture().blocks;
    // Shorter than a layer's experts, the embedding and the head.
    if any().is_none() {
        return;
    }
    let backend = GpuBackend::new(Gpu::alone(0, 500_000).expect("a device"));
    let limits = Limits { context: 128, kv: KvType::Bf16, ..LIMITS };
    let plan = Plan::new(&backend.gpu, &model, blocks, &limits).expect("fits");
    let split = |split: Split| split.buffers[0] != split.buffers[1] && split.per_split > 0;
    assert!(plan.embed.is_some_and(|embed| split(embed.weight)));
    assert!(plan.head.is_some_and(|head| split(head.weight)));
    assert!(plan.layers.iter().all(|layer| split(layer.experts)));
    let mut segments = [compile(&backend, &model, blocks, &limits)];
    assert_close("split tensors", &logits(&model, &mut segments, &text(64), &[30, 1, 1, 1]));

    let backend = GpuBackend::new(Gpu::alone(0, 200_000).expect("a device"));
    let error = make(&backend, &model, blocks, &limits).err().expect("too short");
    assert!(error.to_string().contains("two buffers hold"), "{error}");
    assert!(backend.footprint(&model, blocks, &limits).device > 1 << 60);
}

#[test]
fn a_segment_takes_what_its_footprint_says() {
    let model = tiny();
    let blocks = &model.architecture().blocks;
    let Some(backend) = gpu() else { return };
    let flash = HeadMode { kind: HeadKind::Flash, n_probes: 14 };
    for (blocks, n_slots, max_batch, head) in [
        (&blocks[..], 1, 64, HeadMode::EXACT),
        (&blocks[..4], 2, 1, HeadMode::EXACT),
        (&blocks[9..], 3, 16, flash),
    ] {
        let limits = Limits { n_slots, max_batch, head, ..LIMITS };
        let Footprint { kv, scratch, device } = backend.footprint(&model, blocks, &limits);
        let segment = make(&backend, &model, blocks, &limits).expect("compiles");
        assert_eq!(device, segment.buffers.bytes());
        let queue = segment.queue.as_ref().map_or(0, |queue| queue.staging.bytes());
        assert_eq!((kv, scratch), (0, segment.staging.bytes() + queue));
    }
}

#[test]
fn a_wrong_kernel_is_replaced_or_refused() {
    let model = tiny();
    let blocks = &model.architecture().blocks[..2];
    let all = Variant::ALL.to_vec();
    let Some(gpu) = any().map(|gpu| gpu.faulty()) else { return };
    for (kernel, constant, value) in [
        ("attention", "WINDOW", 3.0),
        ("experts_out", "DOWN_AT", 0.0),
        ("attention_prefill", "WINDOW", 3.0),
        ("embed", "PER_SPLIT", 64.0),
    ] {
        let backend = GpuBackend::new(Arc::clone(&gpu));
        gpu.plant(Fault { kernel, constant, value, variants: all.clone() });
        let error = make(&backend, &model, blocks, &LIMITS).err().expect("wrong in every variant");
        let text = error.to_string();
        assert!(matches!(error, Error::DeviceFault { .. }), "{kernel}: {text}");
        assert!(text.contains(kernel) && text.contains(&backend.gpu.name()), "{kernel}: {text}");
    }
    let backend = GpuBackend::new(Arc::clone(&gpu));
    let best = *gpu.variants().last().expect("one at least");
    gpu.plant(Fault { kernel: "norm_gemv", constant: "EPS", value: 1.0, variants: vec![best] });
    let segment = make(&backend, &model, blocks, &LIMITS).expect("another variant is right");
    let [notice] = segment.notices.as_slice() else { panic!("{:?}", segment.notices) };
    assert!(notice.contains("norm_gemv") && notice.contains(best.name()), "{notice}");
}

#[test]
fn the_fastest_right_variant_is_measured() {
    let model = tiny();
    let blocks = &model.architecture().blocks;
    let Some(gpu) = any().map(|gpu| gpu.faulty()) else { return };
    for (block, kernel, constant, value) in
        [(&blocks[1], "experts_in", "UP_AT", 0.0), (&blocks[9], "head", "EPS", 1.0)]
    {
        let backend = GpuBackend::new(Arc::clone(&gpu));
        let supported = backend.supports(block).expect("supported");
        let best = *backend.gpu.variants().last().expect("one at least");
        // With a fault in one variant, another is chosen.
        backend.gpu.plant(Fault { kernel, constant, value, variants: vec![best] });
        let chosen = backend.measure(&model, block, supported.clone());
        assert!(backend.accepts(block, &chosen), "{chosen:?}");
        let own = chosen.iter().find(|id| id.op() == kernel).expect("among them");
        assert_ne!(own.variant(), best.name(), "{chosen:?}");
        // With a fault in all, the block is refused.
        backend.gpu.plant(Fault { kernel, constant, value, variants: Variant::ALL.to_vec() });
        let backend = GpuBackend::new(Arc::clone(&backend.gpu));
        assert_eq!(backend.measure(&model, block, supported.clone()), supported);
        let reason = backend.supports(block).expect_err("refused");
        assert!(reason.contains(kernel) && reason.contains(&backend.gpu.name()), "{reason}");
    }
}

#[test]
fn what_is_not_a_number_is_an_error() {
    let model = tiny();
    let blocks = &model.architecture().blocks;
    let Some(backend) = gpu() else { return };
    let mut io = io(&model, &LIMITS);
    for n in [1, 5] {
        let tokens = vec![0; n];
        let sequence = Sequence { slot: 0, position: 0, tokens: &tokens, logits: Logits::Last };
        let step = Step { sequences: &[sequence] };
        for bad in [f32::NAN, f32::INFINITY] {
            let mut layers = make(&backend, &model, &blocks[3..6], &LIMITS).expect("compiles");
            io.hidden.fill(0.5);
            layers.forward(&step, &mut io).expect("numbers");
            layers.rewind(0, 0);
            io.hidden.fill(0.5);
            io.hidden[n * layers.hidden_size - 1] = bad;
            let error = layers.forward(&step, &mut io).expect_err("no number");
            assert!(matches!(error, Error::NonFinite { layer: 2, .. }), "{n} tokens, {bad}: {error}");
            let mut head = make(&backend, &model, &blocks[9..], &LIMITS).expect("compiles");
            io.hidden.fill(0.5);
            io.hidden[n * layers.hidden_size - 1] = bad;
            let error = head.forward(&step, &mut io).expect_err("no number");
            assert!(matches!(error, Error::NonFiniteHead), "{n} tokens, {bad}: {error}");
        }
    }
}

#[test]
fn a_lost_device_is_an_error_of_each_step() {
    let model = tiny();
    let Some(backend) = breakable().map(GpuBackend::new) else { return };
    let mut segment = make(&backend, &model, &model.architecture().blocks, &LIMITS).expect("compiles");
    let mut io = io(&model, &LIMITS);
    let sequence = Sequence { slot: 0, position: 0, tokens: &[1], logits: Logits::Last };
    segment.forward(&Step { sequences: &[sequence] }, &mut io).expect("runs");
    backend.gpu.lose();
    let lost = |error: Error| assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    let step = Step { sequences: &[Sequence { position: 1, ..sequence }] };
    lost(segment.forward(&step, &mut io).expect_err("lost"));
    let draw = Draw { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0 };
    lost(segment.begin(0, 1, 1, &draw).expect_err("lost"));
    lost(segment.queue(&[0.5]).expect_err("lost"));
    lost(make(&backend, &model, &model.architecture().blocks, &LIMITS).err().expect("lost"));
}

/// The likeliest tokens of a row, in rank order.
fn ranked(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    all.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    all.truncate(n);
    all
}

#[test]
fn decoding_ahead_is_decoding() {
    let model = tiny();
    let Some(backend) = gpu() else { return };
    let mut segment = make(&backend, &model, &model.architecture().blocks, &LIMITS).expect("compiles");
    let prompt = text(20);
    let (prompt, last) = (&prompt[..19], prompt[19]);
    let mut io = io(&model, &LIMITS);
    let vocab_size = model.architecture().vocab_size;
    const STEPS: usize = 70;
    let step = |segment: &mut GpuSegment, io: &mut Activations, position: usize, tokens: &[u32]| {
        let sequence = Sequence { slot: 1, position, tokens, logits: Logits::Last };
        segment.forward(&Step { sequences: &[sequence] }, io).expect("runs");
    };
    step(&mut segment, &mut io, 0, prompt);
    let (mut token, mut expected) = (last, Vec::new());
    for i in 0..STEPS {
        step(&mut segment, &mut io, 19 + i, &[token]);
        let candidates = ranked(&io.logits[..vocab_size], 5);
        token = candidates[0].0;
        expected.push(Drawn { token, candidates });
    }
    let draw = Draw { temperature: 0.0, top_k: 5, top_p: 1.0, min_p: 0.0 };
    let before = segment.counters;
    assert!(Segment::rewind(&mut segment, 1, 0));
    step(&mut segment, &mut io, 0, prompt);
    segment.begin(1, 19, last, &draw).expect("begins");
    // Queued unevenly, some always under way, around the ring's end.
    let (mut n_queued, mut got) = (0, Vec::new());
    for n in [3, 1, 40, 20, 6] {
        segment.queue(&vec![0.5; n]).expect("queues");
        n_queued += n;
        while got.len() + 2 < n_queued {
            got.push(segment.next().expect("a step"));
        }
    }
    while got.len() < STEPS {
        got.push(segment.next().expect("a step"));
    }
    assert_eq!(got, expected);
    println!(
        "{} dispatches and {} submissions for {STEPS} tokens",
        segment.counters.dispatches - before.dispatches,
        segment.counters.submissions - before.submissions
    );
    // Stopped in the middle, and begun again from an earlier position.
    segment.queue(&[0.5; 4]).expect("queues");
    segment.stop();
    assert!(Segment::rewind(&mut segment, 1, 60));
    segment.begin(1, 60, expected[40].token, &draw).expect("begins");
    segment.queue(&[0.5; 4]).expect("queues");
    for expected in &expected[41..45] {
        assert_eq!(&segment.next().expect("a step"), expected);
    }
    // A draw other than the likeliest.
    segment.stop();
    assert!(Segment::rewind(&mut segment, 1, 60));
    let draw = Draw { temperature: 5.0, top_k: 5, ..draw };
    segment.begin(1, 60, expected[40].token, &draw).expect("begins");
    segment.queue(&[0.999]).expect("queues");
    let drawn = segment.next().expect("a step");
    assert_eq!(drawn.candidates, expected[41].candidates);
    assert_eq!(drawn.token, drawn.candidates[4].0);
}

#[test]
fn a_step_is_the_same_in_pieces_of_any_length() {
    let model = tiny();
    let Some(backend) = gpu() else { return };
    let tokens = text(19);
    let sequence = Sequence { slot: 0, position: 0, tokens: &tokens, logits: Logits::All };
    let mut io = io(&model, &LIMITS);
    let mut logits = Vec::new();
    // Tokens of the first piece: 16, 10 and 1; the time it takes decides about the others.
    for budget in [None, Some(18), Some(1)] {
        let mut segment = make(&backend, &model, &model.architecture().blocks, &LIMITS).expect("compiles");
        if let Some(budget) = budget {
            segment.pace.took(false, budget, 1, super::pace::TARGET);
        }
        segment.forward(&Step { sequences: &[sequence] }, &mut io).expect("runs");
        logits.push(io.logits.clone());
    }
    assert!(logits.iter().all(|of| *of == logits[0]));
}

#[test]
fn slots_are_apart_and_positions_come_back() {
    let Some(backend) = gpu() else { return };
    let model = tiny();
    let blocks = &model.architecture().blocks;
    let mut segment = make(&backend, &model, blocks, &LIMITS).expect("compiles");
    let tokens = text(64);
    let mut io = io(&model, &LIMITS);
    let vocab_size = model.architecture().vocab_size;
    // Other tokens in the other slot, in the same steps.
    let other: Vec<u32> = tokens.iter().rev().copied().collect();
    let mut got = Vec::new();
    let mut position = 0;
    for n in [10, 1, 20] {
        let of = position..position + n;
        let step = Step {
            sequences: &[
                Sequence { slot: 1, position, tokens: &tokens[of.clone()], logits: Logits::All },
                Sequence { slot: 0, position, tokens: &other[of], logits: Logits::None },
            ],
        };
        segment.forward(&step, &mut io).expect("runs");
        got.extend_from_slice(&io.logits[..n * vocab_size]);
        position += n;
    }
    assert_close("two slots", &got);
    assert!(Segment::rewind(&mut segment, 1, 5));
    let sequence = Sequence { slot: 1, position: 5, tokens: &tokens[5..31], logits: Logits::All };
    segment.forward(&Step { sequences: &[sequence] }, &mut io).expect("runs");
    got.truncate(5 * vocab_size);
    got.extend_from_slice(&io.logits[..26 * vocab_size]);
    assert_close("rewound", &got);
}

#[test]
fn a_profile_names_kernels() {
    let Some(backend) = gpu() else { return };
    let model = tiny();
    let mut segment = make(&backend, &model, &model.architecture().blocks, &LIMITS).expect("compiles");
    let mut io = io(&model, &LIMITS);
    assert!(segment.profile(true).is_empty());
    for (position, tokens) in [(0, &[1, 2, 3][..]), (3, &[4])] {
        let sequence = Sequence { slot: 0, position, tokens, logits: Logits::Last };
        segment.forward(&Step { sequences: &[sequence] }, &mut io).expect("runs");
    }
    let phases = segment.profile(false);
    let named = |name: &str| phases.iter().find(|phase| phase.name == name);
    for name in ["embed", "attention", "experts_in", "head", "ternary_gemm", "experts_in_gemm"] {
        assert!(
            named(name).is_some_and(|phase| phase.bytes > 0 || name == "attention"),
            "{name}: {phases:?}"
        );
    }
    assert!(phases.iter().any(|phase| !phase.time.is_zero()), "{phases:?}");
    assert!(segment.profile(false).is_empty());
}
