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
        /// Codes of [`TERNARY_PANELS`] panels are unpacked to bytes once for up to [`GEMM_TOKENS`] tokens, which they meet in tiles.
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
            let mut codes = [[Unpacked([[0; CHUNK]; 4]); RUN_BLOCKS]; TERNARY_PANELS];
            let mut lanes = [[PanelLanes([[0.0; LANES]; PANEL_ROWS]); GEMM_TOKENS]; TERNARY_PANELS];
            for (tokens, out) in tokens.chunks(GEMM_TOKENS).zip(out.chunks_mut(GEMM_TOKENS * n_rows)) {
                let acts = acts_of(acts, tokens);
                let acts = &acts[..tokens.len()];
                let mut out = Out { out, n_rows, at: 0 };
                let mut panels = panels.clone();
                while panels.len() >= TERNARY_PANELS {
                    let first = panels.start;
                    panels.start += TERNARY_PANELS;
                    pass::<TERNARY_PANELS>(rows, first, acts, &mut codes, &mut lanes, &mut out);
                    out.at += TERNARY_PANELS * PANEL_ROWS;
                }
                let codes = codes.first_chunk_mut().expect("at least one panel");
                let lanes = lanes.first_chunk_mut().expect("at least one panel");
                for p in panels {
                    pass::<1>(rows, p, acts, codes, lanes, &mut out);
                    out.at += PANEL_ROWS;
                }
            }
        }

        /// Where a gemm's results go.
        struct Out<'a> {
            /// `[tokens, n_rows]`.
            out: &'a mut [f32],
            n_rows: usize,
            /// Row of the first panel.
            at: usize,
        }

        /// `G` panels from `first` on times all of `acts`.
        #[inline]
        #[target_feature(enable = $features)]
        fn pass<const G: usize>(
            rows: &TernaryRows<'_>,
            first: usize,
            acts: &[QuantizedRow<'_>],
            codes: &mut [[Unpacked<4>; RUN_BLOCKS]; G],
            lanes: &mut [[PanelLanes; GEMM_TOKENS]; G],
            out: &mut Out<'_>,
        ) {
            // No closures: they would be calls.
            let mut panels = [rows.panel(first); G];
            let mut scales = [_mm_setzero_ps(); G];
            for g in 0..G {
                panels[g] = rows.panel(first + g);
                scales[g] = row_scales(rows.panel_scales(first + g));
            }
            let n_blocks = panels[0].len();
            for first_block in (0..n_blocks).step_by(RUN_BLOCKS) {
                let len = RUN_BLOCKS.min(n_blocks - first_block);
                let mut chunks = panels;
                for chunks in &mut chunks {
                    *chunks = &chunks[first_block..first_block + len];
                }
                let is_last = first_block + len == n_blocks;
                let mut run = Run { chunks, codes: &mut *codes, first_block, scales, is_last };
                let mut done = 0;
                while done < acts.len() {
                    let n = tile_len(acts.len() - done, TERNARY_TILE);
                    if done == 0 {
                        tile!(n, run, true; acts, done, lanes, out);
                    } else {
                        tile!(n, run, false; acts, done, lanes, out);
                    }
                    done += n;
                }
            }
        }

        /// Consecutive blocks of `G` panels.
        struct Run<'a, const G: usize> {
            chunks: [&'a [[u8; CHUNK]]; G],
            /// A byte each, once a tile has unpacked them.
            codes: &'a mut [[Unpacked<4>; RUN_BLOCKS]; G],
            first_block: usize,
            /// Of the panels' rows.
            scales: [__m128; G],
            /// Whether these blocks end the rows.
            is_last: bool,
        }

        impl<const G: usize> Run<'_, G> {
            /// Adds the products of these blocks and of `N` of `acts` from `first` on to `lanes`, or writes the dot
            /// products to `out`. With `UNPACK`, for the first tile, the blocks are unpacked on the way: beside
            /// the products that costs little.
            #[inline]
            #[target_feature(enable = $features)]
            fn tile<const N: usize, const UNPACK: bool>(
                &mut self,
                acts: &[QuantizedRow<'_>],
                first: usize,
                lanes: &mut [[PanelLanes; GEMM_TOKENS]; G],
                out: &mut Out<'_>,
            ) {
                let acts: &[QuantizedRow<'_>; N] =
                    acts[first..].first_chunk().expect("as many activations as a tile's tokens");
                let mut sums = [[[zero_lanes(); VECTORS]; N]; G];
                let (mut q, mut scales) = ([&[][..]; N], [&[][..]; N]);
                for (t, act) in acts.iter().enumerate() {
                    q[t] = &act.q_blocks()[self.first_block..][..self.chunks[0].len()];
                    scales[t] = &act.span_scales()[self.first_block / SPAN_BLOCKS..];
                    if self.first_block > 0 {
                        for g in 0..G {
                            sums[g][t] = load_panel(&lanes[g][first + t]);
                        }
                    }
                }
                let sums = self.add_spans::<N, UNPACK>(q, scales, sums);
                if !self.is_last {
                    for g in 0..G {
                        for t in 0..N {
                            store_panel(&mut lanes[g][first + t], sums[g][t]);
                        }
                    }
                    return;
                }
                let mut dots = [[_mm_setzero_ps(); N]; G];
                for g in 0..G {
                    dots[g] = trees(sums[g]);
                }
                let Out { out, n_rows, at } = out;
                for t in 0..N {
                    let out = &mut out[(first + t) * *n_rows..][..*n_rows][*at..];
                    let correction = _mm_set1_ps(acts[t].correction());
                    for (g, out) in (0..G).zip(out.chunks_mut(PANEL_ROWS)) {
                        put(_mm_mul_ps(_mm_sub_ps(dots[g][t], correction), self.scales[g]), out);
                    }
                }
            }

            /// `lanes` and Σ over spans of scale * code sum, for each of `N` tokens.
            #[inline]
            #[target_feature(enable = $features)]
            fn add_spans<const N: usize, const UNPACK: bool>(
                &mut self,
                q: [&[[i8; ACT_BLOCK]]; N],
                scales: [&[[f32; LANES]]; N],
                mut lanes: [[[Float; VECTORS]; N]; G],
            ) -> [[[Float; VECTORS]; N]; G] {
                for s in 0..self.chunks[0].len().div_ceil(SPAN_BLOCKS) {
                    let mut products = [[[zero(); VECTORS]; N]; G];
                    for b in s * SPAN_BLOCKS..self.chunks[0].len().min((s + 1) * SPAN_BLOCKS) {
                        for j in 0..4 {
                            let mut codes = [[zero(); VECTORS]; G];
                            for g in 0..G {
                                let plane = &mut self.codes[g][b].0[j];
                                for v in 0..VECTORS {
                                    codes[g][v] = if UNPACK {
                                        let codes = plane_of(j, load_codes(&self.chunks[g][b], v));
                                        store_codes(plane, v, codes);
                                        codes
                                    } else {
                                        load_codes(plane, v)
                                    };
                                }
                                if UNPACK && j == 0 {
                                    prefetch(&self.chunks[g][b]);
                                }
                            }
                            for t in 0..N {
                                let q = load_q(&q[t][b].as_chunks::<32>().0[j]);
                                for g in 0..G {
                                    for v in 0..VECTORS {
                                        products[g][t][v] = dot(products[g][t][v], codes[g][v], q);
                                    }
                                }
                            }
                        }
                    }
                    for t in 0..N {
                        let scales = load_scales(&scales[t][s]);
                        for g in 0..G {
                            for v in 0..VECTORS {
                                lanes[g][t][v] = add_product(lanes[g][t][v], scales, sums(products[g][t][v]));
                            }
                        }
                    }
                }
                lanes
            }
        }

        /// Plane `j` of codes, a byte each.
        #[inline]
        #[target_feature(enable = $features)]
        fn plane_of(j: usize, codes: Int) -> Int {
            match j {
                0 => bits::<0, 0b11>(codes),
                1 => bits::<2, 0b11>(codes),
                2 => bits::<4, 0b11>(codes),
                _ => bits::<6, 0b11>(codes),
            }
        }
    };
}
