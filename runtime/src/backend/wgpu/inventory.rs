//! Every buffer of a segment, listed before any is made.
//!
//! What a segment needs is the sum of the list, and what it allocates is the list: the two cannot differ. All buffers are made
//! before anything is uploaded, so that a device with too little memory says so at once.

use std::ops::Index;

use super::device::{Gpu, STORAGE, buffer_size};
use crate::{error::Error, placement::format_bytes};

/// Buffers to make.
#[derive(Debug, Default)]
pub(super) struct Inventory {
    entries: Vec<(&'static str, u64)>,
}

/// Place of a buffer in its inventory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferId(usize);

/// The buffers of an inventory, made.
pub(super) struct Buffers(Vec<wgpu::Buffer>);

impl Buffers {
    /// Bytes of all.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(wgpu::Buffer::size).sum()
    }
}

impl Index<BufferId> for Buffers {
    type Output = wgpu::Buffer;

    fn index(&self, id: BufferId) -> &wgpu::Buffer {
        &self.0[id.0]
    }
}

impl Inventory {
    /// Notes a storage buffer of `bytes`.
    pub(super) fn add(&mut self, label: &'static str, bytes: u64) -> BufferId {
        self.entries.push((label, buffer_size(bytes)));
        BufferId(self.entries.len() - 1)
    }

    /// Notes a storage buffer of `words` of 4 bytes.
    pub(super) fn words(&mut self, label: &'static str, words: usize) -> BufferId {
        self.add(label, 4 * words as u64)
    }

    /// Bytes of all buffers.
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The first buffer longer than a binding or a buffer of the device may be.
    pub(super) fn too_long(&self, max_bytes: u64) -> Option<String> {
        let (label, bytes) = self.entries.iter().find(|(_, bytes)| *bytes > max_bytes)?;
        let (bytes, max_bytes) = (format_bytes(*bytes), format_bytes(max_bytes));
        Some(format!("`{label}` takes {bytes}, and a buffer may have {max_bytes} there"))
    }

    /// Makes all buffers, filled with zeros.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] with what all of them take; [`Error::Gpu`] for one that is longer than the device allows.
    pub(super) fn allocate(&self, gpu: &Gpu) -> Result<Buffers, Error> {
        if let Some(reason) = self.too_long(gpu.max_buffer()) {
            return Err(gpu.error(reason));
        }
        let mut made = Vec::with_capacity(self.entries.len());
        for (label, bytes) in &self.entries {
            let buffer = gpu
                .scoped(wgpu::ErrorFilter::OutOfMemory, || gpu.buffer(label, *bytes, STORAGE))
                .map_err(|_| self.out_of_memory(gpu))?;
            made.push(buffer);
            gpu.check()?;
        }
        Ok(Buffers(made))
    }

    fn out_of_memory(&self, gpu: &Gpu) -> Error {
        Error::DeviceMemory {
            device: gpu.name(),
            needed: format_bytes(self.bytes()),
            available: "its driver has no more".to_owned(),
            advice: "give it fewer layers with --gpu-layers, or a shorter context with --ctx".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::device::any, *};

    #[test]
    fn too_long_a_buffer_is_named() {
        let mut inventory = Inventory::default();
        inventory.words("short", 1);
        inventory.add("long", 100);
        assert_eq!(inventory.bytes(), 16 + 100);
        assert_eq!(inventory.too_long(100), None);
        assert!(inventory.too_long(99).is_some_and(|reason| reason.contains("`long`")));
    }

    #[test]
    fn too_little_memory_is_an_error_with_the_sum() {
        let Some(gpu) = any() else { return };
        let mut inventory = Inventory::default();
        inventory.add("a", 3 << 20);
        inventory.add("b", 1 << 20);
        // A software device hands out memory that there is not, so the error is looked at alone.
        let error = inventory.out_of_memory(&gpu).to_string();
        assert!(error.contains("4.00 MiB") && error.contains(gpu.name().as_str()), "{error}");
    }
}
