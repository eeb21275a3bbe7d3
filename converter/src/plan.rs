//! A checkpoint read, checked and understood, before any weight is touched.

use std::path::{Path, PathBuf};

use samara_format::{FileLayout, Metadata};
use serde::Serialize;

use crate::arch;
use crate::config::{CONFIG, RawConfig};
use crate::error::Error;
use crate::options::{BoundOptions, FlashHead, Options};
use crate::produce::Job;
use crate::recipe::{Clusters, Draft, Output, Recipe};
use crate::source::{self, Checkpoint, FLASH_FILE};
use crate::text::{self, Texts};

/// Memory that the slots of one of the two batches may take, bytes.
const BATCH_MEMORY: u64 = 224 << 20;
/// Batches in memory at once: one is converted while the other is written.
const N_BATCHES: u64 = 2;
/// Memory besides the batches, bytes: program, headers, plan, write and hash buffers.
const BASE_MEMORY: u64 = 64 << 20;

/// Memory that the texts take while they are parsed and packed, as a multiple of their bytes.
const TEXT_COPIES: u64 = 12;
/// More threads than this are never started.
const MAX_THREADS: usize = 1024;

/// What a conversion will do, from [`plan()`].
#[derive(Debug)]
pub struct Plan {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) outputs: Vec<Output>,
    pub(crate) bound: BoundOptions,
    /// Names and bytes of the text files read.
    pub(crate) text_files: Vec<(String, Vec<u8>)>,
    metadata: Metadata,
    summary: PlanSummary,
}

/// The plan in words and numbers, for people and machines.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PlanSummary {
    /// The checkpoint folder.
    pub source: PathBuf,
    /// Architecture as the output names it.
    pub architecture: String,
    /// Kind of the source, such as "2-bit MLX".
    pub kind: &'static str,
    /// Safetensors files read.
    pub source_files: Vec<String>,
    /// Tensors in them.
    pub source_tensors: usize,
    /// Bytes of these files.
    pub source_bytes: u64,
    /// Keys a query sees on sliding layers, itself included.
    pub window: u64,
    /// True if the output carries FlashHead data.
    pub flash_head: bool,
    /// Output tensors, in file order.
    pub tensors: Vec<PlannedTensor>,
    /// Length of the output, bytes.
    pub output_bytes: u64,
    /// Upper estimate of the memory a conversion takes, bytes.
    pub peak_memory_bytes: u64,
    /// Things a person may want to know.
    pub notes: Vec<String>,
}

/// One output tensor of a plan.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedTensor {
    /// Name in the output.
    pub name: String,
    /// Blocks; more than one for stacked experts.
    pub blocks: u64,
    /// Each part as "dtype \[rows, cols\]".
    pub parts: Vec<String>,
    /// Bytes in the output.
    pub bytes: u64,
}

/// Reads the headers of the checkpoint in `dir`, checks everything that can be checked without reading weights, and
/// says what [`crate::convert()`] would do.
///
/// Besides headers it reads config, tokenizer and template, the FlashHead token map, and the rows of a few clusters.
///
/// # Errors
/// Any defect of the checkpoint; missing files are listed together, and so are tensors that do not fit.
pub fn plan(dir: &Path, options: &Options) -> Result<Plan, Error> {
    let discovery = source::discover(dir)?;
    let texts = text::read(dir)?;
    let config = RawConfig::read(dir)?;
    let mut missing = discovery.missing.clone();
    missing.extend(texts.missing.iter().cloned());
    match &config {
        None => missing.insert(0, CONFIG.to_owned()),
        Some((config, _)) if options.flash_head == FlashHead::Auto && config.get("flash_head").is_some() => {
            missing.extend(discovery.flash_file_missing())
        }
        Some(_) => {}
    }
    let Some((config, config_bytes)) = config.filter(|_| missing.is_empty()) else {
        return Err(Error::MissingFiles { dir: dir.to_owned(), files: missing });
    };
    let checkpoint = discovery.open()?;
    let mut draft = (arch::find(&config, &checkpoint)?.draft)(&config, &checkpoint, options)?;
    let checked = texts.check(&config, draft.vocab_size)?;
    arch::settle_force_tokens(&mut draft.metadata, &checked.stop_ids, checked.end_of_thought)?;
    for output in &draft.outputs {
        if let Recipe::Bounds(clusters) = &output.recipe
            && clusters.centroids.is_some()
        {
            clusters.check_scaled(&checkpoint.files)?;
        }
    }
    let mut text_files = texts.files.clone();
    text_files.push((CONFIG.to_owned(), config_bytes));
    let mut notes = notes(&draft, &checkpoint, texts.has_generation());
    notes.extend(options.window.map(|window| format!("the window was set to {window} by option")));
    assemble(dir, checkpoint, draft, checked, text_files, options, notes)
}

fn notes(draft: &Draft, checkpoint: &Checkpoint, has_generation: bool) -> Vec<String> {
    let mut notes = draft.notes.clone();
    if !checkpoint.ignored_files.is_empty() {
        notes.push(format!("not in the index, left out: {}", checkpoint.ignored_files.join(", ")));
    }
    if !has_generation {
        notes.push(
            "no generation_config.json: temperature 1.0, top-p 0.95 and top-k 20 are stored".to_owned(),
        );
    }
    notes
}

