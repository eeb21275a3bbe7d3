//! config.json, tokenizer and template: nothing that decides what the model computes is assumed.

use samara_converter::{Error, Options, plan};
use serde_json::{Value, json};

use crate::checkpoint::*;

#[test]
fn config_keys_are_required_or_refused_by_name_and_value() {
    let remove = |key: &'static str| {
        let copy = Copy::of(TINY);
        copy.edit_config(|config| drop(config.remove(key)));
        refused(&copy, &[&format!("no {key:?}")]);
    };
    for key in [
        "layer_types",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "sliding_window",
        "partial_rotary_factor",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "rms_norm_eps",
        "rope_theta",
        "use_qk_norm",
        "hidden_act",
        "max_position_embeddings",
        "flash_head",
    ] {
        remove(key);
    }
    let set = |key: &'static str, value: Value| {
        let copy = Copy::of(TINY);
        copy.edit_config(|config| drop(config.insert(key.to_owned(), value.clone())));
        refused(&copy, &[key, &value.to_string()]);
    };
    set("tie_word_embeddings", json!(true));
    set("num_shared_experts", json!(1));
    set("first_k_dense_replace", json!(2));
    set("use_bias", json!(true));
    set("attention_bias", json!(true));
    set("hidden_act", json!("gelu"));
    set("rope_scaling", json!({ "type": "yarn" }));
    set("router_dtype", json!("bf16"));
    set("use_qk_norm", json!(false));
    set("norm_topk_prob", json!(1));
    set("layer_types", json!(["sliding_attention"]));
    set("layer_types", json!(vec!["chunked_attention"; 8]));
    set("moe_intermediate_size", json!([128, 128, 64]));
    set("partial_rotary_factor", json!(0.3));
    set("partial_rotary_factor", json!(1.5));
    set("num_key_value_heads", json!(3));
    set("num_experts_per_tok", json!(33));
    set("num_experts", json!(1 << 28));
    set("num_hidden_layers", json!(1 << 28));
    set("eos_token_id", json!(4096));
    set("eos_token_id", json!("<|im_end|>"));
}

#[test]
fn uniform_arrays_stand_for_their_value() {
    let copy = Copy::of(TINY);
    copy.edit_config(|config| {
        config.insert("moe_intermediate_size".to_owned(), json!(vec![128; 8]));
        config.insert("num_experts".to_owned(), json!([32, 32]));
        config.insert("eos_token_id".to_owned(), json!([3992, 3990]));
    });
    plan(&copy.model(), &Options::default()).unwrap();
}

#[test]
fn shapes_that_disagree_with_the_config_are_refused() {
    for (key, value, tensor) in [
        ("hidden_size", 512, "model.layers.0.self_attn.q_proj.weight"),
        ("moe_intermediate_size", 256, "model.layers.7.mlp.switch_mlp.down_proj.row_alpha: shape"),
        ("moe_intermediate_size", 256, "model.layers.7.mlp.switch_mlp.down_proj.weight"),
        ("num_experts", 16, "model.layers.3.mlp.gate.weight"),
        ("head_dim", 64, "model.layers.0.self_attn.k_norm.weight"),
        ("num_hidden_layers", 8, ""),
    ] {
        let copy = Copy::of(TINY);
        copy.edit_config(|config| drop(config.insert(key.to_owned(), json!(value))));
        match plan(&copy.model(), &Options::default()) {
            Ok(_) => assert_eq!(tensor, "", "{key}"),
            Err(Error::Tensors { .. }) if tensor.ends_with(": shape") => {}
            Err(error) => assert!(
                matches!(&error, Error::Tensors { .. }) && error.to_string().contains(tensor),
                "{error}"
            ),
        }
    }
}

#[test]
fn recognised_by_architecture_or_model_type_alone() {
    let check = |architectures: Value, model_type: Value, good: bool| {
        let copy = Copy::of(STRESS_MLX);
        copy.edit_config(|config| {
            config.insert("architectures".to_owned(), architectures);
            config.insert("model_type".to_owned(), model_type);
        });
        match plan(&copy.model(), &Options::default()) {
            Ok(_) => assert!(good),
            Err(error) => {
                assert!(!good && error.to_string().contains("supported: MapleForCausalLM"), "{error}")
            }
        }
    };
    check(json!(["MapleForCausalLM"]), json!(null), true);
    check(json!(null), json!("maple"), true);
    check(json!(null), json!(null), false);
    check(json!(["LlamaForCausalLM"]), json!("llama"), false);
    let copy = Copy::of(STRESS_MLX);
    let llama = json!({ "model_type": "llama", "hidden_size": 64 });
    std::fs::write(copy.file("config.json"), llama.to_string()).unwrap();
    refused(
        &copy,
        &["config.json has model_type \"llama\", and the weights are packed U32", "supported: Maple"],
    );
    std::fs::write(copy.file("config.json"), "{}").unwrap();
    refused(&copy, &["config.json has no architectures and no model_type"]);
}

