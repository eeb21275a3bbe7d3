//! Each kernel of a block alone, on the block's own weights where it has some: to name the one that is wrong, and to check what
//! running the block once does not reach.

use samara_shaders::Variant;

use super::{
    HEAD_ROWS,
    decode::{self, Affine, Attention, Drawing, ExpertBlocks, Row},
    made::{Made, Ternary},
    prefill,
    trial::{Difference, Trial},
};
use crate::{
    backend::wgpu::{
        device::{Gpu, words_of},
        layer,
        ops::Variants,
        plan,
    },
    error::Error,
    kv::KvType,
    model::Model,
    spec::{BlockSpec, EmbedSpec, HeadSpec, LayerSpec, MoeSpec},
};

/// Keys of an attention in several parts, all of which are merged at a time.
const FEW_KEYS: usize = 500;

/// The same in more parts than that.
const MANY_KEYS: usize = 700;

/// Every kernel of the block in its variant; the first that is wrong.
///
/// # Errors
/// A lost device.
pub(super) fn wrong(
    gpu: &Gpu,
    model: &Model,
    block: &BlockSpec,
    kv: KvType,
    variants: &Variants,
) -> Result<Option<(Difference, Variant)>, Error> {
    each(gpu, variants, |trial| match block {
        BlockSpec::Embed(EmbedSpec { weight }) => {
            let w = Affine::of(model.matrix(weight), weight.rows, weight.cols);
            let tokens = [0, 1, weight.rows as u32 / 2, weight.rows as u32 - 1];
            Ok(vec![decode::embed(trial, &w, &tokens, weight.rows.next_multiple_of(4))?])
        }
        BlockSpec::Layer(spec) => {
            let mut found = decode_layer(trial, model, spec, kv)?;
            let tile = [layer::TILE_PANELS, plan::TILE_TOKENS];
            found.extend(prefill::layer(trial, model, spec, kv, tile)?);
            Ok(found)
        }
        BlockSpec::Head(HeadSpec { norm, weight, token_map: _, flash: _ }) => {
            let rows = weight.rows.min(HEAD_ROWS);
            let w = Affine::of(model.matrix(weight), rows, weight.cols);
            let h = Made::new(1).values(weight.cols, 1.0);
            let row = Row { h: &h, norm: &model.vector(&norm.weight), eps: norm.eps };
            let panels = w.rows.div_ceil(4);
            Ok(vec![decode::head(trial, &w, &row, &[0], panels, super::super::head::HEAD_PANELS)?])
        }
    })
}

/// What running a layer for some tokens does not reach: many parts of an attention.
///
/// # Errors
/// A lost device.
pub(super) fn many_parts(
    gpu: &Gpu,
    spec: &LayerSpec,
    kv: KvType,
    variants: &Variants,
) -> Result<Option<(Difference, Variant)>, Error> {
    each(gpu, variants, |trial| {
        let attention = attention(spec, kv, MANY_KEYS);
        Ok(vec![decode::attention(trial, &attention, 1)?, decode::attention_merge(trial, &attention, 1)?])
    })
}

/// Drawing a token.
///
/// # Errors
/// A lost device.
pub(super) fn drawing(
    gpu: &Gpu,
    vocab_size: usize,
    variants: &Variants,
) -> Result<Option<(Difference, Variant)>, Error> {
    let logits = Made::new(1).values(vocab_size, 10.0);
    each(gpu, variants, |trial| {
        let draw = |temperature, uniform| {
            let drawing = Drawing {
                logits: &logits,
                token_map: None,
                temperature,
                top_k: 20.min(vocab_size),
                top_p: 0.95,
                min_p: 0.01,
                uniform,
            };
            decode::select_token(trial, &drawing)
        };
        Ok(vec![draw(0.0, 0.5)?, draw(1.0, 0.1)?, draw(1.0, 0.9)?])
    })
}

