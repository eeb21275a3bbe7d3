//! Damaged weights: each planted fault is refused by tensor, row, column and value.

use samara_converter::Options;
use serde_json::{Value, json};

use crate::checkpoint::*;

#[test]
fn the_token_map_must_be_a_permutation() {
    let check = |edit: fn(&mut [u8]), wanted: &[&str]| {
        let copy = Copy::of(TINY);
        copy.edit_tensor("lm_head_flash.token_map", edit);
        refused(&copy, wanted);
    };
    check(|bytes| bytes.copy_within(0..4, 400), &["entry 100", "is in entry 0 already"]);
    check(
        |bytes| bytes[..4].copy_from_slice(&4096_i32.to_le_bytes()),
        &["entry 0", "4096 is not a token id"],
    );
    check(
        |bytes| bytes[40..44].copy_from_slice(&(-1_i32).to_le_bytes()),
        &["entry 10", "-1 is not a token id"],
    );
}

/// Converts a damaged copy and asserts that the message holds all of `wanted`, and that nothing has the final name.
fn conversion_refused(copy: &Copy, wanted: &[&str]) {
    let message = copy.convert(&Options::default()).unwrap_err().to_string();
    for part in wanted {
        assert!(message.contains(part), "{part:?} is not in {message:?}");
    }
    assert!(!copy.out("m.samara").exists());
}

#[test]
fn one_weight_off_by_one_ulp_is_named() {
    let name = "model.layers.2.mlp.experts.9.down_proj.weight";
    let copy = Copy::of(STRESS_HF);
    let mut place = (0, 0, 0.0, 0.0);
    copy.edit_tensor(name, |bytes| {
        // The first weight of row 5 that is not zero; rows have 64 columns.
        let row = &mut bytes[5 * 128..6 * 128];
        let bits = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
        let column = row.chunks(2).position(|pair| bits(pair) & 0x7fff != 0).unwrap();
        let old = bits(&row[2 * column..]);
        row[2 * column..2 * column + 2].copy_from_slice(&(old + 1).to_le_bytes());
        let value = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        place = (5, column, value(old + 1), value(old).abs());
    });
    let (row, column, value, scale) = place;
    let at = format!("{name}, row {row}, column {column}: {value:e} is not one of -{scale:e}");
    conversion_refused(&copy, &[&at, "not ternary"]);
}

#[test]
fn damaged_weights_are_named() {
    let nan = 0x7fc0_u16.to_le_bytes();
    let bf16_nan = |tensor: &str, row: usize, column: usize, cols: usize| {
        let copy = Copy::of(STRESS_HF);
        copy.edit_tensor(tensor, |bytes| bytes[2 * (row * cols + column)..][..2].copy_from_slice(&nan));
        conversion_refused(&copy, &[&format!("{tensor}, row {row}, column {column}: NaN")]);
    };
    bf16_nan("model.layers.0.self_attn.q_proj.weight", 3, 77, 128);
    bf16_nan("lm_head.weight", 4095, 127, 128);
    bf16_nan("model.layers.1.mlp.gate.weight", 11, 5, 128);
    bf16_nan("model.norm.weight", 0, 9, 128);

    let copy = Copy::of(STRESS_MLX);
    // Expert 7, row 2, word 1 of 8: columns 16 to 31; code 3 in column 20.
    copy.edit_tensor("model.layers.3.mlp.switch_mlp.up_proj.weight", |bytes| {
        bytes[((7 * 64 + 2) * 8 + 1) * 4 + 1] |= 0b11;
    });
    conversion_refused(&copy, &["model.layers.3.mlp.switch_mlp.up_proj.weight[7], row 2, column 20: code 3"]);

    let copy = Copy::of(STRESS_MLX);
    copy.edit_tensor("model.layers.0.self_attn.o_proj.row_alpha", |bytes| bytes[2 * 6 + 1] |= 0x80);
    conversion_refused(&copy, &["model.layers.0.self_attn.o_proj", "row 6: a row scale of -"]);

    let copy = Copy::of(STRESS_MLX);
    copy.edit_tensor("lm_head.scales", |bytes| bytes[2 * 21..][..2].copy_from_slice(&nan));
    conversion_refused(&copy, &["lm_head.scales, row 10, column 1: NaN"]);
}

/// Replaces the row scales of layer 0's output projection, 128 rows of 512 columns, by scales and biases of its four
/// groups, and lets `edit` damage them.
fn with_groups(edit: impl FnOnce(&mut [u16], &mut [u16])) -> Copy {
    let copy = Copy::of(STRESS_MLX);
    let base = "model.layers.0.self_attn.o_proj";
    copy.edit_shard(SHARD_1, |tensors| {
        let at = tensors.iter().position(|(name, ..)| *name == format!("{base}.row_alpha")).unwrap();
        let (_, _, alpha) = tensors.remove(at);
        let alpha = alpha.chunks(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let mut scales: Vec<u16> = alpha.flat_map(|scale| [scale; 4]).collect();
        let mut biases: Vec<u16> = scales.iter().map(|scale| scale ^ 0x8000).collect();
        edit(&mut scales, &mut biases);
        for (suffix, values) in [("scales", scales), ("biases", biases)] {
            let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            tensors.push((format!("{base}.{suffix}"), json!({ "dtype": "BF16", "shape": [128, 4] }), bytes));
        }
    });
    let path = copy.file("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index["weight_map"].as_object_mut().unwrap().remove(&format!("{base}.row_alpha"));
    std::fs::write(&path, index.to_string()).unwrap();
    copy
}

#[test]
fn group_scales_are_accepted_when_equal_and_refused_when_not() {
    let copy = with_groups(|_, _| {});
    copy.convert(&Options::default()).unwrap();
    let plain = copy.out("plain.samara");
    convert_to(&fixture(STRESS_MLX), &plain, &Options::default()).unwrap();
    let rows = |path| ternary_rows(&open(path), "layers.0.o", 0, 0);
    assert!(rows(&copy.out("m.samara")) == rows(&plain));

    let at = "model.layers.0.self_attn.o_proj.scales, row 30, group 2";
    let copy = with_groups(|_, biases| biases[4 * 30 + 2] ^= 1);
    conversion_refused(&copy, &[at, "bias", "is not minus the scale"]);
    let copy = with_groups(|scales, biases| {
        scales[4 * 30 + 2] ^= 1;
        biases[4 * 30 + 2] ^= 1;
    });
    conversion_refused(&copy, &[at, "differs from the row's first"]);
}
