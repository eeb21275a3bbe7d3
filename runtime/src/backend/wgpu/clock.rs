//! How long each kernel takes, by timestamps that the device writes around a dispatch.

use std::time::Duration;

use super::device::{Gpu, words_of};
use crate::{backend::Phase, error::Error};

/// Timestamps of one submission at most.
pub(super) const MAX_TIMESTAMPS: u32 = wgpu::QUERY_SET_MAX_QUERIES;

/// Name of the time between dispatches of a submission.
const BETWEEN: &str = "between kernels";

/// Timestamps of a submission, and the sums of earlier ones.
pub(super) struct Clock {
    queries: wgpu::QuerySet,
    resolved: wgpu::Buffer,
    staging: wgpu::Buffer,
    /// Nanoseconds of a tick.
    tick: f32,
    /// Kernel and bytes read of each dispatch of the submission.
    dispatches: Vec<(&'static str, u64)>,
    phases: Vec<Phase>,
}

impl Clock {
    /// `None` on a device without timestamps.
    pub(super) fn new(gpu: &Gpu) -> Option<Self> {
        let tick = gpu.tick()?;
        let bytes = u64::from(MAX_TIMESTAMPS) * 8;
        let resolve = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let map = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        Some(Clock {
            queries: gpu.device().create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("dispatches"),
                ty: wgpu::QueryType::Timestamp,
                count: MAX_TIMESTAMPS,
            }),
            resolved: gpu.buffer("timestamps", bytes, resolve),
            staging: gpu.buffer("timestamps", bytes, map),
            tick,
            dispatches: Vec::new(),
            phases: Vec::new(),
        })
    }

    /// Whether `more` dispatches fit the submission.
    pub(super) fn has_room(&self, more: usize) -> bool {
        2 * (self.dispatches.len() + more) <= MAX_TIMESTAMPS as usize
    }

    /// Steps of so many dispatches that fit a submission.
    pub(super) fn steps(&self, dispatches: usize) -> usize {
        MAX_TIMESTAMPS as usize / 2 / dispatches.max(1)
    }

    /// Timestamps around the next dispatch, which `name` does and which reads `bytes`.
    pub(super) fn around(&mut self, name: &'static str, bytes: u64) -> wgpu::ComputePassTimestampWrites<'_> {
        let first = 2 * self.dispatches.len() as u32;
        self.dispatches.push((name, bytes));
        wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        }
    }

    /// The last commands of the submission.
    pub(super) fn resolve(&self, encoder: &mut wgpu::CommandEncoder) {
        let n = 2 * self.dispatches.len() as u32;
        if n > 0 {
            encoder.resolve_query_set(&self.queries, 0..n, &self.resolved, 0);
            encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.staging, 0, u64::from(n) * 8);
        }
    }

    /// Waits for the submission and adds up what it took.
    pub(super) fn take(&mut self, gpu: &Gpu) -> Result<(), Error> {
        let bytes = self.dispatches.len() as u64 * 16;
        if bytes == 0 {
            return Ok(());
        }
        self.staging.map_async(wgpu::MapMode::Read, 0..bytes, |_| {});
        gpu.wait(None)?;
        let ticks: Vec<u64> = {
            let mapped =
                self.staging.get_mapped_range(0..bytes).map_err(|error| gpu.error(error.to_string()))?;
            let words = words_of(&mapped);
            words
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&[low, high]| u64::from(high) << 32 | u64::from(low))
                .collect()
        };
        self.staging.unmap();
        let mut end = None;
        let dispatches = std::mem::take(&mut self.dispatches);
        for ((name, bytes), pair) in dispatches.iter().zip(ticks.as_chunks::<2>().0) {
            if let Some(end) = end {
                self.add(BETWEEN, pair[0].saturating_sub(end), 0);
            }
            self.add(name, pair[1].saturating_sub(pair[0]), *bytes);
            end = Some(pair[1]);
        }
        Ok(())
    }

    fn add(&mut self, name: &'static str, ticks: u64, bytes: u64) {
        let time = Duration::from_nanos((ticks as f64 * f64::from(self.tick)) as u64);
        match self.phases.iter_mut().find(|phase| phase.name == name) {
            Some(phase) => {
                phase.time += time;
                phase.bytes += bytes;
            }
            None => self.phases.push(Phase { name, time, bytes }),
        }
    }

    /// What was timed.
    pub(super) fn phases(&self) -> Vec<Phase> {
        self.phases.clone()
    }
}
