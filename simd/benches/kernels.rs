//! How fast is each instruction set that this machine has? One thread.
//!
//! Rows times one token are weight bytes a second, from far more of them than the caches hold; `read` only loads
//! bytes: the bound of the same run. Rows times several tokens, and attention, are multiply-adds a second (`elem/s`).
//! Machines differ by 20 % from one minute to the next, so compare within a run.
//!
//! `cargo bench -p samara-benches --bench kernels`

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use samara_simd::{
    Affine4Rows, Bf16Rows, Isa, KV_PART, Kernels, Kv, KvSlice, QuantizedRow, QuantizedRows, TernaryRows,
    attention_state_len, offsets_len, scales_len,
};

const COLS: usize = 2048;
/// Weight bytes of a gemv.
const BYTES: usize = 64 << 20;

/// Rows of an expert's gate and up together, and of an attention projection: `[rows, cols]`.
const SHAPES: [(usize, usize); 3] = [(1024, 2048), (2048, 512), (3072, 2048)];

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let kernels: Vec<Kernels> = Isa::ALL.into_iter().filter_map(|isa| Kernels::for_isa(isa).ok()).collect();
    gemv(&mut criterion, &kernels);
    gemm(&mut criterion, &kernels);
    attention(&mut criterion, &kernels);
    quantize(&mut criterion, &kernels);
    criterion.final_summary();
}

fn group<'c>(
    criterion: &'c mut Criterion,
    name: &str,
    throughput: Throughput,
) -> BenchmarkGroup<'c, WallTime> {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_millis(500));
    group.throughput(throughput);
    group
}

fn gemv(criterion: &mut Criterion, kernels: &[Kernels]) {
    // The file has weights at multiples of 4096.
    let bytes = bf16_around_one(BYTES + 4096);
    let bytes = &bytes[bytes.as_ptr().align_offset(4096)..][..BYTES];
    let activations = Activations::new(1, COLS);
    let (act, x) = (activations.row(), random_f32s(COLS));

    let rows = BYTES / (COLS / 4);
    let scales = [0x80, 0x3f].repeat(rows);
    let ternary = TernaryRows::new(bytes, &scales, rows, COLS);
    let mut out = vec![0.0; rows];
    let mut ternary_gemv = group(criterion, "ternary_gemv", Throughput::Bytes(BYTES as u64));
    ternary_gemv.bench_function("read", |bencher| bencher.iter(|| read(black_box(bytes))));
    for kernels in kernels {
        ternary_gemv.bench_function(kernels.isa().name(), |bencher| {
            bencher.iter(|| kernels.ternary_gemv(&ternary, &act, 0..rows, &mut out));
        });
    }
    drop(ternary_gemv);

    let panel = 128 * (COLS / 64) + (16 * COLS / 64).next_multiple_of(128);
    let n_panels = BYTES / panel;
    let bytes_of_panels = &bytes[..panel * n_panels];
    let affine = Affine4Rows::new(bytes_of_panels, 4 * n_panels, COLS);
    let mut affine_gemv = group(criterion, "affine4_gemv", Throughput::Bytes(bytes_of_panels.len() as u64));
    affine_gemv.bench_function("read", |bencher| bencher.iter(|| read(black_box(bytes_of_panels))));
    for kernels in kernels {
        affine_gemv.bench_function(kernels.isa().name(), |bencher| {
            bencher.iter(|| kernels.affine4_gemv(&affine, &act, 0..4 * n_panels, &mut out[..4 * n_panels]));
        });
    }
    drop(affine_gemv);

    let rows = BYTES / (2 * COLS);
    let bf16 = Bf16Rows::new(bytes, rows, COLS);
    let mut bf16_gemv = group(criterion, "bf16_gemv", Throughput::Bytes(BYTES as u64));
    bf16_gemv.bench_function("read", |bencher| bencher.iter(|| read(black_box(bytes))));
    for kernels in kernels {
        bf16_gemv.bench_function(kernels.isa().name(), |bencher| {
            bencher.iter(|| kernels.bf16_gemv(&bf16, &x, 0..rows, &mut out[..rows]));
        });
    }
}

fn gemm(criterion: &mut Criterion, kernels: &[Kernels]) {
    for (rows, cols) in SHAPES {
        let codes = random_bytes(rows * cols / 4);
        let scales = [0x80, 0x3f].repeat(rows);
        let ternary = TernaryRows::new(&codes, &scales, rows, cols);
        for n in [16, 128] {
            let elements = Throughput::Elements((rows * cols * n) as u64);
            let mut group = group(criterion, &format!("ternary_gemm/{rows}x{cols}"), elements);
            let (activations, tokens) = (Activations::new(n, cols), Vec::from_iter(0..n as u32));
            let mut out = vec![0.0; n * rows];
            for kernels in kernels.iter().filter(|kernels| kernels.isa() != Isa::Scalar) {
                group.bench_function(BenchmarkId::new(kernels.isa().name(), n), |bencher| {
                    bencher.iter(|| {
                        kernels.ternary_gemm(&ternary, &activations.rows(), &tokens, 0..rows, &mut out)
                    });
                });
            }
        }
    }
    let (rows, cols, n) = (1024, 2048, 16);
    let elements = Throughput::Elements((rows * cols * n) as u64);
    let (activations, tokens) = (Activations::new(n, cols), Vec::from_iter(0..n as u32));
    let mut out = vec![0.0; n * rows];
    let mut affine_gemm = group(criterion, "affine4_gemm/1024x2048", elements.clone());
    let panels = bf16_around_one((128 + 16) * rows / 4 * cols / 64);
    let affine = Affine4Rows::new(&panels, rows, cols);
    for kernels in kernels.iter().filter(|kernels| kernels.isa() != Isa::Scalar) {
        affine_gemm.bench_function(BenchmarkId::new(kernels.isa().name(), n), |bencher| {
            bencher.iter(|| kernels.affine4_gemm(&affine, &activations.rows(), &tokens, 0..rows, &mut out));
        });
    }
    drop(affine_gemm);

    let values = bf16_around_one(2 * rows * cols);
    let (bf16, x) = (Bf16Rows::new(&values, rows, cols), random_f32s(n * cols));
    let mut bf16_gemm = group(criterion, "bf16_gemm/1024x2048", elements);
    for kernels in kernels {
        bf16_gemm.bench_function(BenchmarkId::new(kernels.isa().name(), n), |bencher| {
            bencher.iter(|| kernels.bf16_gemm(&bf16, &x, 0..rows, &mut out));
        });
    }
}

