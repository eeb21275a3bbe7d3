//! From a path to a model that is ready to run: open, check, sum the memory, then allocate.

use std::{cell::Cell, path::Path, sync::Arc, time::Instant};

use anyhow::Result;
use samara_converter::Progress;
use samara_format::{Access, Error as FormatError};
use samara_runtime::{
    ChatTemplate, Device, Engine, EngineOptions, Error as RuntimeError, HeadKind, MemoryPlan, Model,
    Placement, Plan, Threads, Tokenizer, format_bytes,
};

use crate::{
    choices, cli,
    failure::Failure,
    machine::{Machine, process_left},
    output::note,
    progress::Reporter,
};

/// Context unless asked for: long chats fit, and the caches stay small.
const DEFAULT_CONTEXT: usize = 32_768;

/// What a command needs of an engine beside the options the user gave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wants {
    /// Tokens of one step; 0 takes what is fastest.
    pub(crate) max_batch: usize,
    /// Rows of logits of one step.
    pub(crate) max_logit_rows: usize,
    /// Context unless the user says otherwise, tokens.
    pub(crate) context: usize,
    /// Print the memory sum.
    pub(crate) say: bool,
}

impl Wants {
    /// For answers: long prompts in large steps, one row of logits.
    pub(crate) fn answers(say: bool) -> Self {
        Wants { max_batch: 0, max_logit_rows: 1, context: DEFAULT_CONTEXT, say }
    }

    /// For the logits of every position.
    pub(crate) fn logits(context: usize, say: bool) -> Self {
        Wants { max_batch: 32, max_logit_rows: 32, context, say }
    }
}

/// Opens a model, and keeps it in memory where that was asked for.
pub(crate) fn open(path: &Path, args: &cli::Engine) -> Result<Arc<Model>> {
    let model = map_or_read(path, args)?;
    // Half as much again: other programs go on.
    if available(args, 0) / 3 * 2 > model.file().index().file_len() {
        model.file().large_pages();
    }
    if args.mlock {
        lock(&model, args)?;
    }
    Ok(model)
}

/// Reads a mapped file and keeps it in memory, if there is room for it.
fn lock(model: &Model, args: &cli::Engine) -> Result<()> {
    let file = model.file();
    if file.access() == Access::Mmap {
        let what = format!("--mlock: {}", file.path().display());
        fits(&what, file.index().file_len(), args, "leave --mlock out, a mapped file need not fit")?;
    }
    file.lock().map_err(|error| {
        let advice =
            if cfg!(unix) { "raise the limit of locked memory (ulimit -l), or leave" } else { "leave" };
        Failure::Space(format!("{error}: {advice} --mlock out")).into()
    })
}

/// Mapped, or read where that was asked for or the drive has no maps, as some network drives have not.
fn map_or_read(path: &Path, args: &cli::Engine) -> Result<Arc<Model>> {
    if !args.no_mmap {
        match Model::open(path, Access::Mmap) {
            Ok(model) => return Ok(Arc::new(model)),
            Err(error) if cannot_be_mapped(&error) => {
                note(&format!("{error}: reading it into memory instead"))
            }
            Err(error) => return Err(error.into()),
        }
    }
    read(path, args)
}

/// Whether a file could be opened and read but not mapped, and not for want of address space: reading takes more.
fn cannot_be_mapped(error: &RuntimeError) -> bool {
    matches!(error, RuntimeError::Format(FormatError::Unmappable { cause, .. })
        if cause.kind() != std::io::ErrorKind::OutOfMemory)
}

/// Opens a model and reads it, if there is memory for it.
fn read(path: &Path, args: &cli::Engine) -> Result<Arc<Model>> {
    if let Ok(meta) = path.metadata() {
        let advice = if args.no_mmap {
            "leave --no-mmap out, a mapped file need not fit"
        } else {
            "copy it to a drive that can map files"
        };
        fits(&path.display().to_string(), meta.len(), args, advice)?;
    }
    Ok(Arc::new(Model::open(path, Access::Read)?))
}

/// Refuses what is `len` bytes if memory has no room for it.
fn fits(what: &str, len: u64, args: &cli::Engine, advice: &str) -> Result<()> {
    let available = available(args, 0);
    if len <= available {
        return Ok(());
    }
    let (len, available) = (format_bytes(len), format_bytes(available));
    Err(Failure::Space(format!("{what} is {len}, and {available} of memory are available: {advice}")).into())
}

/// Bytes of address space that a thread takes: its stack, and the arena that glibc reserves for it.
const THREAD_SPACE: u64 = 66 << 20;

/// Bytes that may be allocated when `loaded` bytes of what --memory grants are taken. The limits of the process hold
/// whatever --memory says: going over them ends it.
fn available(args: &cli::Engine, loaded: u64) -> u64 {
    let machine = Machine::detect();
    let granted = args.memory.map_or(machine.memory_available, |memory| memory.saturating_sub(loaded));
    let left = machine.process_left.map(|left| left.saturating_sub(thread_space(args, &machine)));
    granted.min(left.unwrap_or(u64::MAX))
}

