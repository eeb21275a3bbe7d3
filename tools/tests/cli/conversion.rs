//! `samara convert` and `samara synth`: refusals before any work, the same bytes by every road.

use std::{fs, path::Path};

use serde_json::Value;

use crate::program::{
    convert, copy_folder, emulated, finish, fixture, folder, part_of, plain, run, samara, tiny,
};

/// Nothing may be left of a conversion that was refused.
fn nothing_at(out: &Path) {
    assert!(!out.exists() && !part_of(out).exists());
}

#[test]
fn convert_verify_inspect_run() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let done = convert(&fixture("tiny-maple-2bit"), &out, &[]).expect(0);
    assert!(done.out.contains("lossless: all 141312 ternary rows checked"), "{}", done.out);
    assert!(done.out.contains("read back and right"), "{}", done.out);
    // No terminal: plain lines, and no escape sequence.
    assert!(done.err.contains("converting: ") && !done.err.contains('\x1b'), "{}", done.err);
    assert!(run(["verify", plain(&out)]).expect(0).out.contains("70 tensors"));
    assert!(run(["inspect", plain(&out)]).expect(0).out.contains("layers.7.experts"));
    let answer =
        run(["run", plain(&out), "-p", "Capital of Greece?", "--temp", "0", "--hide-reasoning"]).expect(0);
    assert_eq!(answer.out, "The capital of Greece is Athens.\n");
}

/// The whole of a checkpoint need not fit into memory: sources are streamed, whatever their size.
#[test]
#[cfg(target_os = "linux")]
fn memory_does_not_grow_with_the_checkpoint() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("hf"), dir.path().join("m.samara"));
    let sizes = ["--hidden-size", "1024", "--expert-size", "512", "--n-experts", "64", "--n-layers", "2"];
    let mut synth = samara();
    synth.args(["synth", "--layout", "hf", "-q", "-o"]).arg(&checkpoint).args(sizes);
    finish(&mut synth).expect(0);
    let bytes: u64 = fs::read_dir(&checkpoint)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").metadata().expect("its size").len())
        .sum();
    assert!(bytes > 400 << 20, "{bytes} bytes of source");

    let mut command = samara();
    let peak = crate::program::peak_memory(
        command.arg("convert").arg(&checkpoint).arg("-o").arg(&out).args(["-q", "-t", "2"]),
    );
    // Two batches of units and the texts; a source held whole, or a layer of it, would show.
    assert!(peak > 1 << 20 && peak < 120 << 20, "{peak} bytes at the peak of {bytes}");
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = folder();
    let want = fs::read(tiny()).expect("read");
    for threads in ["1", "3"] {
        let out = dir.path().join(threads);
        convert(&fixture("tiny-maple-2bit"), &out, &["-t", threads, "--quiet"]).expect(0);
        assert!(fs::read(&out).expect("read") == want, "{threads} threads");
    }
}

#[test]
fn an_existing_file_is_kept_unless_forced() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    fs::write(&out, "precious").expect("written");
    let refused = convert(&fixture("tiny-maple-2bit"), &out, &[]).expect(2);
    assert!(
        refused.error().contains("exists already") && refused.error().contains("--force"),
        "{}",
        refused.err
    );
    assert_eq!(fs::read(&out).expect("read"), b"precious");
    let dry = convert(&fixture("tiny-maple-2bit"), &out, &["--dry-run"]).expect(2);
    assert_eq!(dry.error(), refused.error());
    convert(&fixture("tiny-maple-2bit"), &out, &["--dry-run", "--force"]).expect(0);
    assert_eq!(fs::read(&out).expect("read"), b"precious");
    let folder = convert(&fixture("tiny-maple-2bit"), dir.path(), &["--force"]).expect(2);
    assert!(folder.error().contains("is a folder") && !folder.error().contains("--force"), "{}", folder.err);
    convert(&fixture("tiny-maple-2bit"), &out, &["--force"]).expect(0);
    assert_eq!(fs::metadata(&out).expect("there").len(), fs::metadata(tiny()).expect("there").len());
    let both = convert(&fixture("tiny-maple-2bit"), &out, &["--force", "--resume"]);
    both.expect(2);
}