/// Runs `checks` in every variant that is chosen for some kernel; the first difference of a kernel in its own that is too large.
fn each(
    gpu: &Gpu,
    variants: &Variants,
    checks: impl Fn(&Trial<'_>) -> Result<Vec<Difference>, Error>,
) -> Result<Option<(Difference, Variant)>, Error> {
    let mut all: Vec<Variant> = variants.values().copied().collect();
    all.sort();
    all.dedup();
    for variant in all {
        let found = checks(&Trial { gpu, variant, fault: None })?;
        let own = |difference: &Difference| variants.get(difference.kernel) == Some(&variant);
        if let Some(wrong) = found.into_iter().find(|difference| own(difference) && !difference.is_small()) {
            return Ok(Some((wrong, variant)));
        }
    }
    Ok(None)
}

/// A layer's attention with so many keys in the cache.
fn attention(spec: &LayerSpec, kv: KvType, n_keys: usize) -> Attention {
    let attn = &spec.attn;
    let window = attn.window.unwrap_or(0);
    Attention {
        n_heads: attn.n_heads,
        n_kv_heads: attn.n_kv_heads,
        head_dim: attn.head_dim,
        normed: attn.qk_norm.is_some(),
        rope_dim: attn.rope.map_or(0, |rope| rope.dim),
        window,
        capacity: (if window == 0 { n_keys } else { window + 7 }).next_multiple_of(32),
        kv_f32: kv == KvType::F32,
        part_keys: layer::PART_KEYS,
        max_parts: plan::MAX_PARTS,
        position: n_keys - 1,
    }
}

fn decode_layer(
    trial: &Trial<'_>,
    model: &Model,
    spec: &LayerSpec,
    kv: KvType,
) -> Result<Vec<Difference>, Error> {
    let LayerSpec { index: _, attn, moe } = spec;
    let MoeSpec { norm, router, n_experts, n_used, .. } = moe;
    let mut made = Made::new(2);
    let h = made.values(attn.qkv.cols, 2.0);
    let (attn_norm, moe_norm) = (model.vector(&attn.norm.weight), model.vector(&norm.weight));
    let attn_row = Row { h: &h, norm: &attn_norm, eps: attn.norm.eps };
    let moe_row = Row { h: &h, norm: &moe_norm, eps: norm.eps };
    let matrix = |m: &crate::spec::MatrixRef| Ternary::of(model.matrix(m), m.rows, m.cols);
    let few = attention(spec, kv, FEW_KEYS);
    let n = (*n_experts).min(n_used + 1);
    let experts = experts(model, moe, n);
    let logits = made.values(n, 3.0);
    let chosen: Vec<(u32, f32)> = (0..*n_used as u32).map(|i| (i, 0.1 + i as f32 / 20.0)).collect();
    Ok(vec![
        decode::norm_gemv(trial, &matrix(&attn.qkv), &attn_row, layer::QKV_PANELS)?,
        decode::attention(trial, &few, 1)?,
        decode::attention_merge(trial, &few, 1)?,
        decode::gemv_add(trial, &matrix(&attn.o), layer::O_PANELS, 1)?,
        decode::norm_router(trial, &prefill::router_values(model, router), &moe_row)?,
        decode::experts_in(trial, &experts, &logits, layer::GATE_PANELS, 1)?,
        decode::experts_out(trial, &experts, &chosen, layer::DOWN_PANELS, 1)?,
    ])
}

/// The first `n` experts of a layer.
fn experts(model: &Model, moe: &MoeSpec, n: usize) -> ExpertBlocks {
    let tensor = &model.file().index().tensors()[moe.experts];
    let words = |bytes: u64| (bytes / 4) as usize;
    let block = words(tensor.block_stride);
    ExpertBlocks {
        words: words_of(&model.file().bytes(tensor)[..4 * n * block]),
        block,
        up_at: words(tensor.parts[1].offset),
        down_at: words(tensor.parts[2].offset),
        hidden_size: moe.router.cols,
        expert_size: moe.expert_size,
        n_used: moe.n_used,
        norm_topk: moe.norm_topk,
        gate_max: moe.gate_max,
        up_abs_max: moe.up_abs_max,
        per_split: n,
    }
}
