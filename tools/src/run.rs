//! `samara run`: one prompt answered, or a chat.

use std::{sync::atomic::Ordering, time::Instant};

use anyhow::Result;
use samara_runtime::{
    ChatTemplate, Engine, Event, Finish, GenerationDefaults, Message, Outcome, Piece, ReasoningSplit,
    RenderOptions, Request, Sampler, SamplerSpec, Session, Specials, Tokenizer, generate,
};
use serde_json::json;

use crate::{
    chat,
    cli::{Run, Sampling},
    failure::Failure,
    head::HeadReads,
    interrupt::{self, CANCEL},
    load,
    output::{self, Printer, note},
    prompt::{self, Prompt},
    shell,
};

pub(crate) fn run(args: Run) -> Result<()> {
    if !args.words.is_empty() {
        let words: Vec<String> = args.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let prompt = shell::option("-p", &words.join(" "));
        let command = format!("samara run {} {prompt}", shell::path(&args.model));
        return Err(Failure::Usage(format!("a prompt is given with -p: {command}")).into());
    }
    // The file first: whoever names a wrong one should not have to type a prompt to learn of it.
    let model = load::open(&args.model, &args.engine)?;
    let prompt = prompt::find(&args)?;
    if prompt == Prompt::Nothing {
        note("nothing on standard input, so nothing to answer");
        return Ok(());
    }
    // Not before the prompt is read: until then Ctrl-C should simply end the program.
    interrupt::listen()?;
    let started = Instant::now();
    let sampler = sampler(&args.sampling, model.generation())?;
    let say = !args.quiet;
    if args.verify {
        load::verify(&model, say)?;
    }
    let (tokenizer, template) = load::texts(&model)?;
    let engine = load::engine(&model, &args.engine, load::Wants::answers(say))?;
    if args.explain {
        load::explain(engine.placements()).iter().for_each(|line| note(line));
        load::explain_choice(&engine).iter().for_each(|line| note(line));
    }
    let mut speaker = Speaker {
        engine,
        session: Session::new(0),
        tokenizer,
        template,
        sampler: Sampler::new(sampler)?,
        stop: stops(&args),
        stop_ids: model.stop_ids().to_vec(),
        max_tokens: args.sampling.max_tokens.map(|n| n as usize),
        load_seconds: started.elapsed().as_secs_f64(),
    };
    match prompt {
        Prompt::Once(text) => once(&mut speaker, &args, text),
        _ => chat::run(&mut speaker, &args),
    }
}

/// Texts that end an answer, with the line ends that a prompt gets too.
fn stops(args: &Run) -> Vec<String> {
    let stop = args.sampling.stop.iter().cloned();
    if args.raw { stop.collect() } else { stop.map(prompt::line_ends).collect() }
}

/// The file's defaults with the user's options over them.
fn sampler(args: &Sampling, defaults: GenerationDefaults) -> Result<SamplerSpec> {
    let unchanged = SamplerSpec::default();
    let spec = SamplerSpec {
        temperature: args.temp.unwrap_or(defaults.temperature),
        top_k: args.top_k.map_or(defaults.top_k, |k| usize::try_from(k).unwrap_or(usize::MAX)),
        top_p: args.top_p.unwrap_or(defaults.top_p),
        min_p: args.min_p.unwrap_or(unchanged.min_p),
        repetition_penalty: args.repetition_penalty.unwrap_or(unchanged.repetition_penalty),
        presence_penalty: args.presence_penalty.unwrap_or(unchanged.presence_penalty),
        frequency_penalty: args.frequency_penalty.unwrap_or(unchanged.frequency_penalty),
        repeat_window: unchanged.repeat_window,
        logit_bias: args.logit_bias.clone(),
        seed: args.seed.unwrap_or_else(fresh_seed),
    };
    // Before anything is loaded or allocated.
    spec.validate().map_err(|error| Failure::Usage(error.to_string()))?;
    Ok(spec)
}

/// A seed nobody chose: from the random keys that the standard library's hash maps get.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// A model with everything that turns messages into an answer.
pub(crate) struct Speaker {
    pub(crate) engine: Engine,
    pub(crate) session: Session,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: ChatTemplate,
    pub(crate) sampler: Sampler,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) load_seconds: f64,
}

/// An answer, with its text apart from its reasoning.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) reasoning: String,
    pub(crate) answer: String,
    pub(crate) n_prompt: usize,
    pub(crate) outcome: Outcome,
}

impl Speaker {
    /// Answers a conversation.
    pub(crate) fn answer(&mut self, messages: &[Message], on_event: &mut dyn FnMut(&Event)) -> Result<Reply> {
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let pieces = self.template.render(messages, options)?;
        let prompt = self.tokenizer.encode_pieces(&pieces)?;
        self.generate(&prompt, ReasoningSplit::new(opens_reasoning(&pieces, &self.tokenizer)), on_event)
    }

    /// Continues a text. Text is text here too: what spells a control token does not become one.
    pub(crate) fn carry_on(&mut self, text: &str, on_event: &mut dyn FnMut(&Event)) -> Result<Reply> {
        let prompt = self.tokenizer.encode(text, Specials::Plain)?;
        self.generate(&prompt, ReasoningSplit::off(), on_event)
    }

    fn generate(
        &mut self,
        prompt: &[u32],
        split: ReasoningSplit,
        on_event: &mut dyn FnMut(&Event),
    ) -> Result<Reply> {
        let request = Request {
            prompt,
            stop: &self.stop,
            stop_ids: &self.stop_ids,
            max_tokens: self.max_tokens,
            split,
        };
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut event = |event: Event| {
            match &event {
                Event::Reasoning(text) => reasoning.push_str(text),
                Event::Answer(text) => answer.push_str(text),
                Event::Notice(text) => note(text),
            }
            on_event(&event);
        };
        let Speaker { engine, session, tokenizer, sampler, .. } = self;
        let outcome = generate(engine, session, tokenizer, sampler, &request, &CANCEL, &mut event)?;
        Ok(Reply { reasoning, answer, n_prompt: prompt.len(), outcome })
    }
}

