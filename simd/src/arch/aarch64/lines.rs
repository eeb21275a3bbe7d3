//! Lines of the 8-bit cache times coefficients of four query heads.

/// The upper bytes of coefficients, then the lower ones, with a set's `add_dot`.
macro_rules! lines {
    ($features:literal) => {
        use std::arch::aarch64::*;

        use super::add_dot;
        use crate::arch::aarch64::load_u8;
        use crate::arch::generic::attention::PREFETCH;
        use crate::arch::generic::attention_q8::{Coefficients, Line, Sums, of_lines};
        use crate::arch::generic::prefetch;

        /// As the scalar `dot_lines`. Half a line at a time: 16 of 32 registers are sums.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn dot_lines(lines: &[Line], coefficients: &Coefficients, first: usize, sums: &mut Sums) {
            let these = first..first + lines.len();
            let upper = of_lines(&coefficients.high, these.clone());
            let lower = of_lines(&coefficients.low, these);
            let zero = vdupq_n_s32(0);
            for half in 0..2 {
                let (mut high, mut low) = ([[zero; 2]; 4], [[zero; 2]; 4]);
                for (n, line) in lines.iter().enumerate() {
                    if half == 0 {
                        prefetch(line.as_ptr(), PREFETCH);
                    }
                    let line = &line.as_chunks::<16>().0[2 * half..];
                    let line = [values(&line[0]), values(&line[1])];
                    for head in 0..4 {
                        let (h, l) = (splat(upper[head][n]), splat(lower[head][n]));
                        for i in 0..2 {
                            high[head][i] = add_dot(high[head][i], line[i], h);
                            low[head][i] = add_dot(low[head][i], line[i], l);
                        }
                    }
                }
                for head in 0..4 {
                    for i in 0..2 {
                        let lanes = vaddq_s32(vshlq_n_s32::<8>(high[head][i]), low[head][i]);
                        let to: &mut [i32; 4] = &mut sums[head].as_chunks_mut().0[2 * half + i];
                        // SAFETY: the reference covers the 16 bytes written.
                        unsafe { vst1q_s32(to.as_mut_ptr(), lanes) };
                    }
                }
            }
        }

        /// Four lanes without their 128.
        #[inline]
        #[target_feature(enable = $features)]
        fn values(bytes: &[u8; 16]) -> int8x16_t {
            vreinterpretq_s8_u8(veorq_u8(load_u8(bytes), vdupq_n_u8(128)))
        }

        /// The same four in each lane.
        #[inline]
        #[target_feature(enable = $features)]
        fn splat(four: [i8; 4]) -> int8x16_t {
            vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(four.map(|x| x as u8))))
        }
    };
}

pub(super) use lines;
