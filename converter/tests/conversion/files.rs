//! Folders and shards: what is missing, cut, hostile or elsewhere is refused by name before any work.

use samara_converter::{Error, Options, TensorProblem, plan};
use serde_json::{Value, json};

use crate::checkpoint::*;

#[test]
fn missing_files_are_listed_together() {
    let check = |fixture: &str, remove: &[&str], listed: &[&str]| {
        let copy = Copy::of(fixture);
        remove.iter().for_each(|name| std::fs::remove_file(copy.file(name)).unwrap());
        let Error::MissingFiles { files, .. } = copy.plan_error() else { panic!("{remove:?}") };
        assert_eq!(files.len(), listed.len(), "{files:?}");
        for (file, listed) in files.iter().zip(listed) {
            assert!(file.starts_with(listed), "{files:?}");
        }
    };
    let (hf_1, hf_3) = ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors");
    check(STRESS_HF, &[hf_1, hf_3], &[hf_1, hf_3]);
    check(STRESS_MLX, &["tokenizer.json"], &["tokenizer.json"]);
    check(STRESS_MLX, &["chat_template.jinja"], &["chat_template.jinja"]);
    check(
        STRESS_MLX,
        &["config.json", SHARD_2, "tokenizer.json"],
        &["config.json", SHARD_2, "tokenizer.json"],
    );
    check(STRESS_MLX, &["model.safetensors.index.json"], &["model.safetensors.index.json"]);
    check(TINY, &["model-flashhead.safetensors"], &["model-flashhead.safetensors"]);
}

#[test]
fn a_flashhead_file_is_missed_even_if_the_index_never_named_it() {
    let copy = Copy::of(TINY);
    let path = copy.file("model.safetensors.index.json");
    let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    index["weight_map"].as_object_mut().unwrap().retain(|name, _| !name.starts_with("lm_head_flash"));
    std::fs::write(&path, index.to_string()).unwrap();
    assert!(plan(&copy.model(), &Options::default()).unwrap().summary().flash_head);
    std::fs::remove_file(copy.file("model-flashhead.safetensors")).unwrap();
    refused(&copy, &["lacks 1 file(s): model-flashhead.safetensors"]);
}

#[test]
fn a_folder_is_needed() {
    let copy = Copy::of(STRESS_MLX);
    let gguf = copy.out("m.gguf");
    std::fs::write(&gguf, b"GGUF").unwrap();
    let message = |path: &std::path::Path| plan(path, &Options::default()).unwrap_err().to_string();
    assert!(message(&gguf).contains("GGUF"));
    assert!(message(&copy.out("nothing")).contains("nothing is there"));
    assert!(message(&copy.file("config.json")).contains("not a folder"));
}

#[test]
fn a_cut_shard_says_both_lengths() {
    let copy = Copy::of(STRESS_MLX);
    let whole = std::fs::read(copy.file(SHARD_2)).unwrap();
    let header = 8 + split_shard(&whole).0.len();
    let full = whole.len();
    for (cut, says) in [
        (0, 8),
        (7, 8),
        (8, header),
        (header - 1, header),
        (header, full),
        (header + 1, full),
        (full - 1, full),
    ] {
        std::fs::write(copy.file(SHARD_2), &whole[..cut]).unwrap();
        refused(&copy, &[SHARD_2, &format!("is {cut} bytes, its header says {says}"), "incomplete download"]);
    }
    std::fs::write(copy.file(SHARD_2), [&whole[..], &[0]].concat()).unwrap();
    refused(&copy, &["bytes after the last tensor"]);
}

#[test]
fn git_lfs_pointers_are_recognised() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aeb13307\nsize 11422654\n";
    for name in
        [SHARD_1, "tokenizer.json", "config.json", "chat_template.jinja", "model.safetensors.index.json"]
    {
        let copy = Copy::of(STRESS_MLX);
        std::fs::write(copy.file(name), pointer).unwrap();
        refused(&copy, &[name, "Git LFS pointer", "git lfs pull"]);
    }
}

