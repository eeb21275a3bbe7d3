//! `samara ppl`: how well a model predicts a text, and how far its logits are from stored ones.
//!
//! Logits are looked at as they come and not kept: a vocabulary times a text is more than most machines hold.

use std::{
    io::{BufWriter, IntoInnerError, Write},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use anyhow::{Context, Result};
use safetensors::{Dtype, SafeTensors};
use samara_format::{Error as FormatError, check_output};
use samara_runtime::{Engine, HeadKind, Model, Specials, divergence, log_prob, score, score_head};
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;
use xxhash_rust::xxh3::xxh3_128;

use crate::{
    cli::Ppl,
    failure::{Failure, INTERRUPTED},
    head::HeadReport,
    interrupt::{self, CANCEL},
    load::{self, Wants},
    output::{json as print_json, line},
    prompt,
};

/// Windows of a text unless `--ctx` says otherwise, tokens.
const WINDOW: usize = 2048;

pub(crate) fn run(args: &Ppl) -> Result<()> {
    check_save(args)?;
    if args.file.is_none() && args.engine.head != HeadKind::Exact {
        let head = args.engine.head;
        return Err(Failure::Usage(format!("--head {head} is compared on a text: give --file")).into());
    }
    let model = load::open(&args.model, &args.engine)?;
    let golden = args.logits.as_deref().map(Golden::read).transpose()?;
    let longest = golden.iter().flat_map(|golden| &golden.sequences).map(|sequence| sequence.ids.len()).max();
    let mut engine =
        load::engine(&model, &args.engine, Wants::logits(WINDOW.max(longest.unwrap_or(0)), !args.json))?;
    let mut record = Map::new();
    if let Some(path) = &args.file {
        let save = args.save_logits.as_deref().map(|path| Save { path, force: args.force });
        let top_k = args.top_k.map_or(model.generation().top_k, |k| k as usize);
        let (likelihood, head) = likelihood(&model, &mut engine, path, save, top_k)?;
        record.extend(likelihood.to_json());
        record.extend(head.map(|head| ("head".to_owned(), head.to_json())));
        if !args.json {
            line(&likelihood.to_text())?;
            head.iter().try_for_each(|head| line(&head.to_text()))?;
        }
    }
    if let Some(golden) = &golden {
        let distance = distance(&mut engine, golden)?;
        record.extend(distance.to_json());
        if !args.json {
            line(&distance.to_text())?;
        }
    }
    if args.json {
        record.insert("kernels".to_owned(), json!(load::kernel_names(engine.placements())));
        record.insert("threads".to_owned(), json!(engine.limits().threads));
        record.insert("context".to_owned(), json!(engine.limits().context));
        print_json(&Value::Object(record))?;
    }
    Ok(())
}

/// Where to store logits.
#[derive(Clone, Copy, Debug)]
struct Save<'a> {
    path: &'a Path,
    /// Replace what is there.
    force: bool,
}

/// Refuses to store logits in place of a file that is there, and of this command's own inputs whatever is asked.
fn check_save(args: &Ppl) -> Result<(), Failure> {
    let Some(path) = &args.save_logits else { return Ok(()) };
    if let Ok(place) = path.canonicalize() {
        let inputs = [Some(&args.model), args.file.as_ref(), args.logits.as_ref()];
        for input in inputs.into_iter().flatten() {
            if input.canonicalize().is_ok_and(|input| input == place) {
                return Err(Failure::Usage(format!(
                    "--save-logits {} would replace {}, which this command reads: choose another name",
                    path.display(),
                    input.display()
                )));
            }
        }
    }
    Save { path, force: args.force }.check()
}

impl Save<'_> {
    fn check(self) -> Result<(), Failure> {
        let Save { path, force } = self;
        if path.symlink_metadata().is_err() {
            return match check_output(path, force) {
                Err(error @ FormatError::NotReplaceable { .. }) => Err(Failure::Usage(error.to_string())),
                _ => Ok(()),
            };
        }
        // Renaming over a folder, a device or a link to nothing would do something else than store a file.
        let why = match (path.is_file(), force) {
            (true, true) => return Ok(()),
            (true, false) => "exists already: choose another name, or use --force to replace it",
            (false, _) => "exists and is not a regular file: choose another name",
        };
        Err(Failure::Usage(format!("{} {why}", path.display())))
    }
}

