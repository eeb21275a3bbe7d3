//! Results on their way back: buffers that the host can read, used in turn.
//!
//! A submission ends with copies into one of them. While it is under way and read, later submissions take others; one that has been
//! read is free again. They are made when a segment is compiled, and more only if more submissions are under way than ever
//! before.

use super::device::{Gpu, words_of};
use crate::error::Error;

/// Buffers of one length.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: u64,
    free: Vec<wgpu::Buffer>,
}

/// A buffer that a submission writes to.
#[derive(Debug)]
pub(super) struct Pending {
    buffer: wgpu::Buffer,
    bytes: u64,
    submission: Option<wgpu::SubmissionIndex>,
}

impl Staging {
    /// `n` buffers of `bytes`.
    pub(super) fn new(gpu: &Gpu, n: usize, bytes: u64) -> Self {
        let mut staging = Staging { bytes, free: Vec::new() };
        staging.free = (0..n).map(|_| staging.make(gpu)).collect();
        staging
    }

    fn make(&self, gpu: &Gpu) -> wgpu::Buffer {
        gpu.buffer("results", self.bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)
    }

    /// Bytes of all that are free.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.free.iter().map(wgpu::Buffer::size).sum()
    }

    /// A free buffer.
    pub(super) fn take(&mut self, gpu: &Gpu) -> Pending {
        let buffer = self.free.pop().unwrap_or_else(|| self.make(gpu));
        Pending { buffer, bytes: 0, submission: None }
    }

    /// Takes a buffer back, read or not.
    pub(super) fn give(&mut self, pending: Pending) {
        pending.buffer.unmap();
        self.free.push(pending.buffer);
    }
}

impl Pending {
    /// Appends a copy of `bytes` of `from`, starting at `at`.
    pub(super) fn copy(
        &mut self,
        encoder: &mut wgpu::CommandEncoder,
        from: &wgpu::Buffer,
        at: u64,
        bytes: u64,
    ) {
        encoder.copy_buffer_to_buffer(from, at, &self.buffer, self.bytes, bytes);
        self.bytes += bytes;
    }

    /// Asks for the contents, once the copies are submitted.
    pub(super) fn submitted(&mut self, submission: wgpu::SubmissionIndex) {
        self.buffer.map_async(wgpu::MapMode::Read, 0..self.bytes, |_| {});
        self.submission = Some(submission);
    }

    /// Waits for the submission, unless it has been waited for.
    ///
    /// # Errors
    /// A lost device.
    pub(super) fn wait(&mut self, gpu: &Gpu) -> Result<(), Error> {
        match self.submission.take() {
            Some(submission) => gpu.wait(Some(submission)),
            None => Ok(()),
        }
    }

    /// `n` words from word `first` on, after [`wait`](Self::wait).
    ///
    /// # Errors
    /// A device that is lost.
    pub(super) fn words(&self, gpu: &Gpu, first: usize, n: usize) -> Result<Vec<u32>, Error> {
        self.with(gpu, first, n, words_of)
    }

    /// The same words as bytes, for `read`.
    ///
    /// # Errors
    /// A device that is lost.
    pub(super) fn with<T>(
        &self,
        gpu: &Gpu,
        first: usize,
        n: usize,
        read: impl FnOnce(&[u8]) -> T,
    ) -> Result<T, Error> {
        let (start, end) = (4 * first as u64, 4 * (first + n) as u64);
        match self.buffer.get_mapped_range(start..end) {
            Ok(mapped) => Ok(read(&mapped)),
            Err(error) => {
                gpu.check()?;
                Err(gpu.error(error.to_string()))
            }
        }
    }
}