fn thread_space(args: &cli::Engine, machine: &Machine) -> u64 {
    let threads = match args.threads.count() {
        0 => machine.threads,
        threads => threads,
    };
    THREAD_SPACE * threads as u64
}

/// What of the limits of the process is left for what, if there are any.
fn process_limits(args: &cli::Engine) -> Option<String> {
    let machine = Machine::detect();
    let (left, threads) = (format_bytes(machine.process_left?), format_bytes(thread_space(args, &machine)));
    Some(format!(
        "the limits of this process (ulimit) leave {left}, and its threads may take {threads} of that; -t sets their \
         number"
    ))
}

/// Tokenizer and chat template of the file.
pub(crate) fn texts(model: &Model) -> Result<(Tokenizer, ChatTemplate)> {
    let tokenizer = tokenizer(model)?;
    let template = model.chat_template(&tokenizer)?;
    Ok((tokenizer, template))
}

/// Tokenizer of the file.
///
/// # Errors
/// Those of the text, and too little memory for it where the process has a limit: a vocabulary takes many times its
/// text.
pub(crate) fn tokenizer(model: &Model) -> Result<Tokenizer> {
    // Converting with Qwen's tokenizer (11.4 MB) takes 142 MB in all, a dozen times its text; twice that is safe.
    const COPIES: u64 = 24;
    const BASE: u64 = 16 << 20;
    let text = model.file().index().metadata().str("tokenizer.json").map_or(0, str::len) as u64;
    let needed = BASE + COPIES * text;
    if let Some(left) = process_left().filter(|left| *left < needed) {
        return Err(Failure::Space(format!(
            "the tokenizer needs up to {} of memory and the limits of this process (ulimit) leave {}: raise them",
            format_bytes(needed),
            format_bytes(left)
        ))
        .into());
    }
    Ok(model.tokenizer()?)
}

/// Settles the context, prints the memory sum, and allocates.
pub(crate) fn engine(model: &Arc<Model>, args: &cli::Engine, wants: Wants) -> Result<Engine> {
    let read = model.file().access() == Access::Read;
    let loaded = if read || args.mlock { model.file().index().file_len() } else { 0 };
    let available = available(args, loaded);
    let max = model.architecture().max_context;
    let gpu_options = args.gpu_layers.is_some() || args.gpu_memory.is_some();
    if gpu_options && matches!(args.device, Device::Cpu | Device::Reference) {
        let device = args.device.name();
        return Err(Failure::Usage(format!(
            "--gpu-layers and --gpu-memory are for a GPU, and --device {device} uses none"
        ))
        .into());
    }
    if args.probes.is_some() && args.head == HeadKind::Exact {
        return Err(Failure::Usage("--probes is for --head flash and --head certified".to_owned()).into());
    }
    let options = EngineOptions {
        device: args.device,
        isa: args.isa,
        threads: args.threads.count(),
        context: max,
        n_slots: 1,
        max_batch: wants.max_batch,
        max_logit_rows: wants.max_logit_rows,
        kv: args.kv,
        head: args.head,
        n_probes: args.probes.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
        gpu_layers: args.gpu_layers.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
        gpu_memory: args.gpu_memory,
    };
    let mut plan = Plan::new(Arc::clone(model), &options)?;
    // What is measured decides what a GPU gets, and so what memory is needed.
    let known = choices::load(model);
    let choices = plan.measure(&known);
    if choices != known {
        choices::save(model, &choices);
    }
    let largest = plan.largest_context(available);
    let plan = plan.with_context(match args.ctx {
        Some(context) => context as usize,
        // Nothing fits: ask for what was wanted, so that the message has a sum.
        None if largest == 0 => wants.context.clamp(1, max),
        None => wants.context.clamp(1, max).min(largest),
    })?;
    if wants.say {
        note(&memory_line(&plan.memory(), read, available, largest, max));
        plan.gpu().iter().for_each(|gpu| note(&gpu_line(gpu, &plan.memory(), args.gpu_memory)));
    }
    let checked = plan.check_memory(available);
    if checked.is_err()
        && let Some(limits) = process_limits(args)
    {
        note(&limits);
    }
    checked?;
    let upload = Upload { reporter: Reporter::new(false, !wants.say), done: Cell::new(u64::MAX) };
    let engine = plan.compile(&mut |done, total| upload.advance(done, total))?;
    upload.reporter.finish();
    if wants.say {
        engine.notices().iter().for_each(|text| note(text));
    }
    Ok(engine)
}

/// Shows how far weights are copied to a GPU.
struct Upload {
    reporter: Reporter,
    done: Cell<u64>,
}

impl Upload {
    fn advance(&self, done: u64, total: u64) {
        // Less than before is another attempt.
        let before = self.done.replace(done);
        let before = if done < before {
            self.reporter.phase("upload", total);
            0
        } else {
            before
        };
        self.reporter.advance(done - before);
    }
}

