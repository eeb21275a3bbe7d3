//! The GPU against the exact function: the first device that a driver offers, a software one if there is no other.

use std::sync::atomic::AtomicBool;

use samara_runtime::{
    Device, Engine, EngineOptions, KvType, Message, ReasoningSplit, RenderOptions, Request, Sampler,
    SamplerSpec, Session, adapters, divergence, generate,
};
use samara_tests::{
    Fixture, Golden, STRESS_INT8, TINY_INT8, emulated, engine, fixture, golden, ids, measure, model,
    unclamped,
};
use serde_json::Value;

/// Below this margin of the two best logits, rounding may pick the other one.
const MARGIN: f64 = 0.02;

/// The device to test, and whether it is one in software: a hundredth of the speed, so that tables leave their longest rows out,
/// which take other numbers through the same code. Without a device the test is left out, and said to be. `SAMARA_NO_GPU`
/// says that where this runs there is none.
fn gpu() -> Option<(Device, bool)> {
    if std::env::var_os("SAMARA_NO_GPU").is_some() {
        println!("skipped: optional: SAMARA_NO_GPU is set");
        return None;
    }
    let Some(adapter) = adapters().into_iter().next() else {
        assert!(std::env::var_os("SAMARA_NO_SKIPS").is_none(), "no driver offers a GPU");
        println!("skipped: no driver offers a GPU");
        return None;
    };
    println!("on {} ({})", adapter.name, adapter.driver);
    Some((Device::Gpu(Some(0)), adapter.software))
}

fn options(device: Device, max_batch: usize) -> EngineOptions {
    EngineOptions { device, context: 512, max_batch, max_logit_rows: max_batch, ..EngineOptions::default() }
}

/// Golden sequences; in software the shorter ones, which are in several steps too.
fn short(file: &str, software: bool) -> Vec<Golden> {
    let mut goldens = golden(file);
    goldens.retain(|golden| golden.ids.len() <= 64 || !software);
    goldens
}

#[test]
fn gpu_is_close_to_the_exact_function() {
    let Some((device, software)) = gpu() else { return };
    for (fixture, file, tolerance) in [
        (Fixture::Tiny, "tiny-maple", &TINY_INT8),
        (Fixture::Stress, "stress-maple", &STRESS_INT8),
        (Fixture::StressWindow17, "stress-maple-window17", &STRESS_INT8),
    ] {
        tolerance.check(&format!("{fixture:?}"), &mut engine(fixture, &options(device, 48)), &golden(file));
        // An emulated machine shows that it finds the device and computes right.
        if emulated() {
            return;
        }
    }
    let f32_cache = EngineOptions { kv: KvType::F32, ..options(device, 64) };
    let mut engine = engine(Fixture::Tiny, &f32_cache);
    TINY_INT8.check("Tiny with an f32 cache", &mut engine, &short("tiny-maple", software));
}

#[test]
fn one_token_a_step_is_close_too() {
    let Some((device, software)) = gpu() else { return };
    // Other kernels than those of longer steps.
    for (fixture, file, tolerance) in
        [(Fixture::Tiny, "tiny-maple", &TINY_INT8), (Fixture::Stress, "stress-maple", &STRESS_INT8)]
    {
        let mut engine = engine(fixture, &options(device, 1));
        tolerance.check(&format!("{fixture:?}, one by one"), &mut engine, &short(file, software));
    }
}

#[test]
fn layers_may_be_split_anywhere_between_cpu_and_gpu() {
    let Some((device, software)) = gpu() else { return };
    for (fixture, file, tolerance) in
        [(Fixture::Tiny, "tiny-maple", &TINY_INT8), (Fixture::Stress, "stress-maple", &STRESS_INT8)]
    {
        let n_layers = model(fixture).architecture().blocks.len() - 2;
        // Those of the trained model are eight, and one kind.
        let step = if software && fixture == Fixture::Tiny { 3 } else { 1 };
        for layers in (0..=n_layers).step_by(step) {
            let options = EngineOptions { gpu_layers: Some(layers), ..options(device, 48) };
            let mut engine = engine(fixture, &options);
            let on_gpu = engine.placements().iter().filter(|placement| placement.backend == "gpu");
            let wanted = match layers {
                0 => 0,
                layers if layers == n_layers => layers + 2,
                layers => layers + 1,
            };
            assert_eq!(on_gpu.count(), wanted, "{layers} layers: {:?}", engine.placements());
            let what = format!("{fixture:?} with {layers} of {n_layers} layers");
            tolerance.check(&what, &mut engine, &short(file, software));
        }
    }
}

