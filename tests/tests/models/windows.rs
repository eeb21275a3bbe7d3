//! What a query sees: windows of 512 and 513 keys around their edge, and full layers beyond any window.

use std::sync::{Arc, atomic::AtomicBool};

use samara_format::Value;
use samara_runtime::{BlockSpec, Device, Engine, EngineOptions, Model, Session};
use samara_tests::{Fixture, changed, emulated, ids, model};

/// Logits after each of the lengths, ascending.
fn logits(model: &Arc<Model>, device: Device, ids: &[u32], lens: &[usize]) -> Vec<Vec<f32>> {
    let options = EngineOptions { device, context: 1100, max_batch: 64, ..EngineOptions::default() };
    let mut engine = Engine::new(Arc::clone(model), &options).expect("compiles");
    let mut session = Session::new(0);
    let after = |len: &usize| {
        let mut logits = Vec::new();
        session.prefill(&mut engine, &ids[..*len], &mut logits, &AtomicBool::new(false)).expect("runs");
        logits
    };
    lens.iter().map(after).collect()
}

fn with_window(window: u64) -> Arc<Model> {
    changed(|metadata| {
        metadata.insert("model.window", window);
    })
}

#[test]
fn a_window_of_512_and_one_of_513_differ_from_the_513th_token_on() {
    let window = if emulated() { 64 } else { 512 };
    let (narrow, wide) = (with_window(window as u64), with_window(window as u64 + 1));
    let lens = [window - 1, window, window + 1, window + 2, window + 3, 2 * window];
    let devices = [Device::Cpu, Device::Reference];
    for &device in if emulated() { &devices[..1] } else { &devices[..] } {
        let after = |model| logits(model, device, &ids(2 * window), &lens);
        for ((of_narrow, of_wide), n) in after(&narrow).iter().zip(after(&wide)).zip(lens) {
            assert_eq!(*of_narrow == of_wide, n <= window, "{n} tokens on {device:?}");
        }
    }
}

#[test]
fn a_window_over_several_parts_of_the_cache_is_the_same_in_any_steps() {
    // The cache looks at 256 positions at a time, so these windows begin inside one part, reach over two or three, and wrap.
    let windows = [257, 255, 256, 300, 512];
    let n = if emulated() { 300 } else { 1100 };
    for &window in if emulated() { &windows[..1] } else { &windows[..] } {
        let model = with_window(window);
        let ids = ids(n);
        let after = |lens: &[usize], max_batch| {
            let options =
                EngineOptions { device: Device::Cpu, context: 1100, max_batch, ..EngineOptions::default() };
            let mut engine = Engine::new(Arc::clone(&model), &options).expect("compiles");
            let (mut session, mut logits) = (Session::new(0), Vec::new());
            for &len in lens {
                session
                    .prefill(&mut engine, &ids[..len], &mut logits, &AtomicBool::new(false))
                    .expect("runs");
            }
            for &id in &ids[lens[lens.len() - 1]..] {
                session.decode(&mut engine, id, None, &mut logits).expect("runs");
            }
            logits
        };
        let in_one = after(&[n], 512);
        if emulated() {
            assert_eq!(after(&[255, 256, 257, n - 20], 64), in_one, "window {window}");
        } else {
            assert_eq!(after(&[511, 512, 513, n - 20], 64), in_one, "window {window}");
            assert_eq!(after(&[700, 1000], 512), in_one, "window {window}");
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
    let n = if emulated() { 65 } else { 700 };
    let (hay, mut needle) = (ids(n), ids(n));
    needle[0] ^= 1;
    for (model, seen) in [
        (model(Fixture::Stress), true),
        (kinds(["full", "sliding", "sliding", "sliding"]), true),
        // Four windows of 16 reach back 60 tokens at most.
        (kinds(["sliding"; 4]), false),
    ] {
        let devices = [Device::Cpu, Device::Reference];
        for &device in if emulated() { &devices[..1] } else { &devices[..] } {
            let differs = logits(&model, device, &hay, &[n]) != logits(&model, device, &needle, &[n]);
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
