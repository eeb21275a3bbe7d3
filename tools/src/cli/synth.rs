//! Options of `samara synth`: many sizes, one line each.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{OUTPUT, values::whole};

/// Heading of the sizes.
pub(super) const SIZES: &str = "Sizes (the tiny or full model's unless given)";

/// Write a synthetic checkpoint, for tests and measurements.
///
/// Weights are made from a seed, with real-looking codes and scales, in either published layout; both layouts of one
/// seed hold the same weights. The tokenizer and chat template are those of the built-in model. What such a model
/// says is noise.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara synth -o tiny-synthetic
  samara synth -o full --full
      Maple-Preview's exact shapes: 463 tensors, 5,308,186,624 bytes
  samara synth -o full-bf16 --full --layout hf
      the same in the bf16 layout: 40,428,060,672 bytes
  samara synth -o wide --hidden-size 512 --n-experts 64 --seed 7")]
pub(crate) struct Synth {
    /// Folder to write, new or empty.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// Layout of the checkpoint.
    #[arg(long, value_enum, default_value_t = Layout::Mlx)]
    pub(crate) layout: Layout,
    /// Maple-Preview's exact shapes instead of tiny ones.
    #[arg(long)]
    pub(crate) full: bool,
    /// Seed of the weights.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<0>, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Print progress and the report as JSON, one object a line, on standard output.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// Print only errors.
    #[arg(short, long, help_heading = OUTPUT)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) sizes: SynthSizes,
}

/// `--layout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    /// 2-bit, stacked experts, as published for MLX.
    Mlx,
    /// bf16, one tensor for each expert, as published on Hugging Face.
    Hf,
}

/// Sizes that differ from the tiny or the full model.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct SynthSizes {
    /// Rows of embedding and head.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) vocab_size: Option<u64>,
    /// Width of the residual.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) hidden_size: Option<u64>,
    /// Layers.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) n_layers: Option<u64>,
    /// Every N-th layer sees all keys.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) full_every: Option<u64>,
    /// Query heads.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) n_heads: Option<u64>,
    /// Key and value heads.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) n_kv_heads: Option<u64>,
    /// Width of a head.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) head_dim: Option<u64>,
    /// Experts of a layer.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) n_experts: Option<u64>,
    /// Experts a token uses.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) n_experts_used: Option<u64>,
    /// Width inside an expert.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) expert_size: Option<u64>,
    /// Keys a query sees on sliding layers.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) sliding_window: Option<u64>,
    /// Longest context the config announces.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) max_context: Option<u64>,
    /// Make head rows a sixteenth as long outside of the first N FlashHead clusters.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) strong_clusters: Option<u64>,
    /// Shards to spread the tensors over.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SIZES)]
    pub(crate) shards: Option<u64>,
    /// Leave FlashHead data out.
    #[arg(long, help_heading = SIZES)]
    pub(crate) no_flash: bool,
}
