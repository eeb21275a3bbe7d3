//! One conversation: the tokens whose keys and values a slot of the engine holds.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{
    backend::{Logits, Sequence, Step},
    engine::Engine,
    error::Error,
};

/// The cached tokens of one slot.
#[derive(Debug)]
pub struct Session {
    slot: usize,
    tokens: Vec<u32>,
}

/// How a prefill ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefill {
    /// Prompt tokens that were cached already.
    pub cached: usize,
    /// Prompt tokens that were run.
    pub run: usize,
    /// Whether it was cut short; the session then holds what was run so far.
    pub cancelled: bool,
}

impl Session {
    /// An empty session on a slot of the engine, below its `n_slots`.
    pub fn new(slot: usize) -> Self {
        Session { slot, tokens: Vec::new() }
    }

    /// Tokens cached so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Makes the cache hold exactly `prompt` and leaves the logits of its last token in `logits`
    /// (`[vocab_size]`, token order). Tokens shared with what is cached are not run again.
    ///
    /// # Errors
    /// An empty prompt, one that does not fit the context, or what [`Engine::forward`] reports. After
    /// [`Error::MovedToCpu`] the call can be repeated.
    pub fn prefill(
        &mut self,
        engine: &mut Engine,
        prompt: &[u32],
        logits: &mut Vec<f32>,
        cancel: &AtomicBool,
    ) -> Result<Prefill, Error> {
        let limits = engine.limits();
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if prompt.len() > limits.context {
            let max = engine.model().architecture().max_context;
            return Err(Error::PromptTooLong { prompt: prompt.len(), context: limits.context, max });
        }
        let cached = self.rewind_to_common(engine, prompt);
        let mut run = 0;
        for chunk in prompt[cached..].chunks(limits.max_batch) {
            if cancel.load(Ordering::Relaxed) {
                return Ok(Prefill { cached, run, cancelled: true });
            }
            let last = cached + run + chunk.len() == prompt.len();
            self.step(engine, chunk, if last { Logits::Last } else { Logits::None }, logits)?;
            run += chunk.len();
        }
        Ok(Prefill { cached, run, cancelled: false })
    }

    /// Appends one token and leaves its logits in `logits`: all of them, or, by a head that leaves rows out, those of which
    /// the `top` largest matter. If the engine has lost the tokens before it with a device, they are run again first.
    ///
    /// # Errors
    /// A full context, or what [`Engine::forward`] reports. After [`Error::MovedToCpu`] the call can be repeated.
    pub fn decode(
        &mut self,
        engine: &mut Engine,
        token: u32,
        top: Option<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        if engine.cached(self.slot) < self.tokens.len() {
            let mut history = self.tokens.clone();
            history.push(token);
            return self.prefill(engine, &history, logits, &AtomicBool::new(false)).map(drop);
        }
        self.step(engine, &[token], top.map_or(Logits::Last, Logits::Top), logits)
    }

    /// As [`Session::decode`], of a token after which no more than the `n` largest logits are of use. Where [`Engine::best`] has them,
    /// `logits` are empty.
    pub(crate) fn decode_best(
        &mut self,
        engine: &mut Engine,
        token: u32,
        n: usize,
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        if engine.cached(self.slot) < self.tokens.len() {
            return self.decode(engine, token, Some(n), logits);
        }
        self.step(engine, &[token], Logits::Best(n), logits)
    }

    /// The slot of the engine.
    pub(crate) fn slot(&self) -> usize {
        self.slot
    }

    /// Takes `token` as cached after the others: a device that runs ahead has done it.
    pub(crate) fn append(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Forgets what the engine no longer has.
    pub(crate) fn keep_cached(&mut self, engine: &Engine) {
        self.tokens.truncate(engine.cached(self.slot));
    }

    /// As [`Engine::pretend`]: an empty session then holds `len` times the token 0.
    pub fn pretend(&mut self, engine: &mut Engine, len: usize) -> bool {
        self.clear(engine);
        let can = engine.pretend(self.slot, len);
        self.tokens.resize(engine.cached(self.slot), 0);
        can
    }

    /// Forgets everything.
    pub fn clear(&mut self, engine: &mut Engine) {
        engine.rewind(self.slot, 0);
        self.tokens.clear();
    }

    fn step(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        wanted: Logits,
        logits: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let sequence = Sequence { slot: self.slot, position: self.tokens.len(), tokens, logits: wanted };
        let result = engine.forward(&Step { sequences: &[sequence] }).map(|rows| {
            if wanted != Logits::None {
                logits.clear();
                logits.extend_from_slice(rows);
            }
        });
        match result {
            Ok(()) => self.tokens.extend_from_slice(tokens),
            // The history is run again by the next call.
            Err(Error::MovedToCpu { .. }) => {}
            // What a failed step leaves is the engine's to say: everything before it, or nothing.
            Err(_) => self.keep_cached(engine),
        }
        result
    }

    /// Keeps the common prefix, less one token when the prompt adds none: its logits are wanted.
    fn rewind_to_common(&mut self, engine: &mut Engine, prompt: &[u32]) -> usize {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let keep = common.min(prompt.len() - 1);
        engine.rewind(self.slot, keep);
        self.keep_cached(engine);
        self.tokens.len()
    }
}