/// How well a text is predicted.
#[derive(Clone, Copy, Debug)]
struct Likelihood {
    /// Predictions scored.
    tokens: usize,
    /// Sum of negative log-likelihoods, nats.
    nll: f64,
    /// xxh3-128 of the file.
    corpus: u128,
}

impl Likelihood {
    fn mean(&self) -> f64 {
        self.nll / self.tokens as f64
    }

    fn to_json(self) -> Map<String, Value> {
        let Likelihood { tokens, nll: _, corpus } = self;
        let (nll, perplexity) = (self.mean(), self.mean().exp());
        [
            ("tokens".to_owned(), json!(tokens)),
            ("nll".to_owned(), json!(nll)),
            ("perplexity".to_owned(), json!(perplexity)),
            ("corpus_hash".to_owned(), json!(format!("{corpus:032x}"))),
        ]
        .into_iter()
        .collect()
    }

    fn to_text(self) -> String {
        let Likelihood { tokens, nll: _, corpus } = self;
        let (nll, perplexity) = (self.mean(), self.mean().exp());
        format!(
            "perplexity {perplexity:.4}, {nll:.6} nats a token over {tokens} tokens; corpus {corpus:032x}"
        )
    }
}

/// Of the exact head, and how the engine's own compares with it if that is another.
fn likelihood(
    model: &Model,
    engine: &mut Engine,
    path: &Path,
    save: Option<Save<'_>>,
    top_k: usize,
) -> Result<(Likelihood, Option<HeadReport>)> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let wrong = |reason: String| Failure::Input(format!("{} {reason}", path.display()));
    let ids = load::tokenizer(model)?.encode(&prompt::decode(&bytes).map_err(wrong)?, Specials::Plain)?;
    if ids.len() < 2 {
        return Err(wrong(format!("is {} tokens long: there is nothing to predict", ids.len())).into());
    }
    let context = engine.limits().context;
    if context < 2 {
        let reason = "with a context of one token nothing can be predicted: raise --ctx";
        return Err(Failure::Usage(reason.to_owned()).into());
    }
    let vocab_size = model.architecture().vocab_size;
    let mut saved = save.map(|save| LogitsFile::create(save, &ids, context, vocab_size)).transpose()?;
    let mut sum = Likelihood { tokens: 0, nll: 0.0, corpus: xxh3_128(&bytes) };
    let mut written = Ok(());
    if saved.is_some() {
        interrupt::listen()?;
    }
    let mut on_rows = |first: usize, rows: &[f32]| {
        // There is no other way out of here, and an unfinished file of that size should not stay.
        if CANCEL.load(Ordering::SeqCst) {
            drop(saved.take());
            std::process::exit(INTERRUPTED.into());
        }
        for (i, row) in rows.chunks_exact(vocab_size).enumerate() {
            let next = first + i + 1;
            // The first token of a window has no past to be predicted from.
            if next < ids.len() && !next.is_multiple_of(context) {
                sum.nll -= log_prob(row, ids[next]);
                sum.tokens += 1;
            }
            if let (Some(file), Ok(())) = (&mut saved, &written) {
                written = file.row(first + i, row);
            }
        }
    };
    let head = HeadReport::of(engine, top_k, |engine, agreement| {
        Ok(score_head(engine, &ids, top_k, |position, exact, head| {
            on_rows(position, exact);
            agreement.add(exact, head);
        })?)
    })?;
    if head.is_none() {
        score(engine, &ids, &mut on_rows)?;
    }
    written?;
    saved.map_or(Ok(()), LogitsFile::finish)?;
    Ok((sum, head))
}