#[test]
fn other_models_and_kinds_are_named() {
    let other = |dtype: &str, quantization: Value, class: &str, wanted: &[&str]| {
        let copy = Copy::of(STRESS_MLX);
        copy.edit_config(|config| {
            config.insert("architectures".to_owned(), json!([class]));
            config.insert("model_type".to_owned(), json!(null));
            config.insert("quantization".to_owned(), quantization);
        });
        std::fs::remove_file(copy.file("model.safetensors.index.json")).unwrap();
        let size = if dtype == "U32" { 4 } else { 2 };
        let name = "model.layers.0.self_attn.q_proj.weight";
        let header = json!({ name: { "dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size] } });
        copy.write_shard("model.safetensors", header.to_string().as_bytes(), &vec![0; 2 * size]);
        refused(&copy, wanted);
    };
    let bits = |bits: u64| json!({ "bits": bits, "group_size": 64 });
    other(
        "F16",
        json!(null),
        "LlamaForCausalLM",
        &["LlamaForCausalLM", "float16", "supported: MapleForCausalLM"],
    );
    other("U32", bits(8), "Qwen3ForCausalLM", &["Qwen3ForCausalLM", "8-bit MLX"]);
    other("BF16", json!(null), "BitNetForCausalLM", &["BitNetForCausalLM", "bfloat16"]);
    other("F16", json!(null), "MapleForCausalLM", &["float16", "supported: MapleForCausalLM"]);
    other("U32", bits(8), "MapleForCausalLM", &["8-bit MLX", "supported"]);
    other("U32", bits(4), "MapleForCausalLM", &["4-bit MLX", "supported"]);
    other(
        "U32",
        json!(null),
        "LlamaForCausalLM",
        &["[\"LlamaForCausalLM\"]", "packed U32", "supported: Maple"],
    );
    other("U32", json!(null), "MapleForCausalLM", &["no \"quantization.bits\""]);
}

#[test]
fn tokenizers_are_checked() {
    let check = |edit: fn(&mut Value), wanted: &str| {
        let copy = Copy::of(STRESS_MLX);
        let path = copy.file("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut tokenizer);
        std::fs::write(&path, tokenizer.to_string()).unwrap();
        refused(&copy, &["tokenizer.json", wanted]);
    };
    check(|tokenizer| tokenizer["model"]["type"] = json!("Unigram"), "model.type is \"Unigram\"");
    check(|tokenizer| tokenizer["added_tokens"][0]["id"] = json!(4096), "vocab_size 4096");
    check(|tokenizer| tokenizer["model"]["vocab"]["a"] = json!(-1), "which is not one");
    check(|tokenizer| drop(tokenizer.as_object_mut().unwrap().remove("model")), "no field \"model\"");
    check(|tokenizer| tokenizer["version"] = json!("2.0"), "version is \"2.0\", only \"1.0\" is supported");
    check(|tokenizer| tokenizer["version"] = json!(1), "version is 1,");
    let copy = Copy::of(STRESS_MLX);
    std::fs::write(copy.file("tokenizer.json"), "{").unwrap();
    refused(&copy, &["tokenizer.json", "EOF"]);
}

#[test]
fn generation_defaults_and_the_embedded_template_are_taken() {
    let copy = Copy::of(STRESS_MLX);
    let settings = json!({ "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [3992, 3998] });
    std::fs::write(copy.file("generation_config.json"), settings.to_string()).unwrap();
    std::fs::remove_file(copy.file("chat_template.jinja")).unwrap();
    let tokenizer_config = json!({ "chat_template": [{ "name": "default", "template": "{{ x }}" }] });
    std::fs::write(copy.file("tokenizer_config.json"), tokenizer_config.to_string()).unwrap();
    copy.convert(&Options::default()).unwrap();
    let file = open(&copy.out("m.samara"));
    let metadata = file.index().metadata();
    assert_eq!(metadata.f64("generation.temperature").unwrap(), 0.6);
    assert_eq!(metadata.u64("generation.top_k").unwrap(), 40);
    assert_eq!(metadata.u64s("tokenizer.stop_ids").unwrap(), [3990, 3992, 3998]);
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap(), "{{ x }}");
    for (settings, wanted) in [
        (json!({ "top_p": 1.5 }), "top_p = 1.5"),
        (json!({ "temperature": -1 }), "temperature = -1"),
        (json!({ "top_k": "x" }), "top_k = \"x\""),
        (json!({ "eos_token_id": [3992, 4096] }), "eos_token_id = [3992,4096]"),
    ] {
        std::fs::write(copy.file("generation_config.json"), settings.to_string()).unwrap();
        let message = copy.plan_error().to_string();
        assert!(
            message.starts_with(&format!("generation_config.json: {wanted} is not supported")),
            "{message}"
        );
    }
}

#[test]
fn an_empty_template_is_refused_where_it_is() {
    for text in ["", " \n\t"] {
        let copy = Copy::of(STRESS_MLX);
        std::fs::write(copy.file("chat_template.jinja"), text).unwrap();
        refused(&copy, &["chat template in chat_template.jinja is empty"]);
        std::fs::remove_file(copy.file("chat_template.jinja")).unwrap();
        let config = json!({ "chat_template": text }).to_string();
        std::fs::write(copy.file("tokenizer_config.json"), config).unwrap();
        refused(&copy, &["chat template in tokenizer_config.json is empty"]);
    }
}
