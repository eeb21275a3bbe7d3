//! What a segment of blocks consists of on a device: its buffers and what fills them, before anything is made.

use samara_format::Affine4Layout;

use super::{
    ahead::{RESULT_WORDS, RING},
    device::Gpu,
    inventory::{BufferId, Inventory},
    segment::{LOGIT_ROWS, STATUS_WORDS},
    weights::{Split, Uploads},
};
use crate::{
    backend::Limits,
    error::Error,
    flash::{Bound, Clusters, HeadMode},
    kv::{KvType, Ring},
    model::Model,
    spec::{AttnSpec, BlockSpec, EmbedSpec, HeadSpec, LayerSpec, MatrixRef, MoeSpec, RopeSpec},
};

/// Most tokens of a step that are computed together; more are not faster for each token.
pub(super) const MAX_TOKENS: usize = 2048;

/// Positions of a cache come in blocks.
const KV_BLOCK: usize = 32;

/// Most parts that the keys of a token are cut into.
pub(super) const MAX_PARTS: usize = 64;

/// Rows of the head to a maximum.
pub(super) const MAXIMUM_ROWS: usize = 32;

/// Everything to make and to fill.
pub(super) struct Plan {
    pub(super) list: Inventory,
    pub(super) uploads: Uploads,
    pub(super) scratch: Scratch,
    /// Tokens that the scratch holds.
    pub(super) max_tokens: usize,
    pub(super) embed: Option<EmbedPlan>,
    pub(super) layers: Vec<LayerPlan>,
    pub(super) head: Option<HeadPlan>,
    pub(super) ahead: Option<AheadPlan>,
}

/// The first block.
pub(super) struct EmbedPlan {
    pub(super) spec: EmbedSpec,
    pub(super) weight: Split,
}

/// One layer.
pub(super) struct LayerPlan {
    pub(super) spec: LayerSpec,
    pub(super) attn_norm: BufferId,
    pub(super) qkv: BufferId,
    /// q, then k.
    pub(super) qk_norm: BufferId,
    pub(super) rope: BufferId,
    pub(super) o: BufferId,
    pub(super) moe_norm: BufferId,
    pub(super) router: BufferId,
    pub(super) experts: Split,
    pub(super) expert: ExpertLayout,
    pub(super) k: BufferId,
    pub(super) v: BufferId,
    pub(super) capacity: usize,
    pub(super) kv: KvType,
}

/// Where the parts of an expert's block are, in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertLayout {
    pub(super) words: usize,
    pub(super) up_at: usize,
    pub(super) down_at: usize,
    pub(super) bytes: u64,
}

/// The last block.
pub(super) struct HeadPlan {
    pub(super) spec: HeadSpec,
    pub(super) norm: BufferId,
    pub(super) weight: Split,
    pub(super) panel_bytes: u64,
    pub(super) flash: Option<FlashPlan>,
}

/// A head that leaves rows out.
pub(super) struct FlashPlan {
    pub(super) mode: HeadMode,
    pub(super) clusters: Clusters,
    pub(super) centroids: Split,
    /// f32 `[n_clusters, 6]`; nothing where none are needed.
    pub(super) bounds: BufferId,
    /// u32 `[n_forced, 2]`: a block of 32 rows, and a bit for each of them, set where it is always computed.
    pub(super) forced: BufferId,
    /// Blocks that have such rows.
    pub(super) n_forced: usize,
    pub(super) scratch: FlashScratch,
}

/// What the kernels of such a head hand to each other, and count.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlashScratch {
    /// u32 `[n_clusters]`: what clusters are ranked by, scores or bounds, as it is ordered.
    pub(super) keys: BufferId,
    /// u32 `[n_clusters]`: the pass in which a cluster is read, or 0. Then the clusters that one pass reads, how many they are, and how many
    /// blocks of rows that are always computed it has.
    pub(super) probed: BufferId,
    /// u32: how many of the largest logits matter.
    pub(super) top: BufferId,
    /// u32: tokens, those certified at first, clusters read beyond `n_probes` (low word, high word).
    pub(super) counts: BufferId,
}

