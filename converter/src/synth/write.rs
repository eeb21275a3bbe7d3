//! Writing the shards, index and texts of a synthetic checkpoint.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::tensors::{SynthTensor, flash_tensors, model_tensors};
use super::{SynthLayout, SynthReport, SynthSpec, SynthTexts};
use crate::error::Error;
use crate::progress::Progress;
use crate::source::FLASH_FILE;
use crate::target::check_space;

/// Bytes made between two writes.
const BATCH_LEN: u64 = 16 << 20;
/// Bytes that one task makes.
const TASK_LEN: u64 = 256 << 10;
/// What a file takes on the disk beyond its bytes, at most: the rest of its last block, and its entries in the folder.
const FILE_SLACK: u64 = 16 << 10;

/// Added to a name while the file is written.
const PART: &str = ".part";
/// The files besides the shards, in the order in which they are written.
const SMALL_FILES: [&str; 5] = [
    "tokenizer.json",
    "chat_template.jinja",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "config.json",
];

/// One safetensors file to be written.
struct Shard {
    name: String,
    tensors: Vec<SynthTensor>,
}

/// Writes everything; the config and the index come last. What was written is removed again if it does not end well.
pub(super) fn write(
    spec: &SynthSpec,
    texts: &SynthTexts<'_>,
    config: &Value,
    dir: &Path,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<SynthReport, Error> {
    let new = !dir.exists();
    open_folder(dir)?;
    let written = write_files(spec, texts, config, dir, progress, cancel);
    if written.is_err() {
        // Best effort: the reason why it failed is what matters.
        let _ = clear_folder(dir, new);
    }
    written
}

/// Removes all files of a folder that was empty before, and the folder itself if it is new.
fn clear_folder(dir: &Path, new: bool) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_own(name.strip_suffix(PART).unwrap_or(&name)) {
            std::fs::remove_file(entry.path())?;
        }
    }
    if new { std::fs::remove_dir(dir) } else { Ok(()) }
}

/// Whether `name` is one that is written here.
fn is_own(name: &str) -> bool {
    let shard = name.strip_prefix("model-").and_then(|name| name.strip_suffix(".safetensors"));
    SMALL_FILES.contains(&name) || name == FLASH_FILE || shard.is_some_and(|shard| shard.contains("-of-"))
}