fn assemble(
    dir: &Path,
    checkpoint: Checkpoint,
    draft: Draft,
    texts: Texts,
    text_files: Vec<(String, Vec<u8>)>,
    options: &Options,
    notes: Vec<String>,
) -> Result<Plan, Error> {
    let Draft { kind, vocab_size: _, mut metadata, outputs, notes: _ } = draft;
    describe_texts(texts, &mut metadata);
    describe_origin(options, &mut metadata);
    let summary = PlanSummary {
        source: dir.to_owned(),
        architecture: metadata.str("general.architecture")?.to_owned(),
        kind,
        source_files: checkpoint.files.iter().map(|file| file.name.clone()).collect(),
        source_tensors: checkpoint.tensors.len(),
        source_bytes: checkpoint.total_len(),
        window: metadata.u64("model.window")?,
        flash_head: metadata.get("flash.n_clusters").is_some(),
        tensors: Vec::new(),
        output_bytes: 0,
        peak_memory_bytes: 0,
        notes,
    };
    let mut plan = Plan { checkpoint, outputs, bound: options.into(), text_files, metadata, summary };
    plan.measure(options)?;
    Ok(plan)
}

fn describe_texts(texts: Texts, metadata: &mut Metadata) {
    let Texts { tokenizer, template, stop_ids, end_of_thought: _, generation } = texts;
    metadata.insert("tokenizer.json", tokenizer);
    metadata.insert("tokenizer.chat_template", template);
    metadata.insert("tokenizer.stop_ids", stop_ids);
    metadata.insert("generation.temperature", generation.temperature);
    metadata.insert("generation.top_p", generation.top_p);
    metadata.insert("generation.top_k", generation.top_k);
}

fn describe_origin(options: &Options, metadata: &mut Metadata) {
    metadata.insert("general.writer", concat!("samara ", env!("CARGO_PKG_VERSION")));
    let origin = [
        ("general.name", &options.name),
        ("general.license", &options.license),
        ("general.source.repository", &options.source_repository),
        ("general.source.revision", &options.source_revision),
    ];
    for (key, value) in origin {
        if let Some(value) = value {
            metadata.insert(key, value.clone());
        }
    }
}

impl Plan {
    /// The plan in words and numbers.
    pub fn summary(&self) -> &PlanSummary {
        &self.summary
    }

    /// The tokenizer (JSON) and the chat template (Jinja) that the output will carry.
    ///
    /// # Errors
    /// None from a plan that [`plan()`] made: both are stored there.
    pub fn texts(&self) -> Result<(&str, &str), Error> {
        Ok((self.metadata.str("tokenizer.json")?, self.metadata.str("tokenizer.chat_template")?))
    }

    /// The clusters that the conversion has to build before it writes.
    pub(crate) fn clusters_to_build(&self) -> Option<&Clusters> {
        self.outputs.iter().find_map(|output| match &output.recipe {
            Recipe::Centroids(clusters) => Some(clusters),
            _ => None,
        })
    }

    /// Names of all source files: shards, then texts.
    pub(crate) fn source_names(&self) -> impl Iterator<Item = &str> {
        let shards = self.checkpoint.files.iter().map(|file| file.name.as_str());
        shards.chain(self.text_files.iter().map(|(name, _)| name.as_str()))
    }

    /// The output's layout, given the xxh3-128 of each source file in the order of [`Self::source_names`].
    pub(crate) fn layout(&self, hashes: &[u128]) -> Result<FileLayout, Error> {
        let mut metadata = self.metadata.clone();
        let names: Vec<String> = self.source_names().map(str::to_owned).collect();
        metadata.insert("general.source.files", names);
        let hashes: Vec<String> = hashes.iter().map(|hash| format!("{hash:032x}")).collect();
        metadata.insert("general.source.hashes", hashes);
        let specs = self.outputs.iter().map(|output| output.spec.clone()).collect();
        Ok(FileLayout::new(metadata, specs, 0)?)
    }

    /// Units of `job` that are made at once.
    pub(crate) fn batch_len(job: &Job<'_>, threads: usize) -> usize {
        let affordable = usize::try_from(BATCH_MEMORY / job.unit_memory().max(1)).unwrap_or(usize::MAX);
        (2 * threads).min(affordable).clamp(1, job.n_units())
    }

    fn measure(&mut self, options: &Options) -> Result<(), Error> {
        let layout = self.layout(&vec![0; self.source_names().count()])?;
        let threads = thread_count(options);
        let mut batch = 0;
        for (output, tensor) in self.outputs.iter().zip(layout.tensors()) {
            let recipe = &output.recipe;
            let job =
                Job { files: &self.checkpoint.files, recipe, tensor, ternarize: self.bound.ternarize() };
            batch = batch.max(job.unit_memory() * Self::batch_len(&job, threads) as u64);
            let parts = tensor.parts.iter().map(|part| &part.spec);
            self.summary.tensors.push(PlannedTensor {
                name: tensor.name.clone(),
                blocks: tensor.n_blocks,
                parts: parts.map(|part| format!("{} [{}, {}]", part.dtype, part.rows, part.cols)).collect(),
                bytes: tensor.len,
            });
        }
        let texts: u64 = self.text_files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        self.summary.output_bytes = layout.file_len();
        let building = self.clusters_to_build().map_or(0, Clusters::build_memory);
        self.summary.peak_memory_bytes = BASE_MEMORY + building.max(N_BATCHES * batch) + TEXT_COPIES * texts;
        Ok(())
    }
}

/// Threads that `options` ask for, within reason.
pub(crate) fn thread_count(options: &Options) -> usize {
    match options.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        n => n.min(MAX_THREADS),
    }
}

impl source::Discovery {
    /// The FlashHead file, if config.json promises FlashHead data and neither it nor the index brings any.
    fn flash_file_missing(&self) -> Option<String> {
        let known = self.missing.iter().chain(self.shards()).any(|file| file == FLASH_FILE);
        (!known && !self.places("lm_head_flash.")).then(|| FLASH_FILE.to_owned())
    }
}
