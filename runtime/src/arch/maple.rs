//! Maple: ternary projections, sliding layers with RoPE and full layers without, a softmax-routed
//! mixture of experts on every layer, an untied affine 4-bit head.

use samara_format::{Dtype, Index, Metadata, layout::PANEL_ROWS};

use super::Architecture;
use crate::{
    error::Error,
    flash::Bound,
    spec::{
        AttnSpec, BlockSpec, EmbedSpec, FlashSpec, HeadSpec, LayerSpec, MatrixRef, MoeSpec, NormSpec,
        QkNormSpec, RopeSpec,
    },
};

pub(super) const NAME: &str = "maple";

/// Dimensions as the metadata gives them, already sane.
struct Dims {
    vocab_size: usize,
    hidden_size: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    n_experts: usize,
    n_used: usize,
    expert_size: usize,
    max_context: usize,
    eps: f32,
}

pub(super) fn build(index: &Index) -> Result<Architecture, Error> {
    let metadata = index.metadata();
    let dims = dims(metadata)?;
    let kinds = metadata.strs("model.layer_kinds")?;
    if kinds.len() != dims.n_layers {
        return Err(invalid(
            "model.layer_kinds",
            format!("{} entries for {} layers", kinds.len(), dims.n_layers),
        ));
    }
    let find = Finder { index };
    let mut blocks = Vec::with_capacity(dims.n_layers + 2);
    blocks.push(BlockSpec::Embed(EmbedSpec {
        weight: find.matrix("embed", Dtype::Affine4, dims.vocab_size, dims.hidden_size)?,
    }));
    for (layer, kind) in kinds.iter().enumerate() {
        let sliding = match kind.as_str() {
            "sliding" => true,
            "full" => false,
            other => {
                return Err(invalid(
                    "model.layer_kinds",
                    format!("layer {layer} is `{other}`, not sliding or full"),
                ));
            }
        };
        blocks.push(BlockSpec::Layer(LayerSpec {
            index: layer,
            attn: attn(&find, &dims, layer, sliding)?,
            moe: moe(&find, &dims, layer)?,
        }));
    }
    blocks.push(BlockSpec::Head(head(&find, &dims)?));
    Ok(Architecture {
        name: NAME,
        blocks,
        vocab_size: dims.vocab_size,
        hidden_size: dims.hidden_size,
        max_context: dims.max_context,
    })
}

fn dims(metadata: &Metadata) -> Result<Dims, Error> {
    let size = |key: &'static str| size(metadata, key);
    let dims = Dims {
        vocab_size: size("model.vocab_size")?,
        hidden_size: size("model.hidden_size")?,
        n_layers: size("model.n_layers")?,
        n_heads: size("model.n_heads")?,
        n_kv_heads: size("model.n_kv_heads")?,
        head_dim: size("model.head_dim")?,
        n_experts: size("model.n_experts")?,
        n_used: size("model.n_experts_used")?,
        expert_size: size("model.expert_size")?,
        max_context: size("model.max_context")?,
        eps: positive(metadata, "model.rms_norm_eps")? as f32,
    };
    if !dims.n_heads.is_multiple_of(dims.n_kv_heads) {
        return Err(invalid(
            "model.n_kv_heads",
            format!("{} does not divide the {} query heads", dims.n_kv_heads, dims.n_heads),
        ));
    }
    if dims.n_used > dims.n_experts {
        return Err(invalid(
            "model.n_experts_used",
            format!("{} of {} experts", dims.n_used, dims.n_experts),
        ));
    }
    Ok(dims)
}

fn attn(find: &Finder<'_>, dims: &Dims, layer: usize, sliding: bool) -> Result<AttnSpec, Error> {
    let metadata = find.index.metadata();
    let name = |part: &str| format!("layers.{layer}.{part}");
    let Dims { hidden_size, n_heads, n_kv_heads, head_dim, eps, .. } = *dims;
    let rope =
        RopeSpec { theta: positive(metadata, "model.rope_theta")?, dim: size(metadata, "model.rope_dim")? };
    if rope.dim > head_dim || !rope.dim.is_multiple_of(2) {
        return Err(invalid(
            "model.rope_dim",
            format!("{} must be even and at most head_dim {head_dim}", rope.dim),
        ));
    }
    Ok(AttnSpec {
        norm: find.norm(&name("attn_norm"), hidden_size, eps)?,
        qkv: find.matrix(
            &name("qkv"),
            Dtype::Ternary2,
            (n_heads + 2 * n_kv_heads) * head_dim,
            hidden_size,
        )?,
        qk_norm: Some(QkNormSpec {
            q: find.norm(&name("q_norm"), head_dim, eps)?,
            k: find.norm(&name("k_norm"), head_dim, eps)?,
        }),
        o: find.matrix(&name("o"), Dtype::Ternary2, hidden_size, n_heads * head_dim)?,
        n_heads,
        n_kv_heads,
        head_dim,
        rope: sliding.then_some(rope),
        window: if sliding { Some(size(metadata, "model.window")?) } else { None },
    })
}

fn moe(find: &Finder<'_>, dims: &Dims, layer: usize) -> Result<MoeSpec, Error> {
    let metadata = find.index.metadata();
    let name = |part: &str| format!("layers.{layer}.{part}");
    let Dims { hidden_size, n_experts, n_used, expert_size, eps, .. } = *dims;
    let experts = name("experts");
    for (part, (what, rows, cols)) in [
        ("gate", expert_size, hidden_size),
        ("up", expert_size, hidden_size),
        ("down", hidden_size, expert_size),
    ]
    .into_iter()
    .enumerate()
    {
        find.part(&experts, part, what, n_experts, Dtype::Ternary2, rows, cols)?;
    }
    Ok(MoeSpec {
        norm: find.norm(&name("ffn_norm"), hidden_size, eps)?,
        router: find.matrix(&name("router"), Dtype::Bf16Panels, n_experts, hidden_size)?,
        experts: find.tensor(&experts)?,
        n_experts,
        n_used,
        expert_size,
        norm_topk: metadata.bool("model.norm_topk")?,
        gate_max: positive(metadata, "model.gate_max")? as f32,
        up_abs_max: positive(metadata, "model.up_abs_max")? as f32,
    })
}

