//! Where the time of a step goes.

use std::time::{Duration, Instant};

use crate::backend::Phase;

/// Times phases when it is on; costs nothing when it is off.
#[derive(Debug, Default)]
pub(super) struct Clock {
    last: Option<Instant>,
    phases: Vec<Phase>,
}

impl Clock {
    /// Starts from nothing, or stops.
    pub(super) fn set(&mut self, on: bool) {
        *self = Clock { last: on.then(Instant::now), phases: Vec::new() };
    }

    /// Time before now belongs to nothing.
    pub(super) fn start(&mut self) {
        if self.last.is_some() {
            self.last = Some(Instant::now());
        }
    }

    /// Time since the last call belongs to `name`, which read `bytes` of weights or cache.
    pub(super) fn lap(&mut self, name: &'static str, bytes: usize) {
        let Some(last) = self.last else { return };
        let now = Instant::now();
        self.last = Some(now);
        let time: Duration = now - last;
        match self.phases.iter_mut().find(|phase| phase.name == name) {
            Some(phase) => {
                phase.time += time;
                phase.bytes += bytes as u64;
            }
            None => self.phases.push(Phase { name, time, bytes: bytes as u64 }),
        }
    }

    /// What was measured since it was set.
    pub(super) fn phases(&self) -> &[Phase] {
        &self.phases
    }
}
