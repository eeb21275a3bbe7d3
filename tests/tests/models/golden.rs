//! The backends against the exact function, through converted files.

use samara_runtime::{
    Activations, Device, Engine, EngineOptions, HeadMode, KvType, Limits, Logits, Sequence, Step, backends,
};
use samara_simd::Kernels;
use samara_tests::{
    Fixture, STRESS_EXACT, STRESS_INT8, TINY_EXACT, TINY_INT8, TINY_KV8, Tolerance, emulated, engine, golden,
    measure, model, unclamped,
};

fn options(device: Device, max_batch: usize) -> EngineOptions {
    EngineOptions { device, context: 512, max_batch, max_logit_rows: max_batch, ..EngineOptions::default() }
}

fn check(fixture: Fixture, file: &str, device: Device, tolerance: &Tolerance) {
    let mut engine = engine(fixture, &options(device, 48));
    tolerance.check(&format!("{fixture:?} {file} on {device:?}"), &mut engine, &golden(file));
}

#[test]
fn reference_equals_the_exact_function() {
    check(Fixture::Tiny, "tiny-maple", Device::Reference, &TINY_EXACT);
    check(Fixture::Stress, "stress-maple", Device::Reference, &STRESS_EXACT);
    // An emulated machine takes five seconds for each of the others, which are the same code.
    if emulated() {
        return;
    }
    check(Fixture::StressHf, "stress-maple", Device::Reference, &STRESS_EXACT);
    check(Fixture::StressWindow17, "stress-maple-window17", Device::Reference, &STRESS_EXACT);
}

#[test]
fn cpu_is_close_to_the_exact_function() {
    check(Fixture::Stress, "stress-maple", Device::Cpu, &STRESS_INT8);
    check(Fixture::StressWindow17, "stress-maple-window17", Device::Cpu, &STRESS_INT8);
}

#[test]
fn cpu_is_close_with_each_kind_of_cache() {
    for (kv, tolerance) in [(KvType::F32, &TINY_INT8), (KvType::Bf16, &TINY_INT8), (KvType::Q8, &TINY_KV8)] {
        let mut engine = engine(Fixture::Tiny, &EngineOptions { kv, ..options(Device::Cpu, 48) });
        tolerance.check(&format!("{kv} cache"), &mut engine, &golden("tiny-maple"));
    }
}

#[test]
fn a_clamp_that_does_not_bind_is_noticed() {
    // The planted fault of the comparison on the CPU.
    let mut engine = Engine::new(unclamped(), &options(Device::Cpu, 48)).expect("compiles");
    let found = measure(&mut engine, &golden("stress-maple"));
    println!("unclamped: {found:?}");
    assert!(found.mean_kl > 5.0 * STRESS_INT8.mean_kl, "{found:?}");
}

#[test]
fn one_key_more_is_noticed() {
    // The harness's planted fault: a window of 17 against the goldens for 16.
    let mut engine = engine(Fixture::StressWindow17, &options(Device::Reference, 48));
    let found = measure(&mut engine, &golden("stress-maple"));
    assert!(found.mean_kl > 1e3 * STRESS_EXACT.mean_kl && found.max_abs > STRESS_EXACT.max_abs, "{found:?}");
    assert!(found.same < found.n - found.n / 300, "{found:?}");
}

/// Largest relative difference of a residual at the last position, over all layers and sequences, and where.
/// Runs block by block, each a segment of its own.
fn hidden_difference(fixture: Fixture, file: &str) -> (f32, String) {
    let model = model(fixture);
    let backends = backends(Kernels::detect());
    let backend = backends.iter().find(|backend| backend.name() == "reference").expect("a reference backend");
    let architecture = model.architecture();
    let n_layers = architecture.blocks.len() - 2;
    let limits = Limits {
        threads: 1,
        fewer_threads: false,
        n_slots: 1,
        context: 512,
        max_batch: 512,
        max_logit_rows: 1,
        kv: KvType::F32,
        head: HeadMode::EXACT,
    };
    let mut worst = (0.0, String::new());
    for golden in golden(file) {
        let sequence = Sequence { slot: 0, position: 0, tokens: &golden.ids, logits: Logits::Last };
        let step = Step { sequences: &[sequence] };
        let mut io = Activations::new(architecture, golden.ids.len(), 1);
        for (i, block) in architecture.blocks[..=n_layers].iter().enumerate() {
            let mut segment =
                backend.compile(&model, &[(block, &[])], &limits, &mut |_, _| {}).expect("compiles");
            segment.forward(&step, &mut io).expect("runs");
            if i == 0 {
                continue;
            }
            let exact = &golden.hidden[i - 1];
            let last = &io.hidden[io.hidden.len() - architecture.hidden_size..];
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let difference =
                norm(&mut exact.iter().zip(last).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
            if difference > worst.0 {
                worst = (difference, format!("{fixture:?}, {} tokens, {}", golden.ids.len(), block.label()));
            }
        }
    }
    worst
}

#[test]
fn reference_residuals_equal_after_each_layer() {
    let goldens = [
        (Fixture::Stress, "stress-maple", &STRESS_EXACT),
        (Fixture::StressWindow17, "stress-maple-window17", &STRESS_EXACT),
        (Fixture::Tiny, "tiny-maple", &TINY_EXACT),
    ];
    for &(fixture, file, tolerance) in if emulated() { &goldens[..1] } else { &goldens[..] } {
        let (difference, place) = hidden_difference(fixture, file);
        println!("residuals of {file}: {difference:.2e} at most, {place}");
        assert!(difference <= tolerance.hidden, "{place}: relative difference {difference}");
    }
    // The planted fault: one key more.
    assert!(hidden_difference(Fixture::StressWindow17, "stress-maple").0 > 100.0 * STRESS_EXACT.hidden);
}
