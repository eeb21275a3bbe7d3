//! A run of blocks on a GPU.
//!
//! A step of one token runs kernels made for one token, a step of several others that read weights once for many tokens. All
//! commands refer to buffers and bind groups made when the segment was compiled.

use std::{ops::Range, sync::Arc, time::Instant};

use super::{
    ahead::Queue,
    clock::Clock,
    device::{Gpu, bytes_of},
    head::Flash,
    inventory::{BufferId, Buffers},
    ops::{Extent, Op, Recorder},
    pace::Pace,
    plan::Scratch,
    staging::{Pending, Staging},
};
use crate::{
    backend::{Activations, Ahead, Counters, Phase, Segment, Step},
    error::Error,
    flash::HeadCounts,
    kv::Ring,
};

/// Rows of logits that are computed and fetched at a time.
pub(super) const LOGIT_ROWS: usize = 8;

/// Words of `status`: 0, or one more than the first layer whose router saw something that is not a number; and the layers so
/// far, which the kernels count.
pub(super) const STATUS_WORDS: usize = 2;

/// A layer's dispatches and the positions its cache holds.
pub(super) struct Layer {
    /// Position in the model.
    pub(super) index: usize,
    pub(super) decode: Vec<Op>,
    pub(super) prefill: Vec<Op>,
    pub(super) ring: Ring,
}

/// The last block.
pub(super) struct Head {
    pub(super) ops: Vec<Op>,
    /// What leaves rows out.
    pub(super) flash: Option<Flash>,
    /// Row of the weight that holds a token's logit, when rows are not in token order.
    pub(super) row_of: Option<Vec<u32>>,
    pub(super) vocab_size: usize,
}

/// Compiled blocks.
pub(super) struct GpuSegment {
    pub(super) gpu: Arc<Gpu>,
    pub(super) buffers: Buffers,
    pub(super) scratch: Scratch,
    /// Tokens that the scratch holds.
    pub(super) max_tokens: usize,
    pub(super) hidden_size: usize,
    /// Row of `scratch.h` that has the last step's last token.
    pub(super) last_row: u32,
    /// What `scratch.logit_rows` begins with.
    pub(super) logit_rows: Vec<u32>,
    pub(super) embed: Option<Op>,
    pub(super) layers: Vec<Layer>,
    pub(super) head: Option<Head>,
    /// What comes back from a step: status, then logits or hidden states.
    pub(super) staging: Staging,
    pub(super) clock: Option<Clock>,
    pub(super) pace: Pace,
    pub(super) counters: Counters,
    /// Decoding ahead, where the segment has every block.
    pub(super) queue: Option<Queue>,
    pub(super) notices: Vec<String>,
}

/// What computes: the part of a segment that depends on the variants of its kernels.
pub(super) struct Parts {
    pub(super) embed: Option<Op>,
    /// Dispatches of each layer's decode and prefill.
    pub(super) layers: Vec<[Vec<Op>; 2]>,
    pub(super) head: Vec<Op>,
    pub(super) flash: Vec<Op>,
    pub(super) select: Vec<Op>,
}

impl GpuSegment {
    /// Takes other dispatches.
    pub(super) fn install(&mut self, parts: Parts) {
        let Parts { embed, layers, head, flash, select } = parts;
        self.embed = embed;
        for (layer, [decode, prefill]) in self.layers.iter_mut().zip(layers) {
            (layer.decode, layer.prefill) = (decode, prefill);
        }
        if let Some(own) = &mut self.head {
            own.ops = head;
            if let Some(own) = &mut own.flash {
                own.ops = flash;
            }
        }
        if let Some(queue) = &mut self.queue {
            queue.select = select;
        }
    }

