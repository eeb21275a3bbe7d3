//! Maple: sliding and full attention layers by turns, every feed-forward a mixture of experts, all projections
//! ternary, embedding and head 4-bit, and optionally FlashHead data for the head.
//!
//! Two source layouts hold the same model: per-expert bf16 matrices, or stacked 2-bit words with a scale for each
//! row. Both are described here as where each output tensor's rows lie; everything numeric happens elsewhere.

use std::sync::Arc;

use safetensors::Dtype as Source;
use samara_format::{Dtype, Metadata, PartSpec, TensorSpec};
use serde_json::json;

use super::Architecture;
use super::flash::{FlashConfig, token_map};
use super::tensors::{Ledger, PACKED, kind};
use crate::clusters::N_WORDS;
use crate::config::RawConfig;
use crate::error::Error;
use crate::options::{FlashHead, Options};
use crate::recipe::{AffineSource, Clusters, Draft, Output, Recipe, Rows, TernaryRows, TernarySource};
use crate::source::{Checkpoint, TensorRef};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { names: &["MapleForCausalLM", "maple"], supported: SUPPORTED, draft };

const SUPPORTED: &str =
    "MapleForCausalLM as 2-bit MLX with stacked experts or as bfloat16 with one tensor per expert";
/// The bound on gate before SiLU and on the magnitude of up.
const CLAMP: f64 = 7.0;
/// Codes in one u32 of the 2-bit layout, and inputs in one of its groups.
const CODES: u64 = 16;
const CODE_GROUP: u64 = 128;
/// Nibbles in one u32 of the 4-bit form, and inputs in one of its groups.
const NIBBLES: u64 = 8;
const NIBBLE_GROUP: u64 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layout {
    Mlx2Bit,
    HuggingFace,
}

/// The sizes of a model, from config.json.
#[derive(Debug, Clone)]
struct Shape {
    vocab_size: u64,
    hidden_size: u64,
    n_layers: u64,
    n_heads: u64,
    n_kv_heads: u64,
    head_dim: u64,
    n_experts: u64,
    n_experts_used: u64,
    expert_size: u64,
}

fn draft(config: &RawConfig, checkpoint: &Checkpoint, options: &Options) -> Result<Draft, Error> {
    let layout = layout(config, checkpoint)?;
    refuse_unsupported(config)?;
    let shape = Shape::read(config)?;
    let mut metadata = Metadata::new();
    shape.describe(&mut metadata);
    describe_attention(config, &shape, options, &mut metadata)?;
    let flash = match options.flash_head {
        FlashHead::Auto => FlashConfig::read(config, checkpoint, shape.vocab_size)?,
        FlashHead::Build { cluster_size } => Some(FlashConfig::build(cluster_size, shape.vocab_size)?),
        FlashHead::None => None,
    };

    let mut builder = Builder { ledger: Ledger::new(checkpoint), layout, shape, outputs: Vec::new() };
    builder.model();
    let auto = options.flash_head == FlashHead::Auto;
    let flash_tensors = flash.as_ref().filter(|_| auto).and_then(|flash| builder.flash_tensors(flash));
    let ignored = builder.ledger.ignore(|name| ignored_tensor(name, auto));
    let Builder { ledger, shape, mut outputs, .. } = builder;
    ledger.close()?;
    if let Some(flash) = &flash {
        let (order, centroids) = match flash_tensors {
            Some((map, centroids)) => (token_map(map, checkpoint, shape.vocab_size)?, Some(centroids)),
            None => ((0..shape.vocab_size as u32).collect(), None),
        };
        flash.describe(&mut metadata);
        add_flash(flash, &shape, order, centroids, &mut outputs);
    }
    let mut notes = Vec::new();
    if !ignored.is_empty() {
        notes.push(format!("not needed, left out: {}", ignored.join(", ")));
    }
    notes.extend(flash_note(options.flash_head, flash.as_ref(), !ignored.is_empty()));
    let kind = match layout {
        Layout::Mlx2Bit => "2-bit MLX",
        Layout::HuggingFace => "bfloat16 Hugging Face",
    };
    Ok(Draft { kind, vocab_size: shape.vocab_size, metadata, outputs, notes })
}

