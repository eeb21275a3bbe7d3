//! Lines of the 8-bit cache.

use crate::arch::generic::attention_q8::{Coefficients, Line, Sums};

/// `sums[head][lane] = Σ (line[4 * lane + i] - 128) * word[i]` over `lines`, which meet the coefficients from `first` on.
pub(super) fn dot_lines(lines: &[Line], coefficients: &Coefficients, first: usize, sums: &mut Sums) {
    for (sums, words) in sums.iter_mut().zip(&coefficients.words) {
        *sums = [0; 16];
        for (line, words) in lines.iter().zip(&words[first..]) {
            for (sum, four) in sums.iter_mut().zip(line.as_chunks::<4>().0) {
                for (byte, word) in four.iter().zip(words) {
                    *sum += (i32::from(*byte) - 128) * i32::from(*word);
                }
            }
        }
    }
}
