//! The same results on every CPU, and no instruction that a CPU lacks.
//!
//! What this machine cannot be, an emulator is: old CPUs, and one whose operating system does not save the registers of
//! the instructions that it reports. `simd/tests/kernels/emulated_cpus.rs` shows that the emulator is what it claims.

use xxhash_rust::xxh3::xxh3_128;

use crate::program::{CACHES, Ran, finish, run, samara, tiny};

/// xxh3-128 of the logits that `bench -p 16 -n 4` ends with on the tiny model. The scalar kernels define it, and a
/// change of their arithmetic, of the model or of those numbers changes it.
const LOGITS: &str = "c1ecea40852e627ca9b07241651b29b0";
/// xxh3-128 of the tiny model's file from its first tensor on.
const TENSORS: u128 = 0xdca0_97aa_3f39_ed34_4e13_3385_1eb6_1d16;

/// Starts the program with arguments on some CPU.
type Start<'a> = &'a dyn Fn(&[&str]) -> Ran;

/// The hash of the logits.
fn logits(start: Start<'_>, isa: &str) -> String {
    let model = tiny().to_str().expect("a plain path");
    let sizes = ["-p", "16", "-n", "4", "--repetitions", "1"];
    let args = [["bench", model, "--json", "--isa", isa].as_slice(), &sizes].concat();
    let json = start(&args).expect(0).json();
    json["logits_hash"].as_str().expect("a hash").to_owned()
}

/// Asserts that the program works, runs `isa`, says so, and computes what it computes everywhere.
fn check(start: Start<'_>, isa: &str) {
    let doctor = start(&["doctor", "--json"]).expect(0).json();
    assert_eq!(doctor["chosen"], isa);
    let model = tiny().to_str().expect("a plain path");
    let explained = ["run", model, "--raw", "-p", "a", "--max-tokens", "1", "--explain"];
    let explained = start(&explained).expect(0);
    // The fastest of those that are there, the definition only where it is alone.
    let (_, variant) = explained.err.split_once("ternary_gemv/").expect("a kernel for ternary rows");
    let sets = doctor["instruction_sets"].as_array().expect("a list");
    let mut names = sets.iter().filter(|set| set["available"] == true).filter_map(|set| set["name"].as_str());
    let runs = |name: &str| variant.starts_with(&format!("{name},"));
    assert!(names.any(|name| runs(name) && (name != "scalar" || isa == "scalar")), "{}", explained.err);
    let demo = start(&["demo", "-p", "Capital of Greece?"]).expect(0);
    assert!(demo.out.ends_with("The capital of Greece is Athens.\n"), "{}", demo.out);
    assert_eq!(logits(start, "auto"), LOGITS, "with {isa}");
}

#[test]
fn logits_and_converted_weights_are_those_of_every_machine() {
    let start: Start<'_> = &|args| run(args);
    assert_eq!(logits(start, "scalar"), LOGITS);
    let chosen = run(["doctor", "--json"]).expect(0).json()["chosen"].clone();
    let chosen = chosen.as_str().expect("a name");
    check(start, chosen);
    let said = run(["doctor"]).expect(0).out;
    assert!(said.contains(&format!("{chosen}: available, taken unless")), "{said}");

    let listed = run(["inspect", tiny().to_str().expect("a plain path"), "--json"]).expect(0).json();
    let offset = listed["tensors"][0]["offset"].as_u64().expect("an offset") as usize;
    let file = std::fs::read(tiny()).expect("read");
    assert_eq!(xxh3_128(&file[offset..]), TENSORS, "{:#034x}", xxh3_128(&file[offset..]));
}

