//! Decoding that runs ahead of the host.
//!
//! The kernel that draws a token writes it where the next step reads it, so steps can be queued before anybody has seen their
//! tokens: nothing in a step's commands depends on the token, and grid sizes only on the position, which the host knows. The host reads
//! what was drawn, some submissions behind.

use std::{collections::VecDeque, time::Instant};

use super::{
    device::bytes_of,
    ops::{Extent, Op},
    plan::AheadPlan,
    segment::GpuSegment,
    staging::{Pending, Staging},
};
use crate::{
    backend::{Ahead, Draw, Drawn, MAX_CANDIDATES},
    error::Error,
};

/// Steps that the buffers of random numbers and of results hold; no submission has more.
pub(super) const RING: usize = 64;

/// Words of a step's result: token, status, then ids and logits of the candidates.
pub(super) const RESULT_WORDS: usize = 2 + 2 * MAX_CANDIDATES;

/// Status of a step: more logits came into question than the kernel has room for.
const TOO_MANY: u32 = u32::MAX - 1;

/// Status of a step: a logit is not a number.
const NOT_A_NUMBER: u32 = u32::MAX;

/// Id of a candidate that there is not.
const NO_TOKEN: u32 = u32::MAX;

/// Submissions under way for which buffers are made beforehand.
pub(super) const UNDER_WAY: usize = 4;

/// Steps under way.
pub(super) struct Queue {
    pub(super) plan: AheadPlan,
    /// Draws from the logits.
    pub(super) select: Vec<Op>,
    pub(super) staging: Staging,
    flights: VecDeque<Flight>,
    slot: usize,
    /// Of the next step to queue.
    position: usize,
    /// Steps queued since `begin`.
    n_queued: usize,
    /// Position and token of the next step to read.
    reading: (usize, u32),
    top_k: usize,
    /// When the device was last seen to finish something.
    seen: Instant,
}

/// A submission of several steps.
struct Flight {
    pending: Pending,
    n_steps: usize,
    /// Steps read.
    n_read: usize,
}

impl Queue {
    pub(super) fn new(plan: AheadPlan, staging: Staging) -> Self {
        Queue {
            plan,
            select: Vec::new(),
            staging,
            flights: VecDeque::new(),
            slot: 0,
            position: 0,
            n_queued: 0,
            reading: (0, 0),
            top_k: 1,
            seen: Instant::now(),
        }
    }

    fn forget(&mut self) {
        for flight in self.flights.drain(..) {
            self.staging.give(flight.pending);
        }
    }
}

/// Words of the parameters: temperature, top_k, top_p, min_p.
fn draw_words(draw: &Draw) -> [u32; 4] {
    let Draw { temperature, top_k, top_p, min_p } = *draw;
    [temperature.to_bits(), top_k as u32, top_p.to_bits(), min_p.to_bits()]
}

const ONLY_WITH_A_QUEUE: &str = "only a segment with a queue is handed out as one that decodes ahead";

impl GpuSegment {
    fn queued(&mut self) -> &mut Queue {
        self.queue.as_mut().expect(ONLY_WITH_A_QUEUE)
    }

    /// Queues steps that fit a submission.
    fn queue_some(&mut self, uniforms: &[f32]) -> Result<(), Error> {
        let n = uniforms.len();
        let queue = self.queued();
        let (first, slot, position) = (queue.n_queued, queue.slot, queue.position);
        let top_k = queue.top_k;
        let leaves_out = self.leave_out(Some(top_k), n);
        let mut pending = {
            let gpu = std::sync::Arc::clone(&self.gpu);
            self.queued().staging.take(&gpu)
        };
        let plan = self.queued().plan;
        // As far as the ring's end, then from its start.
        let until_end = n.min(RING - first % RING);
        let words: Vec<u32> = uniforms.iter().map(|u| u.to_bits()).collect();
        let (head, tail) = words.split_at(until_end);
        let ring = [(first % RING, head), (0, tail)];
        for (at, words) in ring.iter().filter(|(_, words)| !words.is_empty()) {
            let buffer = &self.buffers[plan.uniforms];
            self.gpu.queue().write_buffer(buffer, 4 * *at as u64, &bytes_of(words));
        }
        for layer in &mut self.layers {
            (position..position + n).for_each(|position| layer.ring.wrote(slot, position));
        }
        let submission = self.submit(|this, recorder| {
            if first == 0 {
                this.clear_status(recorder);
            }
            let select = this.queue.as_ref().map_or(&[][..], |queue| &queue.select);
            let steps = (position..position + n).map(|position| Extent {
                n_tokens: 1,
                decode: true,
                position: position as u32,
                n_logit_rows: 1,
                leaves_out,
            });
            recorder.run(steps.flat_map(|extent| {
                let select = select.iter().map(move |op| (op, extent));
                this.ops(0..this.layers.len(), extent).chain(select)
            }));
            for (at, words) in ring.iter().filter(|(_, words)| !words.is_empty()) {
                let step = 4 * RESULT_WORDS as u64;
                let (at, bytes) = (*at as u64 * step, words.len() as u64 * step);
                pending.copy(recorder.encoder(), &this.buffers[plan.results], at, bytes);
            }
        })?;
        pending.submitted(submission);
        let queue = self.queued();
        queue.flights.push_back(Flight { pending, n_steps: n, n_read: 0 });
        queue.n_queued += n;
        queue.position += n;
        Ok(())
    }

