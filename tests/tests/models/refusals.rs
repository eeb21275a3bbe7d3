//! Files and requests the runtime refuses, each with its own error.

use std::{path::PathBuf, sync::Arc, sync::atomic::AtomicBool};

use samara_format::{Access, Dtype, Metadata, TensorSpec, Value};
use samara_runtime::{Device, Engine, EngineOptions, Error, KvType, Model, Plan, Session, score};
use samara_simd::{Isa, Kernels};
use samara_tests::{Fixture, model, rewrite};
use tempfile::TempDir;

/// Opens a copy of the tiny model changed by `edit` and `patch`.
fn open(
    edit: impl FnOnce(&mut Metadata, &mut Vec<TensorSpec>),
    patch: impl Fn(&str, &mut Vec<u8>),
) -> Result<Model, Error> {
    let dir = TempDir::new().expect("a temporary folder");
    let path: PathBuf = dir.path().join("changed.samara");
    rewrite(model(Fixture::Tiny).file(), &path, edit, patch);
    Model::open(&path, Access::Read)
}

fn unpatched(_: &str, _: &mut Vec<u8>) {}

fn message<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("nothing was refused"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn metadata_that_contradicts_itself_is_named() {
    let set = |key: &'static str, value: Value| {
        move |metadata: &mut Metadata, _: &mut Vec<TensorSpec>| {
            metadata.insert(key, value);
        }
    };
    let kinds = |n: usize, kind: &str| Value::Strs(vec![kind.to_owned(); n]);
    for (key, value, expected) in [
        ("general.architecture", Value::Str("llama".to_owned()), "`llama`"),
        ("model.layer_kinds", kinds(7, "full"), "7 entries for 8 layers"),
        ("model.layer_kinds", kinds(8, "linear"), "`linear`"),
        ("model.n_heads", Value::U64(3), "does not divide"),
        ("model.n_experts_used", Value::U64(33), "33 of 32"),
        ("model.hidden_size", Value::U64(0), "model.hidden_size"),
        ("model.hidden_size", Value::U64(u64::MAX), "model.hidden_size"),
        ("model.hidden_size", Value::U64(512), "`embed`"),
        ("model.vocab_size", Value::U64(4095), "`embed`"),
        ("model.expert_size", Value::U64(64), "`layers.0.experts`"),
        ("model.rope_dim", Value::U64(63), "model.rope_dim"),
        ("model.rope_dim", Value::U64(256), "model.rope_dim"),
        ("model.rope_theta", Value::F64(0.0), "model.rope_theta"),
        ("model.rms_norm_eps", Value::F64(-1.0), "model.rms_norm_eps"),
        ("model.window", Value::U64(0), "model.window"),
        ("model.norm_topk", Value::U64(1), "model.norm_topk"),
        ("tokenizer.stop_ids", Value::U64s(vec![1 << 40]), "tokenizer.stop_ids"),
        ("flash.n_clusters", Value::U64(127), "127 clusters of 32 for 4096 tokens"),
        ("flash.cluster_size", Value::U64(0), "flash.cluster_size"),
        ("flash.n_probes", Value::U64(129), "129 of 128 clusters"),
        ("flash.force_tokens", Value::U64s(vec![3990, 4096]), "4096 is not below vocab_size"),
    ] {
        let text = message(open(set(key, value.clone()), unpatched));
        assert!(text.contains(expected), "{key} = {value:?}: {text}");
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let without = |name: &'static str| {
        move |_: &mut Metadata, specs: &mut Vec<TensorSpec>| specs.retain(|spec| spec.name != name)
    };
    for name in ["embed", "layers.3.o", "layers.7.experts", "final_norm", "head"] {
        let text = message(open(without(name), unpatched));
        assert!(text.contains(&format!("`{name}` is missing")), "{text}");
    }
    let as_f32 = |_: &mut Metadata, specs: &mut Vec<TensorSpec>| {
        let norm = specs.iter_mut().find(|spec| spec.name == "layers.2.ffn_norm").expect("a norm");
        *norm = TensorSpec::single("layers.2.ffn_norm", Dtype::F32, 1, 256);
    };
    let text = message(open(as_f32, unpatched));
    assert!(text.contains("layers.2.ffn_norm") && text.contains("F32"), "{text}");
}

