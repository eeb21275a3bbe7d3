//! From a prompt to a finished answer: prefill, sample, stream, stop.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use crate::{
    decoder::Decoder,
    engine::Engine,
    error::Error,
    sample::Sampler,
    session::{Prefill, Session},
    text::{Event, ReasoningSplit, TextStream, Tokenizer},
};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Prompt ids, at least one.
    pub prompt: &'a [u32],
    /// Texts that end the answer; they are not part of it. Reasoning may contain them.
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

/// Runs a request; `on_event` gets the text as it comes, whole characters only. `sampler` goes on from where
/// an earlier request left its random numbers. When a device is lost, the CPU goes on after an [`Event::Notice`].
///
/// # Errors
/// Bad stop texts before any work; a prompt that does not fit; non-finite values.
pub fn generate(
    engine: &mut Engine,
    session: &mut Session,
    tokenizer: &Tokenizer,
    sampler: &mut Sampler,
    request: &Request<'_>,
    cancel: &AtomicBool,
    on_event: &mut dyn FnMut(Event),
) -> Result<Outcome, Error> {
    let mut reply = Reply::new(request)?;
    let mut logits = Vec::new();
    let start = Instant::now();
    let prefill = loop {
        match session.prefill(engine, request.prompt, &mut logits, cancel) {
            Err(moved @ Error::MovedToCpu { .. }) => on_event(Event::Notice(moved.to_string())),
            ended => break ended?,
        }
    };
    let Prefill { cached, run: prefilled, cancelled } = prefill;
    let mut outcome = Outcome {
        tokens: Vec::new(),
        finish: Finish::Cancelled,
        cached,
        prefilled,
        prefill_time: start.elapsed(),
        decode_time: Duration::ZERO,
    };
    if cancelled {
        return Ok(outcome);
    }

    let start = Instant::now();
    let mut history = request.prompt.to_vec();
    let context = engine.limits().context;
    let mut decoder = Decoder::new(engine, session, sampler, logits);
    outcome.finish = loop {
        let more = request.max_tokens.map_or(usize::MAX, |max| max - outcome.tokens.len());
        if more == 0 {
            break Finish::Length;
        }
        if cancel.load(Ordering::Relaxed) {
            break Finish::Cancelled;
        }
        let token = match decoder.next(&history, more - 1) {
            Err(moved @ Error::MovedToCpu { .. }) => {
                on_event(Event::Notice(moved.to_string()));
                decoder.resume(&history, cancel)?;
                continue;
            }
            token => token?,
        };
        outcome.tokens.push(token);
        history.push(token);
        if request.stop_ids.contains(&token) {
            break Finish::Stop;
        }
        reply.push(tokenizer.token_bytes(token), on_event);
        if reply.stopped() {
            break Finish::Stop;
        }
        if decoder.session().tokens().len() == context {
            break Finish::Context;
        }
    };
    drop(decoder);
    reply.finish(on_event);
    if reply.stopped() {
        outcome.finish = Finish::Stop;
    }
    outcome.decode_time = start.elapsed();
    Ok(outcome)
}

/// Bytes of tokens on their way to events: whole characters, reasoning apart, stop texts in the answer.
struct Reply {
    characters: TextStream,
    split: ReasoningSplit,
    answer: TextStream,
}

impl Reply {
    fn new(request: &Request<'_>) -> Result<Self, Error> {
        Ok(Reply {
            characters: TextStream::new(&[])?,
            split: request.split.clone(),
            answer: TextStream::new(request.stop)?,
        })
    }

    fn push(&mut self, bytes: &[u8], on_event: &mut dyn FnMut(Event)) {
        let text = self.characters.push(bytes);
        let events = self.split.push(&text);
        self.give(events, on_event);
    }

    fn finish(&mut self, on_event: &mut dyn FnMut(Event)) {
        let text = self.characters.finish();
        let mut events = self.split.push(&text);
        events.extend(self.split.finish());
        self.give(events, on_event);
        let rest = self.answer.finish();
        if !rest.is_empty() {
            on_event(Event::Answer(rest));
        }
    }

    fn stopped(&self) -> bool {
        self.answer.stopped_by().is_some()
    }

    fn give(&mut self, events: Vec<Event>, on_event: &mut dyn FnMut(Event)) {
        for event in events {
            let event = match event {
                Event::Answer(text) => Event::Answer(self.answer.push(text.as_bytes())),
                other => other,
            };
            if !matches!(&event, Event::Answer(text) if text.is_empty()) {
                on_event(event);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasoning, answer, and whether a stop text ended it.
    fn check(texts: &[&str], stop: &[&str], split: ReasoningSplit, wanted: (&str, &str, bool)) {
        let stop: Vec<String> = stop.iter().map(|text| (*text).to_owned()).collect();
        let request = Request { prompt: &[], stop: &stop, stop_ids: &[], max_tokens: None, split };
        let mut reply = Reply::new(&request).expect("sound stop texts");
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut on_event = |event| match event {
            Event::Reasoning(text) => reasoning.push_str(&text),
            Event::Answer(text) => answer.push_str(&text),
            Event::Notice(text) => panic!("{text}"),
        };
        for text in texts {
            reply.push(text.as_bytes(), &mut on_event);
        }
        reply.finish(&mut on_event);
        let stopped = reply.stopped();
        assert_eq!((reasoning.as_str(), answer.as_str(), stopped), wanted, "{texts:?} {stop:?}");
    }

    #[test]
    fn stop_texts_end_the_answer_and_not_the_reasoning() {
        let texts = ["a+b\n</th", "ink>\n\nc", "+", "d"];
        check(&texts, &["+"], ReasoningSplit::new(true), ("a+b", "c", true));
        check(&texts, &["c+d"], ReasoningSplit::new(true), ("a+b", "", true));
        check(&texts, &["d+"], ReasoningSplit::new(true), ("a+b", "c+d", false));
        check(&texts, &[], ReasoningSplit::new(true), ("a+b", "c+d", false));
        check(&texts, &["+"], ReasoningSplit::off(), ("", "a", true));
        check(&["a", "+"], &["+"], ReasoningSplit::new(true), ("a+", "", false));
    }
}