/// Words of [`FlashScratch::counts`].
pub(super) const COUNT_WORDS: usize = 4;

/// What decoding ahead takes beside.
#[derive(Clone, Copy, Debug)]
pub(super) struct AheadPlan {
    /// u32 `[vocab_size]`: the token of each row of the head; nothing where rows are in token order.
    pub(super) token_map: BufferId,
    /// Temperature, top_k, top_p, min_p.
    pub(super) draw: BufferId,
    /// f32 `[RING]`.
    pub(super) uniforms: BufferId,
    /// u32 `[RING, RESULT_WORDS]`.
    pub(super) results: BufferId,
}

/// Buffers that blocks share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scratch {
    /// `[tokens]` of (token, slot, position, a number).
    pub(super) rows: BufferId,
    /// f32 `[tokens, hidden_size]`.
    pub(super) h: BufferId,
    pub(super) status: BufferId,
    /// u32 `[LOGIT_ROWS]`: rows of `h`.
    pub(super) logit_rows: BufferId,
    /// f32 `[LOGIT_ROWS, vocab_size]`, in the order of the head's rows.
    pub(super) logits: BufferId,
    /// f32, one for 32 rows of the head.
    pub(super) maxima: BufferId,
    /// f32 `[tokens, (n_heads + 2 n_kv_heads) * head_dim]`.
    pub(super) qkv: BufferId,
    /// f32, attention's results in parts.
    pub(super) states: BufferId,
    /// A row as int8 with its scales, for the kernel that comes next.
    pub(super) q: BufferId,
    /// f32 `[tokens, n_heads * head_dim]`.
    pub(super) mixed: BufferId,
    /// f32 `[tokens, hidden_size]`.
    pub(super) normed: BufferId,
    /// int8 and scales of rows.
    pub(super) xq: BufferId,
    pub(super) xs: BufferId,
    /// f32 `[tokens, n_experts]`.
    pub(super) router: BufferId,
    /// `[tokens, n_used]` of (expert, weight).
    pub(super) chosen: BufferId,
    /// u32 `[tokens, n_used]`: which of its expert's pairs a pair is.
    pub(super) slots: BufferId,
    /// u32 `[n_experts]`: pairs of each.
    pub(super) counts: BufferId,
    pub(super) pairs: BufferId,
    pub(super) tiles: BufferId,
    /// f32 `[tokens * n_used, expert_size]`.
    pub(super) act: BufferId,
    /// f32 `[tokens * n_used, hidden_size]`.
    pub(super) y: BufferId,
}

/// The largest of what the blocks need.
#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    hidden_size: usize,
    qkv_rows: usize,
    q_len: usize,
    n_heads: usize,
    head_dim: usize,
    n_experts: usize,
    n_used: usize,
    expert_size: usize,
    vocab_size: usize,
}

impl Sizes {
    fn of(blocks: &[BlockSpec], hidden_size: usize) -> Self {
        let mut sizes = Sizes { hidden_size, ..Sizes::default() };
        for block in blocks {
            match block {
                BlockSpec::Embed(_) => {}
                BlockSpec::Layer(LayerSpec { index: _, attn, moe }) => {
                    sizes.qkv_rows = sizes.qkv_rows.max(attn.qkv.rows);
                    sizes.q_len = sizes.q_len.max(attn.o.cols);
                    sizes.n_heads = sizes.n_heads.max(attn.n_heads);
                    sizes.head_dim = sizes.head_dim.max(attn.head_dim);
                    sizes.n_experts = sizes.n_experts.max(moe.n_experts);
                    sizes.n_used = sizes.n_used.max(moe.n_used);
                    sizes.expert_size = sizes.expert_size.max(moe.expert_size);
                }
                BlockSpec::Head(head) => sizes.vocab_size = sizes.vocab_size.max(head.weight.rows),
            }
        }
        sizes
    }

