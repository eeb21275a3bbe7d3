//! The bytes the kernels are tested on are the bytes that the format's packers write.

use super::common::{Affine4, Bf16, Random, Ternary};
use samara_format::{Affine4Layout, Bf16PanelLayout, TernaryLayout};

#[test]
fn packed_rows_are_equal() {
    for rows in 1..=9 {
        for cols in [1, 15, 16, 17, 64, 127, 128, 129, 320, 640] {
            let mut random = Random((rows * cols) as u64);
            let ternary = Ternary::random(&mut random, rows, cols);
            let layout = TernaryLayout::new(rows, cols).unwrap();
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&ternary.codes, &ternary.scales, &mut packed);
            assert!(packed == ternary.part(), "TERNARY2 [{rows}, {cols}]");

            let bf16 = Bf16::random(&mut random, rows, cols);
            let layout = Bf16PanelLayout::new(rows, cols).unwrap();
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&bf16.values, &mut packed);
            assert!(packed == bf16.part(), "BF16_PANELS [{rows}, {cols}]");

            let cols = cols.next_multiple_of(64);
            let affine = Affine4::random(&mut random, rows, cols);
            let layout = Affine4Layout::new(rows, cols).unwrap();
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&affine.nibbles, &affine.scales, &affine.biases, &mut packed);
            assert!(packed == affine.part(), "AFFINE4 [{rows}, {cols}]");
        }
    }
}

#[test]
fn a_code_in_another_place_is_noticed() {
    let mut ternary = Ternary::random(&mut Random(1), 4, 128);
    let layout = TernaryLayout::new(4, 128).unwrap();
    let mut packed = vec![0; layout.len()];
    layout.pack(&ternary.codes, &ternary.scales, &mut packed);
    ternary.codes[33] = (ternary.codes[33] + 1) % 3;
    assert!(packed != ternary.part());
}
