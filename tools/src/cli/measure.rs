//! Options of the commands that measure: `samara ppl` and `samara bench`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, value_parser};

use super::{Engine, OUTPUT};

const PPL_CTX: &str = "Tokens of a window of the text. Unless given, 2048 or the longest stored sequence, at most the \
                       model's maximum and what fits in memory";
const BENCH_CTX: &str =
    "Tokens of context to make room for, at least those of -p and -n together; just these unless given";

/// Measure how well a model predicts a text.
///
/// `--file` gives perplexity: exp of the mean negative log-likelihood of each token after the first, in windows of
/// the context length. `--logits` compares with stored logits, such as `--save-logits` writes: KL divergence, and how
/// often the likeliest token is the same. They are a safetensors file with two tensors for each sequence j = 0, 1, ...:
/// `j.ids`, I32, its tokens, and `j.logits`, F32, a row of the vocabulary's size for each of its last positions.
///
/// With --head flash or certified, --file is run token by token, and each token's logits are compared with the exact head's.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara ppl m.samara --file wiki.txt
  samara ppl m.samara --file wiki.txt --save-logits l.safetensors
  samara ppl m.samara --logits l.safetensors --json

JSON keys: tokens (predictions scored), nll (mean, nats a token), perplexity,
corpus_hash (xxh3-128 of the text file); with --logits positions, kl_mean,
kl_max (nats), top1_agreement (0 to 1); with --head flash or certified
head.mode, head.argmax_agreement, head.top20_overlap, head.mass_outside
(probability of tokens left out), head.kl_mean (of the head from exact, nats),
head.certified_share (proven by the clusters read at first),
head.bytes_per_token.")]
#[command(mut_arg("ctx", |arg| arg.help(PPL_CTX)))]
pub(crate) struct Ppl {
    /// The .samara file.
    pub(crate) model: PathBuf,
    /// Text to score, UTF-8.
    #[arg(long, value_name = "TEXT", required_unless_present = "logits")]
    pub(crate) file: Option<PathBuf>,
    /// Stored logits to compare with.
    #[arg(long, value_name = "FILE")]
    pub(crate) logits: Option<PathBuf>,
    /// Write the logits of --file for a later --logits. Large: 4 bytes for each token of the text and the vocabulary.
    #[arg(long, value_name = "FILE", requires = "file")]
    pub(crate) save_logits: Option<PathBuf>,
    /// Largest logits that --head certified proves at each position; unless given, the model's own top-k.
    #[arg(long, value_name = "K", value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true,
          requires = "file")]
    pub(crate) top_k: Option<u32>,
    /// Let --save-logits replace an existing file.
    #[arg(long, requires = "save_logits")]
    pub(crate) force: bool,
    /// Print JSON.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: Engine,
}

/// Measure speed.
///
/// Prefill (pp) and decode (tg) in tokens a second: medians over repetitions after a warm-up, with the slowest and
/// fastest. GB/s is the weights that a phase reads, in decode also the keys and values of the context. Their bound, how
/// fast this machine reads the model's weights at all, is measured in the same run, before and after: sequentially, and
/// in blocks of one expert in a shuffled order. The hash of the last logits tells whether two machines, thread counts or versions computed the same.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara bench m.samara
  samara bench m.samara -p 512 -n 128 -t 4 --format markdown
  samara bench m.samara -p 0 -n 64 --json
  samara bench m.samara --profile             where the time goes
  samara bench m.samara --depth 8192          both after 8192 tokens

JSON keys: prefill.tokens_per_s, decode.tokens_per_s, decode.bytes_per_token
(weights and cache); of both gb_per_s, share_of_expert_blocks and
share_of_sequential; prefill.gmac_per_s (multiply-adds of matrices and
attention); bandwidth.expert_blocks_gb_per_s,
bandwidth.sequential_gb_per_s, bandwidth.in_cache (the model is so small that
caches are measured); with --head flash or certified what ppl has under head,
over the tokens decoded; profile; logits_hash, kernels, machine, and what
belongs to a record: threads, file digest, warm-up, repetitions, spread,
version.")]
#[command(mut_arg("ctx", |arg| arg.help(BENCH_CTX)))]
pub(crate) struct Bench {
    /// The .samara file.
    pub(crate) model: PathBuf,
    /// Tokens of the prompt; 0 leaves prefill out.
    #[arg(
        short,
        long = "prompt-tokens",
        value_name = "N",
        default_value_t = 256,
        allow_negative_numbers = true
    )]
    pub(crate) prompt: u32,
    /// Tokens to decode; 0 leaves decode out.
    #[arg(
        short = 'n',
        long = "decode-tokens",
        value_name = "N",
        default_value_t = 64,
        allow_negative_numbers = true
    )]
    pub(crate) decode: u32,
    /// Tokens of context before the prompt, in each repetition. Their keys and values are made up, not computed.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) depth: u32,
    /// Timed repetitions of both.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000),
          allow_negative_numbers = true)]
    pub(crate) repetitions: u32,
    /// Then time the phases of one more repetition: microseconds a token, share of the time, GB/s.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Leave the bandwidth of memory unmeasured.
    #[arg(long)]
    pub(crate) no_bandwidth: bool,
    /// How to print.
    #[arg(long, value_enum, default_value_t = Format::Text, help_heading = OUTPUT)]
    pub(crate) format: Format,
    /// The same as --format json.
    #[arg(long, conflicts_with = "format", help_heading = OUTPUT)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: Engine,
}

/// `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For reading.
    Text,
    /// A table to paste.
    Markdown,
    /// For machines.
    Json,
}