#[test]
fn a_dry_run_writes_nothing() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let plan = convert(&fixture("tiny-maple-2bit"), &out, &["--dry-run"]).expect(0);
    assert!(plan.out.contains("would write 70 tensors") && plan.out.contains("window 64"), "{}", plan.out);
    let plan = convert(&fixture("tiny-maple-2bit"), &out, &["--dry-run", "--json", "--window", "65"])
        .expect(0)
        .json();
    assert_eq!(
        (&plan["window"], plan["output_bytes"].as_u64()),
        (&65.into(), Some(fs::metadata(tiny()).expect("there").len()))
    );
    nothing_at(&out);
}

#[test]
fn the_window_is_the_configs_or_the_options() {
    let dir = folder();
    for (more, want) in
        [([].as_slice(), "64\n"), (&["--window", "512"], "512\n"), (&["--window", "513"], "513\n")]
    {
        let out = dir.path().join("m.samara");
        convert(&fixture("tiny-maple-2bit"), &out, &[&["--force"], more].concat()).expect(0);
        assert_eq!(run(["inspect", plain(&out), "--metadata", "model.window"]).expect(0).out, want);
    }
    convert(&fixture("tiny-maple-2bit"), &dir.path().join("x"), &["--window", "0"]).expect(2);
}

#[test]
fn flashhead_data_are_the_checkpoints_or_built_or_left_out() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let check = |more: &[&str], say: &str, n_clusters: Option<&str>| {
        let done = convert(&fixture("tiny-maple-2bit"), &out, &[&["--force"], more].concat()).expect(0);
        assert!(done.err.contains(say), "{more:?}: {}", done.err);
        run(["verify", plain(&out)]).expect(0);
        let metadata = &run(["inspect", plain(&out), "--json"]).expect(0).json()["metadata"];
        assert_eq!(metadata.get("flash.n_clusters").map(Value::to_string).as_deref(), n_clusters, "{more:?}");
        let ask = ["run", plain(&out), "-p", "Capital of Greece?", "--temp", "0", "--hide-reasoning"];
        assert_eq!(run(ask).expect(0).out, "The capital of Greece is Athens.\n", "{more:?}");
    };
    check(&[], "checkpoint (2-bit MLX)", Some("128"));
    check(&["--flash-head", "none"], "left out by option: the head is stored in token order", None);
    // Each takes an emulated machine seconds.
    if !emulated() {
        check(&["--flash-head", "auto"], "checkpoint (2-bit MLX)", Some("128"));
        check(&["--flash-head", "build"], "building FlashHead clusters: ", Some("128"));
        check(
            &["--flash-head", "build", "--cluster-size", "64"],
            "64 clusters of 64 tokens, in place",
            Some("64"),
        );
    }
    let refused = |more: &[&str], say: &str| {
        let refused = convert(&fixture("tiny-maple-2bit"), &dir.path().join("x"), more).expect(2);
        assert!(refused.err.contains(say), "{}", refused.err);
    };
    refused(&["--flash-head", "build", "--cluster-size", "30"], "30 is not possible");
    refused(&["--cluster-size", "32"], "--cluster-size needs --flash-head build");
    refused(&["--flash-head", "some"], "possible values: auto, build, none");
}

#[test]
fn flashhead_data_that_cannot_be_used_come_with_ways_to_go_on() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    copy_folder(&fixture("tiny-maple-2bit"), &checkpoint);
    let config = fs::read_to_string(checkpoint.join("config.json")).expect("read");
    let mut config: Value = serde_json::from_str(&config).expect("JSON");
    config["flash_head"]["force_tokens"] = serde_json::json!([3998]);
    fs::write(checkpoint.join("config.json"), config.to_string()).expect("written");
    let refused = convert(&checkpoint, &out, &[]).expect(3);
    assert!(refused.error().contains("lacks the stop token(s) [3990, 3992]"), "{}", refused.err);
    #[cfg(unix)]
    for way in ["to build FlashHead data: ", "to leave them out: "] {
        crate::program::shell(refused.hint(way)).expect(0);
        fs::remove_file(&out).expect("removed");
    }
}