/// Legacy FlashHead tensors, which nothing reads, and all of FlashHead's if the checkpoint's data are not wanted.
fn ignored_tensor(name: &str, flash_wanted: bool) -> bool {
    name == "lm_head_flash.cluster_scale"
        || name.starts_with("lm_head_flash.head.")
        || !flash_wanted && name.starts_with("lm_head_flash.")
}

/// What to say of the FlashHead data that were chosen.
fn flash_note(choice: FlashHead, flash: Option<&FlashConfig>, some_ignored: bool) -> Option<String> {
    match (choice, flash) {
        (FlashHead::Auto, Some(_)) => None,
        (FlashHead::Build { .. }, Some(flash)) => {
            let place = if some_ignored { ", in place of the checkpoint's" } else { "" };
            let FlashConfig { n_clusters, cluster_size, .. } = flash;
            Some(format!("FlashHead data are built: {n_clusters} clusters of {cluster_size} tokens{place}"))
        }
        (FlashHead::None, _) => {
            Some("FlashHead data are left out by option: the head is stored in token order".to_owned())
        }
        (_, None) => Some(
            "no FlashHead data: the head is stored in token order; the flash-head option `build` makes some"
                .to_owned(),
        ),
    }
}

/// Which of the two layouts the tensors are in.
fn layout(config: &RawConfig, checkpoint: &Checkpoint) -> Result<Layout, Error> {
    let any = |part: &str| checkpoint.tensors.keys().any(|name| name.contains(part));
    let kind = kind(config, checkpoint);
    let unsupported = |kind: String| Error::UnsupportedKind { kind, supported: SUPPORTED.to_owned() };
    match (kind.as_str(), any(".mlp.switch_mlp."), any(".mlp.experts.")) {
        ("2-bit MLX", _, false) => check_quantization(config).map(|()| Layout::Mlx2Bit),
        ("bfloat16", false, _) => Ok(Layout::HuggingFace),
        (PACKED, ..) => Err(Error::ConfigMissing { key: "quantization.bits".to_owned() }),
        (_, true, true) => Err(unsupported(format!("{kind}, stacked and per-expert,"))),
        (_, true, false) => Err(unsupported(format!("{kind}, stacked-expert,"))),
        _ => Err(unsupported(kind)),
    }
}

/// The 2-bit layout's own description must be the one form that is understood.
fn check_quantization(config: &RawConfig) -> Result<(), Error> {
    let missing = || Error::ConfigMissing { key: "quantization".to_owned() };
    let quantization = config.object("quantization")?.ok_or_else(missing)?;
    quantization.only("group_size", &json!(CODE_GROUP))?;
    quantization.only("mode", &json!("affine"))?;
    for name in ["model.word_embeddings", "lm_head"] {
        let missing = || Error::ConfigMissing { key: format!("quantization.{name}") };
        let four_bit = quantization.object(name)?.ok_or_else(missing)?;
        four_bit.only("bits", &json!(4))?;
        four_bit.only("group_size", &json!(NIBBLE_GROUP))?;
        four_bit.only("mode", &json!("affine"))?;
    }
    Ok(())
}

/// Refuses settings that would change the forward pass.
fn refuse_unsupported(config: &RawConfig) -> Result<(), Error> {
    config.only("tie_word_embeddings", &json!(false))?;
    config.only("num_shared_experts", &json!(0))?;
    config.only("first_k_dense_replace", &json!(0))?;
    for key in ["use_bias", "attention_bias", "mlp_bias", "use_qkv_bias"] {
        config.only(key, &json!(false))?;
    }
    config.only("rope_scaling", &json!(null))?;
    config.only("router_dtype", &json!("fp32"))?;
    if config.string("hidden_act")? != "silu" {
        return Err(config.refuse("hidden_act", "only \"silu\" is"));
    }
    if !config.bool("use_qk_norm")? {
        return Err(config.refuse("use_qk_norm", "only true is"));
    }
    Ok(())
}

