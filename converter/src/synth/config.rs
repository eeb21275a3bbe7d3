//! config.json of a synthetic checkpoint, as the two published layouts write it.

use serde_json::{Value, json};

use super::{SynthLayout, SynthSpec, SynthTexts};
use crate::error::Error;
use crate::text;

/// The config for `spec`; token ids come from the tokenizer's added tokens.
pub(super) fn config(spec: &SynthSpec, texts: &SynthTexts<'_>) -> Result<Value, Error> {
    let ids =
        text::named_ids(texts.tokenizer, spec.vocab_size, &["<|endoftext|>", "<|im_end|>", "</think>"])?;
    let [end_of_text, end_of_turn, end_of_thought] = ids[..] else { unreachable!("one entry for each name") };
    let missing = |name: &str| Error::Tokenizer { reason: format!("no added token {name}") };
    let eos = end_of_turn.or(end_of_text).ok_or_else(|| missing("<|im_end|>"))?;
    let kinds = (1..=spec.n_layers)
        .map(|layer| if layer % spec.full_every == 0 { "full_attention" } else { "sliding_attention" });
    let mut config = json!({
        "architectures": ["MapleForCausalLM"],
        "bos_token_id": end_of_text,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "first_k_dense_replace": 0,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "layer_types": kinds.collect::<Vec<_>>(),
        "max_position_embeddings": spec.max_context,
        "moe_intermediate_size": spec.expert_size,
        "norm_topk_prob": true,
        "num_attention_heads": spec.n_heads,
        "num_experts": spec.n_experts,
        "num_experts_per_tok": spec.n_experts_used,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
        "num_shared_experts": 0,
        "pad_token_id": null,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 10000,
        "router_dtype": "fp32",
        "sliding_window": spec.sliding_window,
        "tie_word_embeddings": false,
        "use_bias": false,
        "use_qk_norm": true,
        "vocab_size": spec.vocab_size,
    });
    if spec.layout == SynthLayout::Mlx2Bit {
        let force_tokens = [Some(eos), end_of_thought, end_of_text].into_iter().flatten().collect();
        describe_words(spec, force_tokens, &mut config);
    }
    Ok(config)
}

/// What the 2-bit layout adds.
fn describe_words(spec: &SynthSpec, force_tokens: Vec<u64>, config: &mut Value) {
    let four_bit = json!({ "bits": 4, "group_size": 64 });
    config["model_type"] = json!("maple");
    config["quantization"] = json!({
        "bits": 2, "group_size": 128, "mode": "affine", "model.word_embeddings": four_bit, "lm_head": four_bit,
    });
    if let Some(flash) = spec.flash {
        config["flash_head"] = json!({
            "n_clusters": spec.vocab_size / flash.cluster_size, "cluster_size": flash.cluster_size,
            "n_probes": flash.n_probes, "bits": 4, "group_size": 64, "head_bits": 4, "head_group_size": 64,
            "scaled_centroids": true, "force_tokens": force_tokens,
        });
    }
}
