//! Every kernel of every instruction set this machine has returns the scalar kernel's bits, and the
//! comparison notices a fault in any of them.

use super::common::{ActivationRows, Activations, Affine4, Bf16, Random, Ternary};
use proptest::prelude::*;
use samara_simd::{
    Isa, KV_BLOCK, KV_LEAST, KV_PART, Kernels, Kv, KvSlice, Op, attention_state_len, q8_dims, q8_key_at,
    q8_value_at, value_at,
};

/// Inputs of every operation for one shape.
#[derive(Clone)]
struct Case {
    x: Vec<f32>,
    y: Vec<f32>,
    act: Activations,
    ternary: Ternary,
    affine: Affine4,
    affine_act: Activations,
    bf16: Bf16,
    /// Of several tokens.
    acts: ActivationRows,
    affine_acts: ActivationRows,
    /// `[n_tokens, cols]`.
    xs: Vec<f32>,
    attention: Attention,
}

/// Query heads and the keys and values of one part, in each of the cache's formats.
#[derive(Clone)]
struct Attention {
    head_dim: usize,
    first: usize,
    n_keys: usize,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    scales: Vec<f32>,
}

impl Attention {
    fn random(random: &mut Random) -> Self {
        let head_dim = [1, 8, 33, 64, 128][random.below(5) as usize];
        let n_keys = 1 + random.below(KV_PART as u64) as usize;
        let positions = n_keys.next_multiple_of(KV_BLOCK);
        let n_queries = 1 + random.below(9) as usize;
        // Products of the smallest are below the least normal f32.
        let mut f32s = |n: usize| {
            let magnitude = 2.0f32.powi([0, 0, 0, -40, -62][random.below(5) as usize]);
            random.f32s(n).into_iter().map(|x| magnitude * x).collect()
        };
        let (queries, keys) = (f32s(n_queries * head_dim), f32s(positions * head_dim));
        let (values, scales) = (f32s(positions * head_dim), f32s(positions));
        Self { head_dim, first: random.below(n_keys as u64) as usize, n_keys, queries, keys, values, scales }
    }

    /// States of all formats, one after the other.
    fn parts(&self, kernels: &Kernels) -> Vec<f32> {
        let upper = |x: &[f32]| -> Vec<u16> {
            let not_least = x.iter().map(|x| if x.abs() < KV_LEAST { 0.0 } else { *x });
            not_least.map(|x| (x.to_bits() >> 16) as u16).collect()
        };
        let (keys16, values16) = (upper(&self.keys), upper(&self.values));
        // What is not stored is noise.
        let small = |x: f32| (x * 127.0) as i8 as u8 ^ 128;
        let dims = q8_dims(self.head_dim);
        let noise = || (0..KV_PART * dims).map(|i| 1 + (i * 89 % 255) as u8).collect::<Vec<u8>>();
        let (mut keys8, mut values8) = (noise(), noise());
        for position in 0..self.n_keys {
            for d in 0..self.head_dim {
                let value = self.values[value_at(position, d, self.head_dim)];
                keys8[q8_key_at(position, d, self.head_dim)] = small(self.keys[position * self.head_dim + d]);
                values8[q8_value_at(position, d)] = small(value);
            }
        }
        let formats = [
            Kv::F32 { keys: &self.keys, values: &self.values },
            Kv::Bf16 { keys: &keys16, values: &values16 },
            Kv::Q8 { keys: &keys8, key_scales: &self.scales, values: &values8, value_scales: &self.scales },
        ];
        let n = self.queries.len() / self.head_dim;
        let part = |kv| {
            let slice = KvSlice { kv, n_keys: self.n_keys, head_dim: self.head_dim };
            let mut weights = vec![f32::NAN; n * KV_PART];
            let mut state = vec![f32::NAN; attention_state_len(n, self.head_dim)];
            kernels.attention_part(&self.queries, &slice, self.first, 0.3, &mut weights, &mut state);
            state
        };
        formats.into_iter().flat_map(part).collect()
    }
}

