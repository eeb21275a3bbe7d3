//! What comes out is what went in: both source layouts, every row, every bit.

use crate::checkpoint::*;
use safetensors::SafeTensors;
use samara_converter::{Options, plan};

fn tensor_names(file: &samara_format::SamaraFile) -> Vec<String> {
    file.index().tensors().iter().map(|tensor| tensor.name.clone()).collect()
}

#[test]
fn both_layouts_of_one_model_give_the_same_tensors() {
    let copy = Copy::of(STRESS_MLX);
    let (mlx, hf) = (copy.out("mlx.samara"), copy.out("hf.samara"));
    let report = convert_to(&fixture(STRESS_MLX), &mlx, &Options::default()).unwrap();
    let report_hf = convert_to(&fixture(STRESS_HF), &hf, &Options::default()).unwrap();
    // Counted independently from the fixtures: 160 rows of zeros, 354,739 weights of -0.0 in the bf16 layout.
    assert_eq!((report.counts.rows, report.counts.zero_rows, report.counts.negative_zeros), (15_872, 160, 0));
    let counts = report_hf.counts;
    assert_eq!((counts.rows, counts.zero_rows, counts.negative_zeros), (15_872, 160, 354_739));
    assert_eq!((counts.ternarized_rows, counts.near_threshold), (0, 0));

    let (mlx, hf) = (open(&mlx), open(&hf));
    assert_eq!(tensor_names(&mlx), tensor_names(&hf));
    for (left, right) in mlx.index().tensors().iter().zip(hf.index().tensors()) {
        assert_eq!(left.parts, right.parts, "{}", left.name);
        // The 4-bit ones too: quantising bf16 follows the release's form to the bit.
        assert_eq!(mlx.bytes(left) == hf.bytes(right), left.hash == right.hash, "{}", left.name);
        assert_eq!(left.hash, right.hash, "{}", left.name);
    }
}

#[test]
fn a_planted_difference_is_seen_by_the_comparison_of_layouts() {
    let copy = Copy::of(STRESS_HF);
    copy.edit_tensor("model.layers.2.mlp.experts.5.up_proj.weight", |bytes| {
        let at = bytes.iter().skip(1).step_by(2).position(|&high| high & 0x7f != 0).unwrap();
        bytes[2 * at + 1] ^= 0x80;
    });
    copy.convert(&Options::default()).unwrap();
    let mlx = copy.out("mlx.samara");
    convert_to(&fixture(STRESS_MLX), &mlx, &Options::default()).unwrap();
    let (mlx, hf) = (open(&mlx), open(&copy.out("m.samara")));
    let differing: Vec<&str> = mlx
        .index()
        .tensors()
        .iter()
        .zip(hf.index().tensors())
        .filter_map(|(left, right)| (left.hash != right.hash).then_some(left.name.as_str()))
        .collect();
    assert_eq!(differing, ["layers.2.experts"]);
    let differs = |part| {
        ternary_rows(&mlx, "layers.2.experts", 5, part) != ternary_rows(&hf, "layers.2.experts", 5, part)
    };
    assert_eq!([differs(0), differs(1), differs(2)], [false, true, false], "gate, up, down");
}

