//! Which blocks go to a GPU: by number, by memory, by speed, and when it fails.

use std::sync::{Mutex, atomic::Ordering};

use super::*;
use crate::fake::{FakeBackend, model};

fn options(device: Device) -> EngineOptions {
    EngineOptions { device, context: 160, ..EngineOptions::default() }
}

fn plan(options: &EngineOptions, cpu: FakeBackend, gpu: Option<FakeBackend>) -> Result<Plan, Error> {
    let gpu = gpu.map(|gpu| Box::new(gpu) as Box<dyn Backend>);
    Plan::of_backends(model("tiny-maple-2bit"), options, vec![Box::new(cpu)], gpu)
}

/// First block on the GPU, by its label; `none` without one.
fn first(plan: &Plan) -> String {
    let placements = plan.placements();
    let found = placements.iter().position(|placement| placement.backend == "gpu");
    if let Some(first) = found {
        assert!(placements[first..].iter().all(|placement| placement.backend == "gpu"), "{placements:?}");
    }
    found.map_or_else(|| "none".to_owned(), |first| placements[first].block.clone())
}

/// A layer takes 110 bytes with a context of 160, the head 50, the embedding 30: 960 in all.
#[test]
fn the_last_layers_go_to_the_gpu_while_they_fit() {
    let check = |device: Device, layers: Option<usize>, memory: Option<u64>, want: &str, bytes: u64| {
        let options = EngineOptions { gpu_layers: layers, gpu_memory: memory, ..options(device) };
        let plan = plan(&options, FakeBackend::cpu(0), Some(FakeBackend::gpu())).expect("a plan");
        assert_eq!((first(&plan).as_str(), plan.memory().device), (want, bytes), "{options:?}");
        assert_eq!(plan.gpu().is_some(), want != "none");
        // 8 bytes of a block on the host for each 8 positions, as the fake says.
        let blocks = plan.placements().iter().filter(|placement| placement.backend == "cpu").count();
        assert_eq!(plan.memory().kv, 160 * blocks as u64, "{options:?}");
    };
    for device in [Device::Gpu(None), Device::Gpu(Some(0)), Device::Auto] {
        check(device, None, None, "embed", 960);
        check(device, None, Some(960), "embed", 960);
        check(device, None, Some(959), "layer 0", 930);
        check(device, None, Some(929), "layer 1", 820);
        check(device, None, Some(160), "layer 7", 160);
        check(device, None, Some(159), "head", 50);
        check(device, None, Some(49), "none", 0);
        check(device, Some(0), None, "none", 0);
        check(device, Some(1), None, "layer 7", 160);
        check(device, Some(7), None, "layer 1", 820);
        check(device, Some(8), None, "embed", 960);
        check(device, Some(99), None, "embed", 960);
    }
}

#[test]
fn what_does_not_fit_the_gpu_is_refused_with_what_does() {
    let check = |device: Device, layers: Option<usize>, memory: u64, want: Option<&str>| {
        let options = EngineOptions { gpu_layers: layers, gpu_memory: Some(memory), ..options(device) };
        let plan = plan(&options, FakeBackend::cpu(0), Some(FakeBackend::gpu())).expect("a plan");
        let checked = plan.check_memory(u64::MAX).err().map(|error| error.to_string());
        match (checked, want) {
            (None, None) => {}
            (Some(text), Some(part)) => assert!(text.contains(part), "{options:?}: {text}"),
            (checked, want) => panic!("{options:?}: {checked:?}, {want:?}"),
        }
    };
    check(Device::Gpu(None), None, 50, None);
    check(
        Device::Gpu(None),
        None,
        49,
        Some("needs 50 B for its part of the model, and --gpu-memory grants 49 B; grant more"),
    );
    check(Device::Auto, None, 49, None);
    check(Device::Gpu(None), Some(2), 270, None);
    check(Device::Gpu(None), Some(2), 269, Some("the last 1 layers fit: use --gpu-layers 1"));
    check(Device::Auto, Some(2), 269, Some("the last 1 layers fit: use --gpu-layers 1"));
    check(Device::Gpu(None), Some(0), 0, None);
}

