//! From a prompt to a finished answer: prefill, sample, stream, stop.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use crate::{
    engine::Engine,
    error::Error,
    sample::{Sampler, SamplerSpec},
    session::Session,
    text::{Event, ReasoningSplit, TextStream, Tokenizer},
};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Prompt ids, at least one.
    pub prompt: &'a [u32],
    /// How to choose tokens.
    pub sampler: SamplerSpec,
    /// Texts that end the answer; they are not part of it.
    pub stop: &'a [String],
    /// Tokens that end the answer; they are not part of it.
    pub stop_ids: &'a [u32],
    /// Most tokens to generate; `None` goes on to the end of the context.
    pub max_tokens: Option<usize>,
    /// Parts reasoning from the answer.
    pub split: ReasoningSplit,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop token or a stop text.
    Stop,
    /// `max_tokens` reached.
    Length,
    /// The context is full.
    Context,
    /// The caller asked for it.
    Cancelled,
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Generated ids, the stop token included when there was one.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Prompt tokens taken from the cache.
    pub cached: usize,
    /// Prompt tokens run.
    pub prefilled: usize,
    /// Time to the first logits.
    pub prefill_time: Duration,
    /// Time from there to the end.
    pub decode_time: Duration,
}

/// Runs a request; `on_event` gets the text as it comes, whole characters only.
///
/// # Errors
/// Bad sampler settings or stop texts before any work; a prompt that does not fit; non-finite values.
pub fn generate(
    engine: &mut Engine,
    session: &mut Session,
    tokenizer: &Tokenizer,
    request: &Request<'_>,
    cancel: &AtomicBool,
    on_event: &mut dyn FnMut(Event),
) -> Result<Outcome, Error> {
    let mut sampler = Sampler::new(request.sampler.clone())?;
    let mut text = TextStream::new(request.stop)?;
    let mut split = request.split.clone();
    let mut logits = Vec::new();
    let start = Instant::now();
    let prefill = session.prefill(engine, request.prompt, &mut logits, cancel)?;
    let mut outcome = Outcome {
        tokens: Vec::new(),
        finish: Finish::Cancelled,
        cached: prefill.cached,
        prefilled: prefill.run,
        prefill_time: start.elapsed(),
        decode_time: Duration::ZERO,
    };
    if prefill.cancelled {
        return Ok(outcome);
    }

    let start = Instant::now();
    let mut history = request.prompt.to_vec();
    outcome.finish = loop {
        if request.max_tokens == Some(outcome.tokens.len()) {
            break Finish::Length;
        }
        if cancel.load(Ordering::Relaxed) {
            break Finish::Cancelled;
        }
        let token = sampler.sample(&mut logits, &history)?.id;
        outcome.tokens.push(token);
        history.push(token);
        if request.stop_ids.contains(&token) {
            break Finish::Stop;
        }
        let certain = text.push(tokenizer.token_bytes(token));
        split.push(&certain).into_iter().for_each(&mut *on_event);
        if text.stopped_by().is_some() {
            break Finish::Stop;
        }
        if session.tokens().len() == engine.limits().context {
            break Finish::Context;
        }
        if request.max_tokens == Some(outcome.tokens.len()) {
            break Finish::Length;
        }
        session.decode(engine, token, &mut logits)?;
    };
    let rest = text.finish();
    split.push(&rest).into_iter().chain(split.finish()).for_each(on_event);
    outcome.decode_time = start.elapsed();
    Ok(outcome)
}
