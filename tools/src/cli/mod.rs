//! The command line as data: every option with the sentence that explains it, and examples to copy.

mod measure;
mod synth;
mod values;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use samara_runtime::{Device, HeadKind, KvType};

use self::values::{ChosenIsa, bias, device, isa, size, whole};
pub(crate) use self::{
    measure::{Bench, Format, Ppl},
    synth::{Layout, Synth, SynthSizes},
};
use crate::output::Json;

/// Heading of the options that say where a model runs and what it may take.
const RUNS: &str = "Where it runs";
/// Heading of the options that say what is printed.
const OUTPUT: &str = "Output";
/// Heading of the options of the sampler.
const SAMPLING: &str = "Sampling (the file's own defaults unless given)";

const AFTER: &str = "\
Start here:
  samara demo                                 see it work on a built-in model
  samara convert checkpoint -o m.samara       make one file of a checkpoint
  samara run m.samara                         chat with it
  samara run m.samara -p \"Name three trees.\"  ask once

`samara COMMAND --help` explains every option with examples.

Exit codes:
  0    done
  1    failed while working
  2    the command line is wrong
  3    an input is wrong: a damaged or foreign file, an empty prompt, a
       checkpoint that does not fit its config
  4    not enough memory or disk space
  130  interrupted

With --json an error is also an object on standard output, with the keys
error and exit_code, unless the command had printed its own object before.";

/// Run native-ternary mixture-of-experts models from one file.
#[derive(Debug, Parser)]
#[command(name = "samara", version, after_help = AFTER, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Convert(Convert),
    Run(Box<Run>),
    Inspect(Inspect),
    Verify(Verify),
    Ppl(Ppl),
    Bench(Bench),
    Synth(Synth),
    Demo(Demo),
    Devices(Devices),
    Doctor(Doctor),
    Completions(Completions),
    Man(Man),
}

impl Command {
    /// Whether it asks the system's drivers for GPUs.
    pub(crate) fn looks_for_gpus(&self) -> bool {
        let may = |args: &Engine| matches!(args.device, Device::Auto | Device::Gpu(_));
        match self {
            Command::Run(args) => may(&args.engine),
            Command::Ppl(args) => may(&args.engine),
            Command::Bench(_) | Command::Demo(_) | Command::Devices(_) | Command::Doctor(_) => true,
            _ => false,
        }
    }

    /// What a machine that reads standard output was promised.
    pub(crate) fn json(&self) -> Json {
        let (asked, form) = match self {
            Command::Convert(args) => (args.json, if args.dry_run { Json::Object } else { Json::Lines }),
            Command::Synth(args) => (args.json, Json::Lines),
            Command::Run(args) => (args.json, Json::Object),
            Command::Inspect(args) => (args.json, Json::Object),
            Command::Verify(args) => (args.json, Json::Object),
            Command::Ppl(args) => (args.json, Json::Object),
            Command::Bench(args) => (args.json || args.format == Format::Json, Json::Object),
            Command::Devices(args) => (args.json, Json::Object),
            Command::Doctor(args) => (args.json, Json::Object),
            Command::Demo(_) | Command::Completions(_) | Command::Man(_) => (false, Json::No),
        };
        if asked { form } else { Json::No }
    }
}

/// Make one .samara file of a Maple checkpoint.
///
/// The checkpoint is a folder with config.json, tokenizer.json, a chat template and safetensors shards, in either
/// published layout: bf16 with one tensor for each expert, or 2-bit. Which one it is is found out. Every ternary
/// row is checked to be exactly -a, 0 or +a, and the counts are printed; a row that is not is refused by tensor,
/// row and column.
///
/// The file is written as OUT.part and renamed when it is complete and on the disk. Ctrl-C keeps the part;
/// --resume continues it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara convert maple-2bit -o m.samara
  samara convert maple-2bit -o m.samara --dry-run  check, write nothing
  samara convert maple-2bit -o m.samara --resume   go on where it stopped
  samara convert maple-bf16 -o m.samara --flash-head build
      with FlashHead data of its own")]
