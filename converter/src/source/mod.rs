//! A checkpoint folder: which shards it has, which tensors they hold, where each tensor's bytes are.
//!
//! Discovery believes headers and file sizes. The index only says which shards there should be; its `total_size` is
//! often wrong and is not read. Everything that is missing is listed at once.

mod header;
mod read;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;

pub(crate) use header::refuse_pointer;
pub(crate) use read::SourceFile;

use crate::error::{Error, TensorProblem};
use crate::json::{self, UniqueMap};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// FlashHead data come in a file of their own, which an index need not name.
pub(crate) const FLASH_FILE: &str = "model-flashhead.safetensors";

/// Files of a checkpoint that a plan need not read.
pub(crate) const SIDE_FILES: [&str; 2] = [INDEX, "tokenizer_config.json"];

/// Longest text file (config, index, tokenizer, template) that is read, bytes.
const MAX_TEXT_LEN: u64 = 256 << 20;

/// Where one source tensor is.
#[derive(Debug, Clone)]
pub(crate) struct TensorRef {
    /// Index into [`Checkpoint::files`].
    pub(crate) file: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    /// Absolute byte offset in the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The shards of a checkpoint and their tensors.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// Shards, by name.
    pub(crate) files: Vec<SourceFile>,
    /// Tensors, by name.
    pub(crate) tensors: BTreeMap<String, TensorRef>,
    /// Tensors that the index places in a shard without them.
    pub(crate) misplaced: Vec<TensorProblem>,
    /// Safetensors files in the folder that belong to nothing.
    pub(crate) ignored_files: Vec<String>,
}

/// What the folder's listing and index say, before any shard is opened.
#[derive(Debug)]
pub(crate) struct Discovery {
    dir: PathBuf,
    /// Shard names that should be there, sorted.
    shards: Vec<String>,
    /// Tensor and shard, as the index pairs them.
    placed: Vec<(String, String)>,
    /// Every file that should be there and is not.
    pub(crate) missing: Vec<String>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: UniqueMap<String>,
}

/// Reads a text file of the checkpoint whole, refusing Git LFS pointers and absurd sizes; `None` if it is not there.
pub(crate) fn read_text(dir: &Path, name: &str) -> Result<Option<Vec<u8>>, Error> {
    if !dir.join(name).is_file() {
        return Ok(None);
    }
    let file = SourceFile::open(dir.join(name))?;
    refuse_pointer(&file)?;
    if file.len > MAX_TEXT_LEN {
        return Err(Error::TooLarge { what: name.to_owned() });
    }
    let mut bytes = vec![0; usize::try_from(file.len).expect("capped above")];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(Some(bytes))
}

/// Finds the shards of `dir` without opening them.
pub(crate) fn discover(dir: &Path) -> Result<Discovery, Error> {
    if !dir.is_dir() {
        return Err(not_a_folder(dir));
    }
    let mut found =
        Discovery { dir: dir.to_owned(), shards: Vec::new(), placed: Vec::new(), missing: Vec::new() };
    if let Some(bytes) = read_text(dir, INDEX)? {
        let index: ShardIndex = json::parse(INDEX, &bytes)?;
        for (tensor, shard) in index.weight_map.0 {
            header::plain_file_name(&shard)?;
            found.placed.push((tensor, shard));
        }
        found.shards = found.placed.iter().map(|(_, shard)| shard.clone()).collect();
    } else if dir.join(SINGLE).is_file() {
        found.shards.push(SINGLE.to_owned());
    } else {
        found.missing.push(format!("{INDEX} (or {SINGLE})"));
    }
    if dir.join(FLASH_FILE).is_file() {
        found.shards.push(FLASH_FILE.to_owned());
    }
    found.shards.sort();
    found.shards.dedup();
    found.missing.extend(found.shards.iter().filter(|shard| !dir.join(shard).is_file()).cloned());
    Ok(found)
}

fn not_a_folder(dir: &Path) -> Error {
    let hint = match dir.extension().and_then(|extension| extension.to_str()) {
        _ if !dir.exists() => "nothing is there; pass the folder that holds config.json".to_owned(),
        Some("gguf") => {
            "GGUF files cannot be converted; pass the folder of a safetensors checkpoint".to_owned()
        }
        _ => "pass the folder that holds config.json".to_owned(),
    };
    Error::NotAFolder { path: dir.to_owned(), hint }
}

impl Discovery {
    /// Names of the shards that should be there.
    pub(crate) fn shards(&self) -> &[String] {
        &self.shards
    }

    /// True if the index names a tensor that starts with `prefix`.
    pub(crate) fn places(&self, prefix: &str) -> bool {
        self.placed.iter().any(|(tensor, _)| tensor.starts_with(prefix))
    }

    /// Opens every shard and reads its header. [`Discovery::missing`] must be empty.
    pub(crate) fn open(self) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint {
            files: Vec::new(),
            tensors: BTreeMap::new(),
            misplaced: Vec::new(),
            ignored_files: ignored_files(&self.dir, &self.shards)?,
        };
        for (id, name) in self.shards.iter().enumerate() {
            let file = SourceFile::open(self.dir.join(name))?;
            let tensors = header::read_header(&file)?;
            checkpoint.files.push(file);
            for tensor in tensors {
                checkpoint.insert(id, tensor)?;
            }
        }
        for (tensor, shard) in self.placed {
            let held =
                checkpoint.tensors.get(&tensor).is_some_and(|at| checkpoint.files[at.file].name == shard);
            if !held {
                checkpoint.misplaced.push(TensorProblem::NotInShard { tensor, file: shard });
            }
        }
        Ok(checkpoint)
    }
}

impl Checkpoint {
    fn insert(&mut self, file: usize, tensor: header::ShardTensor) -> Result<(), Error> {
        let header::ShardTensor { name, dtype, shape, offset, len } = tensor;
        if let Some(first) = self.tensors.get(&name) {
            let (first, second) = (self.files[first.file].name.clone(), self.files[file].name.clone());
            return Err(Error::DuplicateTensor { tensor: name, first, second });
        }
        self.tensors.insert(name, TensorRef { file, dtype, shape, offset, len });
        Ok(())
    }

    /// Sum of all shards' lengths, bytes.
    pub(crate) fn total_len(&self) -> u64 {
        self.files.iter().map(|file| file.len).fold(0, u64::saturating_add)
    }
}

fn ignored_files(dir: &Path, shards: &[String]) -> Result<Vec<String>, Error> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let name = entry.map_err(Error::io("list", dir))?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") && !shards.contains(&name) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