#[test]
fn hostile_headers_are_refused() {
    let check = |header: &str, data: &[u8], wanted: &str| {
        let copy = Copy::of(STRESS_MLX);
        copy.write_shard(SHARD_1, header.as_bytes(), data);
        refused(&copy, &[SHARD_1, wanted]);
    };
    let t = |name: &str, shape: &str, offsets: &str| {
        format!(r#""{name}":{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    check(
        &format!("{{{},{}}}", t("a", "[1]", "[0,1]"), t("a", "[1]", "[0,1]")),
        &[0],
        "\"a\" is there twice",
    );
    check(r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, &[0], "duplicate field");
    check(r#"{"__metadata__":{"x":"1","x":"2"}}"#, &[], "\"x\" is there twice");
    check(r#"{"__metadata__":{},"__metadata__":{}}"#, &[], "is there twice");
    check(&format!("{{{},{}}}", t("a", "[2]", "[0,2]"), t("b", "[2]", "[1,3]")), &[0; 3], "overlaps");
    check(&format!("{{{},{}}}", t("a", "[1]", "[0,1]"), t("b", "[1]", "[2,3]")), &[0; 3], "gap");
    check(&format!("{{{}}}", t("a", "[1]", "[1,0]")), &[0], "after its end");
    check(&format!("{{{}}}", t("a", "[3]", "[0,2]")), &[0; 2], "needs 3");
    check(&format!("{{{}}}", t("a", "[4294967296,4294967296]", "[0,1]")), &[0], "overflows");
    check(&format!("{{{}}}", t("a", "[1]", "[0,18446744073709551615]")), &[0], "needs 1");
    check(&format!("{{{}}}", t("a", "[-1]", "[0,1]")), &[0], "invalid value");
    check(r#"{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}"#, &[0], "unknown variant `Q4`");
    check("[]", &[], "safetensors header");
    check("{", &[], "EOF");
    check("\u{0}\u{1}", &[], "line 1");
}

#[test]
fn a_huge_header_length_is_not_allocated() {
    for length in [100_000_001_u64, 1 << 40, 1 << 63, u64::MAX] {
        let copy = Copy::of(STRESS_MLX);
        std::fs::write(copy.file(SHARD_1), length.to_le_bytes()).unwrap();
        refused(&copy, &[SHARD_1, &length.to_string(), "limit of 100000000"]);
    }
}

#[test]
fn shard_names_stay_in_the_folder() {
    for name in [
        "../../etc/x.safetensors",
        "/etc/x.safetensors",
        "C:x.safetensors",
        "a\\b.safetensors",
        "a\u{0}.safetensors",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "x.bin",
    ] {
        let copy = Copy::of(STRESS_MLX);
        let index = json!({ "weight_map": { "lm_head.weight": name } }).to_string();
        std::fs::write(copy.file("model.safetensors.index.json"), index).unwrap();
        assert!(
            matches!(copy.plan_error(), Error::UnsafeFileName { name: found } if found == name),
            "{name:?}"
        );
    }
}

#[cfg(unix)]
#[test]
fn a_download_cache_of_symbolic_links_works() {
    let copy = Copy::of(TINY);
    let (blobs, snapshot) = (copy.out("blobs"), copy.out("snapshots/0123abcd"));
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::rename(copy.model(), &blobs).unwrap();
    for entry in std::fs::read_dir(&blobs).unwrap() {
        let name = entry.unwrap().file_name();
        let blob = blobs.join(format!("blob-of-{}", name.to_str().unwrap().replace('.', "-")));
        std::fs::rename(blobs.join(&name), &blob).unwrap();
        std::os::unix::fs::symlink(
            std::path::Path::new("../../blobs").join(blob.file_name().unwrap()),
            snapshot.join(name),
        )
        .unwrap();
    }
    let (linked, plain) = (copy.out("linked.samara"), copy.out("plain.samara"));
    convert_to(&snapshot, &linked, &Options::default()).unwrap();
    convert_to(&fixture(TINY), &plain, &Options::default()).unwrap();
    assert!(std::fs::read(linked).unwrap() == std::fs::read(plain).unwrap());
}

#[test]
fn every_tensor_problem_is_listed() {
    let copy = Copy::of(STRESS_MLX);
    copy.edit_header(SHARD_1, |header| {
        let norm = header.remove("model.layers.0.input_layernorm.weight").unwrap();
        header.insert("model.layers.0.extra.weight".to_owned(), norm);
        let gate = header.get_mut("model.layers.0.mlp.gate.weight").unwrap();
        gate["dtype"] = json!("F16");
        let words = header.get_mut("model.layers.1.mlp.switch_mlp.up_proj.weight").unwrap();
        words["shape"] = json!([12, 8, 64]);
    });
    let Error::Tensors { mut problems } = copy.plan_error() else { panic!("not tensors") };
    // The index still places the norm that was renamed.
    problems.sort_by_key(ToString::to_string);
    let text: Vec<String> = problems.iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 4, "{text:#?}");
    let has = |wanted: &TensorProblem| assert!(problems.contains(wanted), "{wanted} not in {text:#?}");
    has(&TensorProblem::NotInShard {
        tensor: "model.layers.0.input_layernorm.weight".into(),
        file: SHARD_1.into(),
    });
    has(&TensorProblem::Unexpected { tensor: "model.layers.0.extra.weight".into(), file: SHARD_1.into() });
    has(&TensorProblem::Dtype {
        tensor: "model.layers.0.mlp.gate.weight".into(),
        found: "F16".into(),
        expected: "BF16".into(),
    });
    has(&TensorProblem::Shape {
        tensor: "model.layers.1.mlp.switch_mlp.up_proj.weight".into(),
        found: vec![12, 8, 64],
        expected: vec![12, 64, 8],
    });
}

#[test]
fn a_tensor_in_two_shards_is_refused() {
    let copy = Copy::of(STRESS_MLX);
    copy.edit_header(SHARD_2, |header| {
        let norm = header.remove("model.norm.weight").unwrap();
        header.insert("model.layers.0.input_layernorm.weight".to_owned(), norm);
    });
    refused(&copy, &["model.layers.0.input_layernorm.weight is in both", SHARD_1, SHARD_2]);
}

#[cfg(target_os = "linux")]
#[test]
fn an_absurdly_large_text_is_not_read() {
    let copy = Copy::of(STRESS_MLX);
    std::fs::File::create(copy.file("tokenizer.json")).unwrap().set_len(1 << 40).unwrap();
    refused(&copy, &["tokenizer.json is too large"]);
}
