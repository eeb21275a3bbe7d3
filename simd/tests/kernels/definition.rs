//! The scalar kernels against the same sums in f64, within bounds that follow from the number of f32
//! operations a term passes through, and the rules of each operation as tables.

use super::common::{Activations, Affine4, Bf16, Random, Ternary, bf16};
use samara_simd::{
    KV_BLOCK, KV_PART, Kernels, Kv, KvSlice, attention_state_len, put_q8_key, put_q8_value, q8_dims,
    q8_key_at, q8_value_at, read, value_at,
};

/// Largest error of a chain of `n` rounded f32 operations, relative to the sum of magnitudes.
fn gamma(n: usize) -> f64 {
    n as f64 * f64::from(f32::EPSILON)
}

const SHAPES: [(usize, usize); 8] =
    [(1, 64), (2, 128), (3, 192), (4, 256), (5, 384), (6, 640), (7, 1024), (9, 2048)];

/// f64 dot products and the sums of their terms' magnitudes.
fn check_dots(found: &[f32], bound: f64, term: impl Fn(usize, usize) -> (f64, f64), cols: usize) {
    for (row, &found) in found.iter().enumerate() {
        let (sum, size) = (0..cols).map(|col| term(row, col)).fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        let error = (f64::from(found) - sum).abs();
        assert!(error <= bound * size, "row {row} of {cols} columns: {found} instead of {sum}");
    }
}

#[test]
fn ternary_rows() {
    for (rows, cols) in SHAPES {
        for cols in [cols, cols - 1, cols + 1] {
            let mut random = Random((rows * cols) as u64);
            let ternary = Ternary::random(&mut random, rows, cols);
            let act = Activations::new(&Kernels::scalar(), &random.activations(cols));
            let term = |row: usize, col: usize| {
                let weight = f64::from(bf16(ternary.scales[row]));
                let x = f64::from(act.q[col]) * f64::from(act.scale(col));
                let code = f64::from(ternary.codes[row * cols + col]);
                // The codes 0..=2 and the correction are summed apart, so both count.
                (weight * (code - 1.0) * x, (weight * (code + 1.0) * x).abs())
            };
            check_dots(
                &ternary.gemv(&Kernels::scalar(), &act),
                gamma(2 * cols.div_ceil(128) + 8),
                term,
                cols,
            );
        }
    }
}

#[test]
fn affine_rows() {
    for (rows, cols) in SHAPES {
        let mut random = Random((rows * cols) as u64);
        let affine = Affine4::random(&mut random, rows, cols);
        let act = Activations::new(&Kernels::scalar(), &random.activations(cols));
        let term = |row: usize, col: usize| {
            let group = row * cols / 64 + col / 64;
            let x = f64::from(act.q[col]) * f64::from(act.scale(col));
            let product =
                f64::from(bf16(affine.scales[group])) * f64::from(affine.nibbles[row * cols + col]) * x;
            let bias = f64::from(bf16(affine.biases[group])) * x;
            (product + bias, product.abs() + bias.abs())
        };
        check_dots(&affine.gemv(&Kernels::scalar(), &act), gamma(cols / 64 + 8), term, cols);
        let group = (rows - 1) * cols / 64;
        let expected = f32::from(affine.nibbles[(rows - 1) * cols]) * bf16(affine.scales[group]);
        assert_eq!(affine.row(&Kernels::scalar(), rows - 1)[0], expected + bf16(affine.biases[group]));
    }
}

#[test]
fn bf16_rows() {
    for (rows, cols) in SHAPES {
        for cols in [cols, cols - 1, cols + 1] {
            let mut random = Random((rows * cols) as u64);
            let weights = Bf16::random(&mut random, rows, cols);
            let x = random.activations(cols);
            let term = |row: usize, col: usize| {
                let product = f64::from(bf16(weights.values[row * cols + col])) * f64::from(x[col]);
                (product, product.abs())
            };
            check_dots(&weights.gemv(&Kernels::scalar(), &x), gamma(cols.div_ceil(8) + 4), term, cols);
        }
    }
}