    /// Tokens that are computed together: as many as buffers of `max_buffer` bytes hold.
    fn max_tokens(&self, limits: &Limits, max_buffer: u64) -> usize {
        let widest = self
            .hidden_size
            .max(self.qkv_rows)
            .max(self.n_experts)
            .max(self.n_used * self.hidden_size.max(self.expert_size.next_multiple_of(256)));
        let fit = max_buffer / (4 * widest.max(1) as u64);
        limits.max_batch.min(MAX_TOKENS).min(usize::try_from(fit).unwrap_or(usize::MAX)).max(1)
    }
}

/// Bytes of a panel of an AFFINE4 matrix.
fn panel_bytes(m: &MatrixRef) -> u64 {
    Affine4Layout::new(m.rows, m.cols).map_or(0, |layout| layout.panel_len() as u64)
}

/// Words of the int8 of a row, and of its scales.
fn row_words(cols: usize) -> (usize, usize) {
    let spans = cols.div_ceil(256);
    (spans * 64, spans * 16)
}

impl Scratch {
    fn new(list: &mut Inventory, sizes: &Sizes, n: usize) -> Self {
        let Sizes {
            hidden_size,
            qkv_rows,
            q_len,
            n_heads,
            head_dim,
            n_experts,
            n_used,
            expert_size,
            vocab_size,
        } = *sizes;
        let pairs = n * n_used;
        let (q, scales): (Vec<_>, Vec<_>) = [(n, hidden_size), (n, q_len), (pairs, expert_size)]
            .into_iter()
            .map(|(rows, cols)| (rows * row_words(cols).0, rows * row_words(cols).1))
            .unzip();
        let most = |words: &[usize]| words.iter().copied().max().unwrap_or_default();
        Scratch {
            rows: list.words("rows", 4 * n),
            h: list.words("hidden states", n * hidden_size),
            status: list.words("status", STATUS_WORDS),
            logit_rows: list.words("logit rows", LOGIT_ROWS),
            logits: list.words("logits", LOGIT_ROWS * vocab_size),
            maxima: list.words("maxima", LOGIT_ROWS * vocab_size.div_ceil(MAXIMUM_ROWS)),
            qkv: list.words("qkv", n * qkv_rows),
            states: list.words("attention in parts", MAX_PARTS * n_heads * (head_dim + 2)),
            q: list
                .words("int8 row", row_words(hidden_size.max(q_len)).0 + row_words(hidden_size.max(q_len)).1),
            mixed: list.words("attention", n * q_len),
            normed: list.words("normed", n * hidden_size),
            xq: list.words("int8 rows", most(&q)),
            xs: list.words("scales of int8 rows", most(&scales)),
            router: list.words("router logits", n * n_experts),
            chosen: list.words("experts chosen", 2 * pairs),
            slots: list.words("places among pairs", pairs),
            counts: list.words("pairs of each expert", n_experts),
            pairs: list.words("pairs", pairs),
            tiles: list.words("tiles", 4 * (1 + max_tiles(pairs, n_experts))),
            act: list.words("expert activations", pairs * expert_size),
            y: list.words("expert outputs", pairs * hidden_size),
        }
    }
}

/// Most tiles of pairs: full ones, and one of each expert that is not.
pub(super) fn max_tiles(pairs: usize, n_experts: usize) -> usize {
    pairs.div_ceil(TILE_TOKENS) + n_experts.min(pairs)
}

/// Tokens of a tile of the experts' gemms.
pub(super) const TILE_TOKENS: usize = 64;

