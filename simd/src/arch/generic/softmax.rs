//! Softmax.

use crate::activation::LANES;
use crate::arch::generic::exp::exp;
use crate::arch::generic::tree;

/// `x = exp(x - max) / Σ exp(x - max)`; the sum as in a dot product. A NaN, +infinity or nothing above
/// -infinity makes every element NaN.
#[inline(always)]
pub(crate) fn softmax(x: &mut [f32]) {
    let mut max = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            max[l] = if chunk[l] > max[l] { chunk[l] } else { max[l] };
        }
    }
    let max = max.iter().chain(tail).fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
    for x in x.iter_mut() {
        *x = exp(*x - max);
    }
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] += chunk[l];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += x;
    }
    let sum = tree(lanes);
    for x in x {
        *x /= sum;
    }
}
