//! The other commands, exit codes, and the memory check.

use std::{fs, path::Path};

use serde_json::Value;

use crate::program::{emulated, finish, fixture, folder, plain, run, samara, tiny};

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[test]
fn wrong_command_lines_are_code_2() {
    let model = plain(tiny());
    let rows: &[&[&str]] = &[
        &[],
        &["nonsense"],
        &["run"],
        &["run", model, "--nonsense"],
        &["run", model, "-p", "a", "-f", "b"],
        &["run", model, "-p", "a", "--temp", "-1"],
        &["run", model, "-p", "a", "--temp", "nan"],
        &["run", model, "-p", "a", "--top-p", "0"],
        &["run", model, "-p", "a", "--min-p", "2"],
        &["run", model, "-p", "a", "--repetition-penalty", "0"],
        &["run", model, "-p", "a", "--max-tokens", "0"],
        &["run", model, "-p", "a", "--logit-bias", "4096=1"],
        &["run", model, "-p", "a", "--logit-bias", "7"],
        &["run", model, "-p", "a", "--device", "tpu"],
        &["run", model, "-p", "a", "--ctx", "0"],
        &["run", model, "-p", "a", "--ctx", "4097"],
        &["run", model, "-p", "a", "-t", "many"],
        &["run", model, "-p", "a", "--memory", "4X"],
        &["run", model, "-p", "a", "--memory", "1.5.2G"],
        &["run", model, "hi"],
        &["bench", model, "-p", "0", "-n", "0"],
        &["bench", model, "-p", "4096", "-n", "1"],
        &["bench", model, "-p", "8", "-n", "8", "--ctx", "10"],
        &["bench", model, "--repetitions", "0"],
        &["bench", model, "--profile", "decode"],
        &["bench", model, "--no-bandwidth=1"],
        &["ppl", model],
        &["completions", "tcsh"],
    ];
    for args in rows {
        let ran = run(*args).expect(2);
        assert!(ran.out.is_empty() && !ran.err.is_empty(), "{args:?}");
    }
}

#[test]
fn numbers_below_their_range_are_refused_with_the_range() {
    let model = plain(tiny());
    let check = |args: &[&str], range: &str| {
        let refused = run(args).expect(2);
        assert!(refused.error().contains(range), "{args:?}: {}", refused.err);
    };
    let from_0 = "from 0 to 18446744073709551615";
    check(&["run", model, "-p", "a", "--seed", "-1"], from_0);
    check(&["run", model, "-p", "a", "--top-k", "-1"], from_0);
    check(&["run", model, "-p", "a", "--ctx", "-1"], "-1 is not in 1..");
    check(&["run", model, "-p", "a", "--max-tokens", "-1"], "-1 is not in 1..");
    check(&["run", model, "-p", "a", "-t", "-1"], "-1 is not in 0..");
    check(&["run", model, "-p", "a", "--memory", "-1"], "\"-1\" is not a number");
    check(&["bench", model, "-p", "-1"], "-1 is not in 0..");
    check(&["convert", "c", "-o", "m", "--window", "-1"], "from 1 to 18446744073709551615");
    check(&["convert", "c", "-o", "m", "--window", "0"], "from 1 to 18446744073709551615");
    check(&["synth", "-o", "c", "--seed", "-1"], from_0);
    check(&["synth", "-o", "c", "--hidden-size", "-1"], from_0);
}

#[test]
fn a_prompt_without_its_option_is_answered_with_the_command() {
    let refused = run(["run", plain(tiny()), "What", "is it?"]).expect(2);
    assert!(refused.error().contains("-p 'What is it?'") || cfg!(windows), "{}", refused.err);
    let help = run(["run", "--help"]).expect(0).out;
    assert!(!help.contains("WORDS") && !help.contains("words"), "{help}");
}

