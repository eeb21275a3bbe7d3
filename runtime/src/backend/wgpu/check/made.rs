//! Made-up activations and weights, the same every time.

use samara_format::TernaryLayout;

use crate::backend::wgpu::device::words_of;

/// A small generator (splitmix64).
#[derive(Clone, Debug)]
pub(super) struct Made(u64);

impl Made {
    pub(super) fn new(seed: u64) -> Self {
        Made(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Around 0, mostly within `size`, now and then four times that, as activations are.
    pub(super) fn value(&mut self, size: f32) -> f32 {
        let unit = (self.bits() >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        if self.bits().is_multiple_of(64) { 4.0 * size * unit } else { size * unit }
    }

    pub(super) fn values(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(size)).collect()
    }

    /// A norm's weights: around 1.
    pub(super) fn norm(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 1.0 + 0.25 * self.value(1.0)).collect()
    }

    /// A TERNARY2 part.
    #[cfg(test)]
    pub(super) fn ternary(&mut self, rows: usize, cols: usize) -> Ternary {
        let layout = TernaryLayout::new(rows, cols).expect("a small matrix");
        let codes: Vec<u8> = (0..rows * cols).map(|_| self.below(3) as u8).collect();
        let scales: Vec<u16> =
            (0..rows).map(|_| ((0.01 + 0.01 * self.value(1.0).abs()).to_bits() >> 16) as u16).collect();
        let mut part = vec![0; layout.len()];
        layout.pack(&codes, &scales, &mut part);
        Ternary::of(&part, rows, cols)
    }

    /// A BF16_PANELS part and its values.
    #[cfg(test)]
    pub(super) fn bf16(&mut self, rows: usize, cols: usize) -> (Vec<u32>, Vec<f64>) {
        let layout = samara_format::Bf16PanelLayout::new(rows, cols).expect("a small matrix");
        let values: Vec<u16> = (0..rows * cols).map(|_| (self.value(0.05).to_bits() >> 16) as u16).collect();
        let mut part = vec![0; layout.len()];
        layout.pack(&values, &mut part);
        (words_of(&part), values.iter().map(|value| f64::from(bf16(u32::from(*value)))).collect())
    }
}

/// The value of a bf16.
pub(super) fn bf16(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

/// A ternary matrix as the GPU gets it, and as numbers.
pub(super) struct Ternary {
    /// The part.
    pub(super) words: Vec<u32>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `[rows, cols]`: sign times the row's scale.
    pub(super) weights: Vec<f64>,
}

impl Ternary {
    /// A TERNARY2 part of a file.
    pub(super) fn of(part: &[u8], rows: usize, cols: usize) -> Self {
        let layout = TernaryLayout::new(rows, cols).expect("a matrix of a file");
        let mut codes = vec![0; cols];
        let mut weights = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            let scale = f64::from(bf16(u32::from(layout.unpack_row(part, row, &mut codes))));
            weights.extend(codes.iter().map(|code| (f64::from(*code) - 1.0) * scale));
        }
        Ternary { words: words_of(part), rows, cols, weights }
    }

    /// Times the rows of `x`, `[n, cols]`: `[n, rows]`.
    pub(super) fn times(&self, x: &[f64]) -> Vec<f64> {
        matmul(&self.weights, x, self.cols)
    }
}

/// `x` `[n, cols]` times each row of `weights` `[rows, cols]`: `[n, rows]`.
pub(super) fn matmul(weights: &[f64], x: &[f64], cols: usize) -> Vec<f64> {
    let dot = |a: &[f64], b: &[f64]| {
        let mut lanes = [0.0; 8];
        for (a, b) in a.chunks(8).zip(b.chunks(8)) {
            lanes.iter_mut().zip(a.iter().zip(b)).for_each(|(lane, (a, b))| *lane += a * b);
        }
        lanes.iter().sum::<f64>()
    };
    x.chunks_exact(cols).flat_map(|x| weights.chunks_exact(cols).map(move |row| dot(row, x))).collect()
}