/// Four query heads over a whole part, of which scores and sums are a multiply-add each for every key and dimension.
fn attention(criterion: &mut Criterion, kernels: &[Kernels]) {
    const QUERIES: usize = 4;
    const DIM: usize = 128;
    let queries = random_f32s(QUERIES * DIM);
    let upper = |x: Vec<f32>| Vec::from_iter(x.into_iter().map(|x| (x.to_bits() >> 16) as u16));
    let small = |x: Vec<f32>| Vec::from_iter(x.into_iter().map(|x| (127.0 * x) as i8 as u8 ^ 128));
    let f32s = || random_f32s(KV_PART * DIM);
    let (keys, values, scales) = (f32s(), f32s(), random_f32s(KV_PART));
    let (keys16, values16, keys8, values8) = (upper(f32s()), upper(f32s()), small(f32s()), small(f32s()));
    let formats = [
        ("f32", Kv::F32 { keys: &keys, values: &values }),
        ("bf16", Kv::Bf16 { keys: &keys16, values: &values16 }),
        ("q8", Kv::Q8 { keys: &keys8, key_scales: &scales, values: &values8, value_scales: &scales }),
    ];
    let elements = Throughput::Elements((2 * QUERIES * DIM * KV_PART) as u64);
    let mut group = group(criterion, "attention_part", elements);
    let mut weights = vec![0.0; QUERIES * KV_PART];
    let mut state = vec![0.0; attention_state_len(QUERIES, DIM)];
    for (format, kv) in formats {
        let slice = KvSlice { kv, n_keys: KV_PART, head_dim: DIM };
        for kernels in kernels {
            group.bench_function(BenchmarkId::new(kernels.isa().name(), format), |bencher| {
                bencher.iter(|| kernels.attention_part(&queries, &slice, 0, 0.1, &mut weights, &mut state));
            });
        }
    }
}

fn quantize(criterion: &mut Criterion, kernels: &[Kernels]) {
    let x = random_f32s(COLS);
    let mut new = Activations::new(1, COLS);
    let mut group = group(criterion, "quantize", Throughput::Elements(COLS as u64));
    for kernels in kernels {
        group.bench_function(kernels.isa().name(), |bencher| {
            bencher.iter(|| {
                kernels.quantize(&x, &mut new.q, &mut new.scales, &mut new.offsets);
            });
        });
    }
}

/// Loads all bytes and adds them up in whatever registers every machine has.
fn read(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 16];
    for line in bytes.as_chunks::<128>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// Activations of `n` tokens, with their buffers.
struct Activations {
    q: Vec<i8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
    n: usize,
    cols: usize,
}

impl Activations {
    fn new(n: usize, cols: usize) -> Self {
        let (mut q, mut scales) = (vec![0; n * cols], vec![0.0; n * scales_len(cols)]);
        let mut offsets = vec![0.0; n * offsets_len(cols)];
        let x = random_f32s(n * cols);
        let buffers = scales.chunks_mut(scales_len(cols)).zip(offsets.chunks_mut(offsets_len(cols)));
        for ((x, q), (scales, offsets)) in x.chunks(cols).zip(q.chunks_mut(cols)).zip(buffers) {
            Kernels::scalar().quantize(x, q, scales, offsets);
        }
        Self { q, scales, offsets, n, cols }
    }

    fn row(&self) -> QuantizedRow<'_> {
        QuantizedRow::new(&self.q, &self.scales, &self.offsets)
    }

    fn rows(&self) -> QuantizedRows<'_> {
        QuantizedRows::new(&self.q, &self.scales, &self.offsets, self.n, self.cols)
    }
}

/// xorshift64*.
fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    seed.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

fn random_bytes(len: usize) -> Vec<u8> {
    let mut seed = 1;
    (0..len.div_ceil(8)).flat_map(|_| random(&mut seed).to_le_bytes()).take(len).collect()
}

/// Numbers whose products are neither tiny nor huge, which some CPUs are slow at. As codes they are as good as others.
fn bf16_around_one(len: usize) -> Vec<u8> {
    let mut bytes = random_bytes(len);
    for [low, high] in bytes.as_chunks_mut::<2>().0 {
        (*low, *high) = (*low | 0x80, 0x3f);
    }
    bytes
}

fn random_f32s(n: usize) -> Vec<f32> {
    let mut seed = 2;
    (0..n).map(|_| (random(&mut seed) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}
