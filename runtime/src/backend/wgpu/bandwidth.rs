//! How fast a device reads its memory; and work that brings it to its full speed.

use std::time::{Duration, Instant};

use std::sync::Arc;

use super::device::{Gpu, Pipeline, STORAGE};
use crate::error::Error;

/// Bytes that are read again and again; more than caches hold.
const BYTES: u64 = 512 << 20;

/// Workgroups that read: many more than any device runs at once.
const GROUPS: u32 = 8192;

/// A submission is made longer until it takes this long: what surrounds it does not count then.
const LONG: Duration = Duration::from_millis(20);

/// The best of this many submissions counts.
const TURNS: usize = 5;

/// Bytes that are read to wake a device.
const WAKE_BYTES: u64 = 64 << 20;

/// A device that has nothing to do lowers its clocks, and takes about this long to raise them.
const WAKE: Duration = Duration::from_millis(150);

/// A buffer to read.
struct Reader<'a> {
    gpu: &'a Gpu,
    bytes: u64,
    pipeline: Arc<Pipeline>,
    group: wgpu::BindGroup,
}

impl<'a> Reader<'a> {
    /// Of so many bytes, or what a buffer may have.
    fn new(gpu: &'a Gpu, bytes: u64) -> Result<Self, Error> {
        let bytes = bytes.min(gpu.max_buffer()) & !15;
        let (source, sums) = gpu
            .scoped(wgpu::ErrorFilter::OutOfMemory, || {
                let sums = 4 * 256 * u64::from(GROUPS);
                (gpu.buffer("bandwidth", bytes, STORAGE), gpu.buffer("sums", sums, STORAGE))
            })
            .map_err(|reason| gpu.error(reason))?;
        let pipeline = gpu.pipeline("read_memory", gpu.variants()[0], &[])?;
        let group = gpu.bind(&pipeline, &[source.as_entire_binding(), sums.as_entire_binding()]);
        Ok(Reader { gpu, bytes, pipeline, group })
    }

    /// Reads it so many times.
    fn time(&self, passes: u32) -> Result<Duration, Error> {
        let device = self.gpu.device();
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        pass.set_pipeline(&self.pipeline.raw);
        pass.set_bind_group(0, &self.group, &[]);
        (0..passes).for_each(|_| pass.dispatch_workgroups(GROUPS, 1, 1));
        drop(pass);
        let commands = encoder.finish();
        let started = Instant::now();
        let submission = self.gpu.queue().submit([commands]);
        self.gpu.wait(Some(submission))?;
        Ok(started.elapsed())
    }

    /// Passes that take as long as it takes for what surrounds them not to count.
    fn passes(&self) -> Result<u32, Error> {
        let mut passes = 1;
        while self.time(passes)? < LONG {
            passes *= 2;
        }
        Ok(passes)
    }
}

/// Bytes a second.
///
/// # Errors
/// A device without room for the buffer, or that is lost.
pub(super) fn measure(gpu: &Gpu) -> Result<f64, Error> {
    let reader = Reader::new(gpu, BYTES)?;
    let passes = reader.passes()?;
    let mut best = reader.time(passes)?;
    for _ in 1..TURNS {
        best = best.min(reader.time(passes)?);
    }
    Ok(f64::from(passes) * reader.bytes as f64 / best.as_secs_f64())
}

/// Keeps a device busy until it runs at its full speed, so that what is timed next is timed at that.
///
/// # Errors
/// As [`measure`].
pub(super) fn wake(gpu: &Gpu) -> Result<(), Error> {
    let reader = Reader::new(gpu, WAKE_BYTES)?;
    let began = Instant::now();
    let passes = reader.passes()?;
    while began.elapsed() < WAKE {
        reader.time(passes)?;
    }
    Ok(())
}
