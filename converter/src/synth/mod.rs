//! Synthetic checkpoints: either source layout, any size, made from a seed.
//!
//! They stand in for the real model where that cannot be: full-size timing, memory limits, tests. Codes and scales
//! look real (about 40 % zeros, a few zero rows, half of the bf16 zeros negative) and are scaled so that a forward
//! pass through many layers stays finite and lively. Both layouts of one seed hold the same weights, so converting
//! either must give the same file contents.

mod config;
mod tensors;
mod weights;
mod write;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use crate::error::Error;
use crate::progress::Progress;

/// The layouts a synthetic checkpoint can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum SynthLayout {
    /// 2-bit words with stacked experts, 4-bit embedding and head, FlashHead file.
    Mlx2Bit,
    /// bfloat16 with one tensor per expert.
    HuggingFace,
}

/// FlashHead data of a synthetic checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SynthFlash {
    /// Head rows in one cluster; divides the vocabulary.
    pub cluster_size: u64,
    /// Clusters probed for each token.
    pub n_probes: u64,
}

/// The sizes of a synthetic checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SynthSpec {
    /// Source layout.
    pub layout: SynthLayout,
    /// Seed of every weight.
    pub seed: u64,
    /// Rows of embedding and head; more than the tokenizer's largest id.
    pub vocab_size: u64,
    /// Width of the residual; a multiple of 128.
    pub hidden_size: u64,
    /// Layers.
    pub n_layers: u64,
    /// Every n-th layer sees all keys, the others a window.
    pub full_every: u64,
    /// Query heads.
    pub n_heads: u64,
    /// Key and value heads; divides the query heads.
    pub n_kv_heads: u64,
    /// Width of a head; a multiple of 16.
    pub head_dim: u64,
    /// Experts of a layer.
    pub n_experts: u64,
    /// Experts a token uses.
    pub n_experts_used: u64,
    /// Width inside an expert; a multiple of 16.
    pub expert_size: u64,
    /// Keys a query sees on sliding layers.
    pub sliding_window: u64,
    /// Longest context the config announces.
    pub max_context: u64,
    /// FlashHead data; written as a file in the 2-bit layout only.
    pub flash: Option<SynthFlash>,
    /// Head rows of all clusters but this many are a sixteenth as long, so that their logits can be told to be small.
    pub strong_clusters: Option<u64>,
    /// Shards to spread the tensors over.
    pub n_shards: u64,
}

impl SynthSpec {
    /// A model small enough for a test, for a tokenizer of up to 4,096 ids.
    pub fn tiny(layout: SynthLayout) -> Self {
        Self {
            layout,
            seed: 0,
            vocab_size: 4096,
            hidden_size: 128,
            n_layers: 4,
            full_every: 4,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 64,
            n_experts: 8,
            n_experts_used: 2,
            expert_size: 64,
            sliding_window: 32,
            max_context: 4096,
            flash: Some(SynthFlash { cluster_size: 32, n_probes: 16 }),
            strong_clusters: None,
            n_shards: 2,
        }
    }

    /// Maple-Preview's exact shapes: 5.3 GB in the 2-bit layout, 40.4 GB in the bf16 one.
    pub fn full(layout: SynthLayout) -> Self {
        Self {
            layout,
            seed: 0,
            vocab_size: 151_936,
            hidden_size: 2048,
            n_layers: 24,
            full_every: 4,
            n_heads: 16,
            n_kv_heads: 4,
            head_dim: 128,
            n_experts: 256,
            n_experts_used: 8,
            expert_size: 512,
            sliding_window: 512,
            max_context: if layout == SynthLayout::Mlx2Bit { 128_000 } else { 131_072 },
            flash: Some(SynthFlash { cluster_size: 32, n_probes: 512 }),
            strong_clusters: None,
            n_shards: if layout == SynthLayout::Mlx2Bit { 3 } else { 9 },
        }
    }

    /// Number of tensors and their bytes, without the FlashHead file.
    ///
    /// # Errors
    /// [`Error::Synth`] for sizes that cannot be.
    pub fn payload(&self) -> Result<(usize, u64), Error> {
        self.check()?;
        let tensors = tensors::model_tensors(self);
        Ok((tensors.len(), tensors.iter().map(tensors::SynthTensor::len).sum()))
    }