impl Case {
    fn new(rows: usize, cols: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let x = random.activations(cols);
        let affine_cols = cols.next_multiple_of(64);
        let affine_x = random.activations(affine_cols);
        let n_tokens = 1 + random.below(7) as usize;
        let xs: Vec<f32> = (0..n_tokens).flat_map(|_| random.activations(cols)).collect();
        let affine_xs: Vec<f32> = (0..n_tokens).flat_map(|_| random.activations(affine_cols)).collect();
        Self {
            acts: ActivationRows::new(&xs, cols),
            affine_acts: ActivationRows::new(&affine_xs, affine_cols),
            xs,
            attention: Attention::random(&mut random),
            y: random.f32s(cols),
            act: Activations::new(&Kernels::scalar(), &x),
            ternary: Ternary::random(&mut random, rows, cols),
            affine: Affine4::random(&mut random, rows, affine_cols),
            affine_act: Activations::new(&Kernels::scalar(), &affine_x),
            bf16: Bf16::random(&mut random, rows, cols),
            x,
        }
    }

    /// The same with one input of each operation changed a little, in the last place a kernel looks.
    fn with_fault(&self) -> Self {
        let mut faulty = self.clone();
        let last = faulty.x.len() - 1;
        faulty.x[last] = 3.0 - faulty.x[last];
        faulty.y[last] += 0.5;
        let code = faulty.ternary.codes.last_mut().expect("a code");
        *code = (*code + 1) % 3;
        *faulty.affine.nibbles.last_mut().expect("a nibble") ^= 1;
        let last = faulty.xs.len() - 1;
        faulty.xs[last] = 3.0 - faulty.xs[last];
        let (last, dim) = (faulty.attention.n_keys - 1, faulty.attention.head_dim);
        faulty.attention.values[value_at(last, dim - 1, dim)] += 0.5;
        *faulty.bf16.values.last_mut().expect("a value") ^= 0x0100;
        faulty
    }
}

type Run = fn(&Kernels, &Case) -> Vec<f32>;

/// How each operation is run on a case; its results as f32.
const RUNS: [(Op, Run); Op::ALL.len()] = [
    (Op::TernaryGemv, |kernels, case| case.ternary.gemv(kernels, &case.act)),
    (Op::TernaryGemm, |kernels, case| case.ternary.gemm(kernels, &case.acts)),
    (Op::Affine4Gemv, |kernels, case| case.affine.gemv(kernels, &case.affine_act)),
    (Op::Affine4Gemm, |kernels, case| case.affine.gemm(kernels, &case.affine_acts)),
    (Op::Affine4Row, |kernels, case| case.affine.row(kernels, case.affine.rows - 1)),
    (Op::Bf16Gemv, |kernels, case| case.bf16.gemv(kernels, &case.x)),
    (Op::Bf16Gemm, |kernels, case| case.bf16.gemm(kernels, &case.xs)),
    (Op::Quantize, |kernels, case| {
        let Activations { q, scales, offsets } = Activations::new(kernels, &case.x);
        q.into_iter().map(f32::from).chain(scales).chain(offsets).collect()
    }),
    (Op::RmsNorm, |kernels, case| {
        let mut out = vec![0.0; case.x.len()];
        kernels.rms_norm(&case.x, &case.y, 1e-6, &mut out);
        out
    }),
    (Op::RmsNormInPlace, |kernels, case| {
        let mut out = case.x.clone();
        kernels.rms_norm_in_place(&mut out, &case.y, 1e-6);
        out
    }),
    (Op::SwigluClamped, |kernels, case| {
        let mut out = vec![0.0; case.x.len()];
        kernels.swiglu_clamped(&case.x, &case.y, 7.0, 0.75, &mut out);
        out
    }),
    (Op::Combine, |kernels, case| {
        let (mut out, n) = (case.x.clone(), (case.xs.len() / case.x.len()) as u32);
        let rows: Vec<u32> = (0..n).rev().collect();
        let weights: Vec<f32> = (1..=n).map(|i| 1.0 / i as f32).collect();
        kernels.combine(&case.xs, &rows, &weights, &mut out);
        out
    }),
    (Op::Rope, |kernels, case| {
        let mut out: Vec<f32> = case.x.iter().chain(&case.x).copied().collect();
        kernels.rope(&mut out, &case.y, &case.x);
        out
    }),
    (Op::Softmax, |kernels, case| {
        let mut out = case.x.clone();
        kernels.softmax(&mut out);
        out
    }),
    (Op::TopKRouter, |kernels, case| {
        let k = case.y.len().min(8);
        let (mut logits, mut experts, mut weights) = (case.y.clone(), vec![0; k], vec![0.0; k]);
        kernels.top_k_router(&mut logits, true, &mut experts, &mut weights);
        weights.into_iter().chain(experts.into_iter().map(|expert| expert as f32)).chain(logits).collect()
    }),
    (Op::AttentionPart, |kernels, case| case.attention.parts(kernels)),
    (Op::AttentionMerge, |kernels, case| {
        let dim = case.x.len();
        let state = |x: &[f32], largest| [x, &[largest, 1.5]].concat();
        let mut merged = state(&case.x, 2.0);
        kernels.attention_merge(&mut merged, &state(&case.y, 1.75), dim);
        merged
    }),
    (Op::AttentionFinish, |kernels, case| {
        let mut out = vec![0.0; case.x.len()];
        kernels.attention_finish(&[&case.x[..], &[2.0, 1.5]].concat(), case.x.len(), &mut out);
        out
    }),
];

