//! `samara demo`: the whole way, from a checkpoint to an answer, on a model that is part of the program.

use std::{io::Write, path::Path, sync::Arc};

use anyhow::{Context, Result};
use samara_converter::{Options, Quiet, convert, plan};
use samara_format::Access;
use samara_runtime::{Message, Model, SamplerSpec, Session, format_bytes};

use crate::{
    cli::{Demo, Device, Engine},
    convert::proof,
    interrupt::{self, CANCEL},
    load::{self, Wants},
    output::{Printer, note},
    run::{Speaker, summary},
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
    note(&format!("3. samara run tiny.samara --temp 0 -p {:?}", args.prompt));
    answer(file, args)?;
    if let Some(path) = &args.keep {
        note(&format!("The file stays at {0}. Chat with it: samara run {0}", path.display()));
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
    Ok(proof(&convert(&plan, file, &options, &Quiet, &CANCEL)?))
}

fn answer(file: &Path, args: &Demo) -> Result<()> {
    // Read, not mapped: the folder goes away while the model is still open.
    let model = Arc::new(Model::open(file, Access::Read)?);
    let options =
        Engine { device: Device::Auto, ctx: None, memory: None, no_mmap: false, threads: args.threads };
    let engine = load::engine(&model, &options, Wants::answers(false))?;
    load::explain(engine.placements()).iter().for_each(|text| note(&format!("   {text}")));
    let tokenizer = model.tokenizer()?;
    let mut speaker = Speaker {
        engine,
        session: Session::new(0),
        template: model.chat_template(&tokenizer)?,
        tokenizer,
        // The sums are right when the likeliest token is taken.
        sampler: SamplerSpec { temperature: 0.0, ..SamplerSpec::default() },
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
    Ok(())
}