impl Plan {
    /// Plans a segment.
    ///
    /// # Errors
    /// What the device cannot hold or do, in words: [`Error::Gpu`].
    pub(super) fn new(
        gpu: &Gpu,
        model: &Model,
        blocks: &[BlockSpec],
        limits: &Limits,
    ) -> Result<Self, Error> {
        let mut list = Inventory::default();
        let mut uploads = Uploads::default();
        let dummy = list.words("nothing", 0);
        let sizes = Sizes::of(blocks, model.architecture().hidden_size);
        let max_tokens = sizes.max_tokens(limits, gpu.max_buffer());
        let mut plan = Plan {
            scratch: Scratch::new(&mut list, &sizes, max_tokens),
            list: Inventory::default(),
            uploads: Uploads::default(),
            max_tokens,
            embed: None,
            layers: Vec::new(),
            head: None,
            ahead: None,
        };
        let mut ropes: Vec<(RopeSpec, BufferId)> = Vec::new();
        for block in blocks {
            match block {
                BlockSpec::Embed(spec) => {
                    let EmbedSpec { weight } = spec;
                    let weight = uploads.panels(&mut list, gpu, "embedding", model, weight, dummy)?;
                    plan.embed = Some(EmbedPlan { spec: spec.clone(), weight });
                }
                BlockSpec::Layer(spec) => {
                    let rope = match spec.attn.rope {
                        None => dummy,
                        Some(rope) => match ropes.iter().find(|(known, _)| *known == rope) {
                            Some((_, id)) => *id,
                            None => {
                                let id = uploads.rope(&mut list, rope, limits.context);
                                ropes.push((rope, id));
                                id
                            }
                        },
                    };
                    let mut at = Place { gpu, model, limits, list: &mut list, uploads: &mut uploads, dummy };
                    plan.layers.push(at.layer(spec, rope)?);
                }
                BlockSpec::Head(spec) => {
                    let mut at = Place { gpu, model, limits, list: &mut list, uploads: &mut uploads, dummy };
                    plan.head = Some(at.head(spec)?);
                }
            }
        }
        if plan.embed.is_some()
            && plan.layers.len() + 2 == model.architecture().blocks.len()
            && let Some(HeadPlan { spec, .. }) = &plan.head
        {
            let token_map = match &spec.token_map {
                Some(map) => uploads.words(&mut list, "token map", model.token_map(map)?),
                None => dummy,
            };
            plan.ahead = Some(AheadPlan {
                token_map,
                draw: list.words("draw", 4),
                uniforms: list.words("random numbers", RING),
                results: list.words("results", RING * RESULT_WORDS),
            });
        }
        (plan.list, plan.uploads) = (list, uploads);
        match plan.list.too_long(gpu.max_buffer()) {
            Some(reason) => Err(gpu.error(reason)),
            None => Ok(plan),
        }
    }

    /// Bytes of the buffers that the host reads.
    pub(super) fn staging_bytes(&self) -> u64 {
        4 * self.staging_words() as u64
            + if self.ahead.is_some() {
                4 * (super::ahead::UNDER_WAY * RING * RESULT_WORDS) as u64
            } else {
                0
            }
    }

    /// Words of what comes back from a step.
    pub(super) fn staging_words(&self) -> usize {
        STATUS_WORDS
            + match &self.head {
                Some(head) => LOGIT_ROWS * head.spec.weight.rows,
                None => self.max_tokens * self.hidden_size(),
            }
    }

    fn hidden_size(&self) -> usize {
        let of_layer = |layer: &LayerPlan| layer.spec.moe.router.cols;
        let layer = self.layers.first().map(of_layer);
        layer.or(self.embed.as_ref().map(|embed| embed.spec.weight.cols)).unwrap_or_default()
    }
}

/// Where a layer's buffers go.
struct Place<'a> {
    gpu: &'a Gpu,
    model: &'a Model,
    limits: &'a Limits,
    list: &'a mut Inventory,
    uploads: &'a mut Uploads,
    dummy: BufferId,
}