fn write_files(
    spec: &SynthSpec,
    texts: &SynthTexts<'_>,
    config: &Value,
    dir: &Path,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<SynthReport, Error> {
    let tensors = model_tensors(spec);
    let (n_tensors, payload_bytes) = (tensors.len(), tensors.iter().map(SynthTensor::len).sum::<u64>());
    let mut shards = split(tensors, spec.n_shards, payload_bytes);
    let flash = flash_tensors(spec);
    if !flash.is_empty() {
        shards.push(Shard { name: FLASH_FILE.to_owned(), tensors: flash });
    }
    let pretty = |value: &Value| serde_json::to_vec_pretty(value).expect("plain JSON");
    let tokenizer_config = json!({ "eos_token": "<|im_end|>", "model_max_length": spec.max_context });
    let small_files = SMALL_FILES.into_iter().zip([
        texts.tokenizer.as_bytes().to_vec(),
        texts.chat_template.as_bytes().to_vec(),
        pretty(&tokenizer_config),
        pretty(&index(&shards, payload_bytes)),
        pretty(config),
    ]);
    let small_files: Vec<(&str, Vec<u8>)> = small_files.collect();
    let format = if spec.layout == SynthLayout::Mlx2Bit { "mlx" } else { "pt" };
    let headers: Vec<Vec<u8>> = shards.iter().map(|shard| header(shard, format)).collect();

    let weights = shards.iter().flat_map(|shard| &shard.tensors).map(SynthTensor::len).sum::<u64>();
    let file_bytes = weights + headers.iter().map(|header| 8 + header.len() as u64).sum::<u64>();
    check_space(dir, dir, room(file_bytes, shards.len(), &small_files))?;
    progress.phase("generate", weights);
    for (shard, header) in shards.iter().zip(&headers) {
        write_shard(dir, shard, header, progress, cancel)?;
    }
    let mut files: Vec<String> = shards.into_iter().map(|shard| shard.name).collect();
    for (name, bytes) in small_files {
        write_file(dir, name, |file| Ok(file.write_all(&bytes)?))?;
        files.push(name.to_owned());
    }
    Ok(SynthReport { files, tensors: n_tensors, payload_bytes, file_bytes })
}

/// Disk space that shards of `file_bytes` and the small files take, bytes.
fn room(file_bytes: u64, n_shards: usize, small_files: &[(&str, Vec<u8>)]) -> u64 {
    let small = small_files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>();
    file_bytes + small + FILE_SLACK * (n_shards + small_files.len()) as u64
}

fn open_folder(dir: &Path) -> Result<(), Error> {
    if dir.symlink_metadata().is_ok() && !dir.is_dir() {
        return Err(Error::OutputNotAFolder { path: dir.to_owned() });
    }
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let mut entries = std::fs::read_dir(dir).map_err(Error::io("list", dir))?;
    if entries.next().is_some() {
        return Err(Error::FolderNotEmpty { path: dir.to_owned() });
    }
    Ok(())
}

/// Cuts the sorted tensors into at most `n` shards of about equal bytes.
fn split(tensors: Vec<SynthTensor>, n: u64, total: u64) -> Vec<Shard> {
    let mut parts: Vec<Vec<SynthTensor>> = Vec::new();
    let mut before = 0;
    for tensor in tensors {
        // The shard in which the tensor's first byte falls.
        let shard =
            usize::try_from(u128::from(before) * u128::from(n) / u128::from(total.max(1))).expect("below n");
        before += tensor.len();
        if parts.len() <= shard {
            parts.push(Vec::new());
        }
        parts.last_mut().expect("pushed above").push(tensor);
    }
    let n = parts.len();
    let name = |i: usize| format!("model-{:05}-of-{n:05}.safetensors", i + 1);
    parts.into_iter().enumerate().map(|(i, tensors)| Shard { name: name(i), tensors }).collect()
}

fn index(shards: &[Shard], payload_bytes: u64) -> Value {
    let mut weight_map = Map::new();
    for shard in shards {
        for tensor in &shard.tensors {
            weight_map.insert(tensor.name.clone(), json!(shard.name));
        }
    }
    json!({ "metadata": { "total_size": payload_bytes }, "weight_map": weight_map })
}

fn header(shard: &Shard, format: &str) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": format }));
    let mut end = 0;
    for tensor in &shard.tensors {
        let start = end;
        end += tensor.len();
        let info = json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.clone(), info);
    }
    let mut bytes = serde_json::to_vec(&header).expect("plain JSON");
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    bytes
}

fn write_shard(
    dir: &Path,
    shard: &Shard,
    header: &[u8],
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<(), Error> {
    write_file(dir, &shard.name, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header)?;
        shard.tensors.iter().try_for_each(|tensor| write_tensor(file, tensor, progress, cancel))
    })
}

/// Why a file was not written.
enum Stop {
    Io(std::io::Error),
    Cancelled,
}

impl From<std::io::Error> for Stop {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}

/// Writes `name` under a temporary name and renames it.
fn write_file(dir: &Path, name: &str, body: impl FnOnce(&mut File) -> Result<(), Stop>) -> Result<(), Error> {
    let part: PathBuf = dir.join(format!("{name}{PART}"));
    let mut file = File::create(&part).map_err(Error::io("create", &part))?;
    let written = body(&mut file).and_then(|()| Ok(file.sync_data()?));
    drop(file);
    match written {
        Ok(()) => {}
        Err(Stop::Cancelled) => return Err(Error::Cancelled { kept: None }),
        Err(Stop::Io(error)) => return Err(Error::io("write", &part)(error)),
    }
    std::fs::rename(&part, dir.join(name)).map_err(Error::io("rename", &part))
}

