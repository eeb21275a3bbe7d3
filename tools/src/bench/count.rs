//! What a token has to read and compute, from the model's blocks alone.

use std::ops::Range;

use samara_runtime::{AttnSpec, BlockSpec, Engine, HeadSpec, KvType, LayerSpec, MatrixRef, MoeSpec};

/// Bytes of keys and values that the token at `position` reads in all layers, its own among them.
pub(super) fn kv_bytes(engine: &Engine, position: usize) -> u64 {
    let blocks = engine.model().architecture().blocks.iter().zip(engine.placements());
    blocks
        .map(|(block, placement)| match block {
            BlockSpec::Layer(LayerSpec { attn, .. }) => {
                let kv = if placement.backend == "reference" { KvType::F32 } else { engine.limits().kv };
                2 * (attn.n_kv_heads * kv.head_bytes(attn.head_dim)) as u64 * keys(attn, position)
            }
            BlockSpec::Embed(_) | BlockSpec::Head(_) => 0,
        })
        .sum()
}

/// Multiply-adds of a prefill of tokens at `positions`, with logits of the last: matrices and attention, nothing else.
pub(super) fn prefill_macs(blocks: &[BlockSpec], positions: Range<usize>) -> u64 {
    let n = positions.len();
    let size = |matrix: &MatrixRef| (matrix.rows * matrix.cols) as u64;
    let of = |block: &BlockSpec| match block {
        BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
            let MoeSpec { router, n_used, expert_size, .. } = moe;
            let experts = (3 * n_used * expert_size * router.cols) as u64;
            // A query with each key, and a weight with each value.
            let per_key = 2 * (attn.n_heads * attn.head_dim) as u64;
            let attention: u64 = positions.clone().map(|position| per_key * keys(attn, position)).sum();
            n as u64 * (size(&attn.qkv) + size(&attn.o) + size(router) + experts) + attention
        }
        BlockSpec::Head(HeadSpec { weight, .. }) => size(weight),
        BlockSpec::Embed(_) => 0,
    };
    blocks.iter().map(of).sum()
}

/// Keys that the token at `position` sees, its own among them.
fn keys(attn: &AttnSpec, position: usize) -> u64 {
    attn.window.map_or(position + 1, |window| window.min(position + 1)) as u64
}

#[cfg(test)]
mod tests {
    use samara_runtime::NormSpec;

    use super::*;

    #[test]
    fn multiply_adds_are_those_of_the_formulas() {
        let matrix = |rows, cols| MatrixRef { tensor: 0, part: 0, rows, cols };
        let norm = NormSpec { weight: matrix(1, 8), eps: 0.0 };
        let attn = AttnSpec {
            norm,
            qkv: matrix(16, 8),
            qk_norm: None,
            o: matrix(8, 8),
            n_heads: 2,
            n_kv_heads: 1,
            head_dim: 4,
            rope: None,
            window: Some(3),
        };
        let moe = MoeSpec {
            norm,
            router: matrix(5, 8),
            experts: 0,
            n_experts: 5,
            n_used: 2,
            expert_size: 4,
            norm_topk: true,
            gate_max: 1.0,
            up_abs_max: 1.0,
        };
        let layer = BlockSpec::Layer(LayerSpec { index: 0, attn, moe });
        // Four tokens see 1, 2, 3 and 3 keys.
        let of_layer = 4 * (128 + 64 + 40 + 2 * 3 * 32) + 2 * 8 * (1 + 2 + 3 + 3);
        assert_eq!(prefill_macs(std::slice::from_ref(&layer), 0..4), of_layer);
        let head = BlockSpec::Head(HeadSpec { norm, weight: matrix(100, 8), token_map: None, flash: None });
        assert_eq!(prefill_macs(&[layer, head], 0..4), of_layer + 800);
    }
}
