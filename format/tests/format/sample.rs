//! Sample data: numbers that look random but are the same in every run.

use std::path::Path;

use samara_format::{FileLayout, Metadata, TensorSpec, Writer};

/// Xorshift, 64 bits.
pub(crate) struct Noise(u64);

impl Noise {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// `n` bytes below `end`.
    pub(crate) fn bytes(&mut self, n: usize, end: u64) -> Vec<u8> {
        (0..n).map(|_| ((self.next() >> 20) % end) as u8).collect()
    }

    /// `n` bf16 patterns.
    pub(crate) fn halves(&mut self, n: usize) -> Vec<u16> {
        (0..n).map(|_| (self.next() >> 20) as u16).collect()
    }
}

/// Bytes for a tensor of the file, made from its name.
pub(crate) fn content(name: &str, len: u64) -> Vec<u8> {
    Noise::new(name.bytes().fold(7, |seed: u64, b| seed.rotate_left(5) ^ u64::from(b)))
        .bytes(len as usize, 256)
}

/// Writes a file whose tensors hold `content`, in pieces of `piece` bytes.
pub(crate) fn write(path: &Path, metadata: &Metadata, tensors: &[TensorSpec], piece: usize) {
    let layout = FileLayout::new(metadata.clone(), tensors.to_vec(), 0).unwrap();
    let mut writer = Writer::create(path, layout, true).unwrap();
    for _ in tensors {
        let mut tensor = writer.tensor().unwrap();
        let (name, len) = (tensor.spec().name.clone(), tensor.spec().len);
        for bytes in content(&name, len).chunks(piece) {
            tensor.append(bytes).unwrap();
        }
        tensor.finish().unwrap();
    }
    writer.finish().unwrap();
}
