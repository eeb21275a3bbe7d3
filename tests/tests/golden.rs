//! The backends against the exact function, through converted files.

use samara_runtime::{Activations, Device, Engine, EngineOptions, Limits, Logits, Sequence, Step, backends};
use samara_tests::{Fixture, Golden, compare_rows, engine, golden, model};

/// What a backend may differ from the exact logits by. Reference: f32 rounding only. CPU: int8
/// activations, one scale for 16 inputs. Its largest difference is at tokens the model finds hopeless,
/// whose logits are tens below the best, so the KL is the bound that means something.
struct Tolerance {
    max_abs: f64,
    mean_kl: f64,
    hidden: f32,
}

fn options(device: Device, max_batch: usize) -> EngineOptions {
    EngineOptions { device, context: 512, max_batch, max_logit_rows: max_batch, ..EngineOptions::default() }
}

/// Logits of every position of a sequence, run in steps of `max_batch`.
fn all_logits(engine: &mut Engine, ids: &[u32]) -> Vec<f32> {
    let mut rows = Vec::new();
    samara_runtime::score(engine, ids, &mut |_, step| rows.extend_from_slice(step)).expect("runs");
    rows
}

/// Mean KL over all compared rows of all sequences, and the largest difference of two logits.
fn measure(engine: &mut Engine, goldens: &[Golden]) -> (f64, f64) {
    let (mut kl, mut max_abs, mut n) = (0.0, 0.0f64, 0);
    for golden in goldens {
        let rows = all_logits(engine, &golden.ids);
        let vocab_size = golden.logits[0].len();
        let last = &rows[rows.len() - golden.logits.len() * vocab_size..];
        let (mean, max, _) = compare_rows(golden.logits.iter().map(Vec::as_slice), last);
        kl += mean * golden.logits.len() as f64;
        max_abs = max_abs.max(max);
        n += golden.logits.len();
    }
    (kl / f64::from(u32::try_from(n).expect("few rows")), max_abs)
}

fn check(fixture: Fixture, file: &str, device: Device, tolerance: &Tolerance) {
    let mut engine = engine(fixture, &options(device, 48));
    let (kl, max_abs) = measure(&mut engine, &golden(file));
    println!("{fixture:?} {file} on {device:?}: mean KL {kl:.3e}, max abs {max_abs:.3e}");
    assert!(kl <= tolerance.mean_kl, "{fixture:?} on {device:?}: mean KL {kl}");
    assert!(max_abs <= tolerance.max_abs, "{fixture:?} on {device:?}: max abs {max_abs}");
}

const TINY_EXACT: Tolerance = Tolerance { max_abs: 1e-4, mean_kl: 1e-11, hidden: 1e-5 };
const STRESS_EXACT: Tolerance = Tolerance { max_abs: 1e-4, mean_kl: 1e-10, hidden: 1e-5 };

#[test]
fn reference_equals_the_exact_function() {
    check(Fixture::Tiny, "tiny-maple", Device::Reference, &TINY_EXACT);
    check(Fixture::Stress, "stress-maple", Device::Reference, &STRESS_EXACT);
    check(Fixture::StressWindow17, "stress-maple-window17", Device::Reference, &STRESS_EXACT);
}

#[test]
fn cpu_is_close_to_the_exact_function() {
    check(Fixture::Tiny, "tiny-maple", Device::Cpu, &Tolerance { max_abs: 0.5, mean_kl: 1e-6, hidden: 0.0 });
}

#[test]
fn one_key_more_is_noticed() {
    // The harness's planted fault: a window of 17 against the goldens for 16.
    let mut engine = engine(Fixture::StressWindow17, &options(Device::Reference, 48));
    let (kl, max_abs) = measure(&mut engine, &golden("stress-maple"));
    assert!(kl > 1e3 * STRESS_EXACT.mean_kl && max_abs > STRESS_EXACT.max_abs, "KL {kl}, max abs {max_abs}");
}

/// Runs block by block, each a segment of its own, and compares the residual after every layer.
fn check_hidden(fixture: Fixture, file: &str, tolerance: &Tolerance) {
    let model = model(fixture);
    let backends = backends();
    let backend = backends.iter().find(|backend| backend.name() == "reference").expect("a reference backend");
    let architecture = model.architecture();
    let n_layers = architecture.blocks.len() - 2;
    let limits = Limits { threads: 1, n_slots: 1, context: 512, max_batch: 512, max_logit_rows: 1 };
    for golden in golden(file) {
        let sequence = Sequence { slot: 0, position: 0, tokens: &golden.ids, logits: Logits::Last };
        let step = Step { sequences: &[sequence] };
        let mut io = Activations {
            hidden: vec![0.0; golden.ids.len() * architecture.hidden_size],
            logits: vec![0.0; architecture.vocab_size],
        };
        for (i, block) in architecture.blocks[..=n_layers].iter().enumerate() {
            let mut segment =
                backend.compile(&model, std::slice::from_ref(block), &limits).expect("compiles");
            segment.forward(&step, &mut io).expect("runs");
            if i == 0 {
                continue;
            }
            let exact = &golden.hidden[i - 1];
            let last = &io.hidden[io.hidden.len() - architecture.hidden_size..];
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let difference =
                norm(&mut exact.iter().zip(last).map(|(a, b)| a - b)) / norm(&mut exact.iter().copied());
            assert!(
                difference <= tolerance.hidden,
                "{fixture:?}, {} tokens, {}: relative difference {difference}",
                golden.ids.len(),
                block.label()
            );
        }
    }
}

#[test]
fn reference_residuals_equal_after_each_layer() {
    check_hidden(Fixture::Tiny, "tiny-maple", &TINY_EXACT);
    check_hidden(Fixture::Stress, "stress-maple", &STRESS_EXACT);
}

#[test]
fn argmax_agrees_at_every_position() {
    for device in [Device::Reference, Device::Cpu] {
        let mut engine = engine(Fixture::Tiny, &options(device, 64));
        let (mut same, mut n) = (0, 0);
        for golden in golden("tiny-maple") {
            let rows = all_logits(&mut engine, &golden.ids);
            let got = rows.chunks_exact(golden.logits[0].len()).map(|row| samara_runtime::argmax(row) as u32);
            same += got.zip(&golden.argmax).filter(|(a, b)| a == *b).count();
            n += golden.argmax.len();
        }
        println!("{device:?}: {same} of {n} argmaxes agree");
        let wanted = if device == Device::Reference { n } else { n - n / 300 };
        assert!(same >= wanted, "{device:?}: {same} of {n} argmaxes agree");
    }
}