#[test]
fn the_largest_context_fits_both_memories() {
    let options = EngineOptions { gpu_layers: Some(2), gpu_memory: Some(270), ..options(Device::Gpu(None)) };
    let plan = plan(&options, FakeBackend::cpu(0), Some(FakeBackend::gpu())).expect("a plan");
    // Two layers have a byte for each 16 positions: 10 each.
    assert_eq!(plan.largest_context(u64::MAX), 175);
    let half = plan.memory().private();
    assert_eq!(plan.largest_context(half), 160);
}

#[test]
fn a_gpu_steps_by_its_own_batch() {
    let max_batch = |device, layers, max_batch| {
        let options = EngineOptions { context: 4096, max_batch, gpu_layers: layers, ..options(device) };
        let plan = plan(&options, FakeBackend::cpu(0), Some(FakeBackend::gpu())).expect("a plan");
        plan.compile(&mut |_, _| {}).expect("compiles").limits().max_batch
    };
    assert_eq!(max_batch(Device::Gpu(None), None, 0), 2048);
    assert_eq!(max_batch(Device::Gpu(None), Some(1), 0), 2048);
    assert_eq!(max_batch(Device::Gpu(None), Some(0), 0), 512);
    assert_eq!(max_batch(Device::Gpu(None), None, 32), 32);
}

#[test]
fn the_faster_has_each_layer() {
    let check = |cpu_us: u64, gpu_us: u64, want: &str| {
        let gpu = FakeBackend { layer_us: gpu_us, ..FakeBackend::gpu() };
        let mut plan = plan(&options(Device::Auto), FakeBackend::cpu(cpu_us), Some(gpu)).expect("a plan");
        let choices = plan.measure(&Choices::default());
        assert_eq!(first(&plan), want, "{cpu_us} {gpu_us}: {:?}", plan.reasons());
        assert!(plan.reasons().iter().any(|line| line.contains("us a layer")), "{:?}", plan.reasons());
        assert_eq!(choices.speeds.len(), 2, "{choices:?}");
        // What is known is not measured again.
        let mut again = self::plan(&options(Device::Auto), FakeBackend::cpu(0), Some(FakeBackend::gpu()));
        let again = again.as_mut().expect("a plan");
        assert_eq!(again.measure(&choices).speeds, choices.speeds);
        assert_eq!(first(again), want);
    };
    check(3000, 0, "embed");
    check(0, 3000, "none");
    // Asked for, it is not measured.
    let gpu = FakeBackend { layer_us: 3000, ..FakeBackend::gpu() };
    let mut asked = plan(&options(Device::Gpu(None)), FakeBackend::cpu(0), Some(gpu)).expect("a plan");
    assert!(asked.measure(&Choices::default()).speeds.is_empty());
    assert_eq!(first(&asked), "embed");
}

#[test]
fn a_split_costs_a_step_on_both_sides() {
    let model = model("tiny-maple-2bit");
    let blocks = &model.architecture().blocks;
    let host = Speed { layer: 4.0, head: 10.0, step: 1.0 };
    let check = |gpu: Speed, splits: [f64; 4]| {
        let speeds = Speeds { host, gpu };
        let found = [0, 1, 9, 10].map(|first| speeds.of_split(blocks, first));
        assert_eq!(found, splits, "{gpu:?}");
    };
    // Everything, all but the embedding, the head alone, nothing: the embedding costs a step and no time.
    check(Speed { layer: 1.0, head: 2.0, step: 5.0 }, [15.0, 16.0, 40.0, 43.0]);
    check(Speed { layer: 5.0, head: 2.0, step: 0.5 }, [42.5, 43.5, 35.5, 43.0]);
}