#[test]
#[should_panic(expected = "instead of")]
fn a_wrong_code_leaves_the_bound() {
    let mut random = Random(1);
    let mut ternary = Ternary::random(&mut random, 4, 2048);
    let x = random.f32s(2048);
    let act = Activations::new(&Kernels::scalar(), &x);
    let right = ternary.clone();
    ternary.codes[5000] = (ternary.codes[5000] + 1) % 3;
    let term = |row: usize, col: usize| {
        let weight = f64::from(bf16(right.scales[row])) * f64::from(act.q[col]) * f64::from(act.scale(col));
        let code = f64::from(right.codes[row * 2048 + col]);
        (weight * (code - 1.0), (weight * (code + 1.0)).abs())
    };
    check_dots(&ternary.gemv(&Kernels::scalar(), &act), gamma(2 * 16 + 8), term, 2048);
}

#[test]
fn quantised_values_are_within_half_a_step() {
    for cols in [1, 127, 128, 129, 640] {
        let x = Random(cols as u64).activations(cols);
        let act = Activations::new(&Kernels::scalar(), &x);
        for (col, &x) in x.iter().enumerate() {
            let scale = f64::from(act.scale(col));
            let error = (f64::from(x) - scale * f64::from(act.q[col])).abs();
            assert!(error <= scale * (0.5 + 127.0 * gamma(3)), "column {col} of {cols}: {x}");
        }
        assert!(act.q[cols..].iter().all(|&q| q == 0), "padding of {cols} columns");
        let (correction, offsets) = act.offsets.split_last().expect("offsets and their sum");
        assert_eq!(*correction, offsets.iter().fold(0.0, |sum, offset| sum + offset));
        for (half, &offset) in offsets.iter().enumerate() {
            let term = |col: usize| f64::from(act.q[col]) * f64::from(act.scale(col));
            let (sum, size) = (64 * half..64 * half + 64)
                .map(term)
                .fold((0.0, 0.0), |(sum, size): (f64, f64), term| (sum + term, size + term.abs()));
            assert!((f64::from(offset) - sum).abs() <= gamma(5) * size, "offset {half} of {cols} columns");
        }
    }
}

/// Inputs by column, the scale of group 0, and values by column.
type QuantiserRule = (&'static [(usize, f32)], f32, &'static [(usize, i8)]);

#[test]
fn quantiser_rules() {
    // Columns 0..4 are in group 0, column 32 too; column 4 is in group 1.
    let rules: [QuantiserRule; 7] = [
        (&[(0, 127.0), (1, 0.5), (2, 1.5), (3, -2.5)], 1.0, &[(0, 127), (1, 0), (2, 2), (3, -2)]),
        (&[(0, -127.0), (32, 63.0), (96, 64.0)], 1.0, &[(0, -127), (32, 63), (96, 64)]),
        (&[(0, 1.0), (4, 1e6)], 1.0 / 127.0, &[(0, 127), (4, 127)]),
        (&[], 0.0, &[(0, 0)]),
        (&[(0, 1e-38)], 0.0, &[(0, 0)]),
        (&[(0, f32::NAN), (1, 1.0)], f32::NAN, &[(0, 0), (1, 0)]),
        (&[(0, 1.0), (33, f32::NEG_INFINITY)], f32::NAN, &[(0, 0), (33, 0)]),
    ];
    for (inputs, scale, values) in rules {
        let mut x = [0.0; 128];
        inputs.iter().for_each(|&(col, value)| x[col] = value);
        let act = Activations::new(&Kernels::scalar(), &x);
        assert!(act.scales[0] == scale || act.scales[0].is_nan() && scale.is_nan(), "{inputs:?}");
        for &(col, value) in values {
            assert_eq!(act.q[col], value, "{inputs:?} column {col}");
        }
    }
}