/// Writes what [`Golden::read`] reads, row by row: the header says every size before the first row comes. It is
/// written beside its place and renamed when it is whole; until then dropping it removes it.
struct LogitsFile<'a> {
    out: BufWriter<NamedTempFile>,
    save: Save<'a>,
    ids: &'a [u32],
    /// Tokens of a sequence.
    context: usize,
}

impl<'a> LogitsFile<'a> {
    fn create(save: Save<'a>, ids: &'a [u32], context: usize, vocab_size: usize) -> Result<Self> {
        let (mut header, mut offset) = (Map::new(), 0);
        for (j, window) in ids.chunks(context).enumerate() {
            let n = window.len();
            for (name, dtype, shape) in
                [(format!("{j}.ids"), "I32", vec![n]), (format!("{j}.logits"), "F32", vec![n, vocab_size])]
            {
                let end = offset + 4 * shape.iter().product::<usize>();
                header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": [offset, end] }));
                offset = end;
            }
        }
        let mut header = Value::Object(header).to_string();
        header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
        let mut file = LogitsFile { out: BufWriter::new(beside(save.path)?), save, ids, context };
        file.write(&(header.len() as u64).to_le_bytes())?;
        file.write(header.as_bytes())?;
        Ok(file)
    }

    /// The logits at a position of the text; positions ascend.
    fn row(&mut self, position: usize, row: &[f32]) -> Result<()> {
        if position.is_multiple_of(self.context) {
            let end = self.ids.len().min(position + self.context);
            self.write(bytemuck::cast_slice(&self.ids[position..end]))?;
        }
        self.write(bytemuck::cast_slice(row))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).with_context(|| cannot_write(self.save.path))
    }

    fn finish(self) -> Result<()> {
        let LogitsFile { out, save, ids: _, context: _ } = self;
        let why = || cannot_write(save.path);
        let file = out.into_inner().map_err(IntoInnerError::into_error).with_context(why)?;
        file.as_file().sync_all().with_context(why)?;
        // Something may have come there meanwhile.
        save.check()?;
        file.persist(target(save.path)).map_err(|error| error.error).with_context(why)?;
        Ok(())
    }
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// Where a link leads, so that the link stays. Of a new file the folder is followed: the canonical form of a path has
/// no limit of length on Windows.
fn target(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    path.canonicalize()
        .or_else(|_| Ok(folder.canonicalize()?.join(path.file_name().unwrap_or_default())))
        .unwrap_or_else(|_: std::io::Error| path.to_owned())
}

/// A new file next to where `path` leads, on the same disk, with the rights that a new file has.
fn beside(path: &Path) -> Result<NamedTempFile> {
    let target = target(path);
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut name = target.file_name().unwrap_or_default().to_owned();
    name.push(".");
    let mut builder = tempfile::Builder::new();
    builder.prefix(&name).suffix(".part");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder).with_context(|| format!("cannot create {}", path.display()))
}

/// Stored logits.
#[derive(Debug)]
struct Golden {
    path: String,
    sequences: Vec<GoldenSequence>,
}

#[derive(Debug)]
struct GoldenSequence {
    ids: Vec<u32>,
    /// Of the last positions, f32 `[m, vocab_size]`.
    logits: Vec<f32>,
    vocab_size: usize,
}

impl Golden {
    fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let wrong = |reason: String| Failure::Input(format!("{}: {reason}", path.display()));
        let tensors = SafeTensors::deserialize(&bytes)
            .map_err(|error| wrong(format!("not a safetensors file: {error}")))?;
        let mut sequences = Vec::new();
        while let Ok(ids) = tensors.tensor(&format!("{}.ids", sequences.len())) {
            let j = sequences.len();
            let logits = tensors
                .tensor(&format!("{j}.logits"))
                .map_err(|_| wrong(format!("there is no {j}.logits")))?;
            let &[n_rows, vocab_size] = logits.shape() else {
                return Err(
                    wrong(format!("{j}.logits has shape {:?}, not [m, vocabulary]", logits.shape())).into()
                );
            };
            if ids.dtype() != Dtype::I32 || logits.dtype() != Dtype::F32 {
                return Err(wrong(format!("{j}.ids must be I32 and {j}.logits F32")).into());
            }
            let ids: Vec<u32> = words(ids.data()).map(u32::from_le_bytes).collect();
            if n_rows == 0 || n_rows > ids.len() {
                return Err(wrong(format!("{j}.logits has {n_rows} rows for {} tokens", ids.len())).into());
            }
            let logits = words(logits.data()).map(f32::from_le_bytes).collect();
            sequences.push(GoldenSequence { ids, logits, vocab_size });
        }
        if sequences.is_empty() {
            return Err(wrong("there is no 0.ids: these are not stored logits".to_owned()).into());
        }
        Ok(Golden { path: path.display().to_string(), sequences })
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.as_chunks::<4>().0.iter().copied()
}