#[test]
fn blocks_that_a_gpu_cannot_run_stay_on_the_cpu() {
    let odd = || FakeBackend { refuses: Some(3), ..FakeBackend::gpu() };
    let check = |options: EngineOptions, gpu: FakeBackend, want: Result<&str, &str>| match (
        plan(&options, FakeBackend::cpu(0), Some(gpu)),
        want,
    ) {
        (Ok(plan), Ok(want)) => assert_eq!(first(&plan), want, "{options:?}"),
        (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{options:?}: {error}"),
        (plan, _) => panic!("{options:?}: {plan:?}"),
    };
    let layers = |device, n| EngineOptions { gpu_layers: Some(n), ..options(device) };
    check(options(Device::Auto), odd(), Ok("layer 4"));
    check(options(Device::Gpu(None)), odd(), Ok("layer 4"));
    check(layers(Device::Gpu(None), 4), odd(), Ok("layer 4"));
    check(layers(Device::Gpu(None), 5), odd(), Err("layer 3 on device `gpu`: too odd"));
    check(layers(Device::Auto, 5), odd(), Ok("layer 4"));
    let q8 = |device| EngineOptions { kv: KvType::Q8, ..options(device) };
    check(q8(Device::Auto), FakeBackend::gpu(), Ok("none"));
    check(q8(Device::Gpu(None)), FakeBackend::gpu(), Err("use --kv bf16"));
    let plan = plan(&q8(Device::Auto), FakeBackend::cpu(0), Some(FakeBackend::gpu())).expect("a plan");
    assert!(plan.reasons()[0].contains("use --kv bf16"), "{:?}", plan.reasons());
}

#[test]
fn a_gpu_that_fails_is_left_out_and_said_to() {
    let device = || "gpu Fake".to_owned();
    let fault = || Error::DeviceFault { device: device(), reason: "kernel `head` is off".into() };
    let memory = || Error::DeviceMemory {
        device: device(),
        needed: "960 B".into(),
        available: "the driver has no more".into(),
        advice: "a".into(),
    };
    let check = |options: EngineOptions, fails: Vec<Error>, want: Result<(&str, &[&str]), &str>| {
        let case = format!("{options:?} {fails:?}");
        let gpu = FakeBackend { fails: Mutex::new(fails), ..FakeBackend::gpu() };
        let plan = plan(&options, FakeBackend::cpu(0), Some(gpu)).expect("a plan");
        match (plan.compile(&mut |_, _| {}), want) {
            (Ok(engine), Ok((first, parts))) => {
                let on_gpu = engine.placements().iter().find(|placement| placement.backend == "gpu");
                assert_eq!(on_gpu.map_or("none", |placement| placement.block.as_str()), first, "{case}");
                assert_eq!(engine.notices().len(), parts.len(), "{case}: {:?}", engine.notices());
                for (notice, part) in engine.notices().iter().zip(parts) {
                    assert!(notice.contains(part), "{case}: {notice}");
                }
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{case}: {error}"),
            (found, _) => panic!("{case}: {found:?}"),
        }
    };
    for device in [Device::Gpu(None), Device::Auto] {
        check(options(device), vec![], Ok(("embed", &[])));
        check(options(device), vec![fault()], Ok(("none", &["kernel `head` is off"])));
        // 960 bytes, then 720 or fewer, then 540.
        check(options(device), vec![memory()], Ok(("layer 2", &["fewer layers"])));
        check(options(device), vec![memory(), memory()], Ok(("layer 4", &["fewer", "fewer"])));
        let two = EngineOptions { gpu_layers: Some(2), ..options(device) };
        check(two, vec![memory()], Err("the driver has no more"));
    }
    // A GPU that fails while it is measured.
    let gpu = FakeBackend { fails: Mutex::new(vec![fault()]), ..FakeBackend::gpu() };
    let mut plan = plan(&options(Device::Auto), FakeBackend::cpu(0), Some(gpu)).expect("a plan");
    plan.measure(&Choices::default());
    assert_eq!(first(&plan), "none");
    assert!(plan.reasons()[0].contains("kernel `head` is off"), "{:?}", plan.reasons());
}

#[test]
fn progress_is_told_and_the_engine_keeps_the_reasons() {
    let plan = plan(&options(Device::Gpu(None)), FakeBackend::cpu(0), Some(FakeBackend::gpu()));
    let told = std::sync::atomic::AtomicU64::new(0);
    let engine = plan.expect("a plan").compile(&mut |done, _| told.store(done, Ordering::Relaxed));
    assert_eq!(told.load(Ordering::Relaxed), 1);
    let reasons = engine.expect("compiles").reasons().to_vec();
    assert_eq!(reasons, ["gpu Fake 9000 [vulkan:1:2], driver fake 1"]);
}
