//! Random rows in the file's layouts, packed here by the plain index formulas of the layouts.

use samara_simd::{
    Affine4Rows, Bf16Rows, Kernels, QuantizedRow, QuantizedRows, TernaryRows, offsets_len, padded_cols,
    scales_len,
};

/// splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Uniform in -1..1.
    pub(crate) fn f32(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.f32()).collect()
    }

    /// Activations: magnitudes from 1e-3 to 1e3 in runs of 16, some runs zero.
    pub(crate) fn activations(&mut self, n: usize) -> Vec<f32> {
        let mut magnitude = 1.0;
        let draw = |i| {
            if i % 16 == 0 {
                magnitude = [0.0, 1e-3, 1.0, 1.0, 1.0, 1e3][self.below(6) as usize];
            }
            magnitude * self.f32()
        };
        (0..n).map(draw).collect()
    }

    pub(crate) fn bf16(&mut self) -> u16 {
        (self.f32().to_bits() >> 16) as u16
    }
}

pub(crate) fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Ternary rows: codes `[rows, cols]`, bf16 scales `[rows]`, and the part that holds them.
#[derive(Clone)]
pub(crate) struct Ternary {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u16>,
}

impl Ternary {
    pub(crate) fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        let codes = (0..rows * cols).map(|_| random.below(3) as u8).collect();
        Self { rows, cols, codes, scales: (0..rows).map(|_| random.bf16()).collect() }
    }

    pub(crate) fn part(&self) -> Vec<u8> {
        let (n_panels, n_blocks) = (self.rows.div_ceil(4), self.cols.div_ceil(128));
        let mut part = vec![0b0101_0101; 128 * n_panels * n_blocks];
        for row in 0..self.rows {
            for col in 0..self.cols {
                let chunk = (row / 4) * n_blocks + col / 128;
                let byte = &mut part[128 * chunk + 32 * (row % 4) + col % 32];
                let shift = 2 * (col % 128 / 32);
                *byte = *byte & !(3 << shift) | self.codes[row * self.cols + col] << shift;
            }
        }
        let scales: Vec<u8> = self.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        part.extend(scales);
        part.resize(128 * n_panels * n_blocks + (8 * n_panels).next_multiple_of(128), 0);
        part
    }

    pub(crate) fn gemv(&self, kernels: &Kernels, act: &Activations) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows];
        let part = self.part();
        let rows = TernaryRows::from_part(&part, self.rows, self.cols);
        kernels.ternary_gemv(&rows, &act.row(), 0..self.rows, &mut out);
        out
    }
}

impl Ternary {
    pub(crate) fn gemm(&self, kernels: &Kernels, acts: &ActivationRows) -> Vec<f32> {
        let mut out = vec![f32::NAN; acts.order.len() * self.rows];
        let part = self.part();
        let rows = TernaryRows::from_part(&part, self.rows, self.cols);
        kernels.ternary_gemm(&rows, &acts.rows(), &acts.order, 0..self.rows, &mut out);
        out
    }
}

/// Affine 4-bit rows: nibbles `[rows, cols]`, bf16 scales and biases `[rows, cols / 64]`.
#[derive(Clone)]
pub(crate) struct Affine4 {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) nibbles: Vec<u8>,
    pub(crate) scales: Vec<u16>,
    pub(crate) biases: Vec<u16>,
}

impl Affine4 {
    pub(crate) fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        let nibbles = (0..rows * cols).map(|_| random.below(16) as u8).collect();
        let mut groups = || (0..rows * cols / 64).map(|_| random.bf16()).collect();
        Self { rows, cols, nibbles, scales: groups(), biases: groups() }
    }

    pub(crate) fn part(&self) -> Vec<u8> {
        let n_groups = self.cols / 64;
        let header = (16 * n_groups).next_multiple_of(128);
        let panel_len = header + 128 * n_groups;
        let mut part = vec![0; panel_len * self.rows.div_ceil(4)];
        for row in 0..self.rows {
            let panel = &mut part[panel_len * (row / 4)..][..panel_len];
            for g in 0..n_groups {
                let at = 16 * g + 2 * (row % 4);
                panel[at..at + 2].copy_from_slice(&self.scales[row * n_groups + g].to_le_bytes());
                panel[at + 8..at + 10].copy_from_slice(&self.biases[row * n_groups + g].to_le_bytes());
            }
            for col in 0..self.cols {
                let byte = &mut panel[header + 128 * (col / 64) + 32 * (row % 4) + col % 32];
                *byte |= self.nibbles[row * self.cols + col] << (4 * (col % 64 / 32));
            }
        }
        part
    }

    pub(crate) fn gemv(&self, kernels: &Kernels, act: &Activations) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows];
        let part = self.part();
        kernels.affine4_gemv(
            &Affine4Rows::new(&part, self.rows, self.cols),
            &act.row(),
            0..self.rows,
            &mut out,
        );
        out
    }

    pub(crate) fn gemm(&self, kernels: &Kernels, acts: &ActivationRows) -> Vec<f32> {
        let mut out = vec![f32::NAN; acts.order.len() * self.rows];
        let part = self.part();
        let rows = Affine4Rows::new(&part, self.rows, self.cols);
        kernels.affine4_gemm(&rows, &acts.rows(), &acts.order, 0..self.rows, &mut out);
        out
    }

    pub(crate) fn row(&self, kernels: &Kernels, row: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.cols];
        let part = self.part();
        kernels.affine4_row(&Affine4Rows::new(&part, self.rows, self.cols), row, &mut out);
        out
    }
}