    /// Records with `record`, hands it to the device, and counts it.
    pub(super) fn submit(
        &mut self,
        record: impl FnOnce(&mut Self, &mut Recorder<'_>),
    ) -> Result<wgpu::SubmissionIndex, Error> {
        let mut clock = self.clock.take();
        let gpu = Arc::clone(&self.gpu);
        let mut recorder = Recorder::new(&gpu, clock.as_mut());
        record(self, &mut recorder);
        self.counters.submissions += 1;
        self.counters.dispatches += recorder.n_dispatches;
        let submission = recorder.submit(&gpu);
        let timed = clock.as_mut().map_or(Ok(()), |clock| clock.take(&gpu));
        self.clock = clock;
        timed.map(|()| submission)
    }

    /// Runs rows `range` of a step. `tokens` are (slot, position, token) of all its rows; `wanted` the rows of the range whose
    /// logits go to `logits`, `[wanted, vocab_size]`, of which the `top` largest matter, if not all.
    pub(super) fn run(
        &mut self,
        tokens: &[(usize, usize, u32)],
        range: Range<usize>,
        (wanted, top): (&[u32], Option<usize>),
        hidden: &mut [f32],
        logits: &mut [f32],
    ) -> Result<(), Error> {
        let n = range.len();
        self.last_row = n as u32 - 1;
        let pieces = self.pace.prefill(n, self.layers.len());
        self.write_rows(&tokens[range.clone()]);
        let through = self.embed.is_none() || self.head.is_none();
        let of = range.start * self.hidden_size..range.end * self.hidden_size;
        let hidden = if through { &mut hidden[of] } else { &mut [] };
        if self.embed.is_none() {
            let words: Vec<u32> = hidden.iter().map(|x| x.to_bits()).collect();
            self.gpu.queue().write_buffer(&self.buffers[self.scratch.h], 0, &bytes_of(&words));
        }
        let mut extent = Extent {
            n_tokens: n as u32,
            decode: tokens.len() == 1,
            position: tokens[range.start].1 as u32,
            n_logit_rows: 0,
            leaves_out: self.leave_out(top, 1),
        };
        let mut first = 0;
        while first + pieces.layers < self.layers.len() {
            let end = first + pieces.layers;
            self.submit(|this, recorder| {
                if first == 0 {
                    this.clear_status(recorder);
                }
                recorder.run(this.ops(first..end, extent));
            })?;
            first = end;
        }
        let mut chunks = wanted.chunks(LOGIT_ROWS);
        let mut rows = chunks.next().unwrap_or_default();
        let mut logits = logits;
        loop {
            extent.n_logit_rows = rows.len() as u32;
            self.write_logit_rows(rows);
            let mut pending = self.staging.take(&self.gpu);
            let last = first..self.layers.len();
            let submission = self.submit(|this, recorder| {
                if last.start == 0 {
                    this.clear_status(recorder);
                }
                recorder.run(this.ops(last, extent));
                this.fetch(recorder, &mut pending, &extent);
            })?;
            pending.submitted(submission);
            let vocab_size = self.head.as_ref().map_or(0, |head| head.vocab_size);
            let (out, rest) = logits.split_at_mut(rows.len() * vocab_size);
            let read = self.receive(&mut pending, hidden, out);
            self.staging.give(pending);
            read?;
            logits = rest;
            first = self.layers.len() + 1; // nothing but logits
            rows = match chunks.next() {
                Some(rows) => rows,
                None => return Ok(()),
            };
        }
    }

    /// The logits of the last token that went through the layers, of which the `top` largest matter, if not all.
    fn head_alone(&mut self, top: Option<usize>, logits: &mut [f32]) -> Result<(), Error> {
        let leaves_out = self.leave_out(top, 1);
        let extent = Extent { n_tokens: 1, decode: true, position: 0, n_logit_rows: 1, leaves_out };
        self.write_logit_rows(&[self.last_row]);
        let mut pending = self.staging.take(&self.gpu);
        let alone = self.layers.len() + 1..self.layers.len() + 1;
        let submission = self.submit(|this, recorder| {
            recorder.run(this.ops(alone, extent));
            this.fetch(recorder, &mut pending, &extent);
        })?;
        pending.submitted(submission);
        let read = self.receive(&mut pending, &mut [], logits);
        self.staging.give(pending);
        read
    }

    /// Runs some of the segment's dispatches on hidden states `h`, `[tokens, hidden_size]`, or on what is there if there are none: for
    /// checks. What caches held is lost.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn run_alone(
        &mut self,
        tokens: &[(usize, usize, u32)],
        h: &[f32],
        n_logit_rows: usize,
        dispatches: impl FnOnce(&Self, Extent) -> Vec<&Op>,
    ) -> Result<(), Error> {
        self.write_rows(tokens);
        self.write_logit_rows(&(0..n_logit_rows as u32).collect::<Vec<_>>());
        let words: Vec<u32> = h.iter().map(|x| x.to_bits()).collect();
        self.gpu.queue().write_buffer(&self.buffers[self.scratch.h], 0, &bytes_of(&words));
        let extent = Extent {
            n_tokens: tokens.len() as u32,
            decode: tokens.len() == 1,
            position: tokens[0].1 as u32,
            n_logit_rows: n_logit_rows as u32,
            leaves_out: false,
        };
        let submission = self.submit(|this, recorder| {
            this.clear_status(recorder);
            recorder.run(dispatches(this, extent).into_iter().map(|op| (op, extent)));
        })?;
        self.gpu.wait(Some(submission))
    }