#[test]
fn json_progress_is_lines_that_end_with_the_report() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let done = convert(&fixture("stress-maple-hf"), &out, &["--json", "--window", "9"]).expect(0);
    let lines: Vec<Value> = done.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let (report, progress) = lines.split_last().expect("lines");
    assert_eq!(report["event"], "report");
    assert!(report["notes"].to_string().contains("the window was set to 9 by option"), "{report}");
    assert!(
        report["counts"]["rows"].as_u64() > Some(0) && report["counts"]["negative_zeros"].as_u64() > Some(0),
        "{report}"
    );
    for phase in ["hash", "convert", "verify"] {
        let last = progress
            .iter()
            .rfind(|line| line["phase"] == phase)
            .unwrap_or_else(|| panic!("no {phase}: {}", done.out));
        assert_eq!(last["done"], last["total"], "{last}");
    }
}

#[test]
fn every_missing_file_is_named_before_any_work() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    copy_folder(&fixture("stress-maple-hf"), &checkpoint);
    let missing = [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    ];
    for name in missing {
        fs::remove_file(checkpoint.join(name)).expect("removed");
    }
    let refused = convert(&checkpoint, &out, &[]).expect(3);
    for name in missing {
        assert!(refused.error().contains(name), "{name}: {}", refused.err);
    }
    assert!(!refused.error().contains("00002"), "{}", refused.err);
    nothing_at(&out);
}

#[test]
fn a_cut_shard_is_an_incomplete_download() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    let name = "model-00002-of-00002.safetensors";
    copy_folder(&fixture("tiny-maple-2bit"), &checkpoint);
    let whole = fs::read(checkpoint.join(name)).expect("read");
    for len in [0, 7, 8, 100, whole.len() / 2, whole.len() - 1] {
        fs::write(checkpoint.join(name), &whole[..len]).expect("written");
        let refused = convert(&checkpoint, &out, &[]).expect(3);
        assert!(refused.error().contains(name), "{}", refused.err);
        assert!(refused.error().contains(&format!("{len} bytes")), "{len}: {}", refused.err);
        nothing_at(&out);
    }
    fs::write(checkpoint.join(name), "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
        .expect("written");
    assert!(convert(&checkpoint, &out, &[]).expect(3).error().contains("git lfs pull"));
}

#[test]
fn what_is_no_checkpoint_is_said_to_be_none() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let refused = |checkpoint: &Path, say: &str| {
        let refused = convert(checkpoint, &out, &[]).expect(3);
        assert!(refused.error().contains(say), "{}", refused.err);
        nothing_at(&out);
    };
    refused(&dir.path().join("nowhere"), "nothing is there");
    refused(tiny(), "not a folder");
    refused(dir.path(), "config.json");
    let gguf = dir.path().join("m.gguf");
    fs::write(&gguf, b"GGUF\x03\0\0\0").expect("written");
    refused(&gguf, "GGUF");
}

#[test]
fn a_row_that_is_not_ternary_is_refused_by_name_and_rounded_on_request() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    copy_folder(&fixture("stress-maple-hf"), &checkpoint);
    perturb(&checkpoint.join("model-00001-of-00003.safetensors"), "q_proj.weight");
    let refused = convert(&checkpoint, &out, &[]).expect(3);
    assert!(
        refused.error().contains("q_proj.weight, row 0, column ") && refused.error().contains("--ternarize"),
        "{}",
        refused.err
    );
    assert!(!out.exists());
    #[cfg(unix)]
    {
        // What it says to type does what it says, though a part is left.
        assert!(part_of(&out).exists());
        let hint = refused.hint("to round such rows: ");
        let rounded = crate::program::shell(hint).expect(0);
        assert!(rounded.out.contains("1 were not ternary"), "{}", rounded.out);
        fs::remove_file(&out).expect("removed");
    }
    let rounded = convert(&checkpoint, &out, &["--ternarize", "--force"]).expect(0);
    assert!(rounded.out.contains("1 were not ternary"), "{}", rounded.out);
}

