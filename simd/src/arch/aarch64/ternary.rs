//! Ternary rows times int8 activations.
//!
//! Codes are small enough to be signed bytes, even the code 3 that is not valid. A span at a time, first its lanes 0..4
//! and then 4..8: the sums of a tile and one plane of four rows fit into the registers.

use std::arch::aarch64::*;

/// Bits `2j..2j + 2` of each byte.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn plane(codes: uint8x16_t, j: usize) -> int8x16_t {
    let mask = vdupq_n_u8(3);
    vreinterpretq_s8_u8(match j {
        0 => vandq_u8(codes, mask),
        1 => vandq_u8(vshrq_n_u8::<2>(codes), mask),
        2 => vandq_u8(vshrq_n_u8::<4>(codes), mask),
        _ => vshrq_n_u8::<6>(codes),
    })
}

/// The ternary kernels of a set: its `$features`, and how many tokens are a tile.
macro_rules! ternary_kernels {
    ($features:literal, $tile:literal) => {
        use std::arch::aarch64::*;

        use super::{Sums, ZERO, dot, lane_sums};
        use $crate::QuantizedRow;
        use $crate::activation::{ACT_BLOCK, LANES, SPAN_BLOCKS};
        use $crate::arch::aarch64::ternary::plane;
        use $crate::arch::aarch64::{Lanes, load_f32, load_i8, load_u8, prefetch, to_array, tree};
        use $crate::rows::{CHUNK, PANEL_ROWS, TernaryRows, bf16};

        $crate::arch::aarch64::gemm::gemv_and_gemm!($features, TernaryRows<'_>, $tile);

        /// The four rows of panel `p` times each of `acts`; spans ascending.
        #[target_feature(enable = $features)]
        fn panel_dots<const N: usize>(
            rows: &TernaryRows<'_>,
            p: usize,
            acts: [QuantizedRow<'_>; N],
        ) -> [[f32; PANEL_ROWS]; N] {
            let mut low = [[vdupq_n_f32(0.0); PANEL_ROWS]; N];
            let mut high = low;
            for (s, chunks) in rows.panel(p).chunks(SPAN_BLOCKS).enumerate() {
                let mut q: [&[[i8; ACT_BLOCK]]; N] = [&[]; N];
                let mut scales = [&[0.0; LANES]; N];
                for t in 0..N {
                    q[t] = &acts[t].q_blocks()[s * SPAN_BLOCKS..][..chunks.len()];
                    scales[t] = &acts[t].span_scales()[s];
                }
                add_half_span::<N, 0>(chunks, q, scales, &mut low);
                add_half_span::<N, 1>(chunks, q, scales, &mut high);
            }
            let scales = rows.panel_scales(p).as_chunks().0;
            let scales = load_f32(&[bf16(scales[0]), bf16(scales[1]), bf16(scales[2]), bf16(scales[3])]);
            let mut dots = [[0.0; PANEL_ROWS]; N];
            for t in 0..N {
                let sums = vsubq_f32(tree(low[t], high[t]), vdupq_n_f32(acts[t].correction()));
                dots[t] = to_array(vmulq_f32(sums, scales));
            }
            dots
        }

        /// Adds scale * code sum of a span to lanes `4H..4H + 4` of each row and token.
        #[inline]
        #[target_feature(enable = $features)]
        fn add_half_span<const N: usize, const H: usize>(
            chunks: &[[u8; CHUNK]],
            q: [&[[i8; ACT_BLOCK]]; N],
            scales: [&[f32; LANES]; N],
            lanes: &mut [Lanes; N],
        ) {
            let mut sums: [[Sums; PANEL_ROWS]; N] = [[ZERO; PANEL_ROWS]; N];
            for (b, chunk) in chunks.iter().enumerate() {
                if H == 0 {
                    prefetch(chunk);
                }
                let codes = chunk.as_chunks::<16>().0;
                let codes = [
                    load_u8(&codes[H]),
                    load_u8(&codes[2 + H]),
                    load_u8(&codes[4 + H]),
                    load_u8(&codes[6 + H]),
                ];
                for j in 0..4 {
                    let mut planes = [vdupq_n_s8(0); PANEL_ROWS];
                    for (plane_of, &codes) in planes.iter_mut().zip(&codes) {
                        *plane_of = plane(codes, j);
                    }
                    for (sums, q) in sums.iter_mut().zip(q) {
                        let q = load_i8(&q[b].as_chunks::<16>().0[2 * j + H]);
                        for (sums, &codes) in sums.iter_mut().zip(&planes) {
                            *sums = dot(*sums, codes, q);
                        }
                    }
                }
            }
            for ((lanes, sums), scales) in lanes.iter_mut().zip(sums).zip(scales) {
                let scales = load_f32(&scales.as_chunks().0[H]);
                for (lane, sums) in lanes.iter_mut().zip(sums) {
                    let sums = vcvtq_f32_s32(lane_sums(sums));
                    *lane = vaddq_f32(*lane, vmulq_f32(scales, sums));
                }
            }
        }
    };
}

pub(super) use ternary_kernels;