    /// Refuses sizes that no checkpoint can have.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24, 1),
            ("hidden_size", self.hidden_size, 1 << 16, 128),
            ("n_layers", self.n_layers, 1 << 10, 1),
            ("full_every", self.full_every, 1 << 10, 1),
            ("n_kv_heads", self.n_kv_heads, 1 << 10, 1),
            ("n_heads", self.n_heads, 1 << 10, self.n_kv_heads),
            ("head_dim", self.head_dim, 1 << 10, 16),
            ("n_experts", self.n_experts, 1 << 12, 1),
            ("n_experts_used", self.n_experts_used, self.n_experts, 1),
            ("expert_size", self.expert_size, 1 << 16, 16),
            ("sliding_window", self.sliding_window, 1 << 24, 1),
            ("max_context", self.max_context, 1 << 28, 1),
            ("n_shards", self.n_shards, 999, 1),
        ];
        sizes
            .into_iter()
            .try_for_each(|(name, value, most, multiple)| check_size(name, value, most, multiple))?;
        if self.strong_clusters.is_some() && self.flash.is_none() {
            let reason = "strong clusters were asked for, but no FlashHead data, which say what a cluster is"
                .to_owned();
            return Err(Error::Synth { reason });
        }
        self.flash.map_or(Ok(()), |flash| check_flash(flash, self.vocab_size))
    }
}

fn check_size(name: &str, value: u64, most: u64, multiple: u64) -> Result<(), Error> {
    if value != 0 && value <= most && value.is_multiple_of(multiple) {
        return Ok(());
    }
    let wanted = if multiple == 1 { "a number".to_owned() } else { format!("a multiple of {multiple}") };
    let reason = format!("{name} = {value}, but {wanted} from {multiple} to {most} is needed");
    Err(Error::Synth { reason })
}

fn check_flash(flash: SynthFlash, vocab_size: u64) -> Result<(), Error> {
    let SynthFlash { cluster_size, n_probes } = flash;
    let n_clusters = vocab_size.checked_div(cluster_size).unwrap_or(0);
    let reason = if n_clusters == 0 || n_clusters * cluster_size != vocab_size {
        format!(
            "a vocabulary of {vocab_size} cannot be cut into FlashHead clusters of {cluster_size}: choose a multiple, or leave FlashHead out"
        )
    } else if !(1..=n_clusters).contains(&n_probes) {
        format!("{n_probes} of {n_clusters} FlashHead clusters cannot be probed: 1 to {n_clusters} can")
    } else {
        return Ok(());
    };
    Err(Error::Synth { reason })
}

/// The texts a synthetic checkpoint carries.
#[derive(Debug, Clone, Copy)]
pub struct SynthTexts<'a> {
    /// tokenizer.json
    pub tokenizer: &'a str,
    /// chat_template.jinja
    pub chat_template: &'a str,
}

/// What was written.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct SynthReport {
    /// Files in the folder.
    pub files: Vec<String>,
    /// Tensors, without the FlashHead file's.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub payload_bytes: u64,
    /// Bytes of all safetensors files.
    pub file_bytes: u64,
}

/// Writes a synthetic checkpoint into the new or empty folder `dir`.
///
/// Every file is written under a temporary name first, and config.json and the index come last, so a folder that was
/// not finished does not look like a checkpoint. After an error what was written is removed.
///
/// # Errors
/// [`Error::Synth`], [`Error::OutputNotAFolder`], [`Error::FolderNotEmpty`], [`Error::DiskSpace`], [`Error::Cancelled`], or an I/O error.
pub fn synthesise(
    spec: &SynthSpec,
    texts: &SynthTexts<'_>,
    dir: &Path,
    progress: &dyn Progress,
    cancel: &AtomicBool,
) -> Result<SynthReport, Error> {
    spec.check()?;
    let config = config::config(spec, texts)?;
    write::write(spec, texts, &config, dir, progress, cancel)
}