/// bf16 rows: values `[rows, cols]`.
#[derive(Clone)]
pub(crate) struct Bf16 {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) values: Vec<u16>,
}

impl Bf16 {
    pub(crate) fn random(random: &mut Random, rows: usize, cols: usize) -> Self {
        Self { rows, cols, values: (0..rows * cols).map(|_| random.bf16()).collect() }
    }

    pub(crate) fn part(&self) -> Vec<u8> {
        let n_chunks = self.cols.div_ceil(16);
        let mut part = vec![0; 128 * n_chunks * self.rows.div_ceil(4)];
        for row in 0..self.rows {
            for col in 0..self.cols {
                let at = 128 * ((row / 4) * n_chunks + col / 16) + 32 * (row % 4) + 2 * (col % 16);
                part[at..at + 2].copy_from_slice(&self.values[row * self.cols + col].to_le_bytes());
            }
        }
        part
    }

    pub(crate) fn gemv(&self, kernels: &Kernels, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.rows];
        let part = self.part();
        kernels.bf16_gemv(&Bf16Rows::new(&part, self.rows, self.cols), x, 0..self.rows, &mut out);
        out
    }
}

impl Bf16 {
    /// `x` is `[n, cols]`.
    pub(crate) fn gemm(&self, kernels: &Kernels, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / self.cols * self.rows];
        let part = self.part();
        kernels.bf16_gemm(&Bf16Rows::new(&part, self.rows, self.cols), x, 0..self.rows, &mut out);
        out
    }
}

/// Quantised activations of several tokens, and an order to take them in.
#[derive(Clone)]
pub(crate) struct ActivationRows {
    pub(crate) each: Vec<Activations>,
    q: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
    pub(crate) order: Vec<u32>,
}

impl ActivationRows {
    /// Of `x`, `[n, cols]`; the order is backwards, with the first token once more.
    pub(crate) fn new(x: &[f32], cols: usize) -> Self {
        let each: Vec<_> = x.chunks(cols).map(|x| Activations::new(&Kernels::scalar(), x)).collect();
        let n = each.len() as u32;
        Self {
            q: each.iter().flat_map(|act| act.q.iter().copied()).collect(),
            scales: each.iter().flat_map(|act| act.scales.iter().copied()).collect(),
            offsets: each.iter().flat_map(|act| act.offsets.iter().copied()).collect(),
            order: (0..n).rev().chain(std::iter::once(0)).collect(),
            each,
        }
    }

    pub(crate) fn rows(&self) -> QuantizedRows<'_> {
        let n = self.each.len();
        QuantizedRows::new(&self.q, &self.scales, &self.offsets, n, self.q.len() / n)
    }
}

/// Quantised activations with the buffers they live in.
#[derive(Clone)]
pub(crate) struct Activations {
    pub(crate) q: Vec<i8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) offsets: Vec<f32>,
}

impl Activations {
    pub(crate) fn new(kernels: &Kernels, x: &[f32]) -> Self {
        let mut new = Self {
            q: vec![77; padded_cols(x.len())],
            scales: vec![f32::NAN; scales_len(x.len())],
            offsets: vec![f32::NAN; offsets_len(x.len())],
        };
        kernels.quantize(x, &mut new.q, &mut new.scales, &mut new.offsets);
        new
    }

    pub(crate) fn row(&self) -> QuantizedRow<'_> {
        QuantizedRow::new(&self.q, &self.scales, &self.offsets)
    }

    /// The scale of a column.
    pub(crate) fn scale(&self, col: usize) -> f32 {
        self.scales[8 * (col / 256) + col % 32 / 4]
    }
}