impl Shape {
    fn read(config: &RawConfig) -> Result<Self, Error> {
        let shape = Self {
            vocab_size: config.size("vocab_size")?,
            hidden_size: config.size("hidden_size")?,
            n_layers: config.size("num_hidden_layers")?,
            n_heads: config.size("num_attention_heads")?,
            n_kv_heads: config.size("num_key_value_heads")?,
            head_dim: config.size("head_dim")?,
            n_experts: config.size("num_experts")?,
            n_experts_used: config.size("num_experts_per_tok")?,
            expert_size: config.size("moe_intermediate_size")?,
        };
        shape.check(config)?;
        Ok(shape)
    }

    /// Refuses sizes that do not go together.
    fn check(&self, config: &RawConfig) -> Result<(), Error> {
        let Self { n_heads, n_experts, .. } = *self;
        let heads = format!("a divisor of the {n_heads} heads is needed");
        let experts = format!("at most the {n_experts} experts can be");
        let rules = [
            (self.hidden_size.is_multiple_of(NIBBLE_GROUP), "hidden_size", "a multiple of 64 is needed"),
            (self.head_dim.is_multiple_of(CODES), "head_dim", "a multiple of 16 is needed"),
            (self.expert_size.is_multiple_of(CODES), "moe_intermediate_size", "a multiple of 16 is needed"),
            (n_heads.is_multiple_of(self.n_kv_heads), "num_key_value_heads", heads.as_str()),
            (self.n_experts_used <= n_experts, "num_experts_per_tok", experts.as_str()),
            (self.n_layers <= 4096, "num_hidden_layers", "at most 4096 are"),
            (self.n_layers * n_experts <= 1 << 17, "num_experts", "at most 131072 in all layers are"),
        ];
        match rules.into_iter().find(|(good, ..)| !good) {
            Some((_, key, wanted)) => Err(config.refuse(key, wanted)),
            None => Ok(()),
        }
    }

    fn q_size(&self) -> u64 {
        self.n_heads * self.head_dim
    }

    fn kv_size(&self) -> u64 {
        self.n_kv_heads * self.head_dim
    }

    fn describe(&self, metadata: &mut Metadata) {
        let Self { vocab_size, hidden_size, n_layers, n_heads, n_kv_heads, head_dim, .. } = *self;
        let Self { n_experts, n_experts_used, expert_size, .. } = *self;
        metadata.insert("general.architecture", "maple");
        metadata.insert("model.vocab_size", vocab_size);
        metadata.insert("model.hidden_size", hidden_size);
        metadata.insert("model.n_layers", n_layers);
        metadata.insert("model.n_heads", n_heads);
        metadata.insert("model.n_kv_heads", n_kv_heads);
        metadata.insert("model.head_dim", head_dim);
        metadata.insert("model.n_experts", n_experts);
        metadata.insert("model.n_experts_used", n_experts_used);
        metadata.insert("model.expert_size", expert_size);
        metadata.insert("model.gate_max", CLAMP);
        metadata.insert("model.up_abs_max", CLAMP);
    }
}

