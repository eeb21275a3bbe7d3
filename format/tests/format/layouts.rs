//! The packed layouts against the formulas of SPEC.md (R22 to R24), element by element and byte by byte.

use samara_format::{Affine4Layout, Bf16PanelLayout, TernaryLayout};

use crate::sample::Noise;

/// Row counts around the panel of 4 and its double.
const ROWS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 9];

#[test]
fn ternary() {
    for rows in ROWS {
        for cols in [1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 640] {
            let layout = TernaryLayout::new(rows, cols).unwrap();
            let mut noise = Noise::new((rows * 1000 + cols) as u64);
            let (codes, scales) = (noise.bytes(rows * cols, 3), noise.halves(rows));
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&codes, &scales, &mut packed);
            check_ternary(&layout, &codes, &scales, &packed);
        }
    }
}

fn check_ternary(layout: &TernaryLayout, codes: &[u8], scales: &[u16], packed: &[u8]) {
    let (rows, cols) = (layout.rows(), layout.cols());
    let (padded_rows, padded_cols) = (rows.next_multiple_of(4), cols.next_multiple_of(128));
    let blocks = padded_cols / 128;
    assert_eq!((layout.n_panels(), layout.n_col_blocks()), (padded_rows / 4, blocks));
    assert_eq!(layout.codes_len(), padded_rows * padded_cols / 4);
    assert_eq!(layout.scales_offset(), layout.codes_len());
    assert_eq!(layout.len(), layout.codes_len() + (2 * padded_rows).next_multiple_of(128));
    // R22 in the other direction: from each byte and bit pair to its row and column.
    for (at, byte) in packed[..layout.codes_len()].iter().enumerate() {
        let (chunk, in_chunk) = (at / 128, at % 128);
        let row = chunk / blocks * 4 + in_chunk / 32;
        for j in 0..4 {
            let col = chunk % blocks * 128 + 32 * j + in_chunk % 32;
            let expected = if row < rows && col < cols { codes[row * cols + col] } else { 1 };
            assert_eq!(byte >> (2 * j) & 3, expected, "[{rows}, {cols}]: row {row}, column {col}");
        }
    }
    for (row, bytes) in packed[layout.scales_offset()..].chunks_exact(2).enumerate() {
        let expected = scales.get(row).copied().unwrap_or(0);
        assert_eq!(bytes, expected.to_le_bytes(), "[{rows}, {cols}]: scale of row {row}");
    }
    let mut back = vec![9; cols];
    for row in 0..rows {
        assert_eq!(layout.unpack_row(packed, row, &mut back), scales[row]);
        assert_eq!(back, codes[row * cols..][..cols], "[{rows}, {cols}]: row {row}");
    }
}

#[test]
fn affine4() {
    for rows in ROWS {
        for cols in [64, 128, 320, 512, 576, 2048] {
            let layout = Affine4Layout::new(rows, cols).unwrap();
            let mut noise = Noise::new((rows * 1000 + cols) as u64);
            let groups = cols / 64;
            let nibbles = noise.bytes(rows * cols, 16);
            let (scales, biases) = (noise.halves(rows * groups), noise.halves(rows * groups));
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&nibbles, &scales, &biases, &mut packed);
            check_affine4(&layout, [&scales, &biases], &nibbles, &packed);
        }
    }
}