impl Place<'_> {
    fn head(&mut self, spec: &HeadSpec) -> Result<HeadPlan, Error> {
        let Place { gpu, model, limits, list, uploads, dummy } = self;
        let HeadSpec { norm, weight, token_map: _, flash: _ } = spec;
        let norm = uploads.vectors(list, "norm", vec![norm.weight]);
        let split = uploads.panels(list, gpu, "head", model, weight, *dummy)?;
        let clusters = Clusters::of(model, spec, limits.head)?;
        Ok(HeadPlan {
            spec: spec.clone(),
            norm,
            weight: split,
            panel_bytes: panel_bytes(weight),
            flash: clusters.map(|clusters| self.flash(clusters)).transpose()?,
        })
    }

    fn flash(&mut self, clusters: Clusters) -> Result<FlashPlan, Error> {
        let Place { gpu, model, limits, list, uploads, dummy } = self;
        let centroids = &clusters.spec.centroids;
        let n_clusters = centroids.rows;
        let mut forced: Vec<[u32; 2]> = Vec::new();
        for row in &clusters.forced {
            let (block, bit) = (row / MAXIMUM_ROWS as u32, 1 << (row % MAXIMUM_ROWS as u32));
            match forced.last_mut() {
                Some([last, bits]) if *last == block => *bits |= bit,
                _ => forced.push([block, bit]),
            }
        }
        let bounds = clusters.bounds.iter().flat_map(|bound| {
            let Bound { high, low, radius, norm, centroid_magnitude, row_magnitude } = *bound;
            [high, low, radius, norm, centroid_magnitude, row_magnitude].map(f32::to_bits)
        });
        Ok(FlashPlan {
            mode: limits.head,
            centroids: uploads.panels(list, gpu, "centroids", model, centroids, *dummy)?,
            bounds: uploads.words(list, "bounds of clusters", bounds.collect()),
            n_forced: forced.len(),
            forced: uploads.words(list, "rows always computed", forced.into_flattened()),
            scratch: FlashScratch {
                keys: list.words("keys of clusters", n_clusters.next_multiple_of(4)),
                probed: list.words("clusters read", 2 * n_clusters + 2),
                top: list.words("logits that matter", 1),
                counts: list.words("clusters counted", COUNT_WORDS),
            },
            clusters,
        })
    }

    fn layer(&mut self, spec: &LayerSpec, rope: BufferId) -> Result<LayerPlan, Error> {
        let Place { gpu, model, limits, list, uploads, dummy } = self;
        let LayerSpec { index: _, attn, moe } = spec;
        let AttnSpec { norm, qkv, qk_norm, o, n_heads: _, n_kv_heads, head_dim, rope: _, window } = attn;
        let MoeSpec { norm: moe_norm, router, experts, .. } = moe;
        let capacity = Ring::positions(*window, limits.context, limits.max_batch).next_multiple_of(KV_BLOCK);
        let positions = limits.n_slots * n_kv_heads * capacity;
        let cache = positions as u64 * limits.kv.head_bytes(*head_dim) as u64;
        let qk_norm = match qk_norm {
            Some(norms) => uploads.vectors(list, "norms of q and k", vec![norms.q.weight, norms.k.weight]),
            None => *dummy,
        };
        let tensor = &model.file().index().tensors()[*experts];
        let words = |bytes: u64| (bytes / 4) as usize;
        Ok(LayerPlan {
            attn_norm: uploads.vectors(list, "norm", vec![norm.weight]),
            qkv: uploads.matrix(list, "qkv weights", model, qkv),
            qk_norm,
            rope,
            o: uploads.matrix(list, "o weights", model, o),
            moe_norm: uploads.vectors(list, "norm", vec![moe_norm.weight]),
            router: uploads.matrix(list, "router weights", model, router),
            experts: uploads.blocks(list, gpu, model, *experts, *dummy)?,
            expert: ExpertLayout {
                words: words(tensor.block_stride),
                up_at: words(tensor.parts[1].offset),
                down_at: words(tensor.parts[2].offset),
                bytes: tensor.parts.iter().map(|part| part.len).sum(),
            },
            k: list.add("keys", cache),
            v: list.add("values", cache),
            capacity,
            kv: limits.kv,
            spec: spec.clone(),
        })
    }
}
