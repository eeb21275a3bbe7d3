//! Walking panels and tokens.

/// Panels that stay in the first-level cache while tokens pass over them: 8 KiB of ternary rows with 2048 columns, as
/// much as the int8 activations of a tile.
pub(super) const GROUP: usize = 4;

/// `gemv` and `gemm` for `$rows` with a set's `$features`, out of `panel_dots`, which is the four rows of a panel times
/// the activations of `N` tokens; `$tile` tokens at a time, then two, then one.
macro_rules! gemv_and_gemm {
    ($features:literal, $rows:ty, $tile:literal) => {
        /// As the scalar `gemv`, same bits.
        #[target_feature(enable = $features)]
        pub(crate) fn gemv(
            rows: &$rows,
            act: &$crate::QuantizedRow<'_>,
            panels: std::ops::Range<usize>,
            out: &mut [f32],
        ) {
            for (p, out) in panels.zip(out.chunks_mut($crate::PANEL_ROWS)) {
                let [dots] = panel_dots(rows, p, [*act]);
                out.copy_from_slice(&dots[..out.len()]);
            }
        }

        /// As the scalar `gemm`, same bits.
        #[target_feature(enable = $features)]
        pub(crate) fn gemm(
            rows: &$rows,
            acts: &$crate::QuantizedRows<'_>,
            tokens: &[u32],
            panels: std::ops::Range<usize>,
            n_rows: usize,
            out: &mut [f32],
        ) {
            for start in panels.clone().step_by($crate::arch::aarch64::gemm::GROUP) {
                let group = start..panels.end.min(start + $crate::arch::aarch64::gemm::GROUP);
                let at = $crate::PANEL_ROWS * (start - panels.start);
                let (tiles, rest) = tokens.as_chunks::<$tile>();
                let (pairs, last) = rest.as_chunks::<2>();
                let (out, rest) = out.split_at_mut($tile * n_rows * tiles.len());
                for (tokens, out) in tiles.iter().zip(out.chunks_exact_mut($tile * n_rows)) {
                    tile(rows, acts, tokens, group.clone(), n_rows, at, out);
                }
                let (out, rest) = rest.split_at_mut(2 * n_rows * pairs.len());
                for (tokens, out) in pairs.iter().zip(out.chunks_exact_mut(2 * n_rows)) {
                    tile(rows, acts, tokens, group.clone(), n_rows, at, out);
                }
                for (&token, out) in last.iter().zip(rest.chunks_exact_mut(n_rows)) {
                    tile(rows, acts, &[token], group.clone(), n_rows, at, out);
                }
            }
        }

        /// `out[t][at..]`: the rows of `panels` times each token; `out` f32 `[N, n_rows]`.
        #[target_feature(enable = $features)]
        fn tile<const N: usize>(
            rows: &$rows,
            acts: &$crate::QuantizedRows<'_>,
            tokens: &[u32; N],
            panels: std::ops::Range<usize>,
            n_rows: usize,
            at: usize,
            out: &mut [f32],
        ) {
            let acts = tokens.map(|token| acts.row(token as usize));
            for (i, p) in panels.enumerate() {
                let dots = panel_dots(rows, p, acts);
                for (dots, out) in dots.iter().zip(out.chunks_exact_mut(n_rows)) {
                    let out = &mut out[at + $crate::PANEL_ROWS * i..];
                    let n = out.len().min($crate::PANEL_ROWS);
                    out[..n].copy_from_slice(&dots[..n]);
                }
            }
        }
    };
}

pub(super) use gemv_and_gemm;
