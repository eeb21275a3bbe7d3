//! What a query sees: windows of 512 and 513 keys around their edge, and full layers beyond any window.

use std::sync::{Arc, atomic::AtomicBool};

use samara_format::{Access, Metadata, Value};
use samara_runtime::{BlockSpec, Device, Engine, EngineOptions, Model, Session};
use samara_tests::{Fixture, model, rewrite};

/// The stress model with other metadata: 4 layers, the last one full, the others with a window of 16.
fn changed(edit: impl FnOnce(&mut Metadata)) -> Arc<Model> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("changed.samara");
    rewrite(model(Fixture::Stress).file(), &path, |metadata, _| edit(metadata), |_, _| {});
    Arc::new(Model::open(&path, Access::Read).expect("opens"))
}

fn logits(model: &Arc<Model>, device: Device, ids: &[u32]) -> Vec<f32> {
    let options = EngineOptions { device, context: 1100, max_batch: 64, ..EngineOptions::default() };
    let mut engine = Engine::new(Arc::clone(model), &options).expect("compiles");
    let mut logits = Vec::new();
    Session::new(0).prefill(&mut engine, ids, &mut logits, &AtomicBool::new(false)).expect("runs");
    logits
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20).collect()
}

fn with_window(window: u64) -> Arc<Model> {
    changed(|metadata| {
        metadata.insert("model.window", window);
    })
}

#[test]
fn a_window_of_512_and_one_of_513_differ_from_the_513th_token_on() {
    let (model_512, model_513) = (with_window(512), with_window(513));
    for device in [Device::Cpu, Device::Reference] {
        for n in [511, 512, 513, 514, 515, 1024] {
            let ids = ids(n);
            let same = logits(&model_512, device, &ids) == logits(&model_513, device, &ids);
            assert_eq!(same, n <= 512, "{n} tokens on {device:?}");
        }
    }
}

#[test]
fn full_layers_see_the_first_token_and_windows_do_not() {
    let kinds = |kinds: [&str; 4]| {
        let kinds = Value::Strs(kinds.map(str::to_owned).to_vec());
        changed(|metadata| {
            metadata.insert("model.layer_kinds", kinds);
        })
    };
    let (hay, mut needle) = (ids(700), ids(700));
    needle[0] ^= 1;
    for (model, seen) in [
        (model(Fixture::Stress), true),
        (kinds(["full", "sliding", "sliding", "sliding"]), true),
        // Four windows of 16 reach back 60 tokens at most.
        (kinds(["sliding"; 4]), false),
    ] {
        for device in [Device::Cpu, Device::Reference] {
            let differs = logits(&model, device, &hay) != logits(&model, device, &needle);
            assert_eq!(differs, seen, "{device:?}");
        }
    }
}

#[test]
fn layer_kinds_decide_window_and_rotation() {
    // Full at 3 and 7, no RoPE there, whatever `nope_on_global_attention` says in the checkpoint's config.
    let model = model(Fixture::Tiny);
    for block in &model.architecture().blocks {
        let BlockSpec::Layer(layer) = block else { continue };
        let full = matches!(layer.index, 3 | 7);
        assert_eq!(layer.attn.window, (!full).then_some(64), "layer {}", layer.index);
        assert_eq!(layer.attn.rope.map(|rope| (rope.theta, rope.dim)), (!full).then_some((10_000.0, 64)));
    }
}