/// Makes one batch of rows while the one before is written.
fn write_tensor(
    file: &mut File,
    tensor: &SynthTensor,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<(), Stop> {
    let rows_per_batch = (BATCH_LEN / tensor.row_bytes).max(1);
    let (mut making, mut ready) = (Vec::new(), Vec::new());
    let mut first = 0;
    while first < tensor.rows {
        if cancel.load(Ordering::Relaxed) {
            return Err(Stop::Cancelled);
        }
        let n = rows_per_batch.min(tensor.rows - first);
        let (written, ()) = rayon::join(|| file.write_all(&ready), || make(tensor, first, n, &mut making));
        written?;
        progress.advance(ready.len() as u64);
        std::mem::swap(&mut making, &mut ready);
        first += n;
    }
    file.write_all(&ready)?;
    progress.advance(ready.len() as u64);
    Ok(())
}

fn make(tensor: &SynthTensor, first: u64, n: u64, out: &mut Vec<u8>) {
    let size = |value: u64| usize::try_from(value).expect("64-bit target");
    let rows_per_task = (TASK_LEN / tensor.row_bytes).max(1);
    out.resize(size(n * tensor.row_bytes), 0);
    out.par_chunks_mut(size(rows_per_task * tensor.row_bytes)).enumerate().for_each(|(task, rows)| {
        let first = first + task as u64 * rows_per_task;
        for (row, bytes) in (first..).zip(rows.chunks_exact_mut(size(tensor.row_bytes))) {
            tensor.row(row, bytes);
        }
    });
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::options::Options;
    use crate::plan::plan;

    /// A checkpoint of full size whose weights are holes: headers are all that a plan reads.
    fn hollow(layout: SynthLayout, dir: &Path) {
        let spec = SynthSpec { flash: None, ..SynthSpec::full(layout) };
        let fixture = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny-maple-2bit"));
        for name in ["tokenizer.json", "chat_template.jinja"] {
            std::fs::copy(fixture.join(name), dir.join(name)).unwrap();
        }
        let tokenizer = std::fs::read_to_string(fixture.join("tokenizer.json")).unwrap();
        let texts = SynthTexts { tokenizer: &tokenizer, chat_template: "" };
        let config = super::super::config::config(&spec, &texts).unwrap();
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let tensors = model_tensors(&spec);
        let total = tensors.iter().map(SynthTensor::len).sum();
        let shards = split(tensors, spec.n_shards, total);
        std::fs::write(dir.join("model.safetensors.index.json"), index(&shards, total).to_string()).unwrap();
        for shard in &shards {
            let header = header(shard, "pt");
            let mut file = File::create(dir.join(&shard.name)).unwrap();
            file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
            file.write_all(&header).unwrap();
            let payload = shard.tensors.iter().map(SynthTensor::len).sum::<u64>();
            file.set_len(8 + header.len() as u64 + payload).unwrap();
        }
    }

    #[test]
    fn the_room_asked_for_is_little_more_than_what_is_written() {
        let small: Vec<(&str, Vec<u8>)> = SMALL_FILES.into_iter().map(|name| (name, vec![0; 5000])).collect();
        let asked = room(1_800_000, 2, &small);
        assert!((1_825_000..2_000_000).contains(&asked), "{asked}");
    }

    #[test]
    fn the_plan_of_a_full_size_source_stays_under_a_gibibyte_of_memory() {
        for (layout, n_shards) in [(SynthLayout::Mlx2Bit, 3), (SynthLayout::HuggingFace, 9)] {
            let dir = tempfile::tempdir().unwrap();
            hollow(layout, dir.path());
            for threads in [1, 8, 128] {
                let plan = plan(dir.path(), &Options { threads, ..Options::default() }).unwrap();
                let summary = plan.summary();
                assert_eq!(summary.source_files.len(), n_shards);
                assert!(
                    summary.peak_memory_bytes < 1 << 30,
                    "{layout:?}, {threads}: {}",
                    summary.peak_memory_bytes
                );
                // Codes and scales of the body, 4-bit embedding and head, padding: the same from either source.
                assert!(
                    (5_310_000_000..5_330_000_000).contains(&summary.output_bytes),
                    "{}",
                    summary.output_bytes
                );
            }
        }
    }
}