#[test]
fn codes_and_scales_are_the_source_words() {
    let copy = Copy::of(TINY);
    copy.convert(&Options::default()).unwrap();
    let file = open(&copy.out("m.samara"));
    let shard = std::fs::read(fixture(TINY).join("model-00001-of-00002.safetensors")).unwrap();
    let shard = SafeTensors::deserialize(&shard).unwrap();
    let check = |source: &str, expert: usize, tensor: &str, part: usize, first: usize| {
        let words = shard.tensor(&format!("{source}.weight")).unwrap();
        let alpha = shard.tensor(&format!("{source}.row_alpha")).unwrap();
        let dims = words.shape();
        let (rows, row_bytes) = (dims[dims.len() - 2], 4 * dims[dims.len() - 1]);
        let stored = ternary_rows(&file, tensor, expert, part);
        for row in 0..rows {
            let at = expert * rows + row;
            let bytes = &words.data()[at * row_bytes..(at + 1) * row_bytes];
            let codes: Vec<u8> =
                bytes.iter().flat_map(|byte| [0, 2, 4, 6].map(|shift| byte >> shift & 3)).collect();
            let zero = codes.iter().all(|&code| code == 1);
            let scale = u16::from_le_bytes(alpha.data()[2 * at..2 * at + 2].try_into().unwrap());
            assert_eq!(stored[first + row], (codes, if zero { 0 } else { scale }), "{source} {expert} {row}");
        }
    };
    for expert in [0, 31] {
        for (part, name) in ["gate", "up", "down"].into_iter().enumerate() {
            let source = format!("model.layers.1.mlp.switch_mlp.{name}_proj");
            check(&source, expert, "layers.1.experts", part, 0);
        }
    }
    // q has 4 heads of 128 rows, k and v 2 each.
    check("model.layers.0.self_attn.q_proj", 0, "layers.0.qkv", 0, 0);
    check("model.layers.0.self_attn.k_proj", 0, "layers.0.qkv", 0, 512);
    check("model.layers.0.self_attn.v_proj", 0, "layers.0.qkv", 0, 768);
    check("model.layers.0.self_attn.o_proj", 0, "layers.0.o", 0, 0);
}

#[test]
fn head_rows_are_in_cluster_order_bit_for_bit() {
    let copy = Copy::of(TINY);
    copy.convert(&Options::default()).unwrap();
    let file = open(&copy.out("m.samara"));
    let read = |shard: &str| std::fs::read(fixture(TINY).join(shard)).unwrap();
    let (shard, flash) = (read("model-00001-of-00002.safetensors"), read("model-flashhead.safetensors"));
    let (shard, flash) =
        (SafeTensors::deserialize(&shard).unwrap(), SafeTensors::deserialize(&flash).unwrap());
    let map = flash.tensor("lm_head_flash.token_map").unwrap();
    let map: Vec<u32> = map.data().chunks(4).map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect();

    let stored_map = file.index().tensor("head.token_map").unwrap();
    assert_eq!(
        file.bytes(stored_map)[..4 * map.len()],
        *flash.tensor("lm_head_flash.token_map").unwrap().data()
    );
    let check = |source: &SafeTensors<'_>, from: &str, tensor: &str, order: &dyn Fn(usize) -> usize| {
        let get = |suffix: &str| source.tensor(&format!("{from}.{suffix}")).unwrap().data().to_vec();
        let (words, scales, biases) = (get("weight"), get("scales"), get("biases"));
        let stored = affine_rows(&file, tensor);
        let (row_words, row_groups) = (words.len() / stored.len(), scales.len() / stored.len());
        let bits =
            |bytes: &[u8]| bytes.chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect::<Vec<u16>>();
        for (row, stored) in stored.iter().enumerate() {
            let id = order(row);
            let words = &words[id * row_words..(id + 1) * row_words];
            let nibbles: Vec<u8> = words.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
            let of = id * row_groups..(id + 1) * row_groups;
            assert_eq!(
                *stored,
                (nibbles, bits(&scales[of.clone()]), bits(&biases[of])),
                "{tensor} row {row}"
            );
        }
    };
    check(&shard, "lm_head", "head", &|row| map[row] as usize);
    check(&flash, "lm_head_flash.centroids", "head.centroids", &|row| row);
}