fn close(found: f32, expected: f64, size: f64, n: usize) {
    assert!((f64::from(found) - expected).abs() <= gamma(n) * size, "{found} instead of {expected}");
}

#[test]
fn norm_gate_and_rotation() {
    for n in [1, 7, 8, 9, 128, 2048] {
        let mut random = Random(n as u64);
        let (x, y) = (random.f32s(n), random.f32s(n));
        let mut out = vec![0.0; n];
        Kernels::scalar().rms_norm(&x, &y, 1e-6, &mut out);
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / n as f64;
        for (i, &out) in out.iter().enumerate() {
            let expected = f64::from(y[i]) * f64::from(x[i]) / (mean + 1e-6).sqrt();
            close(out, expected, expected.abs(), n / 8 + 10);
        }
        let (mut sums, rows, weights) = (y.clone(), [2, 0, 2], [0.5, -1.5, 2.0]);
        let three: Vec<f32> = [&y[..], &y, &x].concat();
        Kernels::scalar().combine(&three, &rows, &weights, &mut sums);
        for (i, &sum) in sums.iter().enumerate() {
            let (x, y) = (f64::from(x[i]), f64::from(y[i]));
            close(sum, y + 2.5 * x - 1.5 * y, 2.5 * (x.abs() + y.abs()), 5);
        }
        let (gate, up): (Vec<_>, Vec<_>) = x.iter().zip(&y).map(|(x, y)| (x * 20.0, y * 10.0)).unzip();
        Kernels::scalar().swiglu_clamped(&gate, &up, 7.0, 7.0, &mut out);
        for (i, &out) in out.iter().enumerate() {
            let (gate, up) = (f64::from(gate[i]).min(7.0), f64::from(up[i]).clamp(-7.0, 7.0));
            let expected = gate / (1.0 + (-gate).exp()) * up;
            close(out, expected, expected.abs(), 8);
        }
        let mut rotated: Vec<f32> = x.iter().chain(&y).chain(&x).copied().collect();
        Kernels::scalar().rope(&mut rotated, &y, &x);
        for i in 0..n {
            let (a, b) = (f64::from(x[i]), f64::from(y[i]));
            close(rotated[i], a * b - b * a, 2.0 * (a * b).abs(), 2);
            close(rotated[n + i], b * b + a * a, b * b + a * a, 2);
            assert_eq!(rotated[2 * n + i], x[i]);
        }
    }
}