fn head(find: &Finder<'_>, dims: &Dims) -> Result<HeadSpec, Error> {
    let metadata = find.index.metadata();
    let token_map = match find.index.tensor("head.token_map") {
        Some(_) => Some(find.matrix("head.token_map", Dtype::U32, 1, dims.vocab_size)?),
        None => None,
    };
    Ok(HeadSpec {
        norm: find.norm("final_norm", dims.hidden_size, dims.eps)?,
        weight: find.matrix("head", Dtype::Affine4, dims.vocab_size, dims.hidden_size)?,
        token_map,
        flash: if metadata.get("flash.n_clusters").is_some() { Some(flash(find, dims)?) } else { None },
    })
}

/// The version of the bounds that this reads.
const BOUNDS: u64 = 1;

fn flash(find: &Finder<'_>, dims: &Dims) -> Result<FlashSpec, Error> {
    let metadata = find.index.metadata();
    let n_clusters = size(metadata, "flash.n_clusters")?;
    let cluster_size = size(metadata, "flash.cluster_size")?;
    if n_clusters * cluster_size != dims.vocab_size || !cluster_size.is_multiple_of(PANEL_ROWS) {
        let found = format!(
            "{n_clusters} clusters of {cluster_size} for {} tokens: whole panels of {PANEL_ROWS} rows that hold them all are \
             needed",
            dims.vocab_size
        );
        return Err(invalid("flash.cluster_size", found));
    }
    let n_probes = size(metadata, "flash.n_probes")?;
    if n_probes > n_clusters {
        return Err(invalid("flash.n_probes", format!("{n_probes} of {n_clusters} clusters")));
    }
    let token = |&id: &u64| match u32::try_from(id) {
        Ok(token) if (token as usize) < dims.vocab_size => Ok(token),
        _ => Err(invalid("flash.force_tokens", format!("{id} is not below vocab_size {}", dims.vocab_size))),
    };
    let bounds = match metadata.get("flash.bound") {
        Some(_) if metadata.u64("flash.bound")? == BOUNDS => {
            Some(find.matrix("head.bounds", Dtype::U32, 1, Bound::WORDS * n_clusters)?)
        }
        _ => None,
    };
    Ok(FlashSpec {
        centroids: find.matrix("head.centroids", Dtype::Affine4, n_clusters, dims.hidden_size)?,
        cluster_size,
        n_probes,
        force_tokens: metadata.u64s("flash.force_tokens")?.iter().map(token).collect::<Result<_, _>>()?,
        bounds,
    })
}

/// Looks tensors up and checks them against what the metadata promised.
struct Finder<'a> {
    index: &'a Index,
}

impl Finder<'_> {
    fn tensor(&self, name: &str) -> Result<usize, Error> {
        let position = self.index.tensors().iter().position(|tensor| tensor.name == name);
        position.ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    fn matrix(&self, name: &str, dtype: Dtype, rows: usize, cols: usize) -> Result<MatrixRef, Error> {
        self.part(name, 0, "", 1, dtype, rows, cols)
    }

    fn norm(&self, name: &str, n: usize, eps: f32) -> Result<NormSpec, Error> {
        Ok(NormSpec { weight: self.matrix(name, Dtype::Bf16, 1, n)?, eps })
    }

    #[expect(clippy::too_many_arguments, reason = "one check of everything the directory says of a part")]
    fn part(
        &self,
        name: &str,
        part: usize,
        part_name: &str,
        n_blocks: usize,
        dtype: Dtype,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixRef, Error> {
        let tensor = self.tensor(name)?;
        let entry = &self.index.tensors()[tensor];
        let wanted = format!("{n_blocks} x {dtype:?} [{rows}, {cols}] {part_name}");
        let Some(spec) = entry.parts.get(part).map(|part| &part.spec) else {
            return Err(Error::TensorShape {
                name: name.to_owned(),
                found: "no such part".to_owned(),
                wanted,
            });
        };
        let same = entry.n_blocks == n_blocks as u64
            && spec.dtype == dtype
            && spec.rows == rows as u64
            && spec.cols == cols as u64
            && (part_name.is_empty() || spec.name == part_name);
        if !same {
            let found =
                format!("{} x {:?} [{}, {}] {}", entry.n_blocks, spec.dtype, spec.rows, spec.cols, spec.name);
            return Err(Error::TensorShape { name: name.to_owned(), found, wanted });
        }
        Ok(MatrixRef { tensor, part, rows, cols })
    }
}

/// A positive size below 2^31: products of two of them fit `usize`.
fn size(metadata: &Metadata, key: &'static str) -> Result<usize, Error> {
    let value = metadata.u64(key)?;
    if value == 0 || value > i32::MAX as u64 {
        return Err(invalid(key, format!("{value} is not between 1 and 2^31 - 1")));
    }
    Ok(value as usize)
}

fn positive(metadata: &Metadata, key: &'static str) -> Result<f64, Error> {
    let value = metadata.f64(key)?;
    if !value.is_finite() || value <= 0.0 {
        return Err(invalid(key, format!("{value} is not a positive number")));
    }
    Ok(value)
}

fn invalid(key: &'static str, found: String) -> Error {
    Error::InvalidMetadata { key, found }
}
