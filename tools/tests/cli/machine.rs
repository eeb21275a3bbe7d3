//! What the program takes of the machine: the threads that affinity and quota leave, and of a file what it needs.

use std::{fs, process::Command};

use serde_json::Value;

use crate::program::{
    Ran, clean, convert, finish, folder, on_small_disk, peak_memory, program, run, samara, skip, tiny,
};

/// The CPUs that this process may use.
fn allowed() -> Vec<String> {
    let status = fs::read_to_string("/proc/self/status").expect("the kernel's table");
    let list =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("a list").trim();
    list.split(',')
        .flat_map(|span| {
            let (first, last) = span.split_once('-').unwrap_or((span, span));
            let number = |text: &str| text.parse::<u32>().expect("a number");
            number(first)..=number(last)
        })
        .map(|id| id.to_string())
        .collect()
}

/// Threads that the program would start here, a quota of this machine counted.
fn usable() -> usize {
    let doctor = run(["doctor", "--json"]).expect(0).json();
    doctor["machine"]["usable_threads"].as_u64().expect("a number") as usize
}

/// What the program prints as JSON on these CPUs; `None` where there is no `taskset`.
fn bound_to(cpus: &str, args: &[&str]) -> Option<Value> {
    let mut command = Command::new("taskset");
    let Ok(output) = clean(&mut command).args(["-c", cpus]).args(program()).args(args).output() else {
        skip("there is no `taskset` to set the affinity");
        return None;
    };
    Some(Ran::from(output).expect(0).json())
}

#[test]
fn threads_are_those_that_the_affinity_leaves() {
    let model = tiny().to_str().expect("a plain path");
    let bench = ["bench", model, "-p", "1", "-n", "1", "--repetitions", "1", "--json"];
    let (allowed, usable) = (allowed(), usable());
    // A machine of one core has no other number to show.
    for n in [1, 2].into_iter().filter(|&n| n <= usable) {
        let cpus = allowed[..n].join(",");
        let Some(doctor) = bound_to(&cpus, &["doctor", "--json"]) else { return };
        assert_eq!(doctor["machine"]["usable_threads"], n, "CPUs {cpus}");
        let Some(record) = bound_to(&cpus, &bench) else { return };
        assert_eq!(record["threads"], n, "CPUs {cpus}");
        // A number that was asked for is taken.
        let Some(record) = bound_to(&cpus, &[bench.as_slice(), &["-t", "3"]].concat()) else { return };
        assert_eq!(record["threads"], 3, "CPUs {cpus}");
    }
}

/// A quota of the control group counts, by either version of the kernel's files. They are made up here: setting a real
/// quota takes rights that a test rarely has.
#[test]
fn threads_are_those_that_the_quota_leaves() {
    let threads = |quota: &str| -> Option<u64> {
        let script = format!(
            "v1=$(sed -n 's/^[0-9]*:\\(.*,\\)\\{{0,1\\}}cpu\\(,.*\\)\\{{0,1\\}}:\\///p' /proc/self/cgroup)
             v2=$(sed -n 's/^0:://p' /proc/self/cgroup)
             mount -t tmpfs tmpfs /sys/fs/cgroup || exit 0
             v1=\"/sys/fs/cgroup/cpu/$v1\"; v2=\"/sys/fs/cgroup$v2\"; mkdir -p \"$v1\" \"$v2\"
             echo {quota} > \"$v1/cpu.cfs_quota_us\"; echo 100000 > \"$v1/cpu.cfs_period_us\"
             echo cpu > \"$v2/cgroup.controllers\"; echo {quota} 100000 > \"$v2/cpu.max\"
             samara doctor --json"
        );
        let ran = on_small_disk(1, &script)?;
        let json = ran.out.strip_prefix("mounted\n").expect("the mark of the mount");
        if json.is_empty() {
            skip("there is no /sys/fs/cgroup to put a quota into");
            return None;
        }
        let json: Value = serde_json::from_str(json).unwrap_or_else(|error| panic!("{error}: {ran:?}"));
        json["machine"]["usable_threads"].as_u64()
    };
    // What is made up hides a quota of this machine.
    let all = allowed().len() as u64;
    for (quota, want) in [("100000", 1), ("50000", 1), ("1000000000", all)] {
        let Some(threads) = threads(quota) else { return };
        assert_eq!(threads, want, "{quota} microseconds of 100000");
    }
}

/// A file that is not in memory yet is read where it is needed: the first token touches its experts, not the file.
#[test]
fn the_first_token_does_not_take_the_whole_file() {
    let dir = folder();
    let (checkpoint, model) = (dir.path().join("c"), dir.path().join("m.samara"));
    let sizes = ["--hidden-size", "512", "--expert-size", "512", "--n-experts", "128", "--n-layers", "4"];
    let mut synth = samara();
    synth.arg("synth").arg("-o").arg(&checkpoint).args(["--no-flash", "--n-experts-used", "2", "-q"]);
    finish(synth.args(sizes)).expect(0);
    convert(&checkpoint, &model, &["-q"]).expect(0);
    let bytes = fs::metadata(&model).expect("there").len();
    assert!(bytes > 90 << 20, "{bytes} bytes of model");
    let peak = |more: &[&str]| {
        let mut command = samara();
        command.arg("run").arg(&model).args(["--raw", "-p", "a", "--max-tokens", "1", "-q"]).args(more);
        peak_memory(&mut command)
    };
    let (mapped, whole) = (peak(&[]), peak(&["--no-mmap"]));
    assert!(whole > bytes, "{whole} bytes with all of the file's {bytes}");
    assert!(mapped + bytes / 4 * 3 < whole, "{mapped} bytes mapped, {whole} read, {bytes} of file");
}
