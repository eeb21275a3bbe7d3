//! Ternary rows times int8 activations, for any vector width.

/// The kernels of a `ternary.rs`, compiled for `$features`. From `super` come the vectors of `ymm` or `zmm`,
/// `dot` and `sums`.
macro_rules! ternary_kernels {
    ($features:literal) => {
        use std::arch::x86_64::*;
        use std::ops::Range;

        use super::*;
        use crate::activation::{ACT_BLOCK, LANES, QuantizedRow, QuantizedRows, SPAN_BLOCKS};
        use crate::arch::x86_64::{
            GEMM_TOKENS, PanelLanes, RUN_BLOCKS, Unpacked, acts_of, prefetch, put, row_scales, tile, tile_len,
        };
        use crate::rows::{CHUNK, PANEL_ROWS, TernaryRows};

        /// As the scalar `ternary::gemv`, same bits.
        #[target_feature(enable = $features)]
        pub(crate) fn gemv(
            rows: &TernaryRows<'_>,
            act: &QuantizedRow<'_>,
            panels: Range<usize>,
            out: &mut [f32],
        ) {
            let correction = _mm_set1_ps(act.correction());
            let (mut panels, mut out) = (panels, out.chunks_mut(PANEL_ROWS));
            if !panels.is_empty() {
                rows.prefetch(panels.start * PANEL_ROWS);
            }
            let mut finish = |p: usize, sums: __m128| {
                if let Some(out) = out.next() {
                    put(_mm_mul_ps(_mm_sub_ps(sums, correction), row_scales(rows.panel_scales(p))), out);
                }
            };
            while panels.len() >= TREES {
                let first = panels.start;
                panels.start += TREES;
                let mut lanes = [[zero_lanes(); VECTORS]; TREES];
                for (p, lanes) in (first..).step_by(PANELS).zip(lanes.as_chunks_mut::<PANELS>().0) {
                    *lanes = panel_lanes(std::array::from_fn(|i| rows.panel(p + i)), act);
                }
                (first..).zip(trees(lanes)).for_each(|(p, sums)| finish(p, sums));
            }
            for p in panels {
                let [sums] = trees(panel_lanes([rows.panel(p)], act));
                finish(p, sums);
            }
        }

        /// Of panels, Σ over spans of scale * code sum, by row and lane; spans ascending.
        #[inline]
        #[target_feature(enable = $features)]
        fn panel_lanes<const N: usize>(
            panels: [&[[u8; CHUNK]]; N],
            act: &QuantizedRow<'_>,
        ) -> [[Float; VECTORS]; N] {
            let mut lanes = [[zero_lanes(); VECTORS]; N];
            let q_spans = act.q_blocks().chunks(SPAN_BLOCKS);
            let whole = panels[0].len() / SPAN_BLOCKS;
            for (span, (q, scales)) in q_spans.zip(act.span_scales()).enumerate() {
                let from = span * SPAN_BLOCKS;
                if span < whole {
                    let q = q.first_chunk().expect("a whole span");
                    let chunks = panels.map(|panel| panel[from..].first_chunk().expect("a whole span"));
                    lanes = add_span::<N, SPAN_BLOCKS>(lanes, chunks, q, scales);
                } else {
                    let chunks = panels.map(|panel| panel[from..].first_chunk().expect("half a span"));
                    lanes = add_span::<N, 1>(lanes, chunks, q.first_chunk().expect("half a span"), scales);
                }
            }
            lanes
        }

        /// `lanes` and scale * code sum of one span.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_span<const N: usize, const BLOCKS: usize>(
            mut lanes: [[Float; VECTORS]; N],
            chunks: [&[[u8; CHUNK]; BLOCKS]; N],
            q: &[[i8; ACT_BLOCK]; BLOCKS],
            scales: &[f32; LANES],
        ) -> [[Float; VECTORS]; N] {
            // Even planes, and odd ones four times too large: that saves shifts.
            let (mut even, mut odd) = ([[zero(); VECTORS]; N], [[zero(); VECTORS]; N]);
            for (block, q) in q.iter().enumerate() {
                let q = q.as_chunks::<32>().0;
                let q = [load_q(&q[0]), load_q(&q[1]), load_q(&q[2]), load_q(&q[3])];
                for p in 0..N {
                    prefetch(&chunks[p][block]);
                    for v in 0..VECTORS {
                        let codes = load_codes(&chunks[p][block], v);
                        even[p][v] = dot(even[p][v], bits::<0, 0b0011>(codes), q[0]);
                        odd[p][v] = dot(odd[p][v], bits::<0, 0b1100>(codes), q[1]);
                        even[p][v] = dot(even[p][v], bits::<4, 0b0011>(codes), q[2]);
                        odd[p][v] = dot(odd[p][v], bits::<4, 0b1100>(codes), q[3]);
                    }
                }
            }
            let scales = load_scales(scales);
            for p in 0..N {
                for v in 0..VECTORS {
                    lanes[p][v] = add_product(lanes[p][v], scales, sums(add_quarter(even[p][v], odd[p][v])));
                }
            }
            lanes
        }

        /// As the scalar `ternary::gemm`, same bits.
        ///
        /// A panel's codes are unpacked to bytes once for up to [`GEMM_TOKENS`] tokens, which it meets in tiles.
        #[target_feature(enable = $features)]
        pub(crate) fn gemm(
            rows: &TernaryRows<'_>,
            acts: &QuantizedRows<'_>,
            tokens: &[u32],
            panels: Range<usize>,
            n_rows: usize,
            out: &mut [f32],
        ) {
            if let &[token] = tokens {
                return gemv(rows, &acts.row(token as usize), panels, out);
            }
            let mut codes = [Unpacked([[0; CHUNK]; 4]); RUN_BLOCKS];
            let mut lanes = [PanelLanes([[0.0; LANES]; PANEL_ROWS]); GEMM_TOKENS];
            for (tokens, out) in tokens.chunks(GEMM_TOKENS).zip(out.chunks_mut(GEMM_TOKENS * n_rows)) {
                let acts_of = acts_of(acts, tokens);
                for p in panels.clone() {
                    let at = PANEL_ROWS * (p - panels.start);
                    let panel = rows.panel(p);
                    for (i, chunks) in panel.chunks(RUN_BLOCKS).enumerate() {
                        let mut run = Run {
                            chunks,
                            codes: &mut codes[..chunks.len()],
                            first_block: i * RUN_BLOCKS,
                            scales: row_scales(rows.panel_scales(p)),
                            is_last: i * RUN_BLOCKS + chunks.len() == panel.len(),
                            at,
                            n_rows,
                        };
                        let mut done = 0;
                        while done < tokens.len() {
                            let n = tile_len(tokens.len() - done, TILE);
                            let lanes = &mut lanes[done..done + n];
                            let out = &mut out[done * n_rows..(done + n) * n_rows];
                            let acts = &acts_of[done..];
                            if done == 0 {
                                tile!(n, run, true; acts, lanes, out);
                            } else {
                                tile!(n, run, false; acts, lanes, out);
                            }
                            done += n;
                        }
                    }
                }
            }
        }

        /// Consecutive blocks of a panel, and where its results go.
        struct Run<'a> {
            chunks: &'a [[u8; CHUNK]],
            /// A byte each, once a tile has unpacked them.
            codes: &'a mut [Unpacked<4>],
            first_block: usize,
            /// Of the panel's rows.
            scales: __m128,
            /// Whether these blocks end the rows.
            is_last: bool,
            /// The panel's first row in a row of the output.
            at: usize,
            n_rows: usize,
        }

        impl Run<'_> {
            /// Adds the products of these blocks and the first `N` of `acts` to `lanes`, or writes the dot
            /// products to `out`. With `UNPACK`, for the first tile, the blocks are unpacked on the way: beside
            /// the products that costs little.
            #[inline]
            #[target_feature(enable = $features)]
            fn tile<const N: usize, const UNPACK: bool>(
                &mut self,
                acts: &[QuantizedRow<'_>],
                lanes: &mut [PanelLanes],
                out: &mut [f32],
            ) {
                let acts: &[QuantizedRow<'_>; N] =
                    acts.first_chunk().expect("as many activations as a tile's tokens");
                let mut sums = [[zero_lanes(); VECTORS]; N];
                let (mut q, mut scales) = ([&[][..]; N], [&[][..]; N]);
                for (t, act) in acts.iter().enumerate() {
                    q[t] = &act.q_blocks()[self.first_block..][..self.codes.len()];
                    scales[t] = &act.span_scales()[self.first_block / SPAN_BLOCKS..];
                    if self.first_block > 0 {
                        sums[t] = load_panel(&lanes[t]);
                    }
                }
                let sums = add_spans::<N, UNPACK>(self.chunks, self.codes, q, scales, sums);
                if !self.is_last {
                    for (lanes, sums) in lanes.iter_mut().zip(sums) {
                        store_panel(lanes, sums);
                    }
                    return;
                }
                let len = PANEL_ROWS.min(self.n_rows - self.at);
                for (t, sums) in trees(sums).into_iter().enumerate() {
                    let dots = _mm_mul_ps(_mm_sub_ps(sums, _mm_set1_ps(acts[t].correction())), self.scales);
                    put(dots, &mut out[t * self.n_rows + self.at..][..len]);
                }
            }
        }

        /// `lanes` and Σ over spans of scale * code sum, for each of `N` tokens.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_spans<const N: usize, const UNPACK: bool>(
            chunks: &[[u8; CHUNK]],
            codes: &mut [Unpacked<4>],
            q: [&[[i8; ACT_BLOCK]]; N],
            scales: [&[[f32; LANES]]; N],
            mut lanes: [[Float; VECTORS]; N],
        ) -> [[Float; VECTORS]; N] {
            for (s, (chunks, codes)) in
                chunks.chunks(SPAN_BLOCKS).zip(codes.chunks_mut(SPAN_BLOCKS)).enumerate()
            {
                let mut products = [[zero(); VECTORS]; N];
                for (b, (chunk, codes)) in chunks.iter().zip(codes).enumerate() {
                    if UNPACK {
                        unpack(chunk, codes);
                    }
                    for (j, plane) in codes.0.iter().enumerate() {
                        let mut codes = [zero(); VECTORS];
                        for v in 0..VECTORS {
                            codes[v] = load_codes(plane, v);
                        }
                        for t in 0..N {
                            let q = load_q(&q[t][s * SPAN_BLOCKS + b].as_chunks::<32>().0[j]);
                            for v in 0..VECTORS {
                                products[t][v] = dot(products[t][v], codes[v], q);
                            }
                        }
                    }
                }
                for t in 0..N {
                    let scales = load_scales(&scales[t][s]);
                    for v in 0..VECTORS {
                        lanes[t][v] = add_product(lanes[t][v], scales, sums(products[t][v]));
                    }
                }
            }
            lanes
        }

        /// One byte a code.
        #[inline]
        #[target_feature(enable = $features)]
        fn unpack(chunk: &[u8; CHUNK], codes: &mut Unpacked<4>) {
            prefetch(chunk);
            for (j, plane) in codes.0.iter_mut().enumerate() {
                for (code, byte) in plane.iter_mut().zip(chunk) {
                    *code = byte >> (2 * j) & 3;
                }
            }
        }
    };
}
