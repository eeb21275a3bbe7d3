//! Softmax over all experts, then the best k by a total order.

use crate::arch::generic::softmax::softmax;

/// Turns `logits` f32 `[n_experts]` into probabilities and writes the k largest, best first: their
/// `experts` u32 `[k]` and `weights` f32 `[k]`.
///
/// Of equal probabilities the lower index comes first, and NaN ranks below every number.
#[inline(always)]
pub(crate) fn top_k_router(logits: &mut [f32], normalize: bool, experts: &mut [u32], weights: &mut [f32]) {
    softmax(logits);
    let k = experts.len();
    let mut found = 0;
    for (expert, &probability) in logits.iter().enumerate() {
        let mut slot = found;
        while slot > 0 && rank(weights[slot - 1]) < rank(probability) {
            slot -= 1;
        }
        if slot == k {
            continue;
        }
        found = k.min(found + 1);
        experts.copy_within(slot..found - 1, slot + 1);
        weights.copy_within(slot..found - 1, slot + 1);
        (experts[slot], weights[slot]) = (expert as u32, probability);
    }
    if normalize {
        let sum = weights.iter().sum::<f32>() + 1e-20;
        for weight in weights {
            *weight /= sum;
        }
    }
}

#[inline(always)]
fn rank(probability: f32) -> f32 {
    if probability.is_nan() { f32::NEG_INFINITY } else { probability }
}