pub(crate) struct Convert {
    /// Folder of the checkpoint.
    pub(crate) checkpoint: PathBuf,
    /// File to write.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Keys a query on a sliding layer sees, itself included; the checkpoint's sliding_window unless given.
    /// Maple's publishers disagree between 512 and 513.
    #[arg(long, value_name = "N", value_parser = whole::<1>, allow_negative_numbers = true)]
    pub(crate) window: Option<u64>,
    /// Round rows that are not ternary by the 0.7-mean rule instead of refusing them.
    #[arg(long)]
    pub(crate) ternarize: bool,
    /// FlashHead data, for a faster head.
    #[arg(long, value_enum, default_value_t = FlashHead::Auto, value_name = "WHICH")]
    pub(crate) flash_head: FlashHead,
    /// Tokens in a cluster that --flash-head build makes: a multiple of 4 that divides the vocabulary; 32 unless
    /// given.
    #[arg(long, value_name = "N", value_parser = whole::<1>, allow_negative_numbers = true)]
    pub(crate) cluster_size: Option<u64>,
    /// Replace an existing file, and start over if a part is there.
    #[arg(long, conflicts_with = "resume")]
    pub(crate) force: bool,
    /// Continue an interrupted conversion of the same checkpoint.
    #[arg(long)]
    pub(crate) resume: bool,
    /// Check everything and print the plan; write nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Name to store in the file.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) name: Option<String>,
    /// Licence of the checkpoint, to store in the file.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) license: Option<String>,
    /// Repository the checkpoint came from, to store in the file.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) source_repository: Option<String>,
    /// Revision of that repository, to store in the file.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) source_revision: Option<String>,
    /// Print progress and the report as JSON, one object a line, on standard output.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// Print only errors.
    #[arg(short, long, help_heading = OUTPUT)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) threads: Threads,
}

/// Worker threads.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Threads {
    /// Worker threads; one for each core this process may use unless given.
    #[arg(short = 't', long = "threads", value_name = "N", default_value_t = 0, hide_default_value = true,
          value_parser = value_parser!(u16).range(0..=1024), allow_negative_numbers = true, help_heading = RUNS)]
    count: u16,
}

impl Threads {
    /// 0 when the library should choose.
    pub(crate) fn count(self) -> usize {
        self.count.into()
    }
}

/// Where a model runs and how much it may hold.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Engine {
    /// Where to run: auto (each layer where it is fastest and fits, software GPUs left out), cpu, gpu (as much as fits,
    /// the CPU has the rest), gpu:N (that of this number in `samara devices`), or reference (slow and exact, to compare with).
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device, help_heading = RUNS)]
    pub(crate) device: Device,
    /// Layers on the GPU, the last ones, with the head; 0 uses no GPU. Unless given, as many as pay and fit.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = RUNS)]
    pub(crate) gpu_layers: Option<u64>,
    /// Memory of the GPU to count on, such as 6G, for its layers and their context; unless given, what its driver gives.
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true, help_heading = RUNS)]
    pub(crate) gpu_memory: Option<u64>,
    /// Instruction set of the CPU kernels: scalar, avx2, avx-vnni, avx512, avx512-vnni, neon or neon-dotprod; auto is
    /// the fastest that this machine runs. The results are the same with each.
    #[arg(long, value_name = "ISA", default_value = "auto", value_parser = isa, help_heading = RUNS)]
    pub(crate) isa: ChosenIsa,
    /// Tokens of context to make room for: prompt, reasoning and answer together. Unless given, the model's
    /// maximum, 32768, or what fits in memory, whichever is least.
    #[arg(long, value_name = "TOKENS", value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true,
          help_heading = RUNS)]
    pub(crate) ctx: Option<u32>,
    /// How keys and values of the context are stored: f32, bf16 or q8 (8 bit: half the memory of bf16, less exact).
    #[arg(long, value_name = "TYPE", default_value_t = KvType::default(), value_parser = value_parser!(KvType), help_heading = RUNS)]
    pub(crate) kv: KvType,
    /// How the logits of a token are computed while decoding: exact (every row of the output head), flash (the rows of the
    /// clusters that score best; other tokens cannot come) or certified (as many rows as prove that the largest logits, and so
    /// the answer, are those of exact). Prompts always have the exact head.
    #[arg(long, value_name = "HEAD", default_value_t = HeadKind::default(), value_parser = value_parser!(HeadKind),
          help_heading = RUNS)]
    pub(crate) head: HeadKind,
    /// Clusters that --head flash reads, and --head certified at first; unless given, as many as the file says.
    #[arg(long, value_name = "N", value_parser = whole::<1>, allow_negative_numbers = true, help_heading = RUNS)]
    pub(crate) probes: Option<u64>,
    /// Memory to count on, such as 1.5G or 900M, instead of asking the system.
    #[arg(long, value_name = "SIZE", value_parser = size, allow_negative_numbers = true, help_heading = RUNS)]
    pub(crate) memory: Option<u64>,
    /// Read the file into memory instead of mapping it: slower to start, faster after that where the system has large
    /// pages, and the file may be cut or replaced meanwhile.
    #[arg(long, help_heading = RUNS)]
    pub(crate) no_mmap: bool,
    /// Keep the file in memory, all of it, from the start.
    #[arg(long, help_heading = RUNS)]
    pub(crate) mlock: bool,
    #[command(flatten)]
    pub(crate) threads: Threads,
}

