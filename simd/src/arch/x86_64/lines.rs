//! Lines of the 8-bit cache times coefficients of four query heads, for any vector width.

/// For sets that multiply bytes, `dot`: the upper bytes of coefficients, then the lower ones.
macro_rules! lines_of_bytes {
    ($features:literal) => {
        use super::*;
        use crate::arch::generic::attention::PREFETCH;
        use crate::arch::generic::attention_q8::{Coefficients, Line, Sums, of_lines};
        use crate::arch::generic::prefetch;
        use crate::arch::x86_64::take_128;

        /// As the scalar `dot_lines`.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn dot_lines(lines: &[Line], coefficients: &Coefficients, first: usize, sums: &mut Sums) {
            let these = first..first + lines.len();
            let upper = of_lines(&coefficients.high, these.clone());
            let lower = of_lines(&coefficients.low, these);
            for v in 0..LINE_VECTORS {
                let (mut high, mut low) = ([zero(); 4], [zero(); 4]);
                for (i, line) in lines.iter().enumerate() {
                    prefetch(line.as_ptr(), PREFETCH);
                    let line = load_line(line, v);
                    for head in 0..4 {
                        high[head] = dot(high[head], line, splat(upper[head][i]));
                        low[head] = dot(low[head], line, splat(lower[head][i]));
                    }
                }
                for head in 0..4 {
                    store_lanes(&mut sums[head], v, add(shift_left_8(high[head]), low[head]));
                }
            }
            take_128(sums, &coefficients.totals);
        }
    };
}

/// For sets that multiply bytes only where sums stay small: in i16, of which pairs are added.
macro_rules! lines_of_words {
    ($features:literal) => {
        use super::*;
        use crate::arch::generic::attention::PREFETCH;
        use crate::arch::generic::attention_q8::{Coefficients, Line, Sums, of_lines};
        use crate::arch::generic::prefetch;
        use crate::arch::x86_64::take_128;

        /// As the scalar `dot_lines`.
        #[inline]
        #[target_feature(enable = $features)]
        pub(super) fn dot_lines(lines: &[Line], coefficients: &Coefficients, first: usize, sums: &mut Sums) {
            let words = of_lines(&coefficients.words, first..first + lines.len());
            for v in 0..LINE_VECTORS {
                let mut pairs = [[zero(); 2]; 4];
                for (i, line) in lines.iter().enumerate() {
                    prefetch(line.as_ptr(), PREFETCH);
                    let line = [load_words(line, 2 * v), load_words(line, 2 * v + 1)];
                    for head in 0..4 {
                        let four = splat_words(words[head][i]);
                        for half in 0..2 {
                            pairs[head][half] = add(pairs[head][half], multiply_pairs(line[half], four));
                        }
                    }
                }
                for head in 0..4 {
                    for half in 0..2 {
                        store_pairs(&mut sums[head], 2 * v + half, pairs[head][half]);
                    }
                }
            }
            take_128(sums, &coefficients.totals);
        }
    };
}
