//! What the conversion tests share: fixtures, copies of them to damage, and readers of results.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use samara_converter::{Error, Options, Progress, Quiet, Report, convert, plan};
use samara_format::{Access, Affine4Layout, SamaraFile, TernaryLayout};
use serde_json::{Map, Value};

pub(crate) const TINY: &str = "tiny-maple-2bit";
pub(crate) const STRESS_MLX: &str = "stress-maple-2bit";
pub(crate) const STRESS_HF: &str = "stress-maple-hf";

/// Whether an emulator runs this: a twentieth of the speed. What takes long and shows the same is left out then.
pub(crate) fn emulated() -> bool {
    std::env::var_os("SAMARA_EMULATED").is_some()
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures")).join(name)
}

/// A temporary folder with a copy of a fixture in `model`, to be damaged, and room for outputs.
pub(crate) struct Copy {
    dir: tempfile::TempDir,
}

impl Copy {
    pub(crate) fn of(name: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("model")).unwrap();
        for entry in std::fs::read_dir(fixture(name)).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, dir.path().join("model").join(from.file_name().unwrap())).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.model().join(name)
    }

    pub(crate) fn out(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Plans and converts to `m.samara`.
    pub(crate) fn convert(&self, options: &Options) -> Result<Report, Error> {
        convert_to(&self.model(), &self.out("m.samara"), options)
    }

    /// The error of planning.
    pub(crate) fn plan_error(&self) -> Error {
        plan(&self.model(), &Options::default()).expect_err("the plan should be refused")
    }

    /// Changes config.json.
    pub(crate) fn edit_config(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.file("config.json");
        let mut config: Map<String, Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut config);
        std::fs::write(&path, serde_json::to_vec_pretty(&config).unwrap()).unwrap();
    }

    /// Changes the header of a shard; offsets stay what they were unless edited.
    pub(crate) fn edit_header(&self, shard: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.file(shard);
        let bytes = std::fs::read(&path).unwrap();
        let (header, data) = split_shard(&bytes);
        let mut header: Map<String, Value> = serde_json::from_slice(header).unwrap();
        edit(&mut header);
        self.write_shard(shard, &serde_json::to_vec(&header).unwrap(), data);
    }

    /// Changes the tensors of a shard, each as name, dtype and shape, and bytes; offsets are made anew.
    pub(crate) fn edit_shard(&self, shard: &str, edit: impl FnOnce(&mut Vec<(String, Value, Vec<u8>)>)) {
        let bytes = std::fs::read(self.file(shard)).unwrap();
        let (header, data) = split_shard(&bytes);
        let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
        let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__").map(|(name, info)| {
            let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
            let bytes = data[offset(0)..offset(1)].to_vec();
            (name, info, bytes)
        });
        let mut tensors = tensors.collect();
        edit(&mut tensors);
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, mut info, bytes) in tensors {
            info["data_offsets"] = serde_json::json!([data.len(), data.len() + bytes.len()]);
            header.insert(name, info);
            data.extend(bytes);
        }
        self.write_shard(shard, &serde_json::to_vec(&header).unwrap(), &data);
    }

    pub(crate) fn write_shard(&self, shard: &str, header: &[u8], data: &[u8]) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(data);
        std::fs::write(self.file(shard), bytes).unwrap();
    }

    /// Changes the bytes of one tensor, wherever it is.
    pub(crate) fn edit_tensor(&self, tensor: &str, edit: impl FnOnce(&mut [u8])) {
        for entry in std::fs::read_dir(self.model()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut bytes = std::fs::read(&path).unwrap();
            let (header, _) = split_shard(&bytes);
            let data_start = 8 + header.len();
            let header: Map<String, Value> = serde_json::from_slice(header).unwrap();
            if let Some(info) = header.get(tensor) {
                let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize + data_start;
                edit(&mut bytes[offset(0)..offset(1)]);
                std::fs::write(&path, bytes).unwrap();
                return;
            }
        }
        panic!("no shard holds {tensor}");
    }
}