    /// The first `n` words of a scratch buffer.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn words(&self, buffer: BufferId, n: usize) -> Result<Vec<u32>, Error> {
        self.gpu.read(&self.buffers[buffer], 0, n)
    }

    /// The same, as f32.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn floats(&self, buffer: BufferId, n: usize) -> Result<Vec<f32>, Error> {
        Ok(self.words(buffer, n)?.into_iter().map(f32::from_bits).collect())
    }

    /// Fills a scratch buffer with zeros, and waits for that.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn clear(&mut self, buffer: BufferId) -> Result<(), Error> {
        let submission = self.submit(|this, recorder| {
            recorder.encoder().clear_buffer(&this.buffers[buffer], 0, None);
        })?;
        self.gpu.wait(Some(submission))
    }

    /// Whether the head leaves rows out in the next commands, for `n_tokens` tokens one by one, whose `top` largest logits matter, if not
    /// all. If so, the device is told; if not and it might have, that is counted.
    pub(super) fn leave_out(&mut self, top: Option<usize>, n_tokens: usize) -> bool {
        let (Some(top), Some(flash)) = (top, self.head.as_mut().and_then(|head| head.flash.as_mut())) else {
            return false;
        };
        let leaves_out = flash.leaves_out(top);
        if leaves_out {
            flash.write_top(&self.gpu, &self.buffers, top);
        } else {
            flash.count_exact(n_tokens as u64);
        }
        leaves_out
    }

    /// Tokens of the next commands.
    pub(super) fn write_rows(&self, tokens: &[(usize, usize, u32)]) {
        let n = tokens.len() as u32;
        let rows: Vec<u32> = tokens
            .iter()
            .flat_map(|&(slot, position, token)| [token, slot as u32, position as u32, n])
            .collect();
        self.gpu.queue().write_buffer(&self.buffers[self.scratch.rows], 0, &bytes_of(&rows));
    }

    /// Rows of the hidden states whose logits the next commands compute; where they are as before, nothing is written.
    pub(super) fn write_logit_rows(&mut self, rows: &[u32]) {
        if !self.logit_rows.starts_with(rows) {
            self.gpu.queue().write_buffer(&self.buffers[self.scratch.logit_rows], 0, &bytes_of(rows));
            rows.clone_into(&mut self.logit_rows);
        }
    }

    /// Dispatches of some layers, before the first of which comes the embedding, and after the last the logits wanted. A range
    /// that starts past the last layer is the logits alone.
    pub(super) fn ops(&self, layers: Range<usize>, extent: Extent) -> impl Iterator<Item = (&Op, Extent)> {
        let embed = self.embed.as_ref().filter(|_| layers.start == 0);
        let head = self.head.as_ref().filter(|_| layers.end >= self.layers.len() && extent.n_logit_rows > 0);
        let run = self.layers.get(layers).unwrap_or_default().iter();
        let run = run.flat_map(move |layer| if extent.decode { &layer.decode } else { &layer.prefill });
        let head = head.map_or(&[][..], |head| match &head.flash {
            Some(flash) if extent.leaves_out => &flash.ops,
            _ => &head.ops,
        });
        embed.into_iter().chain(run).chain(head).map(move |op| (op, extent))
    }

    /// Forgets what was not a number.
    pub(super) fn clear_status(&self, recorder: &mut Recorder<'_>) {
        recorder.encoder().clear_buffer(&self.buffers[self.scratch.status], 0, None);
    }

    /// What is wrong where layer `at` of the segment has failed.
    pub(super) fn layer_error(&self, at: usize) -> Error {
        match self.layers.get(at) {
            Some(layer) => Error::NonFinite { layer: layer.index, what: "the router's logits" },
            None => Error::NonFiniteHead,
        }
    }

    /// Copies the status, then logits or hidden states, whichever the next one wants.
    fn fetch(&self, recorder: &mut Recorder<'_>, pending: &mut Pending, extent: &Extent) {
        let encoder = recorder.encoder();
        pending.copy(encoder, &self.buffers[self.scratch.status], 0, 4 * STATUS_WORDS as u64);
        let (buffer, words) = match &self.head {
            Some(head) => (self.scratch.logits, extent.n_logit_rows as usize * head.vocab_size),
            None => (self.scratch.h, extent.n_tokens as usize * self.hidden_size),
        };
        if words > 0 {
            pending.copy(encoder, &self.buffers[buffer], 0, 4 * words as u64);
        }
    }

    /// Waits for what `fetch` copied.
    fn receive(&self, pending: &mut Pending, hidden: &mut [f32], logits: &mut [f32]) -> Result<(), Error> {
        let gpu = &self.gpu;
        pending.wait(gpu)?;
        match pending.words(gpu, 0, 1)?[0] {
            0 => {}
            layer => return Err(self.layer_error(layer as usize - 1)),
        }
        let Some(head) = &self.head else {
            return pending.with(gpu, STATUS_WORDS, hidden.len(), |bytes| read_f32(bytes, hidden));
        };
        if logits.is_empty() {
            return Ok(());
        }
        pending.with(gpu, STATUS_WORDS, logits.len(), |bytes| {
            let rows = logits.chunks_exact_mut(head.vocab_size);
            for (logits, bytes) in rows.zip(bytes.chunks_exact(4 * head.vocab_size)) {
                head.in_token_order(bytes, logits)?;
            }
            Ok(())
        })?
    }
}