/// `--flash-head`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FlashHead {
    /// Those of the checkpoint, if it has some.
    Auto,
    /// New ones, in place of the checkpoint's.
    Build,
    /// None: the head in token order.
    None,
}

/// Answer a prompt, or chat.
///
/// A prompt given by -p, -f or standard input is answered once. Without one, on a terminal, this is a chat with
/// line editing and history: end a line with \ to go on in the next, /help lists commands. Ctrl-C stops an answer
/// and keeps what was said; Ctrl-C at the prompt, twice, leaves; so does Ctrl-D.
///
/// The answer goes to standard output and everything else to standard error. A model reasons before it answers:
/// on a terminal the reasoning is dimmed; elsewhere it is printed first, then an empty line, then the answer.
/// --hide-reasoning prints the answer alone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara run m.samara                         chat
  samara run m.samara -p \"Name three trees.\"  ask once
  samara run m.samara -f question.txt --json  one JSON object: answer,
                                              reasoning, why it ended, timings
  samara run m.samara -p \"2+2=\" --temp 0      always the likeliest token
  samara run m.samara --raw -p \"Once upon\"    continue a text, without the
                                              chat template
  echo \"Why is the sky blue?\" | samara run m.samara --hide-reasoning")]
pub(crate) struct Run {
    /// The .samara file.
    pub(crate) model: PathBuf,
    /// What belongs after -p, so that the message can say so.
    #[arg(hide = true)]
    pub(crate) words: Vec<OsString>,
    /// The prompt.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    pub(crate) prompt: Option<OsString>,
    /// File that holds the prompt; - is standard input.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Continue the prompt as it is: no chat template, and the output as it is generated.
    #[arg(long, conflicts_with = "system")]
    pub(crate) raw: bool,
    /// A system message in front of the conversation.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Check every hash of the file before using it.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Print which backend and kernels run which part of the model, and why there.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) explain: bool,
    /// Print the answer without the reasoning before it.
    #[arg(long, conflicts_with = "raw", help_heading = OUTPUT)]
    pub(crate) hide_reasoning: bool,
    /// Print nothing but the answer and errors.
    #[arg(short, long, help_heading = OUTPUT)]
    pub(crate) quiet: bool,
    /// Print one JSON object instead of text, when the answer is complete.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: Engine,
    #[command(flatten)]
    pub(crate) sampling: Sampling,
}

/// How tokens are chosen.
#[derive(Clone, Debug, Args)]
pub(crate) struct Sampling {
    /// Softmax temperature; 0 always takes the likeliest token.
    #[arg(long, value_name = "T", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all.
    #[arg(long, value_name = "K", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) top_k: Option<u64>,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) top_p: Option<f32>,
    /// Drop tokens less likely than this share of the likeliest; 0 drops none.
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens seen before; 1 leaves them.
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract once from the logits of tokens seen before.
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens for each time they were seen.
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Add VALUE to the logit of token ID; may be repeated.
    #[arg(long, value_name = "ID=VALUE", value_parser = bias, help_heading = SAMPLING)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the random choices; the same seed gives the same answer.
    #[arg(long, value_name = "N", value_parser = whole::<0>, allow_negative_numbers = true, help_heading = SAMPLING)]
    pub(crate) seed: Option<u64>,
    /// Most tokens to generate, reasoning included; to the end of the context unless given.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..), allow_negative_numbers = true,
          help_heading = SAMPLING)]
    pub(crate) max_tokens: Option<u32>,
    /// End the answer where this text would begin; may be repeated.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = SAMPLING)]
    pub(crate) stop: Vec<String>,
}

