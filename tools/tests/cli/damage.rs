//! Files that are damaged, unfinished or something else: refused by name, the same way by every command.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::program::{folder, part_of, plain, run, tiny};

/// Flips one bit of a file.
fn flip(path: &Path, offset: u64, bit: u32) {
    let mut file = fs::File::options().read(true).write(true).open(path).expect("opens");
    let mut byte = [0];
    file.seek(SeekFrom::Start(offset)).expect("seeks");
    file.read_exact(&mut byte).expect("reads");
    byte[0] ^= 1 << bit;
    file.seek(SeekFrom::Start(offset)).expect("seeks");
    file.write_all(&byte).expect("writes");
}

fn inspected(path: &Path) -> Value {
    run(["inspect", plain(path), "--json"]).expect(0).json()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Names without layer numbers: `layers.experts`.
fn kind(name: &str) -> String {
    name.split('.').filter(|word| word.parse::<u32>().is_err()).collect::<Vec<_>>().join(".")
}

#[test]
fn one_flipped_bit_in_a_tensor_is_found_and_named() {
    let dir = folder();
    let path = dir.path().join("flipped.samara");
    fs::copy(tiny(), &path).expect("copied");
    // One tensor of each kind, the last of its kind.
    let inspected = inspected(&path);
    let tensors: BTreeMap<String, &Value> = inspected["tensors"]
        .as_array()
        .expect("tensors")
        .iter()
        .map(|tensor| (kind(tensor["name"].as_str().expect("a name")), tensor))
        .collect();
    assert_eq!(tensors.len(), 14, "{:?}", tensors.keys());
    for (i, tensor) in tensors.values().enumerate() {
        let (name, start, len) =
            (tensor["name"].as_str().expect("a name"), number(&tensor["offset"]), number(&tensor["len"]));
        for (offset, bit) in [(start, 0), (start + len / 2, i as u32 % 8), (start + len - 1, 7)] {
            flip(&path, offset, bit);
            let found = run(["verify", plain(&path)]).expect(3);
            assert!(
                found.error().contains(name) && found.error().contains("1 of 70 tensors"),
                "{name}: {}",
                found.err
            );
            let json = run(["verify", plain(&path), "--json"]).expect(3).json();
            assert_eq!((&json["ok"], &json["damaged"][0]["tensor"]), (&false.into(), &name.into()));
            flip(&path, offset, bit);
        }
    }
    // `run` looks at tensors only when it is asked to.
    let (_, experts) = tensors.iter().find(|(kind, _)| kind.as_str() == "layers.experts").expect("experts");
    flip(&path, number(&experts["offset"]) + 5, 1);
    let refused = run(["run", plain(&path), "-p", "hi", "--verify"]).expect(3);
    assert!(refused.error().contains("layers.7.experts") && refused.out.is_empty(), "{}", refused.err);
    flip(&path, number(&experts["offset"]) + 5, 1);
    // Nothing was left flipped, so every fault above was seen on its own.
    let whole = run(["verify", plain(&path)]).expect(0);
    assert!(whole.out.contains("all hashes match"), "{}", whole.out);
}

#[test]
fn two_wrong_tensors_are_both_named() {
    let dir = folder();
    let path = dir.path().join("flipped.samara");
    fs::copy(tiny(), &path).expect("copied");
    let inspected = inspected(&path);
    for i in [1, 40] {
        flip(&path, number(&inspected["tensors"][i]["offset"]), 3);
    }
    let found = run(["verify", plain(&path)]).expect(3);
    for i in [1, 40] {
        assert!(
            found.error().contains(inspected["tensors"][i]["name"].as_str().expect("a name")),
            "{}",
            found.err
        );
    }
}

#[test]
fn padding_counts_as_content() {
    let dir = folder();
    let path = dir.path().join("flipped.samara");
    fs::copy(tiny(), &path).expect("copied");
    let inspected = inspected(&path);
    let tensor = inspected["tensors"]
        .as_array()
        .expect("tensors")
        .iter()
        .find(|tensor| number(&tensor["padding"]) > 0)
        .expect("a tensor with padding");
    flip(&path, number(&tensor["offset"]) + number(&tensor["len"]), 0);
    let found = run(["verify", plain(&path)]).expect(3);
    assert!(found.error().contains(tensor["name"].as_str().expect("a name")), "{}", found.err);
}

/// What every command says of a file it cannot use.
fn refused_alike(path: &Path, say: &str) {
    let path = plain(path);
    let run_says = run(["run", path, "-p", "hi"]).expect(3);
    assert!(run_says.error().contains(say), "{path}: {}", run_says.err);
    assert!(run_says.out.is_empty());
    let others = [
        vec!["inspect", path],
        vec!["inspect", path, "--json"],
        vec!["verify", path],
        vec!["bench", path],
        vec!["ppl", path, "--file", path],
    ];
    for args in others {
        let ran = run(&args).expect(3);
        assert_eq!(ran.error(), run_says.error(), "{args:?}");
        if args.contains(&"--json") {
            assert_eq!(ran.json()["exit_code"], 3, "{args:?}: {}", ran.out);
        } else {
            assert!(ran.out.is_empty(), "{args:?}: {}", ran.out);
        }
    }
}

#[test]
fn header_metadata_and_directory_are_always_checked() {
    let dir = folder();
    let path = dir.path().join("flipped.samara");
    fs::copy(tiny(), &path).expect("copied");
    let bytes = fs::read(&path).expect("read");
    let at = |i: usize| u64::from(u32::from_le_bytes(bytes[i..i + 4].try_into().expect("four bytes")));
    let (metadata_len, directory_len) = (at(24), at(28));
    let directory = (64 + metadata_len).next_multiple_of(8);
    let hash = "is damaged (its hash differs)";
    for (offset, say) in [
        (0, "it starts with the bytes"),
        (10, "format version"),
        (12, "needs features"),
        (16, hash),
        (40, hash),
        (48, hash),
        (64, hash),
        (64 + metadata_len / 2, hash),
        (directory, hash),
        (directory + directory_len - 1, hash),
    ] {
        flip(&path, offset, 1);
        refused_alike(&path, say);
        flip(&path, offset, 1);
    }
    run(["verify", plain(&path)]).expect(0);
}

#[test]
fn a_file_cut_anywhere_is_an_incomplete_download() {
    let dir = folder();
    let bytes = fs::read(tiny()).expect("read");
    let path = dir.path().join("cut.samara");
    for (len, say) in [
        (0, "the file is empty"),
        (1, "less than the 64-byte header"),
        (63, "less than the 64-byte header"),
        (64, "incomplete download"),
        (4096, "incomplete download"),
        (bytes.len() / 2, "incomplete download"),
        (bytes.len() - 1, "incomplete download"),
    ] {
        fs::write(&path, &bytes[..len]).expect("written");
        refused_alike(&path, say);
    }
    fs::write(&path, [bytes.as_slice(), b"x"].concat()).expect("written");
    refused_alike(&path, "something was appended");
}

#[test]
fn other_kinds_of_file_are_recognised() {
    let dir = folder();
    let mut newer = fs::read(tiny()).expect("read");
    newer[8] = 1;
    let header = br#"{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let safetensors = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &[0; 4]].concat();
    let rows: [(&str, &[u8], &str); 7] = [
        ("a.gguf", b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "GGUF"),
        ("a.safetensors", &safetensors, "safetensors"),
        ("a.zip", b"PK\x03\x04\x14\0\0\0\x08\0abcdefghij", "zip"),
        ("lfs.samara", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "LFS"),
        ("newer.samara", &newer, "update samara"),
        (
            "text.samara",
            b"Once upon a time there was a text file, longer than a header would be, but no model.",
            "not a .samara file",
        ),
        ("zeros.samara", &[0; 8192], "unfinished conversion"),
    ];
    for (name, bytes, say) in rows {
        let path = dir.path().join(name);
        fs::write(&path, bytes).expect("written");
        refused_alike(&path, say);
    }
    refused_alike(dir.path(), "not a regular file");
    refused_alike(&dir.path().join("nothing.samara"), "nothing.samara");
    let part: PathBuf = part_of(&dir.path().join("m.samara"));
    fs::write(&part, [0; 4096]).expect("written");
    refused_alike(&part, "samara convert --resume");
}

#[test]
fn sizes_add_up_to_the_file() {
    let dir = folder();
    let stress = dir.path().join("stress.samara");
    crate::program::convert(&crate::program::fixture("stress-maple-hf"), &stress, &[]).expect(0);
    for path in [tiny(), &stress] {
        let len = fs::metadata(path).expect("there").len();
        let inspected = inspected(path);
        let sizes = &inspected["sizes"];
        let sum = number(&sizes["index"]) + number(&sizes["tensors"]) + number(&sizes["padding"]);
        assert_eq!((sum, number(&inspected["file_len"])), (len, len));
        // The same from the tensors alone: each starts where the one before it ended, padding included.
        let mut end = number(&sizes["index"]);
        for tensor in inspected["tensors"].as_array().expect("tensors") {
            assert_eq!(number(&tensor["offset"]), end, "{tensor}");
            end += number(&tensor["len"]) + number(&tensor["padding"]);
            for part in tensor["parts"].as_array().expect("parts") {
                let rows = number(&part["rows"]) as f64;
                let bytes = part["bytes_per_row"].as_f64().expect("a number") * rows;
                assert!((bytes - number(&part["len"]) as f64).abs() < 1e-6, "{part}");
            }
        }
        assert_eq!(end, len);
        let text = run(["inspect", plain(path)]).expect(0).out;
        assert!(text.contains(&format!("= {len} bytes")), "{text}");
    }
}

#[test]
fn one_metadata_value_can_be_had_whole() {
    let template = run(["inspect", plain(tiny()), "--metadata", "tokenizer.chat_template"]).expect(0);
    let source =
        fs::read_to_string(crate::program::fixture("tiny-maple-2bit/chat_template.jinja")).expect("read");
    assert_eq!(template.out, source + "\n");
    assert_eq!(run(["inspect", plain(tiny()), "--metadata", "model.window"]).expect(0).out, "64\n");
    assert_eq!(run(["inspect", plain(tiny()), "--metadata", "model.window", "--json"]).expect(0).json(), 64);
    assert!(run(["inspect", plain(tiny()), "--metadata", "nope"]).expect(2).error().contains("model.window"));
}
