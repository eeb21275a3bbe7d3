//! 4-bit affine rows times int8 activations.
//!
//! A group of 64 columns is one 128 byte chunk of four rows; its scale belongs to all lanes, so every group ends in f32.

/// The affine 4-bit kernels of a set: its `$features`, and how many tokens are a tile.
macro_rules! affine4_kernels {
    ($features:literal, $tile:literal) => {
        use std::arch::aarch64::*;

        use super::{ZERO, dot, lane_sums};
        use $crate::QuantizedRow;
        use $crate::activation::{ACT_HALF, LANES};
        use $crate::arch::aarch64::{
            Lanes, load_bf16, load_f32, load_i8, load_u8, prefetch, splat, to_array, tree,
        };
        use $crate::arch::scalar::{self, affine4::SPAN_GROUPS};
        use $crate::rows::{Affine4Rows, CHUNK, PANEL_ROWS};

        $crate::arch::aarch64::gemm::gemv_and_gemm!($features, Affine4Rows<'_>, $tile);

        /// The four rows of panel `p` times each of `acts`; groups ascending.
        #[target_feature(enable = $features)]
        fn panel_dots<const N: usize>(
            rows: &Affine4Rows<'_>,
            p: usize,
            acts: [QuantizedRow<'_>; N],
        ) -> [[f32; PANEL_ROWS]; N] {
            let (header, chunks) = rows.panel(p);
            for lines in header.chunks(CHUNK / 16) {
                prefetch(lines.as_flattened());
            }
            let mut low = [[vdupq_n_f32(0.0); PANEL_ROWS]; N];
            let mut high = low;
            let mut biases = [vdupq_n_f32(0.0); N];
            let spans = header.chunks(SPAN_GROUPS).zip(chunks.chunks(SPAN_GROUPS));
            for (s, (header, chunks)) in spans.enumerate() {
                let chunks = &chunks[..header.len()];
                let mut q: [&[[i8; ACT_HALF]]; N] = [&[]; N];
                let mut scales = [&[0.0; LANES]; N];
                for t in 0..N {
                    q[t] = &acts[t].q().as_chunks().0[s * SPAN_GROUPS..][..header.len()];
                    scales[t] = &acts[t].span_scales()[s];
                    let offsets = &acts[t].offsets()[s * SPAN_GROUPS..][..header.len()];
                    for (affine, &offset) in header.iter().zip(offsets) {
                        let bias = load_bf16(&affine.as_chunks().0[1]);
                        biases[t] = vaddq_f32(biases[t], vmulq_n_f32(bias, offset));
                    }
                }
                add_half_span::<N, 0>(header, chunks, q, scales, &mut low);
                add_half_span::<N, 1>(header, chunks, q, scales, &mut high);
            }
            let mut dots = [[0.0; PANEL_ROWS]; N];
            for t in 0..N {
                dots[t] = to_array(vaddq_f32(tree(low[t], high[t]), biases[t]));
            }
            dots
        }

        /// Adds the activations' scale times Σ group scale * nibble sum of a span to lanes `4H..4H + 4` of each row and
        /// token.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_half_span<const N: usize, const H: usize>(
            header: &[[u8; 16]],
            chunks: &[[u8; CHUNK]],
            q: [&[[i8; ACT_HALF]]; N],
            act_scales: [&[f32; LANES]; N],
            lanes: &mut [Lanes; N],
        ) {
            let mut span = [[vdupq_n_f32(0.0); PANEL_ROWS]; N];
            for (g, (affine, chunk)) in header.iter().zip(chunks).enumerate() {
                if H == 0 {
                    prefetch(chunk);
                }
                let scales = load_bf16(&affine.as_chunks().0[0]);
                let nibbles = chunk.as_chunks::<16>().0;
                for r in 0..PANEL_ROWS {
                    let nibbles = load_u8(&nibbles[2 * r + H]);
                    let low = vreinterpretq_s8_u8(vandq_u8(nibbles, vdupq_n_u8(15)));
                    let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(nibbles));
                    for (span, q) in span.iter_mut().zip(q) {
                        let q = q[g].as_chunks::<16>().0;
                        let sums = dot(dot(ZERO, low, load_i8(&q[H])), high, load_i8(&q[2 + H]));
                        let sums = vcvtq_f32_s32(lane_sums(sums));
                        span[r] = vaddq_f32(span[r], vmulq_f32(sums, splat(scales, r)));
                    }
                }
            }
            for ((lanes, span), act_scales) in lanes.iter_mut().zip(span).zip(act_scales) {
                let act_scales = load_f32(&act_scales.as_chunks().0[H]);
                for (lane, span) in lanes.iter_mut().zip(span) {
                    *lane = vaddq_f32(*lane, vmulq_f32(act_scales, span));
                }
            }
        }

        /// As the scalar `affine4::dequantize_row`, its loop compiled for this set.
        #[target_feature(enable = $features)]
        pub(crate) fn dequantize_row(rows: &Affine4Rows<'_>, row: usize, out: &mut [f32]) {
            scalar::affine4::dequantize_row(rows, row, out);
        }
    };
}

pub(super) use affine4_kernels;