/// Keys `first..n_keys` of one kv head in parts, of elements of so many bits, against the plain formula in f64; as many query heads as
/// `n_queries`.
fn check_attention(n_queries: usize, head_dim: usize, first: usize, n_keys: usize, bits: u32) {
    let mut random = Random((n_keys + head_dim) as u64);
    let queries = random.f32s(n_queries * head_dim);
    let parts = n_keys.next_multiple_of(KV_PART);
    // int8, from -127 on, and scales of positions.
    let mut elements = |scales: &[f32]| -> Vec<f32> {
        let draw = |i| match bits {
            8 => (random.f32() * 127.0).round() * scales[i / head_dim],
            16 => bf16(random.bf16()),
            _ => random.f32(),
        };
        (0..parts * head_dim).map(draw).collect()
    };
    let scales: Vec<f32> = (0..parts).map(|i| (i % 13 + 20) as f32 / (32.0 * 127.0)).collect();
    // `[position, dimension]`.
    let (keys, values) = (elements(&scales), elements(&scales));
    let dims = q8_dims(head_dim);
    let (mut keys32, mut values32) = (keys.clone(), values.clone());
    let (mut keys8, mut values8) = (vec![0; parts * dims], vec![0; parts * dims]);
    for (position, scale) in scales.iter().enumerate() {
        let (from, at) = (position / KV_PART * KV_PART, position % KV_PART);
        let int8 = |x: f32| (x / scale).round() as i8 as u8 ^ 128;
        for d in 0..head_dim {
            let (key, value) = (keys[position * head_dim + d], values[position * head_dim + d]);
            keys32[(position / KV_BLOCK * head_dim + d) * KV_BLOCK + position % KV_BLOCK] = key;
            values32[from * head_dim + value_at(at, d, head_dim)] = value;
            keys8[from * dims + q8_key_at(at, d, head_dim)] = int8(key);
            values8[from * dims + q8_value_at(at, d)] = int8(value);
        }
    }
    let upper = |x: &[f32]| -> Vec<u16> { x.iter().map(|x| (x.to_bits() >> 16) as u16).collect() };
    let (keys16, values16) = (upper(&keys32), upper(&values32));
    let scalar = Kernels::scalar();
    let empty = |n: usize| vec![0.0; n];
    let len = attention_state_len(n_queries, head_dim);
    let (mut state, mut part, mut weights) = (empty(len), empty(len), empty(n_queries * KV_PART));
    for start in (first / KV_PART * KV_PART..n_keys).step_by(KV_PART) {
        let here = start * head_dim..(start + KV_PART) * head_dim;
        let (bytes, positions) = (start * dims..(start + KV_PART) * dims, start..start + KV_PART);
        let kv = match bits {
            8 => Kv::Q8 {
                keys: &keys8[bytes.clone()],
                key_scales: &scales[positions.clone()],
                values: &values8[bytes],
                value_scales: &scales[positions],
            },
            16 => Kv::Bf16 { keys: &keys16[here.clone()], values: &values16[here] },
            _ => Kv::F32 { keys: &keys32[here.clone()], values: &values32[here] },
        };
        let slice = KvSlice { kv, n_keys: (n_keys - start).min(KV_PART), head_dim };
        scalar.attention_part(&queries, &slice, first.saturating_sub(start), 0.125, &mut weights, &mut part);
        if start <= first {
            state.copy_from_slice(&part);
        } else {
            scalar.attention_merge(&mut state, &part, head_dim);
        }
    }
    let mut out = empty(queries.len());
    scalar.attention_finish(&state, head_dim, &mut out);
    for (q, query) in queries.chunks(head_dim).enumerate() {
        let score = |k: usize| -> f64 {
            let key = query.iter().zip(&keys[k * head_dim..]);
            let dot: f64 = key.map(|(&x, &key)| f64::from(x) * f64::from(key)).sum();
            (0.125 * dot).exp()
        };
        let total: f64 = (first..n_keys).map(score).sum();
        for d in 0..head_dim {
            let value = |k: usize| score(k) / total * f64::from(values[k * head_dim + d]);
            let expected = (first..n_keys).map(value).sum();
            // What rounding costs, in units of 2^-23: to 16 significant bits 2^-17 of each term of a score, an eighth of the sum,
            // and of each weight; to 16 bits of the largest 2^-16 of that.
            let rounded = match bits {
                8 => 128 * (head_dim / 8 + 4),
                16 => 64 * (head_dim / 8 + 2),
                _ => 0,
            };
            close(out[q * head_dim + d], expected, 1.0, KV_PART + head_dim + rounded);
        }
    }
}

#[test]
fn attention_in_parts() {
    for (n_queries, head_dim, first, n_keys) in [
        (1, 64, 0, 1),
        (4, 128, 0, 37),
        (5, 40, 17, 37),
        (8, 128, 300, 700),
        (2, 16, 0, 512),
        (4, 32, 255, 257),
    ] {
        for bits in [8, 16, 32] {
            check_attention(n_queries, head_dim, first, n_keys, bits);
        }
    }
}

#[test]
fn softmax_rules() {
    const INF: f32 = f32::INFINITY;
    let quarter = [0.25; 4];
    let rules: [(&[f32], &[f32]); 8] = [
        (&[], &[]),
        (&[3.0], &[1.0]),
        (&[1e30; 4], &quarter),
        (&[-1e30; 4], &quarter),
        (&[0.0, -INF, 0.0], &[0.5, 0.0, 0.5]),
        (&[-INF; 2], &[f32::NAN; 2]),
        (&[0.0, INF], &[f32::NAN; 2]),
        (&[0.0, f32::NAN, 1.0], &[f32::NAN; 3]),
    ];
    for (input, expected) in rules {
        let mut x = input.to_vec();
        Kernels::scalar().softmax(&mut x);
        let same = x.iter().zip(expected).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
        assert!(same && x.len() == expected.len(), "{input:?}: {x:?}");
    }
}