/// Whether a prompt ends inside a think block, so that what follows is reasoning.
fn opens_reasoning(pieces: &[Piece], tokenizer: &Tokenizer) -> bool {
    let open = tokenizer.special_id("<think>");
    match pieces {
        [.., Piece::Special(id), Piece::Text(text)] if text.trim().is_empty() => Some(*id) == open,
        [.., Piece::Special(id)] => Some(*id) == open,
        [.., Piece::Text(text)] => open.is_none() && text.trim_end().ends_with("<think>"),
        [] => false,
    }
}

fn once(speaker: &mut Speaker, args: &Run, text: String) -> Result<()> {
    let mut printer = (!args.json).then(|| Printer::stdout(args.hide_reasoning, args.raw));
    let mut show = |event: &Event| {
        if let Some(printer) = &mut printer {
            printer.event(event);
            if printer.failed() {
                CANCEL.store(true, Ordering::SeqCst);
            }
        }
    };
    let reply = if args.raw {
        speaker.carry_on(&text, &mut show)?
    } else {
        speaker.answer(&conversation(args, text), &mut show)?
    };
    match printer {
        Some(printer) => printer.finish()?,
        None => output::json(&reply_json(speaker, &reply))?,
    }
    if !args.quiet && !args.json {
        note(&summary(&reply.outcome, speaker.engine.limits().context));
        HeadReads::of(&mut speaker.engine).iter().for_each(|reads| note(&reads.to_text()));
    }
    match reply.outcome.finish {
        Finish::Cancelled => Err(Failure::Interrupted.into()),
        _ => Ok(()),
    }
}

/// The messages of a single question.
fn conversation(args: &Run, text: String) -> Vec<Message> {
    let system = args.system.iter().map(|text| Message::new("system", prompt::line_ends(text.clone())));
    system.chain([Message::new("user", text)]).collect()
}

fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}

/// Steps that decoded: the first token comes from the prefill's logits.
fn decode_steps(outcome: &Outcome) -> usize {
    outcome.tokens.len().saturating_sub(1)
}

/// Tokens a second, if there was something to measure.
fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (seconds > 0.0 && tokens > 0).then(|| tokens as f64 / seconds)
}

fn reply_json(speaker: &mut Speaker, reply: &Reply) -> serde_json::Value {
    let Reply { reasoning, answer, n_prompt, outcome } = reply;
    let (prefill, decode) = (outcome.prefill_time.as_secs_f64(), outcome.decode_time.as_secs_f64());
    json!({
        "answer": answer,
        "reasoning": reasoning,
        "finish_reason": finish_name(outcome.finish),
        "prompt_tokens": n_prompt,
        "completion_tokens": outcome.tokens.len(),
        "token_ids": outcome.tokens,
        "seed": speaker.sampler.spec().seed,
        "kernels": load::kernel_names(speaker.engine.placements()),
        "head": HeadReads::of(&mut speaker.engine).map(HeadReads::to_json),
        "timings": {
            "load_seconds": speaker.load_seconds,
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "prefill_tokens_per_s": rate(outcome.prefilled, prefill),
            "decode_tokens_per_s": rate(decode_steps(outcome), decode),
        },
    })
}

/// What came of an answer, in one line.
pub(crate) fn summary(outcome: &Outcome, context: usize) -> String {
    let why = match outcome.finish {
        Finish::Stop => "complete".to_owned(),
        Finish::Length => "cut by --max-tokens".to_owned(),
        Finish::Context => format!("cut: the context of {context} tokens is full (see --ctx)"),
        Finish::Cancelled => "stopped".to_owned(),
    };
    let mut line = format!("{} prompt tokens", outcome.cached + outcome.prefilled);
    if let Some(rate) = rate(outcome.prefilled, outcome.prefill_time.as_secs_f64()) {
        line += &format!(" ({rate:.0}/s)");
    }
    line += &format!(", {} generated", outcome.tokens.len());
    if let Some(rate) = rate(decode_steps(outcome), outcome.decode_time.as_secs_f64()) {
        line += &format!(" ({rate:.1}/s)");
    }
    format!("{line}, {why}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn a_stop_text_has_the_line_ends_of_a_prompt() {
        let check = |more: &[&str], want: &str| {
            let words = ["samara", "run", "m", "--stop", "a\r\nb\r"];
            let cli = Cli::try_parse_from(words.iter().chain(more)).expect("a command line");
            let Command::Run(args) = cli.command else { panic!("run") };
            assert_eq!(stops(&args), [want]);
        };
        check(&[], "a\nb\r");
        check(&["--raw"], "a\r\nb\r");
    }

    #[test]
    fn the_speed_of_decoding_counts_steps_not_tokens() {
        let check = |tokens: usize, want: Option<f64>, line: &str| {
            let outcome = Outcome {
                tokens: vec![7; tokens],
                finish: Finish::Length,
                cached: 1,
                prefilled: 4,
                prefill_time: Duration::from_secs(2),
                decode_time: Duration::from_secs(4),
            };
            assert_eq!(rate(decode_steps(&outcome), 4.0), want);
            assert_eq!(summary(&outcome, 9), format!("5 prompt tokens (2/s), {line}, cut by --max-tokens"));
        };
        check(0, None, "0 generated");
        check(1, None, "1 generated");
        check(2, Some(0.25), "2 generated (0.2/s)");
        check(9, Some(2.0), "9 generated (2.0/s)");
    }
}