pub(crate) const SHARD_1: &str = "model-00001-of-00002.safetensors";
pub(crate) const SHARD_2: &str = "model-00002-of-00002.safetensors";

/// Asserts that planning is refused with a message that holds all of `wanted`.
pub(crate) fn refused(copy: &Copy, wanted: &[&str]) {
    let message = copy.plan_error().to_string();
    for part in wanted {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
}

/// Header and data of a shard's bytes.
pub(crate) fn split_shard(bytes: &[u8]) -> (&[u8], &[u8]) {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[8..].split_at(len)
}

pub(crate) fn convert_to(model: &Path, out: &Path, options: &Options) -> Result<Report, Error> {
    convert(&plan(model, options)?, out, options, &Quiet, &AtomicBool::new(false))
}

/// Progress that asks for a stop once `limit` bytes of phase "convert" are done.
pub(crate) struct StopAfter<'a> {
    pub(crate) limit: u64,
    pub(crate) cancel: &'a AtomicBool,
    converting: AtomicBool,
    total: AtomicU64,
    done: AtomicU64,
}

impl<'a> StopAfter<'a> {
    pub(crate) fn new(limit: u64, cancel: &'a AtomicBool) -> Self {
        let (total, done) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { limit, cancel, converting: AtomicBool::new(false), total, done }
    }

    /// Source bytes that this run had to convert, and those it did convert.
    pub(crate) fn to_do_and_done(&self) -> (u64, u64) {
        (self.total.load(Ordering::Relaxed), self.done.load(Ordering::Relaxed))
    }
}

impl Progress for StopAfter<'_> {
    fn phase(&self, name: &'static str, total: u64) {
        self.converting.store(name == "convert", Ordering::Relaxed);
        if name == "convert" {
            self.total.store(total, Ordering::Relaxed);
        }
    }

    fn advance(&self, bytes: u64) {
        if self.converting.load(Ordering::Relaxed)
            && self.done.fetch_add(bytes, Ordering::Relaxed) + bytes >= self.limit
        {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }

    fn message(&self, _text: &str) {}
}

pub(crate) fn open(path: &Path) -> SamaraFile {
    SamaraFile::open(path, Access::Read).unwrap()
}

/// One row of codes and its scale as bf16 bits.
pub(crate) type TernaryRow = (Vec<u8>, u16);

/// All rows of a ternary part.
pub(crate) fn ternary_rows(file: &SamaraFile, tensor: &str, block: usize, part: usize) -> Vec<TernaryRow> {
    let tensor = file.index().tensor(tensor).unwrap();
    let spec = &tensor.parts[part].spec;
    let layout = TernaryLayout::new(spec.rows as usize, spec.cols as usize).unwrap();
    let bytes = file.part(tensor, block, part);
    let row = |row| {
        let mut codes = vec![9; layout.cols()];
        let scale = layout.unpack_row(bytes, row, &mut codes);
        (codes, scale)
    };
    (0..layout.rows()).map(row).collect()
}

/// Nibbles, scales and biases of one row.
pub(crate) type AffineRow = (Vec<u8>, Vec<u16>, Vec<u16>);

/// All rows of a 4-bit tensor.
pub(crate) fn affine_rows(file: &SamaraFile, tensor: &str) -> Vec<AffineRow> {
    let tensor = file.index().tensor(tensor).unwrap();
    let spec = &tensor.parts[0].spec;
    let layout = Affine4Layout::new(spec.rows as usize, spec.cols as usize).unwrap();
    let bytes = file.part(tensor, 0, 0);
    let row = |row| {
        let groups = layout.n_groups();
        let (mut nibbles, mut scales, mut biases) =
            (vec![99; layout.cols()], vec![0; groups], vec![0; groups]);
        layout.unpack_row(bytes, row, &mut nibbles, &mut scales, &mut biases);
        (nibbles, scales, biases)
    };
    (0..layout.rows()).map(row).collect()
}