#[test]
fn router_rules() {
    let nan = f32::NAN;
    let rules: [(&[f32], &[u32]); 8] = [
        (&[1.0], &[0]),
        (&[1.0, 2.0, 3.0], &[2, 1]),
        (&[3.0, 2.0, 1.0], &[0, 1, 2]),
        (&[1.0, 2.0, 2.0, 2.0], &[1, 2]),
        (&[0.0; 5], &[0, 1, 2]),
        (&[0.0, -200.0, -300.0], &[0, 1, 2]), // both round to probability 0: lower index first
        (&[nan; 3], &[0, 1, 2]),
        (&[1.0, nan, 3.0], &[0, 1]),
    ];
    for (logits, expected) in rules {
        for normalize in [false, true] {
            let (mut found, mut weights) = (vec![u32::MAX; expected.len()], vec![nan; expected.len()]);
            let mut probabilities = logits.to_vec();
            Kernels::scalar().top_k_router(&mut probabilities, normalize, &mut found, &mut weights);
            assert_eq!(found, expected, "{logits:?}");
            if logits.iter().all(|logit| !logit.is_nan()) {
                let picked = expected.iter().map(|&expert| probabilities[expert as usize]);
                let total = if normalize { picked.clone().sum::<f32>() + 1e-20 } else { 1.0 };
                assert_eq!(weights, picked.map(|p| p / total).collect::<Vec<_>>(), "{logits:?}");
            }
        }
    }
}

#[test]
fn every_whole_line_is_read() {
    let bytes: Vec<u8> = (0..128 * 5 + 17).map(|i| (i % 251) as u8).collect();
    let words = bytes[..640].as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
    assert_eq!(read(&bytes), words.fold(0, u64::wrapping_add));
    assert_eq!(read(&bytes[..127]), 0);
}

#[test]
fn eight_bit_keys_and_values_are_the_nearest() {
    for head_dim in [1, 5, 16, 33, 128] {
        let mut random = Random(head_dim as u64);
        let head = random.f32s(head_dim);
        let largest = head.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        for position in [0, 7, 250] {
            let mut parts = [(); 2].map(|()| vec![128u8; KV_PART * q8_dims(head_dim)]);
            let scales =
                [put_q8_key(&head, position, &mut parts[0]), put_q8_value(&head, position, &mut parts[1])];
            assert_eq!(scales, [largest / 127.0; 2]);
            for (d, x) in head.iter().enumerate() {
                let found = [parts[0][q8_key_at(position, d, head_dim)], parts[1][q8_value_at(position, d)]];
                let nearest = (x * (127.0 / largest)).round_ties_even() as i8 as u8 ^ 128;
                assert_eq!(found, [nearest; 2], "dimension {d} of {head_dim}");
            }
            let others = parts.iter().map(|part| part.iter().filter(|byte| **byte != 128).count());
            assert!(others.into_iter().all(|n| n <= head_dim), "nothing else is written");
        }
    }
    let mut part = [7; 16 * KV_PART];
    for (x, scale) in [(f32::NAN, f32::NAN), (f32::INFINITY, f32::NAN), (1e-31, 0.0), (0.0, 0.0)] {
        let found = [put_q8_key(&[x, 1e-31], 3, &mut part), put_q8_value(&[x, 1e-31], 3, &mut part)];
        assert!(found.iter().all(|found| found.to_bits() == scale.to_bits()), "{x}: {found:?}");
        assert_eq!(part[q8_value_at(3, 1)], 128, "{x}");
    }
}