#[test]
fn metadata_say_everything_the_runtime_needs() {
    let copy = Copy::of(TINY);
    copy.convert(&Options::default()).unwrap();
    let file = open(&copy.out("m.samara"));
    let metadata = file.index().metadata();
    let check = |key: &str, wanted: u64| assert_eq!(metadata.u64(key).unwrap(), wanted, "{key}");
    check("model.vocab_size", 4096);
    check("model.hidden_size", 256);
    check("model.n_layers", 8);
    check("model.n_heads", 4);
    check("model.n_kv_heads", 2);
    check("model.head_dim", 128);
    check("model.n_experts", 32);
    check("model.n_experts_used", 4);
    check("model.expert_size", 128);
    check("model.max_context", 4096);
    check("model.rope_dim", 64);
    check("model.window", 64);
    check("flash.n_clusters", 128);
    check("flash.cluster_size", 32);
    check("flash.n_probes", 14);
    check("generation.top_k", 20);
    assert_eq!(metadata.f64("generation.temperature").unwrap(), 1.0);
    assert_eq!(metadata.f64("generation.top_p").unwrap(), 0.95);
    assert_eq!(metadata.f64("model.rope_theta").unwrap(), 10_000.0);
    assert_eq!(metadata.f64("model.rms_norm_eps").unwrap(), 1e-6);
    assert!(metadata.bool("model.norm_topk").unwrap());
    let kinds = metadata.strs("model.layer_kinds").unwrap();
    let full: Vec<usize> = (0..8).filter(|&layer| kinds[layer] == "full").collect();
    assert_eq!((full, kinds.len()), (vec![3, 7], 8));
    assert_eq!(metadata.u64s("tokenizer.stop_ids").unwrap(), [3990, 3992]);
    assert_eq!(metadata.u64s("flash.force_tokens").unwrap(), [3992, 3998, 3990]);
    let text = |name: &str| std::fs::read_to_string(fixture(TINY).join(name)).unwrap();
    assert_eq!(metadata.str("tokenizer.json").unwrap(), text("tokenizer.json"));
    assert_eq!(metadata.str("tokenizer.chat_template").unwrap(), text("chat_template.jinja"));
    assert_eq!(metadata.strs("general.source.files").unwrap().len(), 6);
    assert_eq!(metadata.strs("general.source.hashes").unwrap().len(), 6);
}

#[test]
fn the_window_is_explicit_and_can_be_set() {
    let check = |window: Option<u64>, wanted: u64| {
        let options = Options { window, ..Options::default() };
        let copy = Copy::of(STRESS_MLX);
        copy.convert(&options).unwrap();
        let file = open(&copy.out("m.samara"));
        assert_eq!(file.index().metadata().u64("model.window").unwrap(), wanted);
        assert_eq!(plan(&copy.model(), &options).unwrap().summary().window, wanted);
    };
    check(None, 16);
    check(Some(17), 17);
    assert!(plan(&fixture(STRESS_MLX), &Options { window: Some(0), ..Options::default() }).is_err());
}

#[test]
fn a_dry_run_tells_the_exact_size_and_the_memory() {
    let plan = plan(&fixture(TINY), &Options::default()).unwrap();
    let copy = Copy::of(TINY);
    let report = copy.convert(&Options::default()).unwrap();
    let summary = plan.summary();
    assert_eq!(summary.output_bytes, report.output_bytes);
    assert_eq!(summary.output_bytes, std::fs::metadata(copy.out("m.samara")).unwrap().len());
    assert_eq!(
        (summary.kind, summary.architecture.as_str(), summary.flash_head),
        ("2-bit MLX", "maple", true)
    );
    assert!(summary.peak_memory_bytes < 1 << 30);
    let json = serde_json::to_value(summary).unwrap();
    assert_eq!(json["tensors"].as_array().unwrap().len(), report.tensors);
}

#[test]
fn rows_that_are_not_ternary_can_be_rounded() {
    let copy = Copy::of(STRESS_HF);
    let name = "model.layers.1.self_attn.o_proj.weight";
    // A row of 512: one weight in four is 1, the others 0.125; mean 0.34375, threshold 0.240625.
    copy.edit_tensor(name, |bytes| {
        for (column, pair) in bytes[..2 * 512].chunks_mut(2).enumerate() {
            let value: u16 = if column % 4 == 0 { 0x3f80 } else { 0xbe00 };
            pair.copy_from_slice(&value.to_le_bytes());
        }
    });
    assert!(copy.convert(&Options::default()).unwrap_err().to_string().contains(name));
    let options = Options { ternarize: true, force: true, ..Options::default() };
    let report = copy.convert(&options).unwrap();
    assert_eq!((report.counts.ternarized_rows, report.counts.near_threshold), (1, 0));
    let rows = ternary_rows(&open(&copy.out("m.samara")), "layers.1.o", 0, 0);
    let codes: Vec<u8> = (0..512).map(|column| if column % 4 == 0 { 2 } else { 1 }).collect();
    assert_eq!(rows[0], (codes, 0x3f80));
}