/// List what a .samara file holds.
///
/// Header, metadata and every tensor with dtype, shape, offset and length. The sizes add up to the file's length
/// exactly. Weights are not read, so this is quick; `samara verify` checks them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara inspect m.samara
  samara inspect m.samara --metadata tokenizer.chat_template
  samara inspect m.samara --json | jq '.tensors[].name'")]
pub(crate) struct Inspect {
    /// The .samara file.
    pub(crate) model: PathBuf,
    /// Print one metadata value whole, and nothing else.
    #[arg(long, value_name = "KEY")]
    pub(crate) metadata: Option<String>,
    /// Print JSON.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Recompute every hash of a .samara file.
///
/// Names each tensor whose bytes are not those that were written, and ends with exit code 3 if there is one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara verify m.samara
  samara verify m.samara --json")]
pub(crate) struct Verify {
    /// The .samara file.
    pub(crate) model: PathBuf,
    /// Print JSON.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
    /// Print only errors.
    #[arg(short, long, help_heading = OUTPUT)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) threads: Threads,
}

/// Convert the built-in tiny model and ask it something.
///
/// Shows what `convert` and `run` do, on a Maple model of 30 million parameters that was trained on small sums,
/// capitals and the like. Needs no download; the file goes to a temporary folder unless --keep names one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara demo
  samara demo -p \"Capital of Greece?\"
  samara demo --keep tiny.samara      then: samara run tiny.samara")]
pub(crate) struct Demo {
    /// What to ask.
    #[arg(short, long, value_name = "TEXT", default_value = "462+520=", allow_hyphen_values = true)]
    pub(crate) prompt: String,
    /// Keep the converted file here.
    #[arg(long, value_name = "FILE")]
    pub(crate) keep: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) threads: Threads,
}

/// List what a model can run on.
#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// Print JSON.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Say what this machine offers: CPU features, the kernels they lead to, memory, GPUs.
///
/// Put its output into a bug report.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print JSON.
    #[arg(long, help_heading = OUTPUT)]
    pub(crate) json: bool,
}

/// Print a completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  samara completions bash > ~/.local/share/bash-completion/completions/samara
  samara completions zsh > ~/.zfunc/_samara
  samara completions fish > ~/.config/fish/completions/samara.fish")]
pub(crate) struct Completions {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Write the manual pages into a folder: one for samara, one for each command.
#[derive(Debug, Args)]
#[command(hide = true)]
pub(crate) struct Man {
    /// The folder; made if it is not there.
    pub(crate) folder: PathBuf,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_options_needs_no_wrapping_at_80_columns() {
        let top = Cli::command();
        for command in std::iter::once(&top).chain(top.get_subcommands()) {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let long: Vec<&str> = text.lines().filter(|line| line.chars().count() > 79).collect();
            assert!(long.is_empty(), "{}: {long:?}", command.get_name());
        }
    }

    #[test]
    fn every_option_stands_under_its_heading() {
        let top = Cli::command();
        let check = |command: &str, heading: Option<&str>, options: &[&str]| {
            let command = top.find_subcommand(command).expect("a command");
            for option in options {
                let arg = command.get_arguments().find(|arg| arg.get_long() == Some(option));
                let arg = arg.unwrap_or_else(|| panic!("no --{option}"));
                assert_eq!(arg.get_help_heading(), heading, "{} --{option}", command.get_name());
            }
        };
        check("run", None, &["prompt", "file", "raw", "system", "verify"]);
        check("run", Some(OUTPUT), &["json", "quiet", "explain", "hide-reasoning"]);
        for command in ["run", "ppl", "bench"] {
            check(
                command,
                Some(RUNS),
                &[
                    "device",
                    "gpu-layers",
                    "gpu-memory",
                    "isa",
                    "ctx",
                    "kv",
                    "memory",
                    "no-mmap",
                    "mlock",
                    "threads",
                ],
            );
        }
        check("run", Some(SAMPLING), &["temp", "top-k", "seed", "max-tokens", "stop", "logit-bias"]);
        check("synth", None, &["output", "layout", "full", "seed"]);
        check("synth", Some(OUTPUT), &["json", "quiet"]);
        check("synth", Some(synth::SIZES), &["vocab-size", "no-flash", "shards"]);
        check("convert", None, &["output", "resume", "name", "flash-head"]);
        check("convert", Some(RUNS), &["threads"]);
    }
}