#[test]
fn an_error_is_json_too_where_json_was_asked_for() {
    let dir = folder();
    let nothing = dir.path().join("nothing");
    let (model, nothing) = (plain(tiny()), plain(&nothing));
    let rows: [(&[&str], i32); 9] = [
        (&["run", nothing, "-p", "a", "--json"], 3),
        (&["run", model, "-p", "a", "--json", "--temp", "-1"], 2),
        (&["run", model, "-p", "a", "--json", "--memory", "1K"], 4),
        (&["run", model, "--json", "--nonsense"], 2),
        (&["verify", nothing, "--json"], 3),
        (&["ppl", model, "--file", nothing, "--json"], 3),
        (&["bench", nothing, "--format", "json"], 3),
        (&["convert", nothing, "-o", nothing, "--json"], 3),
        (&["convert", nothing, "-o", nothing, "--json", "--dry-run"], 3),
    ];
    for (args, code) in rows {
        let ran = run(args).expect(code);
        let json = ran.json();
        assert_eq!(json["exit_code"], code, "{args:?}");
        let first = json["error"].as_str().expect("text").lines().next().expect("a line");
        assert!(!first.is_empty() && ran.error().contains(first), "{args:?}: {json} {}", ran.err);
    }
}

#[test]
#[cfg(unix)]
fn threads_that_cannot_start_are_done_without() {
    if crate::program::limits_are_the_emulators() {
        return;
    }
    // No address space has room for such a stack.
    let verify = |model: &Path| {
        let mut command = samara();
        command.env("RUST_MIN_STACK", (1u64 << 46).to_string());
        command.arg("verify").arg(model).args(["-t", "8"]);
        finish(&mut command)
    };
    assert!(verify(tiny()).expect(0).out.contains("all hashes match"));
    let dir = folder();
    let damaged = dir.path().join("m.samara");
    let mut bytes = fs::read(tiny()).expect("read");
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    fs::write(&damaged, bytes).expect("written");
    assert!(verify(&damaged).expect(3).error().contains("1 of 70 tensors"));
}