/// Norm, rotation, window, layer kinds and router normalisation.
fn describe_attention(
    config: &RawConfig,
    shape: &Shape,
    options: &Options,
    metadata: &mut Metadata,
) -> Result<(), Error> {
    let kinds = config.strings("layer_types")?;
    if kinds.len() as u64 != shape.n_layers {
        let wanted = format!("one entry for each of the {} layers is needed", shape.n_layers);
        return Err(config.refuse("layer_types", wanted));
    }
    let layer_kind = |kind: &&str| match *kind {
        "sliding_attention" => Ok("sliding".to_owned()),
        "full_attention" => Ok("full".to_owned()),
        _ => Err(config.refuse("layer_types", "only \"sliding_attention\" and \"full_attention\" are")),
    };
    let kinds = kinds.iter().map(layer_kind).collect::<Result<Vec<String>, Error>>()?;
    let max_context = config.size("max_position_embeddings")?;
    let window = match options.window {
        Some(0) => {
            return Err(config.refuse("sliding_window", "a window option of 0 hides every key; at least 1"));
        }
        Some(window) => window,
        None if kinds.iter().any(|kind| kind == "sliding") => config.size("sliding_window")?,
        None => max_context,
    };
    let rope_dim = config.positive("partial_rotary_factor")? * shape.head_dim as f64;
    if rope_dim.fract() != 0.0 || rope_dim % 2.0 != 0.0 || rope_dim > shape.head_dim as f64 {
        let wanted = format!("an even share of head_dim {} is needed", shape.head_dim);
        return Err(config.refuse("partial_rotary_factor", wanted));
    }
    metadata.insert("model.max_context", max_context);
    metadata.insert("model.rms_norm_eps", config.positive("rms_norm_eps")?);
    metadata.insert("model.rope_theta", config.positive("rope_theta")?);
    metadata.insert("model.rope_dim", rope_dim as u64);
    metadata.insert("model.window", window);
    metadata.insert("model.layer_kinds", kinds);
    metadata.insert("model.norm_topk", config.bool("norm_topk_prob")?);
    Ok(())
}

fn add_flash(
    flash: &FlashConfig,
    shape: &Shape,
    order: Arc<[u32]>,
    centroids: Option<AffineSource>,
    outputs: &mut Vec<Output>,
) {
    let head = outputs.iter_mut().find(|output| output.spec.name == "head");
    let Some(Recipe::Affine { source, order: head_order, .. }) = head.map(|head| &mut head.recipe) else {
        return;
    };
    *head_order = Some(Arc::clone(&order));
    let (head, cols, cluster_size) = (source.clone(), size(shape.hidden_size), size(flash.cluster_size));
    outputs.push(Output {
        spec: TensorSpec::single("head.token_map", Dtype::U32, 1, shape.vocab_size),
        recipe: Recipe::TokenMap { order: Arc::clone(&order) },
    });
    let clusters = Clusters { head, cols, order, cluster_size, centroids: centroids.clone() };
    outputs.push(Output {
        spec: TensorSpec::single("head.centroids", Dtype::Affine4, flash.n_clusters, shape.hidden_size),
        recipe: match centroids {
            Some(source) => Recipe::Affine { source, rows: size(flash.n_clusters), cols, order: None },
            None => Recipe::Centroids(clusters.clone()),
        },
    });
    outputs.push(Output {
        spec: TensorSpec::single("head.bounds", Dtype::U32, 1, N_WORDS as u64 * flash.n_clusters),
        recipe: Recipe::Bounds(clusters),
    });
}

fn affine(name: &str, rows: u64, cols: u64, source: AffineSource) -> Output {
    let spec = TensorSpec::single(name, Dtype::Affine4, rows, cols);
    Output { spec, recipe: Recipe::Affine { source, rows: size(rows), cols: size(cols), order: None } }
}

/// A size from config.json, capped at 2^28 when it was read.
fn size(value: u64) -> usize {
    usize::try_from(value).expect("64-bit target")
}

/// Collects output tensors while ticking off source tensors.
struct Builder<'a> {
    ledger: Ledger<'a>,
    layout: Layout,
    shape: Shape,
    outputs: Vec<Output>,
}

impl<'a> Builder<'a> {
    /// All tensors but FlashHead's, in file order. What does not fit is in the ledger afterwards.
    fn model(&mut self) {
        let Shape { vocab_size, hidden_size, n_layers, .. } = self.shape;
        if let Some(source) =
            self.affine_source("model.word_embeddings", vocab_size, hidden_size, self.layout)
        {
            self.outputs.push(affine("embed", vocab_size, hidden_size, source));
        }
        for layer in 0..n_layers {
            self.layer(layer);
        }
        self.norm("final_norm", "model.norm.weight", hidden_size);
        if let Some(source) = self.affine_source("lm_head", vocab_size, hidden_size, self.layout) {
            self.outputs.push(affine("head", vocab_size, hidden_size, source));
        }
    }

