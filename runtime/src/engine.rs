//! Stepping a compiled model: what goes in is checked, what the slots hold is kept.

use std::sync::Arc;

use crate::{
    backend::{Activations, Ahead, Counters, Limits, Phase, Segment, Sequence, Step, Threads},
    error::Error,
    flash::HeadCounts,
    model::Model,
    placement::{EngineOptions, Placement, Plan},
};

/// A model placed on backends, with its caches.
pub struct Engine {
    model: Arc<Model>,
    limits: Limits,
    placements: Vec<Placement>,
    segments: Vec<Box<dyn Segment>>,
    /// Positions cached in each slot.
    lens: Vec<usize>,
    io: Activations,
    /// How to go on without a device.
    fallback: Option<Fallback>,
    reasons: Vec<String>,
    notices: Vec<String>,
}

/// Segments in the order of the model's blocks, and who runs those.
pub(crate) struct Compiled {
    pub(crate) placements: Vec<Placement>,
    pub(crate) segments: Vec<Box<dyn Segment>>,
}

/// Compiles every block for the host.
pub(crate) type Fallback = Box<dyn FnOnce() -> Result<Compiled, Error> + Send>;

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limits", &self.limits).field("placements", &self.placements).finish()
    }
}

impl Engine {
    /// Places every block and allocates caches and scratch: [`Plan::new`], then [`Plan::compile`].
    ///
    /// # Errors
    /// Those of the two. Memory is not checked.
    pub fn new(model: Arc<Model>, options: &EngineOptions) -> Result<Self, Error> {
        Plan::new(model, options)?.compile(&mut |_, _| {})
    }

    /// An engine of compiled segments.
    pub(crate) fn assemble(model: Arc<Model>, limits: Limits, compiled: Compiled) -> Self {
        let io = Activations::new(model.architecture(), limits.max_batch, limits.max_logit_rows);
        let lens = vec![0; limits.n_slots];
        let Compiled { placements, segments } = compiled;
        let (fallback, reasons, notices) = (None, Vec::new(), Vec::new());
        Engine { model, limits, placements, segments, lens, io, fallback, reasons, notices }
    }

    /// Says why blocks are where they are, and what a user should know of it.
    pub(crate) fn explain(&mut self, reasons: Vec<String>, notices: Vec<String>) {
        let own = self.segments.iter().flat_map(|segment| segment.notices());
        self.notices = notices.into_iter().chain(own.cloned()).collect();
        self.reasons = reasons;
    }

    /// Says how to go on when a device is lost.
    pub(crate) fn fall_back_to(&mut self, fallback: Fallback) {
        self.fallback = Some(fallback);
    }

    /// After the loss of a device: compiles everything for the host, with every slot empty, and says that it did by
    /// [`Error::MovedToCpu`]. Other errors, and a second loss, stay what they are.
    pub(crate) fn fall_back(&mut self, error: Error) -> Error {
        let (device, reason, fallback) = match (error, self.fallback.take()) {
            (Error::DeviceLost { device, reason }, Some(fallback)) => (device, reason, fallback),
            (error, fallback) => {
                self.fallback = fallback;
                return error;
            }
        };
        match fallback() {
            Ok(Compiled { placements, segments }) => {
                (self.placements, self.segments) = (placements, segments);
                self.lens.fill(0);
                Error::MovedToCpu { device, reason }
            }
            Err(error) => error,
        }
    }

    /// Decoding that runs ahead, where one device has the whole model.
    pub(crate) fn ahead(&mut self) -> Option<&mut dyn Ahead> {
        match self.segments.as_mut_slice() {
            [all] => all.ahead(),
            _ => None,
        }
    }