#[test]
#[cfg(target_os = "linux")]
fn the_limits_of_the_process_count_as_memory() {
    if crate::program::limits_are_the_emulators() {
        return;
    }
    let dir = folder();
    let (checkpoint, model) = (dir.path().join("c"), dir.path().join("m.samara"));
    let sizes = ["--max-context", "268435456", "--n-layers", "2", "--full-every", "1"];
    run(["synth", "-o", plain(&checkpoint), "--quiet"].iter().chain(&sizes)).expect(0);
    crate::program::convert(&checkpoint, &model, &["--quiet"]).expect(0);
    let ask = |limit: &str, more: &str| {
        let line = format!("samara run '{}' -p a --max-tokens 1 -t 2 --memory 1T {more}", model.display());
        crate::program::shell(&format!("ulimit {limit}; {line}"))
    };
    for limit in ["-v 2000000", "-d 2000000"] {
        // 268435456 tokens take more than the limit, whatever --memory promises.
        let refused = ask(limit, "--ctx 268435456").expect(4);
        assert!(refused.error().contains("the largest context that fits is"), "{}", refused.err);
        ask(limit, "").expect(0);
    }
    // How much is too little depends on the size of the program; what it says of that does not.
    let mut refusals = 0;
    for kilobytes in (40_000..400_000).step_by(40_000) {
        let ran = ask(&format!("-v {kilobytes}"), "");
        assert!(matches!(ran.code, Some(0 | 4)), "{kilobytes}: {:?} {}", ran.code, ran.err);
        if ran.code == Some(4) {
            assert!(ran.err.contains("ulimit") || ran.err.contains("cannot map"), "{}", ran.err);
            refusals += 1;
        }
    }
    assert!(refusals > 0, "no limit was too small: this test shows nothing");
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_with_both_numbers() {
    let long = "word ".repeat(3000);
    let refused = run(["run", plain(tiny()), "-p", &long, "--ctx", "1000"]).expect(3);
    assert!(
        refused.error().contains("the context holds 1000") && refused.error().contains("4096"),
        "{}",
        refused.err
    );
    let dir = folder();
    let latin1 = dir.path().join("latin1.txt");
    fs::write(&latin1, b"abc\xe9").expect("written");
    let refused = run(["run", plain(tiny()), "-f", plain(&latin1)]).expect(3);
    assert!(refused.error().contains("offset 3"), "{}", refused.err);
    run(["run", plain(tiny()), "-f", plain(&dir.path().join("none"))]).expect(3);
}

/// Where Vulkan is the only way to a GPU, no driver is no GPU.
#[cfg(all(unix, not(target_vendor = "apple")))]
#[test]
fn without_a_gpu_it_is_refused_and_auto_takes_the_cpu() {
    let ask = |more: &[&str]| {
        let asked = ["run", plain(tiny()), "-p", "Capital of Greece?", "--temp", "0", "--max-tokens", "2"];
        run(asked.iter().chain(more))
    };
    for device in ["gpu", "gpu:0"] {
        let refused = ask(&["--device", device]).expect(2);
        for part in ["no GPU was found", "--device cpu", "samara devices"] {
            assert!(refused.error().contains(part), "{part}: {}", refused.err);
        }
    }
    for more in [&["--explain"] as &[&str], &["--explain", "--gpu-layers", "3", "--gpu-memory", "1G"]] {
        let auto = ask(more).expect(0);
        assert_eq!(auto.err.matches("no GPU was found").count(), 1, "{}", auto.err);
        assert!(auto.err.contains("layer 0 to layer 7 on cpu"), "{}", auto.err);
        assert_eq!(auto.out, ask(&["--device", "cpu"]).expect(0).out);
    }
    assert!(!ask(&[]).expect(0).err.contains("GPU"));
    // Nothing is looked for where no GPU can be used.
    assert!(!ask(&["--explain", "--device", "cpu"]).expect(0).err.contains("GPU"));
    assert!(!ask(&["--explain", "--gpu-layers", "0"]).expect(0).err.contains("GPU"));
    let refused = ask(&["--device", "cpu", "--gpu-layers", "1"]).expect(2);
    assert!(refused.error().contains("--gpu-layers"), "{}", refused.err);
    assert!(run(["devices"]).expect(0).out.contains("gpu        none found\n"));
}

#[test]
fn memory_is_summed_and_checked_before_it_is_allocated() {
    let ask = |more: &[&str]| {
        run(["run", plain(tiny()), "-p", "Capital of Greece?", "--temp", "0"].iter().chain(more))
    };
    // 4096 tokens of this model take about 18 MiB of keys and values.
    let short = ask(&["--memory", "8M", "--ctx", "4096"]).expect(4);
    assert!(short.err.contains("memory: ") && short.out.is_empty(), "{}", short.err);
    let error = short.error();
    assert!(
        error.contains("a context of 4096 tokens needs")
            && error.contains("the largest context that fits is "),
        "{error}"
    );
    let fits: String = error.rsplit("use --ctx ").next().expect("a number").trim().chars().collect();
    ask(&["--memory", "8M", "--ctx", &fits]).expect(0);
    let one_more = (fits.parse::<u32>().expect("a number") + 1).to_string();
    ask(&["--memory", "8M", "--ctx", &one_more]).expect(4);
    // Without --ctx, what fits is taken.
    let taken = ask(&["--memory", "8M"]).expect(0);
    assert!(taken.err.contains(&format!("for {fits} tokens")), "{}", taken.err);
    let none = ask(&["--memory", "1K"]).expect(4);
    assert!(none.error().contains("no context fits"), "{}", none.err);
    let read = ask(&["--memory", "1M", "--no-mmap"]).expect(4);
    assert!(read.error().contains("--no-mmap"), "{}", read.err);
}

#[test]
fn the_context_that_is_too_large_for_a_machine_is_refused_not_tried() {
    let dir = folder();
    let (checkpoint, model) = (dir.path().join("c"), dir.path().join("m.samara"));
    let sizes = ["--max-context", "268435456", "--n-layers", "4", "--full-every", "1"];
    run(["synth", "-o", plain(&checkpoint), "--quiet"].iter().chain(&sizes)).expect(0);
    crate::program::convert(&checkpoint, &model, &["--quiet"]).expect(0);
    // Half a terabyte of keys and values and more: no machine that runs this test has it.
    let refused = run(["run", plain(&model), "-p", "a", "--ctx", "268435456", "--memory", "4G"]).expect(4);
    assert!(refused.error().contains("TiB") || refused.error().contains("GiB"), "{}", refused.err);
    let default = run(["run", plain(&model), "-p", "a", "--max-tokens", "1"]).expect(0);
    assert!(default.err.contains("for 32768 tokens"), "{}", default.err);
}

#[test]
fn perplexity_is_the_same_on_any_number_of_threads() {
    let dir = folder();
    let text = dir.path().join("text.txt");
    let (times, window, least) = if emulated() { (2, "16", 30.0) } else { (6, "64", 100.0) };
    fs::write(&text, "The capital of Greece is Athens. A samara is a winged seed. é漢🦙\n".repeat(times))
        .expect("written");
    let score = |more: &[&str]| {
        let mut json =
            run(["ppl", plain(tiny()), "--file", plain(&text), "--json"].iter().chain(more)).expect(0).json();
        // Kernels are those that were fastest just now.
        json.as_object_mut().expect("an object").retain(|key, _| key != "threads" && key != "kernels");
        json
    };
    let one = score(&["-t", "1"]);
    let (tokens, nll) = (number(&one["tokens"]), number(&one["nll"]));
    assert!(tokens > least && nll > 0.0 && nll < 20.0, "{one}");
    assert!((number(&one["perplexity"]) - nll.exp()).abs() < 1e-9 * nll.exp(), "{one}");
    assert_eq!(one["corpus_hash"].as_str().expect("text").len(), 32);
    for threads in ["3", "8"] {
        assert_eq!(score(&["-t", threads]), one, "{threads} threads");
    }
    // Windows: each has a first token that nothing predicts.
    let windows = score(&["--ctx", window]);
    let n_tokens = tokens + 1.0;
    assert_eq!(
        number(&windows["tokens"]),
        n_tokens - (n_tokens / window.parse::<f64>().expect("a number")).ceil()
    );
    assert_ne!(windows["nll"], one["nll"]);
    // It would take an emulated machine half a minute.
    if !emulated() {
        let exact = score(&["--device", "reference"]);
        assert!((number(&exact["nll"]) - nll).abs() < 0.01 * nll, "{exact} and {one}");
    }
    run(["ppl", plain(tiny()), "--file", plain(&text), "--ctx", "1"]).expect(2);
    fs::write(&text, "").expect("written");
    run(["ppl", plain(tiny()), "--file", plain(&text)]).expect(3);
}

#[test]
fn a_bench_record_at_a_depth_reads_the_cache_there() {
    let bench = |depth: &str| {
        let args =
            ["bench", plain(tiny()), "-p", "4", "-n", "2", "--repetitions", "1", "--no-bandwidth", "--json"];
        run(args.iter().chain(&["--depth", depth])).expect(0).json()
    };
    let kv = |depth| number(&bench(depth)["decode"]["kv_bytes_per_token"]);
    assert!(kv("2000") > 5.0 * kv("200"), "two of eight layers see all of it");
    assert_eq!(bench("2000")["context"], 2006);
    let model = plain(tiny());
    assert!(run(["bench", model, "--depth", "4096"]).expect(2).error().contains("--depth 4096"));
    let refused =
        run(["bench", model, "-p", "1", "-n", "1", "--depth", "9", "--device", "reference"]).expect(2);
    assert!(refused.error().contains("cannot make up"), "{}", refused.err);
}

#[test]
fn stored_logits_are_compared() {
    let golden = fixture("golden/tiny-maple.safetensors");
    let compare = |path: &Path, device: &str| {
        run(["ppl", plain(tiny()), "--logits", plain(path), "--device", device, "--json"]).expect(0).json()
    };
    // Exact logits from an independent engine. An emulated machine takes a minute for them, and the golden tests of the library look
    // at some of them there.
    if !emulated() {
        let int8 = compare(&golden, "cpu");
        assert!(number(&int8["kl_mean"]) > 1e-9 && number(&int8["kl_max"]) < 0.01, "{int8}");
        let exact = compare(&golden, "reference");
        assert!(
            number(&exact["kl_mean"]) <= 1e-9 && number(&exact["logit_max_abs_difference"]) <= 1e-3,
            "{exact}"
        );
        assert_eq!(exact["top1_agreement"], 1.0);
    }

    let dir = folder();
    let (text, saved) = (dir.path().join("text.txt"), dir.path().join("saved.safetensors"));
    let (times, least) = if emulated() { (4, 20.0) } else { (12, 80.0) };
    fs::write(&text, "The capital of Greece is Athens. ".repeat(times)).expect("written");
    let save = ["--ctx", "40", "--save-logits", plain(&saved)];
    run(["ppl", plain(tiny()), "--file", plain(&text)].iter().chain(&save)).expect(0);
    let same = compare(&saved, "cpu");
    assert_eq!((&same["kl_max"], &same["top1_agreement"]), (&0.0.into(), &1.0.into()), "{same}");
    assert!(number(&same["positions"]) > least, "{same}");
    // A planted fault: the last logits change sign.
    let mut bytes = fs::read(&saved).expect("read");
    let last = bytes.len() - 4 * 4096;
    bytes[last..].chunks_exact_mut(4).for_each(|word| word[3] ^= 0x80);
    fs::write(&saved, &bytes).expect("written");
    let faulty = compare(&saved, "cpu");
    assert!(number(&faulty["kl_max"]) > 0.1 && number(&faulty["top1_agreement"]) < 1.0, "{faulty}");
    fs::write(&saved, &bytes[..last]).expect("written");
    run(["ppl", plain(tiny()), "--logits", plain(&saved)]).expect(3);
    let stranger = fixture("tiny-maple-2bit/model-flashhead.safetensors");
    assert!(run(["ppl", plain(tiny()), "--logits", plain(&stranger)]).expect(3).error().contains("0.ids"));
}

#[test]
fn stored_logits_replace_nothing_that_was_not_to_be_replaced() {
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let (model, text, stored, saved) = (at("m.samara"), at("t.txt"), at("golden"), at("saved"));
    fs::copy(tiny(), &model).expect("copied");
    fs::copy(fixture("golden/tiny-maple.safetensors"), &stored).expect("copied");
    fs::write(&text, "The capital of Greece is Athens. ".repeat(12)).expect("written");
    let save = |path: &Path, more: &[&str]| {
        let args = ["ppl", plain(&model), "--file", plain(&text), "--save-logits", plain(path)];
        run(args.iter().chain(&["--ctx", "40"]).chain(more))
    };
    let before = fs::read_dir(dir.path()).expect("a folder").count();
    let inside = dir.path().join("..").join(dir.path().file_name().expect("a name")).join("m.samara");
    let inputs: [(&Path, &[&str]); 4] =
        [(&model, &[]), (&inside, &[]), (&text, &[]), (&stored, &["--logits", plain(&stored)])];
    for (path, more) in inputs {
        for force in [[].as_slice(), &["--force"]] {
            let bytes = fs::read(path).expect("read");
            let refused = save(path, &[more, force].concat()).expect(2);
            assert!(refused.error().contains("which this command reads"), "{}", refused.err);
            assert!(fs::read(path).expect("read") == bytes);
        }
    }
    fs::write(&saved, "precious").expect("written");
    assert!(save(&saved, &[]).expect(2).error().contains("--force"));
    assert_eq!(fs::read(&saved).expect("read"), b"precious");
    save(&saved, &["--force"]).expect(0);
    let bytes = fs::read(&saved).expect("read");
    assert!(bytes.len() > 80 * 4 * 4096);
    fs::create_dir(at("folder")).expect("a folder");
    assert!(save(&at("folder"), &["--force"]).expect(2).error().contains("not a regular file"));
    save(&at("nowhere/saved"), &[]).expect(3);
    run(["ppl", plain(&model), "--file", plain(&text), "--force"]).expect(2);
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), before + 2, "no unfinished file is left");
    #[cfg(unix)]
    {
        // A link stays a link, and one that leads to an input is that input.
        use std::os::unix::fs::{PermissionsExt, symlink};
        symlink(&saved, at("link")).and_then(|()| symlink(&model, at("trap"))).expect("linked");
        fs::write(&saved, "old").expect("written");
        save(&at("link"), &["--force"]).expect(0);
        assert!(fs::read(&saved).expect("read") == bytes && at("link").is_symlink());
        assert!(save(&at("trap"), &["--force"]).expect(2).error().contains("which this command reads"));
        // Others may read it as they may read any new file.
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode();
        assert_eq!(mode(&saved), mode(&text));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn stored_logits_on_a_full_disk_leave_nothing() {
    let dir = folder();
    let text = dir.path().join("t.txt");
    fs::write(&text, "The capital of Greece is Athens. ".repeat(60)).expect("written");
    let script = format!(
        "samara ppl '{}' --file '{}' --save-logits \"$DISK/saved\"; echo code $?; ls \"$DISK\"",
        tiny().display(),
        text.display()
    );
    let Some(ran) = crate::program::on_small_disk(2, &script) else { return };
    assert!(ran.out.ends_with("code 4\n"), "nothing is left, and the code is 4: {} {}", ran.out, ran.err);
}

#[test]
fn a_bench_record_has_what_a_figure_needs() {
    let bench = |more: &[&str]| {
        run(["bench", plain(tiny()), "-p", "40", "-n", "6", "--repetitions", "2"].iter().chain(more))
            .expect(0)
    };
    let record = bench(&["--json"]).json();
    for pointer in [
        "/prefill/tokens_per_s",
        "/prefill/spread/0",
        "/prefill/gb_per_s",
        "/prefill/gmac_per_s",
        "/decode/tokens_per_s",
        "/decode/spread/1",
        "/decode/gb_per_s",
        "/decode/bytes_per_token",
        "/threads_used/decode",
        "/kv",
        "/logits_hash",
        "/kernels/0",
        "/machine/cpu",
        "/machine/memory_total",
        "/machine/gpus",
        "/threads",
        "/file/digest",
        "/warm_up_seconds",
        "/repetitions",
        "/version",
        "/context",
    ] {
        assert!(
            record.pointer(pointer).is_some_and(|value| !value.is_null()),
            "{pointer} is missing: {record}"
        );
    }
    let (rate, bytes) =
        (number(&record["decode"]["tokens_per_s"]), number(&record["decode"]["bytes_per_token"]));
    assert!((number(&record["decode"]["gb_per_s"]) - rate * bytes / 1e9).abs() < 1e-9 * rate * bytes / 1e9);
    let hash = |more: &[&str]| bench(&[&["--format", "json"], more].concat()).json()["logits_hash"].clone();
    assert_eq!(hash(&["-t", "1"]), record["logits_hash"]);
    assert_eq!(hash(&["-t", "3"]), record["logits_hash"]);
    assert_ne!(hash(&["--device", "reference"]), record["logits_hash"]);
    let text = bench(&[]).out;
    for part in
        ["prefill 40", "decode 6", " GB/s: ", " % of expert blocks, ", "bandwidth", "sequential; in cache"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("us/token") && record["profile"].is_null(), "{text}");
    let markdown = bench(&["--format", "markdown"]).out;
    assert!(markdown.starts_with("| what | result |\n|---|---|\n| prefill 40 | "), "{markdown}");
    let decode_only = run(["bench", plain(tiny()), "-p", "0", "-n", "2", "--json"]).expect(0).json();
    assert!(
        decode_only["prefill"]["tokens_per_s"].is_null()
            && number(&decode_only["decode"]["tokens_per_s"]) > 0.0
    );
    let prefill_only = run(["bench", plain(tiny()), "-p", "2", "-n", "0", "--json"]).expect(0).json();
    assert!(
        prefill_only["decode"]["tokens_per_s"].is_null()
            && number(&prefill_only["prefill"]["tokens_per_s"]) > 0.0
    );
}

/// Speeds are compared with nothing here, only with each other.
#[test]
fn a_bench_record_has_the_bandwidth_of_the_same_run() {
    let bench = |more: &[&str]| {
        run(["bench", plain(tiny()), "-p", "20", "-n", "4", "--repetitions", "1", "--json"]
            .iter()
            .chain(more))
        .expect(0)
        .json()
    };
    let record = bench(&[]);
    let bandwidth = &record["bandwidth"];
    let runs = bandwidth["runs"].as_array().expect("a list");
    assert_eq!(runs.len(), 2, "before and after");
    for key in ["sequential_gb_per_s", "expert_blocks_gb_per_s"] {
        let better = runs.iter().map(|run| number(&run[key])).fold(0.0, f64::max);
        assert!(better > 0.0 && number(&bandwidth[key]) == better, "{key}: {bandwidth}");
        let median = key.replace("_gb_per_s", "_median_gb_per_s");
        assert!(
            runs.iter().all(|run| (f64::MIN_POSITIVE..=number(&run[key])).contains(&number(&run[&median])))
        );
        let share = key.replace("_gb_per_s", "");
        for phase in ["prefill", "decode"] {
            let phase = &record[phase];
            let (rate, share) = (number(&phase["gb_per_s"]), number(&phase[format!("share_of_{share}")]));
            assert!(rate > 0.0 && (share * better / rate - 1.0).abs() < 1e-9, "{phase}");
        }
    }
    // All experts of the tiny model, 32 in each of 8 layers, which caches hold.
    let (read, block) = (number(&runs[0]["bytes_read"]), number(&bandwidth["block_bytes"]));
    assert!(bandwidth["in_cache"] == true && block > 0.0 && read == 256.0 * block, "{bandwidth}");

    let without = bench(&["--no-bandwidth"]);
    assert!(without["bandwidth"].is_null() && without["decode"]["share_of_expert_blocks"].is_null());
    assert!(number(&without["decode"]["gb_per_s"]) > 0.0);
}

#[test]
fn a_bench_record_says_where_the_time_went() {
    let bench = |more: &[&str]| {
        let args = ["bench", plain(tiny()), "-p", "600", "-n", "3", "--repetitions", "1", "--profile"];
        run(args.iter().chain(more)).expect(0)
    };
    let record = bench(&["--json"]).json();
    let profile = &record["profile"];
    assert_eq!(profile["timers"], true);
    for (part, tokens) in [("prefill", 600), ("decode", 3)] {
        let part = &profile[part];
        assert_eq!(part["tokens"], tokens);
        let phases = part["phases"].as_array().expect("a list");
        let sum = |key: &str| {
            phases.iter().map(|phase| number(&phase[key])).sum::<f64>() + number(&part["unaccounted"][key])
        };
        let whole = number(&part["us_per_token"]);
        assert!(
            (sum("us_per_token") / whole - 1.0).abs() < 1e-9 && (sum("share") - 1.0).abs() < 1e-9,
            "{part}"
        );
        let reading = phases.iter().filter(|phase| number(&phase["bytes"]) > 0.0);
        assert!(reading.clone().count() >= 5, "{part}");
        assert!(reading.clone().all(|phase| number(&phase["share_of_expert_blocks"]) > 0.0), "{part}");
    }
    // What the timers count is what the sums without timers say.
    let bytes = |part: &str, name: &str| {
        let phases = profile[part]["phases"].as_array().expect("a list").iter();
        phases
            .filter(|phase| name.is_empty() || phase["name"] == name)
            .map(|phase| number(&phase["bytes"]))
            .sum::<f64>()
    };
    let cache = number(&record["decode"]["kv_bytes_per_token"]);
    assert!((bytes("decode", "attention") / 3.0 - cache).abs() < 1.0, "{cache}: {profile}");
    let all = number(&record["decode"]["bytes_per_token"]);
    assert!((bytes("decode", "") / 3.0 / all - 1.0).abs() < 0.01, "{all}: {profile}");
    assert_eq!(bytes("prefill", ""), number(&record["prefill"]["bytes"]));

    let text = bench(&["--no-bandwidth"]).out;
    for part in ["prefill, phase", "decode, phase", "us/token", "  attention ", "  unaccounted "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let markdown = bench(&["--format", "markdown"]).out;
    assert!(
        markdown.contains("\n| decode, phase | us/token | share | GB/s | of expert blocks |\n|---|---:"),
        "{markdown}"
    );
    let decode_only =
        run(["bench", plain(tiny()), "-p", "0", "-n", "2", "--profile", "--json"]).expect(0).json();
    assert!(decode_only["profile"]["prefill"].is_null() && decode_only["profile"]["decode"]["tokens"] == 2);

    // The reference has no timers.
    let reference = [
        "bench",
        plain(tiny()),
        "-p",
        "2",
        "-n",
        "2",
        "--repetitions",
        "1",
        "--profile",
        "--device",
        "reference",
    ];
    let text = run(reference).expect(0).out;
    assert!(text.contains("has no timers") && !text.contains("us/token"), "{text}");
    let json = run(reference.iter().chain(&["--json"])).expect(0).json();
    assert!(json["profile"]["timers"] == false && json["prefill"]["gb_per_s"].is_null(), "{json}");
    assert!(number(&json["decode"]["share_of_expert_blocks"]) > 0.0, "{json}");
}

#[test]
fn the_demo_answers_and_can_keep_its_file() {
    let dir = folder();
    let keep = dir.path().join("tiny.samara");
    let demo = run(["demo", "--keep", plain(&keep)]).expect(0);
    assert!(demo.out.ends_with("\n\n462 + 520 = 982\n"), "{}", demo.out);
    assert!(demo.err.contains("lossless") && demo.err.contains("samara convert"), "{}", demo.err);
    assert!(fs::read(&keep).expect("read") == fs::read(tiny()).expect("read"));
    let refused = run(["demo", "--keep", plain(&keep)]).expect(2);
    assert!(refused.error().contains("--keep") && !refused.error().contains("force"), "{}", refused.err);
    run(["demo", "-p", ""]).expect(3);
    let other = run(["demo", "-p", "Capital of Greece?"]).expect(0);
    assert!(other.out.ends_with("The capital of Greece is Athens.\n"), "{}", other.out);
}

#[test]
fn doctor_and_devices_say_what_runs() {
    let doctor = run(["doctor", "--json"]).expect(0).json();
    let isas = doctor["instruction_sets"].as_array().expect("a list");
    let chosen = isas.iter().find(|isa| isa["name"] == doctor["chosen"]).expect("the chosen one is listed");
    assert_eq!(chosen["available"], true);
    assert!(doctor["kernels"].as_array().is_some_and(|kernels| {
        kernels.iter().any(|name| name.as_str().is_some_and(|name| name.starts_with("ternary_gemv/")))
    }));
    assert!(number(&doctor["machine"]["memory_total"]) > 0.0);
    // A bench of this instruction set, which is not always the fastest, runs the kernels that the doctor names.
    let isa = doctor["chosen"].as_str().expect("a name");
    let once = ["-p", "1", "-n", "1", "--repetitions", "1", "--json", "--isa", isa];
    let bench = run([&["bench", plain(tiny())], &once[..]].concat()).expect(0).json();
    let named = |kernels: &Value, op: &str| {
        kernels
            .as_array()
            .expect("a list")
            .iter()
            .find(|name| name.as_str().is_some_and(|name| name.starts_with(op)))
            .cloned()
    };
    assert_eq!(named(&bench["kernels"], "ternary_gemv/"), named(&doctor["kernels"], "ternary_gemv/"));
    let text = run(["doctor"]).expect(0).out;
    for word in ["cpu", "features", "kernels", "memory", "page size", "gpu"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let devices = run(["devices", "--json"]).expect(0).json();
    assert!(
        devices["backends"].as_array().is_some_and(|names| ["cpu", "reference", "gpu"]
            .iter()
            .all(|name| names.contains(&(*name).into())))
    );
    // A machine without a desktop is nothing that drivers should complain of.
    for command in ["devices", "doctor"] {
        let ran = run([command]).expect(0);
        assert!(ran.out.contains("cpu ") && ran.err.is_empty(), "{}", ran.err);
    }
    assert!(run(["devices"]).expect(0).out.starts_with("cpu "));
}

#[test]
fn completions_and_help_are_there_for_everything() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = run(["completions", shell]).expect(0).out;
        assert!(script.contains("samara") && script.contains("repetition-penalty"), "{shell}");
    }
    let top = run(["--help"]).expect(0).out;
    assert!(top.contains("Exit codes") && top.contains("samara demo"), "{top}");
    for command in [
        "convert",
        "run",
        "inspect",
        "verify",
        "ppl",
        "bench",
        "synth",
        "demo",
        "devices",
        "doctor",
        "completions",
    ] {
        assert!(top.contains(command), "{command}: {top}");
        run([command, "--help"]).expect(0);
    }
    for command in ["convert", "run", "inspect", "verify", "ppl", "bench", "synth", "demo", "completions"] {
        assert!(run([command, "--help"]).expect(0).out.contains("Examples:"), "{command}");
    }
    assert!(run(["ppl", "--help"]).expect(0).out.contains("2048 or the longest stored sequence"));
    assert!(run(["bench", "--help"]).expect(0).out.contains("-p and -n together"));
    assert!(run(["--version"]).expect(0).out.starts_with("samara 0."));
}

#[test]
fn nothing_is_styled_unless_there_is_a_terminal() {
    for (name, value) in [("TERM", "xterm-256color"), ("TERM", "dumb"), ("NO_COLOR", "1")] {
        let mut command = samara();
        command.env(name, value).arg("run").arg(tiny()).args(["-p", "Capital of Greece?", "--temp", "0"]);
        let ran = finish(&mut command);
        assert!(!ran.out.contains('\x1b') && !ran.err.contains('\x1b'), "{name}={value}");
    }
}
