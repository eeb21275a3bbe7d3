//! Ctrl-C, kill -9 and a reader that goes away.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::{ffi::OsStrExt, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use crate::program::{Ran, convert, folder, part_of, run, samara, tiny};

const SIGKILL: i32 = 9;

fn plain(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

fn signal(child: &Child, name: &str) {
    // `kill` is part of every shell, and not every system has it as a program.
    let status = Command::new("sh").args(["-c", &format!("kill -{name} {}", child.id())]).status();
    assert!(status.expect("a shell").success());
}

/// A checkpoint that takes a moment to convert, made once.
fn checkpoint() -> &'static Path {
    static CHECKPOINT: OnceLock<PathBuf> = OnceLock::new();
    CHECKPOINT.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interrupted");
        let _ = fs::remove_dir_all(&path);
        let sizes = ["--hidden-size", "512", "--n-layers", "12", "--n-experts", "24", "--expert-size", "256"];
        run(["synth", "-o", plain(&path), "--layout", "hf", "--quiet"].iter().chain(&sizes)).expect(0);
        path
    })
}

fn start_conversion(out: &Path) -> Child {
    let mut command = samara();
    command.arg("convert").arg(checkpoint()).arg("-o").arg(out).args(["-t", "1", "--quiet"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// Waits until the unfinished file is there.
fn wait_for(path: &Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < Duration::from_secs(60), "{} never came", path.display());
        sleep(Duration::from_millis(1));
    }
}

/// The bytes of an uninterrupted conversion.
fn undisturbed(dir: &Path) -> Vec<u8> {
    let whole = dir.join("whole.samara");
    convert(checkpoint(), &whole, &["--quiet"]).expect(0);
    fs::read(&whole).expect("read")
}

#[test]
fn a_killed_conversion_leaves_no_file_and_can_be_resumed() {
    let dir = folder();
    let want = undisturbed(dir.path());
    let mut halfway = 0;
    for (i, delay) in [None, Some(0), Some(5), Some(40), Some(120), Some(300)].into_iter().enumerate() {
        let out = dir.path().join(format!("{i}.samara"));
        let mut child = start_conversion(&out);
        if let Some(delay) = delay {
            wait_for(&part_of(&out));
            sleep(Duration::from_millis(delay));
        }
        signal(&child, "KILL");
        let killed = child.wait().expect("it ends").signal() == Some(SIGKILL);
        assert!(killed || out.exists(), "it was killed, or had ended well before that");
        if !out.exists() && part_of(&out).exists() {
            halfway += 1;
            let refused = run(["run", plain(&part_of(&out)), "-p", "hi"]).expect(3);
            // Between its making and its being sized it is empty.
            let len = fs::metadata(part_of(&out)).expect("there").len();
            let say = if len == 0 { "the file is empty" } else { "samara convert --resume" };
            assert!(refused.error().contains(say), "{}", refused.err);
            let again = convert(checkpoint(), &out, &[]).expect(2);
            assert!(again.error().contains("--resume") && again.error().contains("--force"), "{}", again.err);
        }
        if !out.exists() {
            convert(checkpoint(), &out, &["--resume", "--quiet"]).expect(0);
        }
        assert!(fs::read(&out).expect("read") == want, "killed after {delay:?} ms, resumed to other bytes");
        assert!(!part_of(&out).exists());
    }
    assert!(halfway >= 2, "only {halfway} conversions were killed halfway");
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

/// A model that talks until its context is full: it may not end its turn, and the reference takes its time.
fn endless(more: &[&str]) -> Command {
    let mut command = samara();
    command.arg("run").arg(tiny()).args(["-p", "Explain a samara.", "--temp", "0", "--device", "reference"]);
    command.args(["--logit-bias", "3992=-inf", "--logit-bias", "3990=-inf"]).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
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

#[test]
fn a_file_that_was_read_may_be_cut_while_it_is_used() {
    let dir = folder();
    let model = dir.path().join("m.samara");
    fs::copy(tiny(), &model).expect("copied");
    let mut command = samara();
    command.arg("run").arg(&model).args([
        "-p",
        "462+520=",
        "--temp",
        "0",
        "--device",
        "reference",
        "--no-mmap",
        "--explain",
    ]);
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("on reference") {
        line.clear();
        assert!(stderr.read_line(&mut line).expect("text") > 0, "it ended early");
    }
    fs::File::options().write(true).open(&model).and_then(|file| file.set_len(0)).expect("cut");
    let ran = Ran::from(child.wait_with_output().expect("it ends")).expect(0);
    assert!(ran.out.ends_with("462 + 520 = 982\n"), "{}", ran.out);
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let mut run = endless(&["--quiet"]);
    let mut inspect = samara();
    inspect.arg("inspect").arg(tiny()).arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped());
    for command in [&mut run, &mut inspect] {
        let mut child = command.spawn().expect("the program starts");
        let mut stdout = child.stdout.take().expect("a pipe");
        stdout.read_exact(&mut [0; 1]).expect("a byte");
        drop(stdout);
        let ran = Ran::from(child.wait_with_output().expect("it ends")).expect(0);
        assert_eq!(ran.err, "");
    }
}

#[test]
fn arguments_that_are_no_text_are_refused_without_a_panic() {
    let bad = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let check = |args: &[&std::ffi::OsStr], code: i32| {
        let ran: Ran = samara().args(args).output().expect("the program starts").into();
        ran.expect(code);
    };
    let model = tiny().as_os_str();
    check(&["run".as_ref(), model, "-p".as_ref(), bad], 2);
    check(&["run".as_ref(), model, "--stop".as_ref(), bad], 2);
    check(&["run".as_ref(), bad, "-p".as_ref(), "hi".as_ref()], 3);
    check(&["run".as_ref(), model, "-f".as_ref(), bad], 3);
    check(&["inspect".as_ref(), bad], 3);
    check(&["convert".as_ref(), bad, "-o".as_ref(), bad], 3);
    check(&[bad], 2);
}
