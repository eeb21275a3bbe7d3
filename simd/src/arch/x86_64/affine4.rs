//! 4-bit affine rows times int8 activations, for any vector width.

/// The kernels of an `affine4.rs`, compiled for `$features`. From `super` come the vectors of `ymm` or `zmm`,
/// `dot` and `sums`.
macro_rules! affine4_kernels {
    ($features:literal) => {
        use std::arch::x86_64::*;
        use std::ops::Range;

        use super::*;
        use crate::activation::{ACT_HALF, LANES, QuantizedRow, QuantizedRows};
        use crate::arch::scalar::{self, affine4::SPAN_GROUPS};
        use crate::arch::x86_64::{
            GEMM_TOKENS, PanelLanes, RUN_BLOCKS, Unpacked, acts_of, prefetch, prefetch_within, put, tile, tile_len,
        };
        use crate::rows::{Affine4Rows, CHUNK, PANEL_ROWS};

        const RUN_GROUPS: usize = 2 * RUN_BLOCKS;

        /// As the scalar `affine4::gemv`, same bits.
        #[target_feature(enable = $features)]
        pub(crate) fn gemv(
            rows: &Affine4Rows<'_>,
            act: &QuantizedRow<'_>,
            panels: Range<usize>,
            out: &mut [f32],
        ) {
            // Clusters of a head lie anywhere: what is after them would be read in vain.
            let Some(last) = panels.clone().last() else { return };
            let end = rows.panel(last).1.as_ptr_range().end.cast();
            for (p, out) in panels.zip(out.chunks_mut(PANEL_ROWS)) {
                put(panel_dots(rows, p, act, end), out);
            }
        }

        /// The four rows of panel `p` times `act`; groups ascending.
        #[inline]
        #[target_feature(enable = $features)]
        fn panel_dots(rows: &Affine4Rows<'_>, p: usize, act: &QuantizedRow<'_>, end: *const u8) -> __m128 {
            let (header, chunks) = rows.panel(p);
            for lines in header.as_flattened().as_chunks().0 {
                prefetch_within(lines, end);
            }
            let halves = act.q().as_chunks::<ACT_HALF>().0;
            let mut lanes = [zero_lanes(); VECTORS];
            let mut biases = _mm_setzero_ps();
            let spans =
                header.chunks(SPAN_GROUPS).zip(chunks.chunks(SPAN_GROUPS)).zip(halves.chunks(SPAN_GROUPS));
            let inputs = act.span_scales().iter().zip(act.offsets().chunks(SPAN_GROUPS));
            for (((header, chunks), halves), (act_scales, offsets)) in spans.zip(inputs) {
                let mut span = [zero_lanes(); VECTORS];
                for (((affine, chunk), q), &offset) in header.iter().zip(chunks).zip(halves).zip(offsets) {
                    prefetch_within(chunk, end);
                    let q = q.as_chunks::<32>().0;
                    let (low, high) = (load_q(&q[0]), load_q(&q[1]));
                    let affine = load_bf16(affine);
                    let bias = _mm256_extractf128_ps::<1>(affine);
                    biases = _mm_add_ps(biases, _mm_mul_ps(bias, _mm_set1_ps(offset)));
                    let scales = by_row(affine);
                    for (v, span) in span.iter_mut().enumerate() {
                        let nibbles = load_codes(chunk, v);
                        let products = dot(zero(), bits::<0, 15>(nibbles), low);
                        let products = dot(products, bits::<4, 15>(nibbles), high);
                        // A scale has 8 significant bits, a sum of 8 products of 4 and 7 bits at most 14.
                        *span = add_exact(*span, scales[v], sums(products));
                    }
                }
                let act_scales = load_scales(act_scales);
                for (lanes, span) in lanes.iter_mut().zip(span) {
                    *lanes = add_product(*lanes, act_scales, span);
                }
            }
            let [dots] = trees([lanes]);
            _mm_add_ps(dots, biases)
        }

        /// As the scalar `affine4::gemm`, same bits.
        ///
        /// A panel's nibbles are unpacked to bytes once for up to [`GEMM_TOKENS`] tokens, which it meets in tiles.
        #[target_feature(enable = $features)]
        pub(crate) fn gemm(
            rows: &Affine4Rows<'_>,
            acts: &QuantizedRows<'_>,
            tokens: &[u32],
            panels: Range<usize>,
            n_rows: usize,
            out: &mut [f32],
        ) {
            if let &[token] = tokens {
                return gemv(rows, &acts.row(token as usize), panels, out);
            }
            let mut groups = [Group::EMPTY; RUN_GROUPS];
            let mut partial = [Partial::EMPTY; GEMM_TOKENS];
            for (tokens, out) in tokens.chunks(GEMM_TOKENS).zip(out.chunks_mut(GEMM_TOKENS * n_rows)) {
                let acts_of = acts_of(acts, tokens);
                for p in panels.clone() {
                    let at = PANEL_ROWS * (p - panels.start);
                    let (header, chunks) = rows.panel(p);
                    let runs = header.chunks(RUN_GROUPS).zip(chunks.chunks(RUN_GROUPS));
                    for (i, (header, run)) in runs.enumerate() {
                        unpack(header, run, &mut groups);
                        let run = Run {
                            groups: &groups[..run.len()],
                            first_group: i * RUN_GROUPS,
                            is_last: i * RUN_GROUPS + run.len() == chunks.len(),
                            at,
                            n_rows,
                        };
                        let mut done = 0;
                        while done < tokens.len() {
                            let n = tile_len(tokens.len() - done, TILE);
                            let partial = &mut partial[done..done + n];
                            let out = &mut out[done * n_rows..(done + n) * n_rows];
                            let acts = &acts_of[done..];
                            tile!(n, run; acts, partial, out);
                            done += n;
                        }
                    }
                }
            }
        }

        /// One chunk, unpacked: 64 columns of four rows.
        #[derive(Clone, Copy)]
        struct Group {
            nibbles: Unpacked<2>,
            /// Each row's scale, eight times.
            scales: PanelLanes,
            biases: [f32; PANEL_ROWS],
        }

        impl Group {
            const EMPTY: Self = Self {
                nibbles: Unpacked([[0; CHUNK]; 2]),
                scales: PanelLanes([[0.0; LANES]; PANEL_ROWS]),
                biases: [0.0; PANEL_ROWS],
            };
        }

        /// A token's sums so far.
        #[derive(Clone, Copy)]
        struct Partial {
            lanes: PanelLanes,
            biases: [f32; PANEL_ROWS],
        }

        impl Partial {
            const EMPTY: Self =
                Self { lanes: PanelLanes([[0.0; LANES]; PANEL_ROWS]), biases: [0.0; PANEL_ROWS] };
        }

        /// Consecutive groups of a panel, and where its results go.
        struct Run<'a> {
            groups: &'a [Group],
            first_group: usize,
            /// Whether these groups end the rows.
            is_last: bool,
            /// The panel's first row in a row of the output.
            at: usize,
            n_rows: usize,
        }

        impl Run<'_> {
            /// Adds the products of these groups and the first `N` of `acts` to `partial`, or writes the dot
            /// products to `out`.
            #[inline]
            #[target_feature(enable = $features)]
            fn tile<const N: usize>(
                &self,
                acts: &[QuantizedRow<'_>],
                partial: &mut [Partial],
                out: &mut [f32],
            ) {
                let acts: &[QuantizedRow<'_>; N] =
                    acts.first_chunk().expect("as many activations as a tile's tokens");
                let mut lanes = [[zero_lanes(); VECTORS]; N];
                let mut biases = [_mm_setzero_ps(); N];
                let (mut q, mut scales, mut offsets) = ([&[][..]; N], [&[][..]; N], [&[][..]; N]);
                for (t, act) in acts.iter().enumerate() {
                    q[t] = &act.q().as_chunks::<ACT_HALF>().0[self.first_group..][..self.groups.len()];
                    scales[t] = &act.span_scales()[self.first_group / SPAN_GROUPS..];
                    offsets[t] = &act.offsets()[self.first_group..][..self.groups.len()];
                    if self.first_group > 0 {
                        lanes[t] = load_panel(&partial[t].lanes);
                        biases[t] = load_rows(&partial[t].biases);
                    }
                }
                for (s, groups) in self.groups.chunks(SPAN_GROUPS).enumerate() {
                    let mut span = [[zero_lanes(); VECTORS]; N];
                    for (g, group) in groups.iter().enumerate() {
                        let g = s * SPAN_GROUPS + g;
                        let row_scales = load_panel(&group.scales);
                        let row_biases = load_rows(&group.biases);
                        let [low, high] = &group.nibbles.0;
                        for t in 0..N {
                            let q = q[t][g].as_chunks::<32>().0;
                            let (q_low, q_high) = (load_q(&q[0]), load_q(&q[1]));
                            for v in 0..VECTORS {
                                let products = dot(zero(), load_codes(low, v), q_low);
                                let products = dot(products, load_codes(high, v), q_high);
                                span[t][v] = add_exact(span[t][v], row_scales[v], sums(products));
                            }
                            let offset = _mm_set1_ps(offsets[t][g]);
                            biases[t] = _mm_add_ps(biases[t], _mm_mul_ps(row_biases, offset));
                        }
                    }
                    for t in 0..N {
                        let scales = load_scales(&scales[t][s]);
                        for v in 0..VECTORS {
                            lanes[t][v] = add_product(lanes[t][v], scales, span[t][v]);
                        }
                    }
                }
                if !self.is_last {
                    for ((partial, lanes), biases) in partial.iter_mut().zip(lanes).zip(biases) {
                        store_panel(&mut partial.lanes, lanes);
                        put(biases, &mut partial.biases);
                    }
                    return;
                }
                let len = PANEL_ROWS.min(self.n_rows - self.at);
                for (t, dots) in trees(lanes).into_iter().enumerate() {
                    put(_mm_add_ps(dots, biases[t]), &mut out[t * self.n_rows + self.at..][..len]);
                }
            }
        }

        /// One byte a nibble, and f32 scales and biases.
        #[inline]
        #[target_feature(enable = $features)]
        fn unpack(header: &[[u8; 16]], chunks: &[[u8; CHUNK]], groups: &mut [Group; RUN_GROUPS]) {
            for lines in header.as_flattened().as_chunks().0 {
                prefetch(lines);
            }
            for ((affine, chunk), group) in header.iter().zip(chunks).zip(groups) {
                prefetch(chunk);
                let affine = load_bf16(affine);
                store_panel(&mut group.scales, by_row(affine));
                put(_mm256_extractf128_ps::<1>(affine), &mut group.biases);
                for (j, plane) in group.nibbles.0.iter_mut().enumerate() {
                    for (nibble, byte) in plane.iter_mut().zip(chunk) {
                        *nibble = byte >> (4 * j) & 15;
                    }
                }
            }
        }

        #[inline]
        #[target_feature(enable = $features)]
        fn load_rows(values: &[f32; PANEL_ROWS]) -> __m128 {
            // SAFETY: the reference covers the 16 bytes read; an unaligned load.
            unsafe { _mm_loadu_ps(values.as_ptr()) }
        }

        /// As the scalar `affine4::dequantize_row`, its loop compiled for these instructions.
        #[target_feature(enable = $features)]
        pub(crate) fn dequantize_row(rows: &Affine4Rows<'_>, row: usize, out: &mut [f32]) {
            scalar::affine4::dequantize_row(rows, row, out);
        }
    };
}