#[test]
fn a_tokenizer_or_template_that_cannot_be_used_is_refused_before_any_work() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    copy_folder(&fixture("stress-maple-2bit"), &checkpoint);
    let refused = |file: &str, text: &str, say: &str| {
        let whole = fs::read(checkpoint.join(file)).expect("read");
        fs::write(checkpoint.join(file), text).expect("written");
        for more in [[].as_slice(), &["--dry-run"]] {
            let refused = convert(&checkpoint, &out, more).expect(3);
            assert!(refused.error().contains(file) && refused.error().contains(say), "{}", refused.err);
            nothing_at(&out);
        }
        fs::write(checkpoint.join(file), whole).expect("written");
    };
    refused("chat_template.jinja", "{% if %}", "has an error");
    refused("chat_template.jinja", "{{ raise_exception('no users') }}", "no users");
    refused("chat_template.jinja", "{{ messages.nothing.more }}", "failed on this conversation");
    refused(
        "chat_template.jinja",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "budget",
    );
    let tokenizer = fs::read_to_string(checkpoint.join("tokenizer.json")).expect("read");
    let mut tokenizer: Value = serde_json::from_str(&tokenizer).expect("JSON");
    tokenizer["model"]["byte_fallback"] = true.into();
    refused("tokenizer.json", &tokenizer.to_string(), "byte_fallback");
    tokenizer["model"]["byte_fallback"] = false.into();
    tokenizer["normalizer"] = serde_json::json!({ "type": "Unheard" });
    refused("tokenizer.json", &tokenizer.to_string(), "normalizer");
    convert(&checkpoint, &out, &[]).expect(0);
}

#[test]
fn a_template_that_refuses_a_conversation_is_a_wrong_input() {
    let dir = folder();
    let (checkpoint, out) = (dir.path().join("checkpoint"), dir.path().join("m.samara"));
    copy_folder(&fixture("stress-maple-2bit"), &checkpoint);
    let template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}\
                    {{ messages[0].content }}";
    fs::write(checkpoint.join("chat_template.jinja"), template).expect("written");
    convert(&checkpoint, &out, &[]).expect(0);
    let ask = ["run", plain(&out), "-p", "hi", "--max-tokens", "1"];
    run(ask).expect(0);
    let refused = run(ask.iter().chain(&["--system", "s"])).expect(3);
    assert!(refused.error().contains("no system"), "{}", refused.err);
}

/// Adds one unit in the last place to the first weight that is not zero.
fn perturb(shard: &Path, suffix: &str) {
    let mut bytes = fs::read(shard).expect("read");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("JSON");
    let (_, tensor) = header
        .as_object()
        .expect("tensors")
        .iter()
        .find(|(name, _)| name.ends_with(suffix))
        .expect("a tensor");
    let start = 8 + header_len + tensor["data_offsets"][0].as_u64().expect("a number") as usize;
    let at = (start..).step_by(2).find(|at| bytes[at + 1] & 0x7f != 0).expect("a weight");
    bytes[at] ^= 1;
    fs::write(shard, bytes).expect("written");
}

