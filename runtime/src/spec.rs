//! What a model is, as data: one [`BlockSpec`] for each stage a backend may be asked to run.
//!
//! An architecture module fills these in and checks every shape against the file; a backend reads
//! them and never asks which architecture they came from. A feature some model lacks is an `Option`,
//! never a name to compare. Destructure specs without `..`, so that a new field stops the build in
//! every backend that has to think about it.

/// One matrix (or vector, `rows` = 1) of the file. The architecture that made it has checked its
/// dtype and shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixRef {
    /// Index into the file's tensor directory.
    pub tensor: usize,
    /// Index of the part inside the tensor's block.
    pub part: usize,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// One stage of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockSpec {
    /// Token ids to hidden states.
    Embed(EmbedSpec),
    /// One transformer layer: hidden states to hidden states.
    Layer(LayerSpec),
    /// Hidden states to logits.
    Head(HeadSpec),
}

impl BlockSpec {
    /// A short name for messages: `embed`, `layer 7`, `head`.
    pub fn label(&self) -> String {
        match self {
            BlockSpec::Embed(_) => "embed".to_owned(),
            BlockSpec::Layer(layer) => format!("layer {}", layer.index),
            BlockSpec::Head(_) => "head".to_owned(),
        }
    }
}

/// Embedding rows, affine 4-bit, in token order.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbedSpec {
    /// `[vocab_size, hidden_size]`, AFFINE4.
    pub weight: MatrixRef,
}

/// One layer: `h += attention(norm(h)); h += moe(norm(h))`.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Position in the model, from 0; used in messages only.
    pub index: usize,
    /// The attention half.
    pub attn: AttnSpec,
    /// The feed-forward half.
    pub moe: MoeSpec,
}

/// An RMSNorm: `w * x / sqrt(mean(x^2) + eps)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    /// `[1, n]`, BF16.
    pub weight: MatrixRef,
    /// Added to the mean square.
    pub eps: f32,
}

/// Grouped-query attention over a KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct AttnSpec {
    /// Applied to the residual before the projections.
    pub norm: NormSpec,
    /// `[(n_heads + 2 * n_kv_heads) * head_dim, hidden_size]`, TERNARY2: rows of q, then k, then v.
    pub qkv: MatrixRef,
    /// Per-head RMSNorm of q and k over `head_dim`, before RoPE.
    pub qk_norm: Option<QkNormSpec>,
    /// `[hidden_size, n_heads * head_dim]`, TERNARY2.
    pub o: MatrixRef,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; query head h reads `h / (n_heads / n_kv_heads)`.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rotary position embedding; `None` leaves q and k as they are.
    pub rope: Option<RopeSpec>,
    /// Keys a query sees, itself included; `None` is all of them.
    pub window: Option<usize>,
}

/// The norms of q and k.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNormSpec {
    /// `[1, head_dim]`.
    pub q: NormSpec,
    /// `[1, head_dim]`.
    pub k: NormSpec,
}

/// Split-half rotary embedding of the first `dim` of `head_dim`: pair i is (i, i + dim/2), turned by
/// `position * theta^(-2i/dim)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// Rotated dimensions, even, at most `head_dim`.
    pub dim: usize,
}

impl RopeSpec {
    /// Radians that pair `i` turns from one position to the next.
    pub fn frequency(&self, i: usize) -> f64 {
        let RopeSpec { theta, dim } = *self;
        libm::pow(theta, -2.0 * i as f64 / dim as f64)
    }

    /// Sine and cosine of `angle`, radians, computed in f64. Not by the platform's library, nor is [`frequency`](Self::frequency):
    /// one would differ from another in a last bit, and so could what is answered.
    pub(crate) fn sin_cos(angle: f64) -> (f32, f32) {
        let (sin, cos) = libm::sincos(angle);
        (sin as f32, cos as f32)
    }
}

/// A mixture of experts with a softmax router.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    /// Applied to the residual before router and experts.
    pub norm: NormSpec,
    /// `[n_experts, hidden_size]`, BF16_PANELS; computed in f32.
    pub router: MatrixRef,
    /// Index of the tensor whose blocks are the experts, each `gate, up, down`, TERNARY2:
    /// `[expert_size, hidden_size]` twice, then `[hidden_size, expert_size]`.
    pub experts: usize,
    /// Blocks of that tensor.
    pub n_experts: usize,
    /// Experts a token runs through.
    pub n_used: usize,
    /// Rows of gate and up.
    pub expert_size: usize,
    /// Divide the chosen probabilities by their sum.
    pub norm_topk: bool,
    /// Upper bound of the gate before silu.
    pub gate_max: f32,
    /// Bound of up on both sides.
    pub up_abs_max: f32,
}

/// Final norm and output projection.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSpec {
    /// Applied to the residual.
    pub norm: NormSpec,
    /// `[vocab_size, hidden_size]`, AFFINE4.
    pub weight: MatrixRef,
    /// `[1, vocab_size]`, U32: the token of each row of `weight`; `None` when rows are in token order.
    pub token_map: Option<MatrixRef>,
    /// Clusters of rows, so that a token need not read them all.
    pub flash: Option<FlashSpec>,
}

/// FlashHead: the rows of a head in clusters, one after another, each with a centroid.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashSpec {
    /// `[n_clusters, hidden_size]`, AFFINE4: the mean direction of a cluster's rows, as long as the longest of them.
    pub centroids: MatrixRef,
    /// Rows of each cluster, whole panels of 4; all clusters together are the head's rows.
    pub cluster_size: usize,
    /// Clusters probed unless the user says otherwise, from 1 to `n_clusters`.
    pub n_probes: usize,
    /// Tokens whose logits are computed whatever cluster they are in.
    pub force_tokens: Vec<u32>,
    /// `[1, 6 * n_clusters]`, U32: the bits of what bounds the logits of each cluster; `None` in a file without.
    pub bounds: Option<MatrixRef>,
}
