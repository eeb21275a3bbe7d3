//! Ctrl-C in the middle of a conversion, a demo, logits and an answer.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use crate::{
    interruption::{checkpoint, endless, start_conversion, undisturbed, wait_for},
    program::{Ran, convert, folder, part_of, plain, run, samara, tiny},
};

fn signal(child: &Child, name: &str) {
    // `kill` is part of every shell, and not every system has it as a program.
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).status();
    assert!(status.expect("a shell").success());
}

#[test]
fn an_interrupted_conversion_says_how_to_go_on() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    let child = start_conversion(&out);
    wait_for(&part_of(&out));
    signal(&child, "INT");
    let stopped = Ran::from(child.wait_with_output().expect("it ends")).expect(130);
    let again = format!("-o {} -t 1 --quiet --resume", out.display());
    assert!(stopped.error().contains(&again), "{}", stopped.err);
    assert!(!out.exists() && part_of(&out).exists());
    convert(checkpoint(), &out, &["--resume"]).expect(0);
    assert!(fs::read(&out).expect("read") == undisturbed(dir.path()));
    // Another checkpoint does not continue this one.
    let other = dir.path().join("other.samara");
    let child = start_conversion(&other);
    wait_for(&part_of(&other));
    signal(&child, "INT");
    Ran::from(child.wait_with_output().expect("it ends")).expect(130);
    let stale = convert(&crate::program::fixture("tiny-maple-2bit"), &other, &["--resume"]).expect(3);
    assert!(stale.error().contains("cannot resume"), "{}", stale.err);
}

#[test]
fn the_command_that_goes_on_can_be_typed() {
    let dir = folder();
    // Everything that a shell would change, and everything that a resumed conversion is bound to.
    let place = dir.path().join("it's $HOME `id` \\");
    fs::create_dir(&place).expect("a folder");
    let out = place.join("-m;\"*.samara");
    let interrupted = |more: &[&str]| {
        let mut command = samara();
        command.arg("convert").arg(checkpoint()).arg("-o").arg(&out).args(["--window", "17", "-t", "1"]);
        command.args(["--name=-it's $HOME", "--license", "a b", "--quiet"]).args(more);
        let child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        wait_for(&part_of(&out));
        signal(&child, "INT");
        Ran::from(child.wait_with_output().expect("it ends")).expect(130)
    };
    crate::program::shell(interrupted(&["--source-revision", "r"]).hint("to go on: ")).expect(0);
    let value = |key: &str| run(["inspect", plain(&out), "--metadata", key]).expect(0).out;
    assert_eq!(value("general.name"), "-it's $HOME\n");
    assert_eq!((value("model.window").as_str(), value("general.source.revision").as_str()), ("17\n", "r\n"));
    // A file that was to be replaced is in the way of going on.
    let stopped = interrupted(&["--force"]);
    assert!(!stopped.error().contains("to go on"), "{}", stopped.err);
    crate::program::shell(stopped.hint("to start over: ")).expect(0);
    assert!(!part_of(&out).exists());
}

#[test]
fn an_interrupted_demo_ends_with_130() {
    let dir = folder();
    for line in ["1. ", "3. "] {
        let mut command = samara();
        command.args(["demo", "-t", "1"]).env("TMPDIR", dir.path());
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut said = String::new();
        while !said.starts_with(line) {
            said.clear();
            assert!(stderr.read_line(&mut said).expect("text") > 0, "it ended early");
        }
        signal(&child, "INT");
        Ran::from(child.wait_with_output().expect("it ends")).expect(130);
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0, "nothing is left");
    }
}

#[test]
fn interrupted_logits_leave_nothing() {
    let dir = folder();
    let text = dir.path().join("t.txt");
    fs::write(&text, "The capital of Greece is Athens. ".repeat(2000)).expect("written");
    let place = dir.path().join("place");
    fs::create_dir(&place).expect("a folder");
    let files = || fs::read_dir(&place).expect("a folder").count();
    let mut command = samara();
    command.arg("ppl").arg(tiny()).args(["--device", "reference", "--file"]).arg(&text);
    command.arg("--save-logits").arg(place.join("saved")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("the program starts");
    let started = Instant::now();
    while files() == 0 {
        assert!(started.elapsed() < Duration::from_secs(60), "no file came");
        sleep(Duration::from_millis(1));
    }
    sleep(Duration::from_millis(200));
    signal(&child, "INT");
    assert_eq!(Ran::from(child.wait_with_output().expect("it ends")).expect(130).out, "");
    assert_eq!(files(), 0);
}

#[test]
fn ctrl_c_stops_an_answer_and_keeps_what_was_said() {
    let mut child = endless(&[]).spawn().expect("the program starts");
    let mut stdout = child.stdout.take().expect("a pipe");
    let mut first = [0; 16];
    stdout.read_exact(&mut first).expect("some text");
    signal(&child, "INT");
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).expect("text");
    let ran = Ran::from(child.wait_with_output().expect("it ends")).expect(130);
    assert!(rest.ends_with('\n') && ran.err.contains("stopped"), "{rest:?} {}", ran.err);
}

#[test]
fn ctrl_c_leaves_valid_json() {
    let mut child = endless(&["--json", "--explain"]).spawn().expect("the program starts");
    // The kernels are named just before the answer begins.
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("on reference") {
        line.clear();
        assert!(stderr.read_line(&mut line).expect("text") > 0, "it ended early");
    }
    sleep(Duration::from_millis(200));
    signal(&child, "INT");
    let ran = Ran::from(child.wait_with_output().expect("it ends")).expect(130);
    assert_eq!(ran.json()["finish_reason"], "cancelled");
}