/// How far two sets of logits are apart.
#[derive(Clone, Copy, Debug)]
struct Distance {
    positions: usize,
    /// Nats.
    kl_mean: f64,
    kl_max: f64,
    /// Share of positions with the same likeliest token.
    top1_agreement: f64,
    /// Largest difference of two logits.
    max_abs: f64,
}

impl Distance {
    fn to_json(self) -> Map<String, Value> {
        let Distance { positions, kl_mean, kl_max, top1_agreement, max_abs } = self;
        [
            ("positions".to_owned(), json!(positions)),
            ("kl_mean".to_owned(), json!(kl_mean)),
            ("kl_max".to_owned(), json!(kl_max)),
            ("top1_agreement".to_owned(), json!(top1_agreement)),
            ("logit_max_abs_difference".to_owned(), json!(max_abs)),
        ]
        .into_iter()
        .collect()
    }

    fn to_text(self) -> String {
        let Distance { positions, kl_mean, kl_max, top1_agreement, max_abs } = self;
        format!(
            "KL mean {kl_mean:.3e}, max {kl_max:.3e} nats; same likeliest token {:.2} %; logits differ by at most \
             {max_abs:.3e}; {positions} positions",
            100.0 * top1_agreement
        )
    }
}

fn distance(engine: &mut Engine, golden: &Golden) -> Result<Distance> {
    let mut sum = Distance { positions: 0, kl_mean: 0.0, kl_max: 0.0, top1_agreement: 0.0, max_abs: 0.0 };
    for (j, sequence) in golden.sequences.iter().enumerate() {
        check_fits(engine, golden, j, sequence)?;
        let GoldenSequence { ids, logits, vocab_size } = sequence;
        let first_stored = ids.len() - logits.len() / vocab_size;
        score(engine, ids, &mut |first, rows| {
            for (i, row) in rows.chunks_exact(*vocab_size).enumerate() {
                let Some(k) = (first + i).checked_sub(first_stored) else { continue };
                let apart = divergence(&logits[k * vocab_size..(k + 1) * vocab_size], row);
                sum.positions += 1;
                sum.kl_mean += apart.kl;
                sum.kl_max = sum.kl_max.max(apart.kl);
                sum.max_abs = sum.max_abs.max(apart.max_abs);
                sum.top1_agreement += f64::from(u8::from(apart.same_top1));
            }
        })?;
    }
    // There is at least one sequence, and each has at least one row.
    sum.kl_mean /= sum.positions as f64;
    sum.top1_agreement /= sum.positions as f64;
    Ok(sum)
}

/// Refuses logits of another vocabulary, and sequences longer than the context.
fn check_fits(engine: &Engine, golden: &Golden, j: usize, sequence: &GoldenSequence) -> Result<(), Failure> {
    let (stored, vocab_size) = (sequence.vocab_size, engine.model().architecture().vocab_size);
    if stored != vocab_size {
        let path = &golden.path;
        return Err(Failure::Input(format!(
            "{path}: {j}.logits is of {stored} tokens, the model has {vocab_size}"
        )));
    }
    let (n, context) = (sequence.ids.len(), engine.limits().context);
    if n > context {
        return Err(Failure::Usage(format!(
            "sequence {j} is {n} tokens and the context {context}: use --ctx {n}"
        )));
    }
    Ok(())
}