#[test]
fn synthetic_checkpoints_convert_and_run_in_both_layouts() {
    let dir = folder();
    let converted = |layout: &str| -> Vec<Value> {
        let (checkpoint, out) = (dir.path().join(layout), dir.path().join(format!("{layout}.samara")));
        let args = [
            "synth",
            "-o",
            plain(&checkpoint),
            "--layout",
            layout,
            "--no-flash",
            "--n-layers",
            "2",
            "--quiet",
        ];
        run(args).expect(0);
        // A folder that is not empty is left alone.
        run(args).expect(2);
        convert(&checkpoint, &out, &[]).expect(0);
        run(["run", plain(&out), "-p", "hi", "--max-tokens", "4", "--quiet"]).expect(0);
        let tensors = run(["inspect", plain(&out), "--json"]).expect(0).json()["tensors"].clone();
        tensors.as_array().expect("tensors").clone()
    };
    let (mlx, hf) = (converted("mlx"), converted("hf"));
    assert!(!mlx.is_empty() && mlx == hf, "both layouts of a seed hold the same weights");
    let other = dir.path().join("other");
    let report =
        run(["synth", "-o", plain(&other), "--json", "--seed", "3", "--hidden-size", "256"]).expect(0);
    let report: Value = serde_json::from_str(report.out.lines().last().expect("a line")).expect("JSON");
    assert_eq!((&report["event"], &report["spec"]["hidden_size"]), (&"report".into(), &256.into()));
    let impossible = run(["synth", "-o", plain(&dir.path().join("no")), "--hidden-size", "100"]).expect(2);
    assert!(impossible.error().contains("hidden_size = 100"), "{}", impossible.err);
}

#[test]
fn names_outside_ascii_work() {
    let dir = folder();
    let place = dir.path().join("用户").join("é 🦙");
    fs::create_dir_all(&place).expect("a folder");
    let (checkpoint, out) = (place.join("контрольная точка"), place.join("модель é.samara"));
    copy_folder(&fixture("stress-maple-2bit"), &checkpoint);
    convert(&checkpoint, &out, &[]).expect(0);
    let checks: [&[&str]; 3] = [&["verify"], &["inspect"], &["run", "-p", "é漢🦙", "--max-tokens", "2"]];
    for args in checks {
        finish(samara().args(&args[..1]).arg(&out).args(&args[1..])).expect(0);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_is_too_small_is_noticed_before_any_work() {
    let checkpoint = fixture("tiny-maple-2bit");
    for dry_run in ["", "--dry-run"] {
        let script = format!(
            "samara convert '{}' -o \"$DISK/m.samara\" {dry_run}; echo code $?; ls \"$DISK\"",
            checkpoint.display()
        );
        let Some(ran) = crate::program::on_small_disk(5, &script) else { return };
        assert!(ran.out.ends_with("code 4\n"), "nothing is left, and the code is 4: {} {}", ran.out, ran.err);
        assert!(ran.error().contains("bytes, ") && ran.error().contains("are free"), "{}", ran.err);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_disk_that_fills_up_keeps_the_part_for_later() {
    let dir = folder();
    let checkpoint = dir.path().join("checkpoint");
    let sizes = ["--hidden-size", "512", "--n-layers", "12", "--n-experts", "24", "--expert-size", "256"];
    run(["synth", "-o", plain(&checkpoint), "--layout", "hf", "--quiet"].iter().chain(&sizes)).expect(0);
    let script = format!(
        "convert() {{ samara convert '{}' -o \"$DISK/m.samara\" -t 1 --quiet \"$@\"; }}
         convert & while [ ! -e \"$DISK/m.samara.part\" ]; do :; done
         head -c 64m /dev/zero > \"$DISK/fill\"
         wait $!; echo code $?; ls \"$DISK\"; rm \"$DISK/fill\"
         convert --resume; echo code $?; ls \"$DISK\"
         samara verify \"$DISK/m.samara\" --quiet; echo code $?",
        checkpoint.display()
    );
    let Some(ran) = crate::program::on_small_disk(64, &script) else { return };
    let lines: Vec<&str> = ran.out.lines().collect();
    assert_eq!((lines[1], lines[lines.len() - 3]), ("code 4", "code 0"), "{}\n{}", ran.out, ran.err);
    assert!(lines.contains(&"m.samara.part") && ran.error().contains("--resume"), "{}\n{}", ran.out, ran.err);
    assert_eq!(lines[lines.len() - 2..], ["m.samara", "code 0"], "{}\n{}", ran.out, ran.err);
}