    /// The step at `position` once more, looked through on the host. It drew no token that there is, so the caller begins anew.
    fn look(&mut self, position: usize, slot: usize, token: u32) -> Result<Drawn, Error> {
        let vocab_size = self.head.as_ref().map_or(0, |head| head.vocab_size);
        let mut logits = vec![0.0; vocab_size];
        let top_k = self.queued().top_k;
        self.run(&[(slot, position, token)], 0..1, (&[0], Some(top_k)), &mut [], &mut logits)?;
        let mut candidates: Vec<(u32, f32)> = (0..).zip(logits).collect();
        candidates.retain(|(_, logit)| *logit > f32::NEG_INFINITY);
        candidates.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        candidates.truncate(top_k);
        Ok(Drawn { token: u32::MAX, candidates })
    }

    /// Steps that go into a submission.
    fn steps_at_once(&self) -> usize {
        let n_layers = self.layers.len();
        let timed = self.clock.as_ref().map_or(usize::MAX, |clock| clock.steps(8 * (n_layers + 1)));
        self.pace.decode(n_layers).min(RING).min(timed).max(1)
    }
}

impl Ahead for GpuSegment {
    fn begin(&mut self, slot: usize, position: usize, token: u32, draw: &Draw) -> Result<(), Error> {
        self.gpu.check()?;
        let scratch = self.scratch;
        let queue = self.queued();
        queue.forget();
        (queue.slot, queue.position, queue.n_queued) = (slot, position, 0);
        queue.reading = (position, token);
        queue.top_k = draw.top_k;
        queue.seen = Instant::now();
        let plan = queue.plan;
        let write = |id, words: &[u32]| {
            self.gpu.queue().write_buffer(&self.buffers[id], 0, &bytes_of(words));
        };
        write(scratch.rows, &[token, slot as u32, position as u32, 0]);
        write(plan.draw, &draw_words(draw));
        self.write_logit_rows(&[0]);
        Ok(())
    }

    fn queue(&mut self, uniforms: &[f32]) -> Result<(), Error> {
        self.gpu.check()?;
        let at_once = self.steps_at_once();
        uniforms.chunks(at_once).try_for_each(|uniforms| self.queue_some(uniforms))
    }

    fn next(&mut self) -> Result<Drawn, Error> {
        let gpu = std::sync::Arc::clone(&self.gpu);
        let n_layers = self.layers.len();
        let queue = self.queued();
        let (top_k, slot, (position, token)) = (queue.top_k, queue.slot, queue.reading);
        let flight = queue.flights.front_mut().expect("next is called for steps that have been queued");
        let first_of_flight = flight.n_read == 0;
        flight.pending.wait(&gpu)?;
        let words = flight.pending.words(&gpu, flight.n_read * RESULT_WORDS, RESULT_WORDS)?;
        flight.n_read += 1;
        queue.reading = (position + 1, words[0]);
        let n_steps = flight.n_steps;
        if flight.n_read == n_steps
            && let Some(flight) = queue.flights.pop_front()
        {
            queue.staging.give(flight.pending);
        }
        if first_of_flight {
            let took = queue.seen.elapsed() / n_steps as u32;
            queue.seen = Instant::now();
            self.pace.took(true, 1, n_layers, took);
        }
        match words[1] {
            0 => {}
            TOO_MANY => return self.look(position, slot, token),
            NOT_A_NUMBER => return Err(Error::NonFiniteHead),
            layer => return Err(self.layer_error(layer as usize - 1)),
        }
        let (ids, logits) = words[2..].split_at(MAX_CANDIDATES);
        // Fewer where the head left out all but a few rows.
        let candidates = ids.iter().zip(logits).take(top_k).take_while(|(id, _)| **id != NO_TOKEN);
        let candidates = candidates.map(|(&id, &logit)| (id, f32::from_bits(logit))).collect();
        Ok(Drawn { token: words[0], candidates })
    }

    fn stop(&mut self) {
        self.queued().forget();
    }
}