#[test]
fn kernels_are_measured_once_and_what_was_chosen_is_kept() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let model = tiny().to_str().expect("a plain path");
    let explain = |more: &[&str]| {
        let mut command = samara();
        command.env(CACHES, cache.path());
        command.args(["run", model, "--raw", "-p", "a", "--max-tokens", "1", "--explain"]).args(more);
        finish(&mut command).expect(0).err
    };
    explain(&[]);
    let folder = cache.path().join("samara").join("kernels");
    let files: Vec<_> =
        std::fs::read_dir(&folder).expect("kept").map(|entry| entry.expect("listed").path()).collect();
    let [file] = &files[..] else { panic!("one file for the model: {files:?}") };
    let kept = std::fs::read_to_string(file).expect("text");
    // What is kept is taken: the definition would not be chosen where there is anything else.
    let stored: serde_json::Value = serde_json::from_str(&kept).expect("JSON");
    let first =
        stored["kernels"].as_object().expect("by shape").iter().find(|(shape, _)| shape.contains("layer"));
    let of_layer = first.expect("layers").1.as_array().expect("a list");
    let gemv = of_layer
        .iter()
        .filter_map(|id| id.as_str())
        .find(|id| id.starts_with("ternary_gemv/"))
        .expect("gemv");
    std::fs::write(file, kept.replace(gemv, "ternary_gemv/scalar")).expect("written");
    assert!(explain(&[]).contains("ternary_gemv/scalar,"), "the choice that was kept");
    assert!(
        explain(&["--isa", gemv.split_once('/').expect("a variant").1]).contains(gemv),
        "--isa goes before it"
    );
    // What does not fit this machine or is damaged is measured again.
    for damaged in [
        kept.replace(gemv, "ternary_gemv/avx513"),
        kept.replace("\"cpu\": \"", "\"cpu\": \"Other "),
        kept[1..].to_owned(),
    ] {
        std::fs::write(file, damaged).expect("written");
        explain(&[]);
        let again = std::fs::read_to_string(file).expect("text");
        assert!(
            serde_json::from_str::<serde_json::Value>(&again)
                .is_ok_and(|again| again["cpu"] == stored["cpu"]),
            "{again}"
        );
        assert!(!again.contains("avx513"), "{again}");
    }
}

#[test]
fn an_instruction_set_that_is_not_there_is_refused() {
    let model = tiny().to_str().expect("a plain path");
    let ask = |isa: &str| run(["run", model, "-p", "hi", "--max-tokens", "1", "--isa", isa]);
    assert!(ask("avx513").expect(2).error().contains("known are scalar, avx2, avx-vnni"));
    ask("auto").expect(0);
    let doctor = run(["doctor", "--json"]).expect(0).json();
    for isa in doctor["instruction_sets"].as_array().expect("a list") {
        let name = isa["name"].as_str().expect("a name");
        if isa["available"] == true {
            ask(name).expect(0);
        } else {
            assert!(ask(name).expect(2).error().contains("use scalar"), "{name}");
        }
    }
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod old {
    use std::process::Command;

    use super::{Start, check};
    use crate::program::{Ran, clean, finish, program, skip, tiny};

    const EMULATOR: &str = "qemu-x86_64-static";

    /// Each CPU, the kernels it must run, and whether `doctor` must see AVX and FMA.
    const CPUS: [(&str, &str, [bool; 2]); 4] = [
        ("Nehalem", "scalar", [false, false]),
        ("Haswell", "avx2", [true, true]),
        ("Skylake-Server", "avx2", [true, true]),
        // Reports AVX2 and AVX-512, and that the operating system saves no register of theirs.
        ("Skylake-Server,x-force-features=on,-xsave", "scalar", [false, false]),
    ];

    fn emulate(cpu: &str, args: &[&str]) -> Ran {
        let mut command = Command::new(EMULATOR);
        clean(&mut command).args(["-cpu", cpu]).args(program()).args(args);
        // Without one the program starts itself again, and not in the emulator.
        finish(command.env("XDG_RUNTIME_DIR", "/nonexistent"))
    }

    /// Whether x86-64 can be emulated here; another machine that is emulated already has no old CPUs.
    fn possible() -> bool {
        if program().len() > 1 {
            println!("skipped: optional: old CPUs are emulated by a program of this machine");
            return false;
        }
        let there = Command::new(EMULATOR).arg("--version").output().is_ok();
        if !there {
            skip(&format!("there is no {EMULATOR}"));
        }
        there
    }

    #[test]
    fn old_cpus_run_the_model_and_compute_the_same() {
        if !possible() {
            return;
        }
        for (cpu, isa, [avx, fma]) in CPUS {
            let start: Start<'_> = &|args| emulate(cpu, args);
            let doctor = start(&["doctor", "--json"]).expect(0).json();
            let features = doctor["machine"]["features"].as_array().expect("features");
            let has = |name: &str| features.iter().any(|feature| feature == name);
            // A run that had left the emulator would show this machine's on Nehalem.
            assert_eq!([has("avx"), has("fma"), has("avx512f")], [avx, fma, false], "{cpu}: {features:?}");
            check(start, isa);
        }
    }

    #[test]
    fn kernels_that_an_old_cpu_lacks_are_refused() {
        if !possible() {
            return;
        }
        let model = tiny().to_str().expect("a plain path");
        for command in ["run", "ppl", "bench"] {
            let more: &[&str] = match command {
                "run" => &["-p", "hi"],
                "ppl" => &["--file", model],
                _ => &[],
            };
            let args = [[command, model, "--isa", "avx2"].as_slice(), more].concat();
            let refused = emulate("Nehalem", &args).expect(2);
            assert!(refused.error().contains("cannot run avx2 kernels"), "{}", refused.err);
            assert!(refused.error().contains("use scalar"), "{}", refused.err);
        }
    }
}