    /// Takes a slot as cached up to `len`: steps that ran ahead have written that far.
    pub(crate) fn wrote(&mut self, slot: usize, len: usize) {
        self.lens[slot] = len;
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What the engine was compiled for.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Which backend and kernels run each block, in order.
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Why blocks are where they are, as far as that was a choice; a line each.
    pub fn reasons(&self) -> &[String] {
        &self.reasons
    }

    /// What did not go as it was asked for, to be shown.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Runs one step and returns its logits, `[n_logit_rows, vocab_size]`, token order; none where [`Engine::best`] has some.
    ///
    /// # Errors
    /// A token outside the vocabulary or a position past the context, which leave every slot as it was; or
    /// non-finite values inside, which leave the step's slots empty; or [`Error::MovedToCpu`], which leaves every slot empty
    /// and can be followed by any other step.
    ///
    /// # Panics
    /// When the step itself is malformed: no tokens, more than `max_batch`, a slot out of range or used
    /// twice, a position that is not the end of the slot's cache, more logits than `max_logit_rows`.
    pub fn forward(&mut self, step: &Step<'_>) -> Result<&[f32], Error> {
        let mut n_logit_rows = self.check(step)?;
        self.io.best.clear();
        for segment in &mut self.segments {
            if let Err(error) = segment.forward(step, &mut self.io) {
                // Some layers have cached these tokens and others not: nothing of it can be trusted.
                for sequence in step.sequences {
                    self.rewind(sequence.slot, 0);
                }
                return Err(self.fall_back(error));
            }
        }
        for sequence in step.sequences {
            self.lens[sequence.slot] = sequence.position + sequence.tokens.len();
        }
        if !self.io.best.is_empty() {
            n_logit_rows = 0;
        }
        Ok(&self.io.logits[..n_logit_rows * self.model.architecture().vocab_size])
    }

    /// After a step with [`Logits::Best`](crate::Logits::Best), by a head that can tell them: the largest logits with their tokens, the
    /// largest first, of equal ones the lower token, and what is no number before all.
    pub fn best(&self) -> &[(u32, f32)] {
        &self.io.best
    }

    /// The logits of the last token of the last step once more, `[vocab_size]`, token order: all of them, or as for
    /// [`Logits::Top`](crate::Logits::Top) with `top`. For comparing a head that leaves rows out with the exact one.
    ///
    /// # Errors
    /// As [`Engine::forward`].
    pub fn logits_again(&mut self, top: Option<usize>) -> Result<&[f32], Error> {
        for segment in &mut self.segments {
            segment.head_again(top, &mut self.io)?;
        }
        Ok(&self.io.logits[..self.model.architecture().vocab_size])
    }

    /// What was read for steps with [`Logits::Top`](crate::Logits::Top) so far; `None` with the exact head.
    pub fn head_counts(&mut self) -> Option<HeadCounts> {
        self.segments.iter_mut().find_map(|segment| segment.head_counts())
    }

    /// Positions cached in a slot.
    pub fn cached(&self, slot: usize) -> usize {
        self.lens[slot]
    }

    /// Takes `len` positions of an empty slot as cached, with values that mean nothing, to measure at a long context. `false`,
    /// and an empty slot, if a backend cannot.
    ///
    /// # Panics
    /// If the slot holds something, or `len` positions do not fit the context.
    pub fn pretend(&mut self, slot: usize, len: usize) -> bool {
        assert!(self.lens[slot] == 0 && len <= self.limits.context, "{len} positions of slot {slot}");
        let can = self.segments.iter_mut().all(|segment| segment.pretend(slot, len));
        self.lens[slot] = len;
        if !can {
            self.rewind(slot, 0);
        }
        can
    }

    /// Threads that decode and that prefill, of the first segment that has threads.
    pub fn threads(&self) -> Option<Threads> {
        self.segments.iter().find_map(|segment| segment.threads())
    }

    /// What devices were asked to do so far; `None` on the host.
    pub fn counters(&self) -> Option<Counters> {
        let of_segments = self.segments.iter().filter_map(|segment| segment.counters());
        of_segments.reduce(|a, b| Counters {
            submissions: a.submissions + b.submissions,
            dispatches: a.dispatches + b.dispatches,
        })
    }

    /// Bytes a second that the device reads from its memory, measured now; `None` on the host.
    pub fn device_bandwidth(&mut self) -> Option<f64> {
        self.segments.iter_mut().find_map(|segment| segment.bandwidth())
    }

    /// Starts timing the phases of steps, or stops; returns those timed since the last call, of all segments.
    pub fn profile(&mut self, on: bool) -> Vec<Phase> {
        let mut all: Vec<Phase> = Vec::new();
        for phase in self.segments.iter_mut().flat_map(|segment| segment.profile(on)) {
            match all.iter_mut().find(|other| other.name == phase.name) {
                Some(other) => {
                    other.time += phase.time;
                    other.bytes += phase.bytes;
                }
                None => all.push(phase),
            }
        }
        all
    }

    /// Forgets the positions of a slot from `len` on. `false` when a window no longer holds what that
    /// needs: the slot is then empty.
    pub fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let len = len.min(self.lens[slot]);
        let mut kept = true;
        for segment in &mut self.segments {
            kept &= segment.rewind(slot, len);
        }
        if !kept {
            for segment in &mut self.segments {
                segment.rewind(slot, 0);
            }
        }
        self.lens[slot] = if kept { len } else { 0 };
        kept
    }

    fn check(&self, step: &Step<'_>) -> Result<usize, Error> {
        let limits = &self.limits;
        let n_tokens = step.n_tokens();
        assert!(n_tokens >= 1 && n_tokens <= limits.max_batch, "a step of {n_tokens} tokens");
        let n_logit_rows = step.logit_rows().count();
        assert!(n_logit_rows <= limits.max_logit_rows, "a step of {n_logit_rows} rows of logits");
        for (i, sequence) in step.sequences.iter().enumerate() {
            let Sequence { slot, position, tokens, logits: _ } = *sequence;
            assert!(slot < limits.n_slots && !tokens.is_empty(), "slot {slot}, {} tokens", tokens.len());
            assert!(step.sequences[..i].iter().all(|other| other.slot != slot), "slot {slot} used twice");
            assert_eq!(position, self.lens[slot], "the next position of slot {slot}");
            let (end, max) = (position + tokens.len(), self.model.architecture().max_context);
            if end > limits.context {
                return Err(Error::PromptTooLong { prompt: end, context: limits.context, max });
            }
        }
        let vocab_size = self.model.architecture().vocab_size;
        for (_, position, id) in step.tokens() {
            if id as usize >= vocab_size {
                return Err(Error::TokenOutOfRange { id, position, vocab_size });
            }
        }
        Ok(n_logit_rows)
    }
}