/// What lies in a GPU's memory, in one line.
fn gpu_line(gpu: &str, memory: &MemoryPlan, granted: Option<u64>) -> String {
    let granted =
        granted.map_or_else(String::new, |granted| format!(" of {} granted", format_bytes(granted)));
    format!(
        "memory of {gpu}: {}{granted} for its weights, KV cache and scratch; the weights it has need no memory of the \
         host",
        format_bytes(memory.device)
    )
}

/// The sum, in one line.
fn memory_line(memory: &MemoryPlan, read: bool, available: u64, largest: usize, max: usize) -> String {
    let MemoryPlan { weights, kv, scratch, device: _, context } = *memory;
    let limit = if largest == max { "the model's maximum" } else { "what fits" };
    format!(
        "memory: {} weights ({}) + {} KV cache for {context} tokens + {} scratch, {} available; largest context: \
         {largest} ({limit})",
        format_bytes(weights),
        if read { "read" } else { "mapped" },
        format_bytes(kv),
        format_bytes(scratch),
        format_bytes(available),
    )
}

/// Why blocks run where they do, and how many threads take part.
pub(crate) fn explain_choice(engine: &Engine) -> Vec<String> {
    engine.reasons().iter().cloned().chain(explain_threads(engine)).collect()
}

/// Which backend and kernels run what, a line for each run of blocks that are alike in both.
pub(crate) fn explain(placements: &[Placement]) -> Vec<String> {
    let alike = |a: &Placement, b: &Placement| a.backend == b.backend && a.kernels == b.kernels;
    placements
        .chunk_by(alike)
        .map(|run| {
            let Placement { block, backend, kernels } = &run[0];
            let span = match run {
                [_, .., last] => format!("{block} to {}", last.block),
                _ => block.clone(),
            };
            let kernels: Vec<String> = kernels.iter().map(ToString::to_string).collect();
            format!("{span} on {backend}: {}", kernels.join(", "))
        })
        .collect()
}

/// How many threads take part.
fn explain_threads(engine: &Engine) -> Option<String> {
    let Threads { decode, prefill } = engine.threads()?;
    let all = engine.limits().threads;
    let tried = if engine.limits().fewer_threads && all > 1 {
        ", fewer where the first tokens show that as faster"
    } else {
        ""
    };
    Some(format!("threads: {prefill} of {all} for prompts, {decode} for each token after{tried}"))
}

/// Names of all kernels, without repeats.
pub(crate) fn kernel_names(placements: &[Placement]) -> Vec<String> {
    let mut names: Vec<String> =
        placements.iter().flat_map(|p| p.kernels.iter().map(ToString::to_string)).collect();
    names.sort();
    names.dedup();
    names
}

/// Checks every hash; a wrong tensor is an error that names it.
pub(crate) fn verify(model: &Model, say: bool) -> Result<()> {
    let started = Instant::now();
    let damaged = crate::verify::damaged(model.file(), 0, &|_| {});
    if !damaged.is_empty() {
        return Err(Failure::Input(
            damaged.iter().map(|(_, error)| error.to_string()).collect::<Vec<_>>().join("\n"),
        )
        .into());
    }
    if say {
        let n = model.file().index().tensors().len();
        note(&format!("verified {n} tensors in {:.1} s", started.elapsed().as_secs_f64()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_mapped_may_be_read() {
        use std::io::ErrorKind;
        let (path, action) = (|| "m.samara".into(), "open");
        let check = |error: FormatError, want: bool| {
            let text = error.to_string();
            assert_eq!(cannot_be_mapped(&error.into()), want, "{text}");
        };
        let unmappable = |kind: ErrorKind| FormatError::Unmappable { path: path(), cause: kind.into() };
        check(unmappable(ErrorKind::Unsupported), true);
        check(unmappable(ErrorKind::InvalidInput), true);
        check(unmappable(ErrorKind::OutOfMemory), false);
        check(FormatError::Io { action, path: path(), cause: ErrorKind::Unsupported.into() }, false);
        assert!(!cannot_be_mapped(&FormatError::Empty.into()));
    }

    #[test]
    fn the_memory_sum_says_what_fits() {
        let plan =
            MemoryPlan { weights: 8 << 20, kv: 2 << 20, scratch: 1 << 20, device: 5 << 20, context: 4096 };
        assert_eq!(
            memory_line(&plan, false, 1 << 30, 4096, 4096),
            "memory: 8.00 MiB weights (mapped) + 2.00 MiB KV cache for 4096 tokens + 1.00 MiB scratch, 1.00 GiB \
             available; largest context: 4096 (the model's maximum)"
        );
        assert!(memory_line(&plan, true, 1 << 30, 100, 4096).ends_with("largest context: 100 (what fits)"));
        assert_eq!(
            gpu_line("gpu X", &plan, Some(6 << 20)),
            "memory of gpu X: 5.00 MiB of 6.00 MiB granted for its weights, KV cache and scratch; the weights it has \
             need no memory of the host"
        );
        assert!(gpu_line("gpu X", &plan, None).starts_with("memory of gpu X: 5.00 MiB for its weights"));
    }
}
