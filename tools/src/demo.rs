//! `samara demo`: the whole way, from a checkpoint to an answer, on a model that is part of the program.

use std::{io::Write, path::Path, sync::Arc};

use anyhow::{Context, Result};
use samara_converter::{Error, Options, Quiet, convert, plan};
use samara_format::Access;
use samara_runtime::{
    Device, Finish, HeadKind, KvType, Message, Model, Sampler, SamplerSpec, Session, format_bytes,
};

use crate::{
    cli::{Demo, Engine},
    convert::proof,
    failure::Failure,
    interrupt::{self, CANCEL},
    load::{self, Wants},
    output::{Printer, note},
    run::{Speaker, summary},
    shell,
};

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../tests/fixtures/tiny-maple-2bit/", $name)))),*]
    };
}

/// Names and bytes of the checkpoint: a Maple model of 30 million parameters in the published 2-bit layout.
const CHECKPOINT: &[(&str, &[u8])] = embedded![
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-flashhead.safetensors",
];

/// A text file of the built-in checkpoint.
pub(crate) fn embedded_text(name: &str) -> Option<&'static str> {
    CHECKPOINT.iter().find(|(known, _)| *known == name).and_then(|(_, bytes)| std::str::from_utf8(bytes).ok())
}

pub(crate) fn run(args: &Demo) -> Result<()> {
    if args.prompt.is_empty() {
        return Err(Failure::Input(
            "the prompt given with -p is empty: there is nothing to answer".to_owned(),
        )
        .into());
    }
    interrupt::listen()?;
    let folder = tempfile::Builder::new()
        .prefix("samara-demo-")
        .tempdir()
        .context("cannot make a temporary folder")?;
    let checkpoint = folder.path().join("checkpoint");
    unpack(&checkpoint)?;
    let bytes: u64 = CHECKPOINT.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    note(&format!(
        "1. A checkpoint, as it would be downloaded: {} files, {}",
        CHECKPOINT.len(),
        format_bytes(bytes)
    ));
    let temporary = folder.path().join("tiny.samara");
    let file = args.keep.as_deref().unwrap_or(&temporary);
    note("2. samara convert checkpoint -o tiny.samara");
    make(&checkpoint, file, args)?.iter().for_each(|text| note(&format!("   {text}")));
    note(&format!("3. samara run tiny.samara --temp 0 {}", shell::option("-p", &args.prompt)));
    answer(file, args)?;
    if let Some(path) = &args.keep {
        note(&format!(
            "The file stays at {}. Chat with it: samara run {}",
            path.display(),
            shell::path(path)
        ));
    }
    Ok(())
}

fn unpack(folder: &Path) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for (name, bytes) in CHECKPOINT {
        let path = folder.join(name);
        std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn make(checkpoint: &Path, file: &Path, args: &Demo) -> Result<Vec<String>> {
    let options = Options { threads: args.threads.count(), ..Options::default() };
    let plan = plan(checkpoint, &options)?;
    let report = convert(&plan, file, &options, &Quiet, &CANCEL).map_err(in_words_of_the_demo)?;
    Ok(proof(&report))
}

/// The converter speaks of options that `demo` does not have, and its checkpoint is gone when this ends.
fn in_words_of_the_demo(error: Error) -> anyhow::Error {
    match error {
        Error::OutputExists { path } | Error::UnfinishedExists { path } => Failure::Usage(format!(
            "{} exists already: choose another name for --keep, or remove it",
            path.display()
        ))
        .into(),
        Error::Cancelled { kept: Some(part) } => {
            note(&format!("{} is unfinished and of no use: remove it", part.display()));
            Failure::Interrupted.into()
        }
        Error::Cancelled { kept: None } => Failure::Interrupted.into(),
        other => other.into(),
    }
}

fn answer(file: &Path, args: &Demo) -> Result<()> {
    // Read, not mapped: the folder goes away while the model is still open.
    let model = Arc::new(Model::open(file, Access::Read)?);
    let options = Engine {
        device: Device::Auto,
        gpu_layers: None,
        gpu_memory: None,
        isa: None,
        ctx: None,
        kv: KvType::default(),
        head: HeadKind::default(),
        probes: None,
        memory: None,
        no_mmap: false,
        mlock: false,
        threads: args.threads,
    };
    let engine = load::engine(&model, &options, Wants::answers(false))?;
    load::explain(engine.placements()).iter().for_each(|text| note(&format!("   {text}")));
    let (tokenizer, template) = load::texts(&model)?;
    let mut speaker = Speaker {
        engine,
        session: Session::new(0),
        template,
        tokenizer,
        // The sums are right when the likeliest token is taken.
        sampler: Sampler::new(SamplerSpec { temperature: 0.0, ..SamplerSpec::default() })?,
        stop: Vec::new(),
        stop_ids: model.stop_ids().to_vec(),
        max_tokens: Some(512),
        load_seconds: 0.0,
    };
    let mut printer = Printer::stdout(false, false);
    let reply = speaker.answer(&[Message::new("user", &args.prompt)], &mut |event| printer.event(event))?;
    printer.finish()?;
    std::io::stdout().flush()?;
    note(&format!("   {}", summary(&reply.outcome, speaker.engine.limits().context)));
    match reply.outcome.finish {
        Finish::Cancelled => Err(Failure::Interrupted.into()),
        _ => Ok(()),
    }
}
