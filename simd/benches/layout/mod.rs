//! What the comparisons share: weights, activations, threads, and the bound.

pub(crate) mod affine4;
pub(crate) mod bf16;
pub(crate) mod ternary;

use std::arch::x86_64::*;
use std::hint::black_box;
use std::ops::Range;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use samara_simd::{Kernels, QuantizedRow, offsets_len, scales_len};

pub(crate) const COLS: usize = 2048;
/// Rows handed to a thread are whole panels of every layout.
const ROW_STEP: usize = 8;

/// One comparison: a criterion group that counts weight bytes.
pub(crate) struct Comparison<'c> {
    group: BenchmarkGroup<'c, WallTime>,
    rows: usize,
    bytes: usize,
}

impl<'c> Comparison<'c> {
    pub(crate) fn new(criterion: &'c mut Criterion, name: &str, rows: usize, bytes: usize) -> Self {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        group.warm_up_time(Duration::from_millis(150)).measurement_time(Duration::from_millis(900));
        group.throughput(Throughput::Bytes(bytes as u64));
        Self { group, rows, bytes }
    }

    /// Times `gemv(rows, out)` over all rows, with one thread and with two.
    pub(crate) fn gemv(&mut self, name: &str, gemv: impl Fn(Range<usize>, &mut [f32]) + Sync) {
        let mut out = vec![0.0f32; self.rows];
        for n_threads in [1, 2] {
            let share = self.rows.div_ceil(n_threads).next_multiple_of(ROW_STEP);
            self.group.bench_function(BenchmarkId::new(name, n_threads), |bencher| {
                bencher.iter(|| on_threads(&mut out, share, &gemv));
            });
        }
    }

    /// Times loading `bytes` and nothing else.
    pub(crate) fn read(&mut self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.bytes, "the bound reads what the variants read");
        for n_threads in [1, 2] {
            let share = (bytes.len() / n_threads).next_multiple_of(4096);
            self.group.bench_function(BenchmarkId::new("read", n_threads), |bencher| {
                bencher.iter(|| {
                    let mut sums = [0.0; 2];
                    on_threads(&mut sums[..n_threads], 1, &|part, sum| {
                        let end = bytes.len().min(share * part.end);
                        // SAFETY: main has seen AVX2.
                        sum[0] = unsafe { load_all(&bytes[share * part.start..end]) };
                    });
                    black_box(sums)
                });
            });
        }
    }
}

/// `run(range, part)` for parts of `share` elements of `out`, each on a thread, the first on this one.
fn on_threads(out: &mut [f32], share: usize, run: &(impl Fn(Range<usize>, &mut [f32]) + Sync)) {
    std::thread::scope(|scope| {
        let mut parts = out.chunks_mut(share).enumerate();
        let first = parts.next();
        for (i, part) in parts {
            scope.spawn(move || run(i * share..i * share + part.len(), part));
        }
        if let Some((_, part)) = first {
            run(0..part.len(), part);
        }
    });
}

/// Adds up all 32 byte words, four sums, 2 KiB prefetched.
#[target_feature(enable = "avx2")]
fn load_all(bytes: &[u8]) -> f32 {
    let mut sums = [_mm256_setzero_si256(); 4];
    for line in bytes.as_chunks::<128>().0 {
        prefetch::<2048>(line.as_ptr());
        prefetch::<2048>(line[64..].as_ptr());
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<32>().0) {
            *sum = _mm256_add_epi64(*sum, load(word));
        }
    }
    let sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    _mm256_extract_epi32::<0>(sum) as f32
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn load<T: Copy>(bytes: &[T; 32]) -> __m256i {
    const { assert!(size_of::<T>() == 1) }
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn load_f32(values: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 32 bytes read; an unaligned load.
    unsafe { _mm256_loadu_ps(values.as_ptr()) }
}

/// Asks for the line `AHEAD` bytes after `at`; with 0, nothing.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn prefetch<const AHEAD: usize>(at: *const u8) {
    if AHEAD > 0 {
        _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(AHEAD));
    }
}

/// Eight lanes added in the crate's order.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn tree(lanes: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps::<1>(lanes));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn pair_sums(products: __m256i) -> __m256 {
    _mm256_cvtepi32_ps(_mm256_madd_epi16(products, _mm256_set1_epi16(1)))
}

/// Weight bytes at a multiple of 4096, where the file has them.
pub(crate) struct Weights {
    bytes: Vec<u8>,
    start: usize,
}

impl Weights {
    pub(crate) fn zeroed(len: usize) -> Self {
        let mut bytes = vec![0; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        bytes.truncate(start + len);
        Self { bytes, start }
    }
}

impl std::ops::Deref for Weights {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

impl std::ops::DerefMut for Weights {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..]
    }
}

pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        // xorshift64*
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Weights {
        let mut bytes = Weights::zeroed(len);
        for word in bytes.as_chunks_mut::<8>().0 {
            *word = self.next().to_le_bytes();
        }
        bytes
    }

    pub(crate) fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    /// bf16 bit patterns around 1, little endian.
    pub(crate) fn bf16s(&mut self, n: usize) -> Weights {
        let mut bytes = Weights::zeroed(2 * n);
        for value in bytes.as_chunks_mut::<2>().0 {
            *value = (0x3f80 | (self.next() >> 57) as u16).to_le_bytes();
        }
        bytes
    }
}

/// Quantised activations, with their buffers.
pub(crate) struct Activations {
    pub(crate) q: Vec<i8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) offsets: Vec<f32>,
}

impl Activations {
    pub(crate) fn new() -> Self {
        let x = Random(9).f32s(COLS);
        let mut new = Self {
            q: vec![0; COLS],
            scales: vec![0.0; scales_len(COLS)],
            offsets: vec![0.0; offsets_len(COLS)],
        };
        Kernels::scalar().quantize(&x, &mut new.q, &mut new.scales, &mut new.offsets);
        new
    }

    pub(crate) fn row(&self) -> QuantizedRow<'_> {
        QuantizedRow::new(&self.q, &self.scales, &self.offsets)
    }
}
