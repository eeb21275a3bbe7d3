//! One token after another: step by step on logits, or checked against a device that runs ahead.
//!
//! A device that has the whole model draws tokens itself and goes on from them, so that it need not wait for the host
//! between two steps. Each draw comes back with the likeliest tokens and their logits. The [`Sampler`] draws from those
//! again, with the same random number, and its draw is the token: the device's was a guess, nearly always right. After a
//! wrong one the steps that went on from it are thrown away. So what is generated does not depend on how.

use std::{
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use crate::{
    backend::Draw,
    engine::Engine,
    error::Error,
    sample::Sampler,
    session::{Prefill, Session},
};

/// Most steps of one submission.
const MAX_STEPS: usize = 8;
/// A submission takes about this long at most, so that stopping does not.
const SUBMISSION: Duration = Duration::from_millis(10);

/// Decodes a sequence. While it exists the session's last tokens may not be the engine's; dropping it settles that.
#[derive(Debug)]
pub struct Decoder<'a> {
    engine: &'a mut Engine,
    session: &'a mut Session,
    sampler: &'a mut Sampler,
    /// Of the last token, `[vocab_size]`, token order; empty when they were used, or never left the device.
    logits: Vec<f32>,
    /// How many of the largest logits are enough for the sampler, if some are.
    few: Option<usize>,
    ahead: Option<RunAhead>,
}

/// A device at work.
#[derive(Debug)]
struct RunAhead {
    draw: Draw,
    /// Steps queued and not yet seen.
    queued: usize,
    /// Steps of the next submission.
    steps: usize,
    /// What the device goes on from after the steps seen so far.
    guess: Option<u32>,
    pace: Pace,
}

/// How long a step takes, from what has been seen since the device began.
#[derive(Debug)]
struct Pace {
    /// When it began; from the first step on, when that was seen: it waits for more than itself.
    since: Instant,
    /// Steps seen.
    seen: u32,
}

impl Pace {
    fn new() -> Self {
        Pace { since: Instant::now(), seen: 0 }
    }

    /// Steps that fit a submission, now that another step was seen.
    fn steps(&mut self) -> usize {
        let took = self.since.elapsed() / self.seen.max(1);
        if self.seen == 0 {
            self.since = Instant::now();
        }
        self.seen += 1;
        let fit = SUBMISSION.as_nanos() / took.as_nanos().max(1);
        usize::try_from(fit).unwrap_or(MAX_STEPS).clamp(1, MAX_STEPS)
    }
}

impl<'a> Decoder<'a> {
    /// Goes on from the session's last token, whose logits these are.
    pub fn new(
        engine: &'a mut Engine,
        session: &'a mut Session,
        sampler: &'a mut Sampler,
        logits: Vec<f32>,
    ) -> Self {
        let draw = sampler.as_draw(engine.model().architecture().vocab_size);
        let few = draw.map(|draw| draw.top_k);
        let draw = draw.filter(|_| engine.ahead().is_some());
        let ahead = draw.map(|draw| RunAhead { draw, queued: 0, steps: 1, guess: None, pace: Pace::new() });
        Decoder { engine, session, sampler, logits, few, ahead }
    }

    /// The session.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// The next token. `history` is all tokens so far, those of the session and then at most the one that this returned
    /// last; after this at most `more` others are going to be wanted.
    ///
    /// # Errors
    /// Those of [`Session::decode`] and [`Sampler::sample`]. After [`Error::MovedToCpu`], [`Decoder::resume`].
    pub fn next(&mut self, history: &[u32], more: usize) -> Result<u32, Error> {
        if self.logits.is_empty()
            && let Some(&token) = history.last()
        {
            let full = self.session.tokens().len() == self.engine.limits().context;
            if self.ahead.is_some() && !full {
                return self.next_ahead(token, history, more);
            }
            if let Some(n) = self.few {
                self.session.decode_best(self.engine, token, n, &mut self.logits)?;
                if self.logits.is_empty() {
                    return Ok(self.sampler.choose(self.engine.best())?.id);
                }
            } else {
                let top = self.sampler.top_of(self.engine.model().architecture().vocab_size, history.len());
                self.session.decode(self.engine, token, Some(top), &mut self.logits)?;
            }
        }
        let chosen = self.sampler.sample(&mut self.logits, history)?;
        self.logits.clear();
        Ok(chosen.id)
    }

    /// Runs `history` again where it is not cached.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn resume(&mut self, history: &[u32], cancel: &AtomicBool) -> Result<Prefill, Error> {
        self.session.prefill(self.engine, history, &mut self.logits, cancel)
    }

    fn next_ahead(&mut self, token: u32, history: &[u32], more: usize) -> Result<u32, Error> {
        match self.try_ahead(token, more) {
            Ok(Some(token)) => Ok(token),
            // A window no longer holds what going back needs: from the start, and on logits.
            Ok(None) => {
                self.ahead = None;
                self.resume(history, &AtomicBool::new(false))?;
                self.next(history, more)
            }
            Err(error) => {
                self.ahead = None;
                if let Some(device) = self.engine.ahead() {
                    device.stop();
                }
                let error = self.engine.fall_back(error);
                self.engine.rewind(self.session.slot(), 0);
                self.session.keep_cached(self.engine);
                Err(error)
            }
        }
    }

    /// `None` when the device has forgotten the sequence.
    fn try_ahead(&mut self, token: u32, more: usize) -> Result<Option<u32>, Error> {
        if self.ahead.as_ref().is_some_and(|ahead| ahead.guess != Some(token)) && !self.halt() {
            return Ok(None);
        }
        let Decoder { engine, session, sampler, ahead, .. } = self;
        let (slot, position, context) = (session.slot(), session.tokens().len(), engine.limits().context);
        let (Some(run), Some(device)) = (ahead, engine.ahead()) else { return Ok(None) };
        if run.guess != Some(token) {
            run.pace = Pace::new();
            device.begin(slot, position, token, &run.draw)?;
        }
        // Two submissions: one runs while the other's tokens are looked at.
        let room = more.saturating_add(1).min(context - position);
        while run.queued < room && run.queued <= run.steps {
            let steps = run.steps.min(room - run.queued);
            device.queue(&sampler.peek(run.queued, steps))?;
            run.queued += steps;
        }
        let drawn = device.next()?;
        run.queued -= 1;
        run.guess = Some(drawn.token);
        run.steps = run.pace.steps();
        session.append(token);
        engine.wrote(slot, session.tokens().len());
        Ok(Some(sampler.choose(&drawn.candidates)?.id))
    }

    /// Takes back the steps that have not been seen. `false` when the sequence is lost with them.
    fn halt(&mut self) -> bool {
        let Decoder { engine, session, ahead, .. } = self;
        let Some(run) = ahead else { return true };
        let (slot, len) = (session.slot(), session.tokens().len());
        run.guess = None;
        if run.queued == 0 {
            return true;
        }
        if let Some(device) = engine.ahead() {
            device.stop();
        }
        engine.wrote(slot, len + run.queued);
        run.queued = 0;
        engine.rewind(slot, len);
        session.keep_cached(engine);
        session.tokens().len() == len
    }
}

impl Drop for Decoder<'_> {
    fn drop(&mut self) {
        self.halt();
    }
}

#[cfg(test)]
mod tests;
