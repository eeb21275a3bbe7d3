//! Every kernel of every instruction set this machine has returns the scalar kernel's bits, and the
//! comparison notices a fault in any of them.

mod common;

use common::{Activations, Affine4, Bf16, Random, Ternary};
use proptest::prelude::*;
use samara_simd::{Isa, Kernels, KvSlice, Op};

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
}

impl Case {
    fn new(rows: usize, cols: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let x = random.activations(cols);
        let affine_cols = cols.next_multiple_of(64);
        let affine_x = random.activations(affine_cols);
        Self {
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
        *faulty.bf16.values.last_mut().expect("a value") ^= 0x0100;
        faulty
    }
}

type Run = fn(&Kernels, &Case) -> Vec<f32>;

/// How each operation is run on a case; its results as f32.
const RUNS: [(Op, Run); Op::ALL.len()] = [
    (Op::TernaryGemv, |kernels, case| case.ternary.gemv(kernels, &case.act)),
    (Op::Affine4Gemv, |kernels, case| case.affine.gemv(kernels, &case.affine_act)),
    (Op::Affine4Row, |kernels, case| case.affine.row(kernels, case.affine.rows - 1)),
    (Op::Bf16Gemv, |kernels, case| case.bf16.gemv(kernels, &case.x)),
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
    (Op::Attention, |kernels, case| {
        let head_dim = case.x.len();
        let segment = |values| KvSlice { keys: &case.y, values };
        let (mut scores, mut out) = ([0.0; 2], vec![0.0; head_dim]);
        kernels.attention(&case.x, &[segment(&case.x), segment(&case.y)], 0.1, &mut scores, &mut out);
        out.into_iter().chain(scores).collect()
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

/// All that `kernels` does on `case` against the scalar kernels.
fn check(kernels: &Kernels, case: &Case) {
    for (op, run) in RUNS {
        let difference = difference(&run(&Kernels::scalar(), case), &run(kernels, case));
        let shape = (case.ternary.rows, case.ternary.cols);
        assert!(difference.is_none(), "{} for {shape:?}: {}", kernels.id(op), difference.unwrap_or_default());
    }
}

/// The instruction sets to test; those this machine lacks are named and counted.
fn present() -> Vec<Kernels> {
    let (present, missing): (Vec<_>, Vec<_>) =
        Isa::ALL.into_iter().filter(|&isa| isa != Isa::Scalar).map(Kernels::for_isa).partition(Result::is_ok);
    // Another architecture has none to test.
    let missing_here = missing.iter().filter(|_| cfg!(target_arch = "x86_64"));
    for error in missing_here.filter_map(|result| result.as_ref().err()) {
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
