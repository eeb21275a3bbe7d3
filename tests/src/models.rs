//! Fixture checkpoints, converted once a process.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, atomic::AtomicBool},
};

use samara_converter::{Options, Quiet, convert, plan};
use samara_format::{Access, Metadata};
use samara_runtime::{Engine, EngineOptions, Model};

use crate::rewrite;

/// The checkpoints the tests run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixture {
    /// The trained 30M model, with FlashHead data, so its head is in cluster order.
    Tiny,
    /// Random weights that bind the clamp, from the 2-bit layout.
    Stress,
    /// The same from the bf16 layout.
    StressHf,
    /// The same with a window of 17 keys instead of 16.
    StressWindow17,
}

impl Fixture {
    /// Its folder.
    pub fn checkpoint(self) -> PathBuf {
        fixture(match self {
            Fixture::Tiny => "tiny-maple-2bit",
            Fixture::Stress | Fixture::StressWindow17 => "stress-maple-2bit",
            Fixture::StressHf => "stress-maple-hf",
        })
    }

    fn window(self) -> Option<u64> {
        (self == Fixture::StressWindow17).then_some(17)
    }
}

/// Whether an emulator runs this, as `SAMARA_EMULATED` says: a tenth of the speed and less. Tables of lengths leave
/// their longest rows out then, which take other numbers through the same code.
pub fn emulated() -> bool {
    std::env::var_os("SAMARA_EMULATED").is_some()
}

/// A file or folder of `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// The fixture, converted and opened.
pub fn model(fixture: Fixture) -> Arc<Model> {
    static MODELS: [OnceLock<Arc<Model>>; 4] = [const { OnceLock::new() }; 4];
    let open = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let path = dir.path().join("model.samara");
        let options = Options { window: fixture.window(), ..Options::default() };
        let plan = plan(&fixture.checkpoint(), &options).expect("a sound checkpoint");
        convert(&plan, &path, &options, &Quiet, &AtomicBool::new(false)).expect("converts");
        // Read, not mapped: the folder goes away here.
        Arc::new(Model::open(&path, Access::Read).expect("opens"))
    };
    Arc::clone(MODELS[fixture as usize].get_or_init(open))
}

/// An engine on the fixture with a context of 1,024 tokens (or what `options` says).
pub fn engine(fixture: Fixture, options: &EngineOptions) -> Engine {
    Engine::new(model(fixture), options).expect("the fixture runs")
}

/// The stress model with other metadata: 4 layers, the last one full, the others with a window of 16.
pub fn changed(edit: impl FnOnce(&mut Metadata)) -> Arc<Model> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("changed.samara");
    rewrite(model(Fixture::Stress).file(), &path, |metadata, _| edit(metadata), |_, _| {});
    Arc::new(Model::open(&path, Access::Read).expect("opens"))
}

/// The stress model without the clamp, a planted fault: its gates go to 69, the clamp is at 7.
pub fn unclamped() -> Arc<Model> {
    changed(|metadata| {
        metadata.insert("model.gate_max", 1e9);
    })
}

/// Deterministic ids spread over the vocabulary.
pub fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| i.wrapping_mul(2_654_435_761) >> 20).collect()
}