#[test]
fn a_wrong_clamp_and_one_key_more_are_noticed() {
    let Some((device, software)) = gpu() else { return };
    let mut unclamped = Engine::new(unclamped(), &options(device, 48)).expect("compiles");
    let mut one_more = engine(Fixture::StressWindow17, &options(device, 48));
    for (what, engine) in [("no clamp", &mut unclamped), ("one key more", &mut one_more)] {
        let kl = measure(engine, &short("stress-maple", software)).mean_kl;
        println!("{what}: mean KL {kl:.3e}");
        assert!(kl > 2.0 * STRESS_INT8.mean_kl, "{what}: KL {kl}");
    }
}

#[test]
fn prompts_in_pieces_equal_one_pass() {
    let Some((device, _)) = gpu() else { return };
    let ids = ids(760);
    let logits_of = |max_batch: usize, ids: &[u32], lens: &[usize]| {
        let options = EngineOptions { device, context: 1100, max_batch, ..EngineOptions::default() };
        let mut engine = engine(Fixture::Stress, &options);
        let (mut session, mut logits) = (Session::new(0), Vec::new());
        for len in lens {
            session.prefill(&mut engine, &ids[..*len], &mut logits, &AtomicBool::new(false)).expect("runs");
        }
        logits
    };
    // A window of 16 wraps often; the full layer has all keys. The last forty come one by one.
    let whole = logits_of(1024, &ids, &[760]);
    let pieces: Vec<usize> = [511, 512, 513, 700, 703].into_iter().chain(720..=760).collect();
    for (max_batch, lens) in [(64, &pieces[..]), (33, &[760])] {
        let kl = divergence(&whole, &logits_of(max_batch, &ids, lens)).kl;
        println!("steps of {max_batch}, {} pieces: KL {kl:.3e}", lens.len());
        assert!(kl <= STRESS_INT8.mean_kl, "steps of {max_batch}, {lens:?}: KL {kl}");
    }
    // The planted fault: another token close to the end.
    let mut other = ids.clone();
    other[758] += 1;
    let others = logits_of(1024, &other, &[760]);
    assert!(divergence(&whole, &others).kl > 4.0 * STRESS_INT8.mean_kl);
}

#[test]
fn golden_answers_are_reproduced_token_for_token() {
    let Some((device, software)) = gpu() else { return };
    let goldens = std::fs::read_to_string(fixture("golden/tiny-answers.jsonl")).expect("goldens");
    let goldens: Vec<Value> = goldens.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut engine = engine(Fixture::Tiny, &options(device, 48));
    assert!(engine.placements().iter().all(|placement| placement.backend == "gpu"));
    let tokenizer = model(Fixture::Tiny).tokenizer().expect("a tokenizer");
    let template = model(Fixture::Tiny).chat_template(&tokenizer).expect("a template");
    let clear =
        goldens.iter().filter(|golden| golden["smallest_margin"].as_f64().expect("a margin") >= MARGIN);
    let clear: Vec<&Value> = clear.collect();
    assert!(clear.len() >= 50, "only {} goldens are clear", clear.len());
    let mut session = Session::new(0);
    for golden in clear.into_iter().step_by(if software { 20 } else { 1 }) {
        let question = golden["question"].as_str().expect("a question");
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let pieces = template.render(&[Message::new("user", question)], options).expect("renders");
        let prompt = tokenizer.encode_pieces(&pieces).expect("encodes");
        let stop_ids = model(Fixture::Tiny).stop_ids().to_vec();
        let request = Request {
            prompt: &prompt,
            stop: &[],
            stop_ids: &stop_ids,
            max_tokens: None,
            split: ReasoningSplit::new(true),
        };
        let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
        let mut sampler = Sampler::new(spec).expect("sound");
        let cancel = AtomicBool::new(false);
        let outcome =
            generate(&mut engine, &mut session, &tokenizer, &mut sampler, &request, &cancel, &mut |_| {});
        let ids: Vec<u64> = outcome.expect("answers").tokens.into_iter().map(u64::from).collect();
        let wanted: Vec<u64> =
            golden["ids"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id")).collect();
        assert_eq!(ids, wanted, "{question}");
    }
}