/// The first place where two results differ in bits; any NaN equals any other.
fn difference(expected: &[f32], found: &[f32]) -> Option<String> {
    if expected.len() != found.len() {
        return Some(format!("{} results instead of {}", found.len(), expected.len()));
    }
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
    let at = (0..expected.len()).find(|&i| !same(expected[i], found[i]))?;
    Some(format!("result {at}: {:e} instead of {:e}", found[at], expected[at]))
}

#[test]
fn several_tokens_are_each_of_them() {
    for kernels in present().into_iter().chain([Kernels::scalar()]) {
        for (rows, cols) in [(1, 64), (6, 128), (9, 640), (21, 320)] {
            let case = Case::new(rows, cols, 11);
            let of = |f: &dyn Fn(&Activations) -> Vec<f32>, acts: &ActivationRows| -> Vec<f32> {
                acts.order.iter().flat_map(|&t| f(&acts.each[t as usize])).collect()
            };
            let ternary = of(&|act| case.ternary.gemv(&kernels, act), &case.acts);
            assert_eq!(
                difference(&ternary, &case.ternary.gemm(&kernels, &case.acts)),
                None,
                "ternary {cols}"
            );
            let affine = of(&|act| case.affine.gemv(&kernels, act), &case.affine_acts);
            assert_eq!(
                difference(&affine, &case.affine.gemm(&kernels, &case.affine_acts)),
                None,
                "4-bit {cols}"
            );
            let bf16: Vec<f32> = case.xs.chunks(cols).flat_map(|x| case.bf16.gemv(&kernels, x)).collect();
            assert_eq!(difference(&bf16, &case.bf16.gemm(&kernels, &case.xs)), None, "bf16 {cols}");
        }
    }
}

/// All that `kernels` does on `case` against the scalar kernels.
fn check(kernels: &Kernels, case: &Case) {
    for (op, run) in RUNS {
        let difference = difference(&run(&Kernels::scalar(), case), &run(kernels, case));
        let shape = (case.ternary.rows, case.ternary.cols);
        assert!(difference.is_none(), "{} for {shape:?}: {}", kernels.id(op), difference.unwrap_or_default());
    }
}

#[test]
fn many_tokens_and_wide_rows() {
    for (rows, cols, n_tokens) in [(5, 2048, 70), (6, 2049, 7), (9, 4160, 12), (4, 128, 129), (3, 640, 64)] {
        let mut random = Random(cols as u64);
        let mut case = Case::new(rows, cols, 2);
        let xs: Vec<f32> = (0..n_tokens).flat_map(|_| random.activations(cols)).collect();
        case.acts = ActivationRows::new(&xs, cols);
        let cols = cols.next_multiple_of(64);
        let xs: Vec<f32> = (0..n_tokens).flat_map(|_| random.activations(cols)).collect();
        case.affine_acts = ActivationRows::new(&xs, cols);
        present().iter().for_each(|kernels| check(kernels, &case));
    }
}

/// The instruction sets to test; those this machine lacks are named and counted.
fn present() -> Vec<Kernels> {
    let (present, missing): (Vec<_>, Vec<_>) = Isa::ALL
        .into_iter()
        .filter(|&isa| isa.is_native() && isa != Isa::Scalar)
        .map(Kernels::for_isa)
        .partition(Result::is_ok);
    for error in missing.iter().filter_map(|result| result.as_ref().err()) {
        println!("skipped: optional: {error}");
    }
    println!("{} instruction sets tested, {} skipped", present.len(), missing.len());
    present.into_iter().flatten().collect()
}