fn check_affine4(layout: &Affine4Layout, pairs: [&[u16]; 2], nibbles: &[u8], packed: &[u8]) {
    let (rows, cols) = (layout.rows(), layout.cols());
    let groups = cols / 64;
    let header = (16 * groups).next_multiple_of(128);
    assert_eq!((layout.n_groups(), layout.panel_header_len()), (groups, header));
    assert_eq!(layout.panel_len(), header + 128 * groups);
    assert_eq!(layout.len(), layout.n_panels() * layout.panel_len());
    assert_eq!(layout.n_panels(), rows.div_ceil(4));
    for (panel, bytes) in packed.chunks_exact(layout.panel_len()).enumerate() {
        for (slot, half) in bytes[..header].chunks_exact(2).enumerate() {
            let (group, kind, row) = (slot / 8, slot % 8 / 4, panel * 4 + slot % 4);
            let expected = if row < rows && group < groups { pairs[kind][row * groups + group] } else { 0 };
            assert_eq!(
                half,
                expected.to_le_bytes(),
                "[{rows}, {cols}]: row {row}, group {group}, kind {kind}"
            );
        }
        for (at, byte) in bytes[header..].iter().enumerate() {
            let row = panel * 4 + at % 128 / 32;
            for (half, value) in [byte & 15, byte >> 4].into_iter().enumerate() {
                let col = at / 128 * 64 + 32 * half + at % 32;
                let expected = if row < rows { nibbles[row * cols + col] } else { 0 };
                assert_eq!(value, expected, "[{rows}, {cols}]: row {row}, column {col}");
            }
        }
    }
    let (mut back, mut scales, mut biases) = (vec![99; cols], vec![0; groups], vec![0; groups]);
    for row in 0..rows {
        layout.unpack_row(packed, row, &mut back, &mut scales, &mut biases);
        assert_eq!(back, nibbles[row * cols..][..cols]);
        assert_eq!(scales, pairs[0][row * groups..][..groups]);
        assert_eq!(biases, pairs[1][row * groups..][..groups]);
    }
}

#[test]
fn bf16_panels() {
    for rows in ROWS {
        for cols in [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 640] {
            let layout = Bf16PanelLayout::new(rows, cols).unwrap();
            let values = Noise::new((rows * 1000 + cols) as u64).halves(rows * cols);
            let mut packed = vec![0xee; layout.len()];
            layout.pack(&values, &mut packed);
            let blocks = cols.div_ceil(16);
            assert_eq!((layout.n_panels(), layout.n_col_blocks()), (rows.div_ceil(4), blocks));
            assert_eq!(layout.len(), rows.next_multiple_of(4) * cols.next_multiple_of(16) * 2);
            for (at, half) in packed.chunks_exact(2).enumerate() {
                let (chunk, in_chunk) = (at / 64, at % 64);
                let (row, col) = (chunk / blocks * 4 + in_chunk / 16, chunk % blocks * 16 + in_chunk % 16);
                let expected = if row < rows && col < cols { values[row * cols + col] } else { 0 };
                assert_eq!(half, expected.to_le_bytes(), "[{rows}, {cols}]: row {row}, column {col}");
            }
            let mut back = vec![9; cols];
            for row in 0..rows {
                layout.unpack_row(&packed, row, &mut back);
                assert_eq!(back, values[row * cols..][..cols]);
            }
        }
    }
}

/// Batches of rows that start at a multiple of 4, packed by themselves, are the bytes of the whole.
#[test]
fn row_batches_are_contiguous() {
    let (rows, cols) = (11, 192);
    let mut noise = Noise::new(1);
    let (nibbles, values) = (noise.bytes(rows * cols, 16), noise.halves(rows * cols));
    let (scales, biases) = (noise.halves(rows * 3), noise.halves(rows * 3));
    let affine = Affine4Layout::new(rows, cols).unwrap();
    let bf16 = Bf16PanelLayout::new(rows, cols).unwrap();
    let (mut affine_whole, mut bf16_whole) = (vec![0; affine.len()], vec![0; bf16.len()]);
    affine.pack(&nibbles, &scales, &biases, &mut affine_whole);
    bf16.pack(&values, &mut bf16_whole);
    for batch in [4, 8] {
        let (mut affine_parts, mut bf16_parts) = (vec![], vec![]);
        for from in (0..rows).step_by(batch) {
            let n = batch.min(rows - from);
            let affine = Affine4Layout::new(n, cols).unwrap();
            let mut bytes = vec![0; affine.len()];
            let (elements, groups) = (from * cols..(from + n) * cols, from * 3..(from + n) * 3);
            affine.pack(&nibbles[elements.clone()], &scales[groups.clone()], &biases[groups], &mut bytes);
            affine_parts.extend(bytes);
            let bf16 = Bf16PanelLayout::new(n, cols).unwrap();
            let mut bytes = vec![0; bf16.len()];
            bf16.pack(&values[elements], &mut bytes);
            bf16_parts.extend(bytes);
        }
        assert_eq!(affine_parts, affine_whole, "batches of {batch}");
        assert_eq!(bf16_parts, bf16_whole, "batches of {batch}");
    }
}