#[test]
fn a_token_map_that_repeats_a_token_is_refused() {
    let patch = |name: &str, bytes: &mut Vec<u8>| {
        if name == "head.token_map" {
            bytes.copy_within(0..4, 40);
        }
    };
    let model = Arc::new(open(|_, _| {}, patch).expect("opens"));
    for device in [Device::Cpu, Device::Reference] {
        let options = EngineOptions { device, ..EngineOptions::default() };
        let error = Engine::new(Arc::clone(&model), &options).expect_err("refused");
        assert!(matches!(error, Error::TokenMap { row: 10, .. }), "{error}");
    }
}

/// The error of a prefill on the tiny model with `bits` at the beginning of a tensor (its last two bytes of
/// row scales when `scale`).
fn damage(tensor: &'static str, at_end: bool, bits: u16, device: Device) -> Error {
    let patch = |name: &str, bytes: &mut Vec<u8>| {
        if name == tensor {
            let at = if at_end { bytes.len() - 512 } else { 0 };
            bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    };
    let model = Arc::new(open(|_, _| {}, patch).expect("opens"));
    let options = EngineOptions { device, ..EngineOptions::default() };
    let mut engine = Engine::new(Arc::clone(&model), &options).expect("compiles");
    let mut session = Session::new(0);
    let result = session.prefill(&mut engine, &[1, 2, 3], &mut Vec::new(), &AtomicBool::new(false));
    assert!(session.tokens().is_empty() && engine.cached(0) == 0, "a failed step leaves nothing cached");
    result.expect_err("refused")
}

const NAN: u16 = 0x7fc0;
const HUGE: u16 = 0x7f00; // 1.7e38

#[test]
fn not_a_number_names_the_layer() {
    for device in [Device::Cpu, Device::Reference] {
        // A row of the router, norms before and after attention, and a row scale whose products overflow the
        // next norm: the 256 row scales of `o` are the last 512 bytes of its tensor.
        for (tensor, at_end, bits, layer) in [
            ("layers.2.router", false, NAN, 2),
            ("layers.5.ffn_norm", false, NAN, 5),
            ("layers.4.attn_norm", false, NAN, 4),
            ("layers.3.o", true, HUGE, 3),
            ("layers.7.o", true, HUGE, 7),
        ] {
            let error = damage(tensor, at_end, bits, device);
            assert!(
                matches!(error, Error::NonFinite { layer: found, .. } if found == layer),
                "{tensor} on {device:?}: {error}"
            );
        }
        let error = damage("final_norm", false, NAN, device);
        assert!(matches!(error, Error::NonFiniteHead), "{device:?}: {error}");
    }
}

#[test]
fn logits_that_are_not_finite_are_not_scored() {
    let patch = |name: &str, bytes: &mut Vec<u8>| {
        if name == "head" {
            bytes[..2].copy_from_slice(&NAN.to_le_bytes());
        }
    };
    let model = Arc::new(open(|_, _| {}, patch).expect("opens"));
    let options = EngineOptions { max_logit_rows: 8, ..EngineOptions::default() };
    let mut engine = Engine::new(model, &options).expect("compiles");
    let error = score(&mut engine, &[1, 2, 3], &mut |_, _| panic!("handed out")).expect_err("refused");
    assert!(matches!(error, Error::NonFiniteLogits { position: 0 }), "{error}");
}

#[test]
fn requests_beyond_the_context_are_refused_with_both_numbers() {
    let options = EngineOptions { context: 100, ..EngineOptions::default() };
    let mut engine = Engine::new(model(Fixture::Tiny), &options).expect("compiles");
    let (mut session, mut logits, go) = (Session::new(0), Vec::new(), AtomicBool::new(false));
    let mut prefill =
        |session: &mut Session, ids: &[u32]| session.prefill(&mut engine, ids, &mut logits, &go);

    let text = message(prefill(&mut session, &[7; 101]));
    assert!(text.contains("101") && text.contains("100") && text.contains("4096"), "{text}");
    assert!(matches!(prefill(&mut session, &[]), Err(Error::EmptyPrompt)));
    let text = message(prefill(&mut session, &[1, 2, 4096]));
    assert!(text.contains("token 4096 at position 2"), "{text}");
    // What was refused has left nothing behind.
    assert_eq!(prefill(&mut session, &[7; 100]).expect("fits").run, 100);
    assert!(matches!(
        session.decode(&mut engine, 1, None, &mut logits),
        Err(Error::PromptTooLong { prompt: 101, .. })
    ));

    let too_large = EngineOptions { context: 4097, ..EngineOptions::default() };
    let text = message(Engine::new(model(Fixture::Tiny), &too_large));
    assert!(text.contains("4097") && text.contains("4096"), "{text}");
}

#[test]
fn threads_that_cannot_start_are_an_error() {
    let options = EngineOptions { threads: 1025, ..EngineOptions::default() };
    match Engine::new(model(Fixture::Tiny), &options) {
        Err(Error::Threads { threads: 1025, .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn kernels_that_this_machine_lacks_are_an_error() {
    let missing = Isa::ALL.into_iter().filter(|isa| Kernels::for_isa(*isa).is_err());
    for isa in missing {
        let options = EngineOptions { isa: Some(isa), ..EngineOptions::default() };
        let text = message(Engine::new(model(Fixture::Tiny), &options));
        assert!(text.contains(isa.name()) && text.contains("use scalar"), "{text}");
    }
    let options = EngineOptions { isa: Some(Isa::Scalar), ..EngineOptions::default() };
    let engine = Engine::new(model(Fixture::Tiny), &options).expect("scalar runs everywhere");
    let kernels = engine.placements().iter().flat_map(|placement| &placement.kernels);
    assert!(kernels.clone().count() > 0 && kernels.clone().all(|id| id.to_string().ends_with("/scalar")));
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_what_is() {
    let options = EngineOptions { device: Device::Gpu(Some(99)), ..EngineOptions::default() };
    let text = message(Engine::new(model(Fixture::Tiny), &options));
    assert!(text.contains("--device gpu") && text.contains("--device cpu"), "{text}");
}

#[test]
fn memory_is_predicted_before_it_is_allocated() {
    let plan = |context| {
        let options = EngineOptions { context, ..EngineOptions::default() };
        Plan::new(model(Fixture::Tiny), &options).expect("a plan")
    };
    let needed = plan(4096).memory();
    // Two full layers of 4,096 positions and six rings of 64 - 1 + 512, in whole parts of 256; two heads of 128, K and V.
    let with = |kv| {
        let options = EngineOptions { context: 4096, kv, ..EngineOptions::default() };
        Plan::new(model(Fixture::Tiny), &options).expect("a plan").memory().kv
    };
    let positions = (2 * 4096 + 6 * 768) * 2 * 2;
    assert_eq!(needed.kv, positions * 128 * 2);
    assert_eq!([with(KvType::F32), with(KvType::Q8)], [positions * 128 * 4, positions * (128 + 4)]);
    assert_eq!(plan(4096).check_memory(needed.private()).expect("just fits"), needed);

    let half = needed.private() / 2;
    let largest = plan(4096).largest_context(half);
    let fits = |context| plan(context).memory().private() <= half;
    assert!(fits(largest) && !fits(largest + 1), "{largest} is not the largest");
    assert_eq!(plan(1).with_context(largest).expect("a plan").memory(), plan(largest).memory());
    let text = message(plan(4096).check_memory(half));
    assert!(text.contains(&format!("--ctx {largest}")), "{text}");
    assert!(message(plan(4096).check_memory(1000)).contains("no context fits"));
    assert!(matches!(plan(1).with_context(4097), Err(Error::ContextTooLarge { context: 4097, max: 4096 })));
}

#[test]
fn every_block_says_who_runs_it() {
    for (device, kernel) in [(Device::Cpu, "ternary_gemv/"), (Device::Reference, "layer/f32")] {
        let options = EngineOptions { device, ..EngineOptions::default() };
        let plan = Plan::new(model(Fixture::Tiny), &options).expect("a plan");
        let placements = plan.placements();
        let blocks: Vec<&str> = placements.iter().map(|placement| placement.block.as_str()).collect();
        assert_eq!((blocks[0], blocks[1], blocks[8], blocks[9]), ("embed", "layer 0", "layer 7", "head"));
        assert!(placements.iter().all(|placement| placement.backend == device.name()));
        assert!(placements[1].kernels.iter().any(|id| id.to_string().starts_with(kernel)), "{placements:?}");
        assert_eq!(plan.compile(&mut |_, _| {}).expect("compiles").placements(), placements);
    }
}