impl Head {
    /// A row of logits as the kernel wrote it, by token. Where the head's input held NaN or infinity, every logit that was computed
    /// is NaN.
    fn in_token_order(&self, bytes: &[u8], logits: &mut [f32]) -> Result<(), Error> {
        match &self.row_of {
            None => read_f32(bytes, logits),
            Some(row_of) => {
                let rows = bytes.as_chunks::<4>().0;
                let by_token = logits.iter_mut().zip(row_of);
                by_token.for_each(|(logit, &row)| *logit = f32::from_le_bytes(rows[row as usize]));
            }
        }
        let no_number = |logit: &f32| logit.is_nan() || *logit == f32::NEG_INFINITY;
        if logits.iter().all(no_number) { Err(Error::NonFiniteHead) } else { Ok(()) }
    }
}

/// Little-endian f32s.
fn read_f32(bytes: &[u8], out: &mut [f32]) {
    out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(out, x)| *out = f32::from_le_bytes(*x));
}

impl Segment for GpuSegment {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        self.gpu.check()?;
        let tokens: Vec<_> = step.tokens().collect();
        for &(slot, position, _) in &tokens {
            self.layers.iter_mut().for_each(|layer| layer.ring.wrote(slot, position));
        }
        let wanted: Vec<usize> = if self.head.is_some() { step.logit_rows().collect() } else { Vec::new() };
        let vocab_size = self.head.as_ref().map_or(0, |head| head.vocab_size);
        let Activations { hidden, logits, best: _ } = io;
        let (mut first, mut done) = (0, 0);
        while first < tokens.len() {
            let started = Instant::now();
            let pieces = self.pace.prefill(tokens.len() - first, self.layers.len());
            let range = first..first + pieces.tokens.min(self.max_tokens);
            let here: Vec<u32> = wanted[done..]
                .iter()
                .take_while(|row| range.contains(row))
                .map(|row| (row - first) as u32)
                .collect();
            let out = &mut logits[done * vocab_size..(done + here.len()) * vocab_size];
            self.run(&tokens, range.clone(), (&here, step.top()), hidden, out)?;
            self.pace.took(tokens.len() == 1, range.len(), self.layers.len(), started.elapsed());
            (first, done) = (range.end, done + here.len());
        }
        Ok(())
    }

    fn head_again(&mut self, top: Option<usize>, io: &mut Activations) -> Result<(), Error> {
        let Some(head) = &self.head else { return Ok(()) };
        let vocab_size = head.vocab_size;
        self.head_alone(top, &mut io.logits[..vocab_size])
    }

    fn head_counts(&mut self) -> Option<HeadCounts> {
        let flash = self.head.as_ref()?.flash.as_ref()?;
        flash.counts(&self.gpu, &self.buffers).ok()
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        // Every layer is told, whatever the others say.
        let kept: Vec<bool> = self.layers.iter_mut().map(|layer| layer.ring.rewind(slot, len)).collect();
        kept.into_iter().all(|kept| kept)
    }

    fn pretend(&mut self, slot: usize, len: usize) -> bool {
        // What a cache holds does not change how long it takes to read; zeros are as good as any.
        if let Some(last) = len.checked_sub(1) {
            self.layers.iter_mut().for_each(|layer| layer.ring.wrote(slot, last));
        }
        true
    }

    fn ahead(&mut self) -> Option<&mut dyn Ahead> {
        if self.queue.is_some() { Some(self) } else { None }
    }

    fn counters(&self) -> Option<Counters> {
        Some(self.counters)
    }

    fn notices(&self) -> &[String] {
        &self.notices
    }

    fn bandwidth(&mut self) -> Option<f64> {
        super::bandwidth::measure(&self.gpu).ok()
    }

    fn profile(&mut self, on: bool) -> Vec<Phase> {
        let phases = self.clock.as_ref().map_or_else(Vec::new, Clock::phases);
        self.clock = if on { Clock::new(&self.gpu) } else { None };
        phases
    }
}