#[test]
fn boundary_shapes() {
    let present = present();
    for cols in [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 640] {
        for rows in 1..=9 {
            let case = Case::new(rows, cols, (rows * cols) as u64);
            present.iter().for_each(|kernels| check(kernels, &case));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(rows in 1usize..=9, cols in 1usize..700, seed: u64) {
        let case = Case::new(rows, cols, seed);
        present().iter().for_each(|kernels| check(kernels, &case));
    }
}

#[test]
fn largest_magnitudes_do_not_saturate() {
    for cols in [64, 128, 640] {
        for sign in [-1.0, 1.0] {
            let mut case = Case::new(5, cols, 1);
            case.act = Activations::new(&Kernels::scalar(), &vec![sign; cols]);
            case.affine_act = case.act.clone();
            case.acts = ActivationRows::new(&vec![sign; 6 * cols], cols);
            case.affine_acts = case.acts.clone();
            case.ternary.codes.fill(2);
            case.affine.nibbles.fill(15);
            present().iter().for_each(|kernels| check(kernels, &case));
        }
    }
}

#[test]
fn activations_that_are_not_numbers_show_in_every_row() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = Random(3).activations(300);
        x[200] = bad;
        let mut case = Case::new(6, 300, 3);
        case.act = Activations::new(&Kernels::scalar(), &x);
        case.x = x;
        present().iter().for_each(|kernels| check(kernels, &case));
        for kernels in present().into_iter().chain([Kernels::scalar()]) {
            assert!(case.ternary.gemv(&kernels, &case.act).iter().all(|dot| dot.is_nan()), "{bad}");
        }
    }
}

#[test]
fn a_fault_in_any_operation_is_noticed() {
    for kernels in present().into_iter().chain([Kernels::scalar()]) {
        for (rows, cols) in [(1, 1), (4, 128), (9, 700)] {
            let mut case = Case::new(rows, cols, 5);
            case.x.fill(1.0);
            let ones = vec![1.0; cols.next_multiple_of(64)];
            case.act = Activations::new(&Kernels::scalar(), &case.x);
            case.affine_act = Activations::new(&Kernels::scalar(), &ones);
            case.acts = ActivationRows::new(&vec![1.0; 5 * cols], cols);
            case.affine_acts = ActivationRows::new(&vec![1.0; 5 * ones.len()], ones.len());
            let faulty = case.with_fault();
            // A softmax over one element is 1 whatever the element is.
            let blind = |op| cols == 1 && matches!(op, Op::Softmax | Op::TopKRouter);
            for (op, run) in RUNS.into_iter().filter(|(op, _)| !blind(*op)) {
                let found = run(&kernels, &faulty);
                assert!(
                    difference(&run(&Kernels::scalar(), &case), &found).is_some(),
                    "{} {cols}",
                    kernels.id(op)
                );
            }
        }
    }
}

#[test]
fn the_smallest_difference_is_a_difference() {
    let next = f32::from_bits(1.0f32.to_bits() + 1);
    for (expected, found, equal) in [
        (&[1.0][..], &[1.0][..], true),
        (&[f32::NAN], &[-f32::NAN], true),
        (&[1.0, 1.0], &[1.0, next], false),
        (&[0.0], &[-0.0], false),
        (&[f32::NAN], &[1.0], false),
        (&[1.0], &[], false),
    ] {
        assert_eq!(difference(expected, found).is_none(), equal, "{expected:?} {found:?}");
    }
}

#[test]
fn a_range_of_panels_is_that_part_of_the_whole() {
    for kernels in present().into_iter().chain([Kernels::scalar()]) {
        let case = Case::new(9, 130, 8);
        let part = case.ternary.part();
        let rows = samara_simd::TernaryRows::from_part(&part, 9, 130);
        let whole = case.ternary.gemv(&kernels, &case.act);
        for range in [0..0, 0..4, 4..8, 4..9, 8..9, 0..9] {
            let mut out = vec![0.0; range.len()];
            kernels.ternary_gemv(&rows, &case.act.row(), range.clone(), &mut out);
            assert_eq!(difference(&whole[range.clone()], &out), None, "{range:?}");
        }
    }
}