/// One wrong code must be noticed by the comparison used above.
#[test]
#[should_panic(expected = "row 4, column 129")]
fn a_wrong_code_is_noticed() {
    let layout = TernaryLayout::new(5, 130).unwrap();
    let (codes, scales) = (vec![2; 5 * 130], vec![0x3f80; 5]);
    let mut packed = vec![0; layout.len()];
    layout.pack(&codes, &scales, &mut packed);
    // Panel 1, column block 1, row 0 of the panel, column 1 of the block: bits 0 and 1 of byte 1.
    packed[(2 + 1) * 128 + 1] ^= 0b11;
    check_ternary(&layout, &codes, &scales, &packed);
}

#[test]
fn dimensions_without_a_layout() {
    const MAX: usize = usize::MAX;
    for (rows, cols) in [(0, 1), (1, 0), (0, 0), (MAX, MAX), (MAX, 2), (2, MAX), (1 << 32, 1 << 32)] {
        assert_eq!(TernaryLayout::new(rows, cols), None, "[{rows}, {cols}]");
        assert_eq!(Bf16PanelLayout::new(rows, cols), None, "[{rows}, {cols}]");
        assert_eq!(Affine4Layout::new(rows, cols), None, "[{rows}, {cols}]");
    }
    for cols in [1, 63, 65, 127, MAX - 62] {
        assert_eq!(Affine4Layout::new(4, cols), None, "[4, {cols}]");
    }
}

#[test]
fn wrong_arguments_panic() {
    let ternary = TernaryLayout::new(2, 3).unwrap();
    let affine = Affine4Layout::new(1, 64).unwrap();
    let bf16 = Bf16PanelLayout::new(2, 3).unwrap();
    let mut packed = vec![0; 4096];
    type Attempt<'a> = (&'a str, &'a mut dyn FnMut(&mut [u8]));
    let attempts: &mut [Attempt<'_>] = &mut [
        ("code 3", &mut |out| ternary.pack(&[0, 1, 2, 3, 0, 0], &[0; 2], &mut out[..ternary.len()])),
        ("few codes", &mut |out| ternary.pack(&[0; 5], &[0; 2], &mut out[..ternary.len()])),
        ("few scales", &mut |out| ternary.pack(&[0; 6], &[0; 1], &mut out[..ternary.len()])),
        ("long out", &mut |out| ternary.pack(&[0; 6], &[0; 2], &mut out[..ternary.len() + 1])),
        ("no such row", &mut |out| _ = ternary.unpack_row(&out[..ternary.len()], 2, &mut [0; 3])),
        ("nibble 16", &mut |out| affine.pack(&[16; 64], &[0], &[0], &mut out[..affine.len()])),
        ("few biases", &mut |out| affine.pack(&[0; 64], &[0], &[], &mut out[..affine.len()])),
        ("few values", &mut |out| bf16.pack(&[0; 5], &mut out[..bf16.len()])),
        ("short row", &mut |out| bf16.unpack_row(&out[..bf16.len()], 0, &mut [0; 2])),
    ];
    for (what, attempt) in attempts {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| attempt(&mut packed)));
        assert!(outcome.is_err(), "{what}: accepted");
    }
}
