//! One query head over the keys and values it may see.

use crate::KvSlice;
use crate::arch::generic::dot;
use crate::arch::generic::softmax::softmax;

/// `out = Σ softmax(scale * query . key) * value`, keys in order: f32 throughout.
#[inline(always)]
pub(crate) fn attention(
    query: &[f32],
    segments: &[KvSlice<'_>],
    scale: f32,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let head_dim = query.len();
    let keys = segments.iter().flat_map(|segment| segment.keys.chunks_exact(head_dim));
    for (score, key) in scores.iter_mut().zip(keys) {
        *score = dot(query, key) * scale;
    }
    softmax(scores);
    out.fill(0.0);
    let values = segments.iter().flat_map(|segment| segment.values.chunks_exact(head_dim));
    for (&score, value) in scores.iter().zip(values) {
        for (out, value) in out.iter_mut().zip(value) {
            *out += score * value;
        }
    }
}
