//! A conversion that is killed, a reader that goes away, a file that is cut, arguments that are no text.

use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use crate::program::{Ran, convert, finish, folder, part_of, plain, run, samara, tiny};

/// A checkpoint that takes a moment to convert, made once.
pub(crate) fn checkpoint() -> &'static Path {
    static CHECKPOINT: OnceLock<PathBuf> = OnceLock::new();
    CHECKPOINT.get_or_init(|| {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interrupted");
        let _ = fs::remove_dir_all(&path);
        let sizes = ["--hidden-size", "512", "--n-layers", "12", "--n-experts", "24", "--expert-size", "256"];
        run(["synth", "-o", plain(&path), "--layout", "hf", "--quiet"].iter().chain(&sizes)).expect(0);
        path
    })
}

pub(crate) fn start_conversion(out: &Path) -> Child {
    let mut command = samara();
    command.arg("convert").arg(checkpoint()).arg("-o").arg(out).args(["-t", "1", "--quiet"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts")
}

/// Waits until the unfinished file is there.
pub(crate) fn wait_for(path: &Path) {
    let started = Instant::now();
    while !path.exists() {
        assert!(started.elapsed() < Duration::from_secs(60), "{} never came", path.display());
        sleep(Duration::from_millis(1));
    }
}

/// The bytes of an uninterrupted conversion.
pub(crate) fn undisturbed(dir: &Path) -> Vec<u8> {
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
        child.kill().expect("its own child");
        let killed = !child.wait().expect("it ends").success();
        assert!(killed || out.exists(), "it was killed, or had ended well before that");
        if !out.exists() && part_of(&out).exists() {
            halfway += 1;
            let len = fs::metadata(part_of(&out)).expect("there").len();
            let ran = run(["run", plain(&part_of(&out)), "-p", "hi", "--max-tokens", "1"]);
            // Sealed, and read back before it gets its name: only then is it a model.
            if ran.code == Some(0) {
                assert!(fs::read(part_of(&out)).expect("read") == want, "half a file was run");
            } else {
                let refused = ran.expect(3);
                // Between its making and its being sized it is empty.
                let say = if len == 0 { "the file is empty" } else { "samara convert --resume" };
                assert!(refused.error().contains(say), "{}", refused.err);
            }
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

/// A model that talks until its context is full: it may not end its turn, and the reference takes its time.
pub(crate) fn endless(more: &[&str]) -> Command {
    let mut command = samara();
    command.arg("run").arg(tiny()).args(["-p", "Explain a samara.", "--temp", "0", "--device", "reference"]);
    command.args(["--logit-bias", "3992=-inf", "--logit-bias", "3990=-inf"]).args(more);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
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

#[cfg(unix)]
fn no_text() -> OsString {
    std::os::unix::ffi::OsStringExt::from_vec(b"\xff\xfe".to_vec())
}

/// Half of a character of two units.
#[cfg(windows)]
fn no_text() -> OsString {
    std::os::windows::ffi::OsStringExt::from_wide(&[0x61, 0xd83e, 0x62])
}

#[test]
fn arguments_that_are_no_text_are_refused_without_a_panic() {
    let bad = &no_text();
    assert!(bad.to_str().is_none());
    let check = |args: &[&std::ffi::OsStr], code: i32| {
        finish(samara().args(args)).expect(code);
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