    fn layer(&mut self, layer: u64) {
        let Shape { hidden_size, head_dim, n_experts, expert_size, .. } = self.shape;
        let (q_size, kv_size) = (self.shape.q_size(), self.shape.kv_size());
        let to = |name: &str| format!("layers.{layer}.{name}");
        let from = |name: &str| format!("model.layers.{layer}.{name}");
        self.norm(&to("attn_norm"), &from("input_layernorm.weight"), hidden_size);
        let qkv = [("q", q_size), ("k", kv_size), ("v", kv_size)]
            .map(|(name, rows)| self.matrix(&from(&format!("self_attn.{name}_proj")), rows, hidden_size));
        self.ternary(to("qkv"), qkv.into_iter().collect(), q_size + 2 * kv_size, hidden_size);
        self.norm(&to("q_norm"), &from("self_attn.q_norm.weight"), head_dim);
        self.norm(&to("k_norm"), &from("self_attn.k_norm.weight"), head_dim);
        let o = self.matrix(&from("self_attn.o_proj"), hidden_size, q_size);
        self.ternary(to("o"), o.map(|o| vec![o]), hidden_size, q_size);
        self.norm(&to("ffn_norm"), &from("post_attention_layernorm.weight"), hidden_size);
        let router = from("mlp.gate.weight");
        if let Some(tensor) = self.ledger.take(&router, Source::BF16, &[n_experts, hidden_size]) {
            let values = Rows::whole(&router, tensor, size(n_experts));
            let spec = TensorSpec::single(to("router"), Dtype::Bf16Panels, n_experts, hidden_size);
            self.outputs
                .push(Output { spec, recipe: Recipe::Bf16Panels { values, cols: size(hidden_size) } });
        }
        let parts = [
            ("gate", expert_size, hidden_size),
            ("up", expert_size, hidden_size),
            ("down", hidden_size, expert_size),
        ];
        self.experts(to("experts"), &from("mlp"), parts);
    }

    fn norm(&mut self, to: &str, from: &str, len: u64) {
        if let Some(tensor) = self.ledger.take(from, Source::BF16, &[len]) {
            let spec = TensorSpec::single(to, Dtype::Bf16, 1, len);
            self.outputs.push(Output { spec, recipe: Recipe::Bf16 { values: Rows::whole(from, tensor, 1) } });
        }
    }

    fn ternary(&mut self, to: String, pieces: Option<Vec<TernaryRows>>, rows: u64, cols: u64) {
        if let Some(pieces) = pieces {
            let spec = TensorSpec::single(to, Dtype::Ternary2, rows, cols);
            self.outputs.push(Output { spec, recipe: Recipe::Ternary { blocks: vec![vec![pieces]] } });
        }
    }

    /// One output tensor with a block for each expert.
    fn experts(&mut self, to: String, from: &str, parts: [(&str, u64, u64); 3]) {
        let n_experts = size(self.shape.n_experts);
        let mut blocks = vec![Vec::with_capacity(parts.len()); n_experts];
        for (part, rows, cols) in parts {
            for (expert, matrix) in self.expert_matrices(from, part, rows, cols).into_iter().enumerate() {
                blocks[expert].push(vec![matrix]);
            }
        }
        if blocks.iter().any(|block| block.len() != parts.len()) {
            return;
        }
        let specs = parts.map(|(part, rows, cols)| PartSpec::new(part, Dtype::Ternary2, rows, cols));
        let spec = TensorSpec { name: to, n_blocks: self.shape.n_experts, parts: specs.into() };
        self.outputs.push(Output { spec, recipe: Recipe::Ternary { blocks } });
    }

    /// The matrices of all experts; fewer than `n_experts` if some are missing.
    fn expert_matrices(&mut self, from: &str, part: &str, rows: u64, cols: u64) -> Vec<TernaryRows> {
        match self.layout {
            Layout::Mlx2Bit => self.stacked_matrices(
                &format!("{from}.switch_mlp.{part}_proj"),
                Some(self.shape.n_experts),
                rows,
                cols,
            ),
            Layout::HuggingFace => (0..self.shape.n_experts)
                .filter_map(|expert| self.matrix(&format!("{from}.experts.{expert}.{part}_proj"), rows, cols))
                .collect(),
        }
    }

    /// One ternary matrix.
    fn matrix(&mut self, from: &str, rows: u64, cols: u64) -> Option<TernaryRows> {
        match self.layout {
            Layout::Mlx2Bit => self.stacked_matrices(from, None, rows, cols).pop(),
            Layout::HuggingFace => {
                let name = format!("{from}.weight");
                let tensor = self.ledger.take(&name, Source::BF16, &[rows, cols])?;
                let weights = Rows::whole(&name, tensor, size(rows));
                Some(TernaryRows {
                    source: TernarySource::Bf16 { weights },
                    rows: size(rows),
                    cols: size(cols),
                })
            }
        }
    }

    /// The matrices of a 2-bit tensor: `n` stacked ones, or a single one without the leading dimension.
    fn stacked_matrices(&mut self, from: &str, n: Option<u64>, rows: u64, cols: u64) -> Vec<TernaryRows> {
        let has = |suffix: &str| self.ledger.has(&format!("{from}.{suffix}"));
        let grouped = cols.is_multiple_of(CODE_GROUP) && has("scales") && !has("row_alpha");
        let parts: &[(&str, Source, Option<u64>)] = if grouped {
            let groups = Some(cols / CODE_GROUP);
            &[
                ("weight", Source::U32, Some(cols / CODES)),
                ("scales", Source::BF16, groups),
                ("biases", Source::BF16, groups),
            ]
        } else {
            &[("weight", Source::U32, Some(cols / CODES)), ("row_alpha", Source::BF16, None)]
        };
        let mut found = Vec::with_capacity(parts.len());
        for &(suffix, dtype, last) in parts {
            let name = format!("{from}.{suffix}");
            let shape: Vec<u64> = n.into_iter().chain([rows]).chain(last).collect();
            found.extend(self.ledger.take(&name, dtype, &shape).map(|tensor| (name, tensor)));
        }
        let matrix = |index: usize| {
            let mut part = found.iter().map(|(name, tensor)| match n {
                Some(n) => Rows::stacked(name, tensor, size(n), index, size(rows)),
                None => Rows::whole(name, tensor, size(rows)),
            });
            let (codes, scales) = (part.next()?, part.next()?);
            let source = match (grouped, part.next()) {
                (false, _) => TernarySource::Words { codes, scales },
                (true, Some(biases)) => TernarySource::Groups { codes, scales, biases },
                (true, None) => return None,
            };
            Some(TernaryRows { source, rows: size(rows), cols: size(cols) })
        };
        (0..n.map_or(1, size)).filter_map(matrix).collect()
    }

    /// A 4-bit matrix in MLX form, or a bf16 one.
    fn affine_source(&mut self, from: &str, rows: u64, cols: u64, layout: Layout) -> Option<AffineSource> {
        let mut take = |suffix: &str, dtype: Source, cols: u64| {
            let name = format!("{from}.{suffix}");
            self.ledger.take(&name, dtype, &[rows, cols]).map(|tensor| Rows::whole(&name, tensor, size(rows)))
        };
        if layout == Layout::HuggingFace {
            return take("weight", Source::BF16, cols).map(|weights| AffineSource::Bf16 { weights });
        }
        let nibbles = take("weight", Source::U32, cols / NIBBLES);
        let scales = take("scales", Source::BF16, cols / NIBBLE_GROUP);
        let biases = take("biases", Source::BF16, cols / NIBBLE_GROUP);
        Some(AffineSource::Words { nibbles: nibbles?, scales: scales?, biases: biases? })
    }

    /// Token map and centroids.
    fn flash_tensors(&mut self, flash: &FlashConfig) -> Option<(&'a TensorRef, AffineSource)> {
        let shape = [flash.n_clusters, flash.cluster_size];
        let map = self.ledger.take("lm_head_flash.token_map", Source::I32, &shape);
        let hidden_size = self.shape.hidden_size;
        let centroids =
            self.affine_source("lm_head_flash.centroids", flash.n_clusters, hidden_size, Layout::Mlx2Bit);
        Some((map?, centroids?))
    }
}
