//! Where the output goes: what may be replaced, who may write, and when the name changes hands.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::checkpoint::*;
use samara_converter::{Error, Options, Progress, check_target, convert, plan};
use samara_format::{Error as FormatError, part_path};

fn force() -> Options {
    Options { force: true, ..Options::default() }
}

fn resume() -> Options {
    Options { resume: true, ..Options::default() }
}

fn journal(out: &Path) -> PathBuf {
    part_path(&part_path(out)).with_extension("journal")
}

/// Calls a function at the start of each phase.
struct AtPhase<F: Fn(&str) + Sync>(F);

impl<F: Fn(&str) + Sync> Progress for AtPhase<F> {
    fn phase(&self, name: &'static str, _total: u64) {
        self.0(name);
    }
    fn advance(&self, _bytes: u64) {}
    fn message(&self, _text: &str) {}
}

/// Asserts that `out` is refused, by the check alone and by a conversion, and before any work.
fn refused_for(copy: &Copy, out: &Path, options: &Options, wanted: &str) {
    let plan = plan(&copy.model(), options).unwrap();
    let early = AtPhase(|name| panic!("phase {name} of a conversion to {}", out.display()));
    let never = AtomicBool::new(false);
    let errors = [
        check_target(&plan, out, options).map(|()| None),
        convert(&plan, out, options, &early, &never).map(Some),
    ];
    for error in errors {
        let error = error.expect_err(&format!("{} should be refused: {wanted}", out.display()));
        let variant = format!("{error:?}");
        assert!(variant.contains(wanted), "{}: {wanted} is not in {variant}: {error}", out.display());
    }
}

/// Everything under a folder: names, kinds, bytes of files.
fn contents(dir: &Path) -> Vec<(PathBuf, String, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = path.symlink_metadata().unwrap().file_type();
        let bytes = kind.is_file().then(|| std::fs::read(&path).unwrap());
        found.push((path.clone(), format!("{kind:?}"), bytes));
        if kind.is_dir() {
            found.extend(contents(&path));
        }
    }
    found.sort();
    found
}

#[test]
fn only_regular_files_are_replaced_and_only_leftovers_discarded() {
    type Make = fn(&Path);
    let folder: Make = |path| std::fs::create_dir(path).unwrap();
    let text: Make = |path| std::fs::write(path, "precious").unwrap();
    let long_text: Make = |path| std::fs::write(path, "precious ".repeat(100)).unwrap();
    let almost: Make = |path| std::fs::write(path, b"\x89SAMARAx").unwrap();
    let mut rows: Vec<(&str, Make, &str)> = vec![
        ("m.samara", folder, "NotReplaceable"),
        ("m.samara.part", folder, "ForeignPart"),
        ("m.samara.part", text, "ForeignPart"),
        ("m.samara.part", long_text, "ForeignPart"),
        ("m.samara.part", almost, "ForeignPart"),
        ("m.samara.part.journal", folder, "ForeignJournal"),
        ("m.samara.part.journal", text, "ForeignJournal"),
    ];
    for make in odd_things() {
        rows.push(("m.samara", make, "NotReplaceable"));
        rows.push(("m.samara.part", make, "ForeignPart"));
        rows.push(("m.samara.part.journal", make, "ForeignJournal"));
    }
    for (name, make, wanted) in rows {
        let copy = Copy::of(STRESS_MLX);
        make(&copy.out(name));
        let before = contents(&copy.out(""));
        for options in [force(), resume()] {
            refused_for(&copy, &copy.out("m.samara"), &options, wanted);
        }
        assert!(contents(&copy.out("")) == before, "{name}, {wanted}: nothing may change");
    }
}

#[cfg(unix)]
fn link_to_file(path: &Path) {
    let file = path.with_file_name("linked");
    std::fs::write(&file, "precious").unwrap();
    std::os::unix::fs::symlink(file, path).unwrap();
}

#[cfg(unix)]
fn link_to_nothing(path: &Path) {
    std::os::unix::fs::symlink("nothing", path).unwrap();
}

#[cfg(unix)]
fn socket(path: &Path) {
    std::os::unix::net::UnixListener::bind(path).unwrap();
}

/// Things that are no files.
#[cfg(unix)]
fn odd_things() -> Vec<fn(&Path)> {
    vec![link_to_file, link_to_nothing, socket]
}

#[cfg(not(unix))]
fn odd_things() -> Vec<fn(&Path)> {
    Vec::new()
}

#[test]
fn the_source_is_never_the_output() {
    let copy = Copy::of(TINY);
    std::fs::write(copy.file("tokenizer_config.json"), "{}").unwrap();
    let before = contents(&copy.model());
    assert!(before.len() >= 7, "{before:?}");
    for (source, ..) in &before {
        refused_for(&copy, source, &force(), "OutputIsSource");
        let plan = plan(&copy.model(), &force()).unwrap();
        let message = check_target(&plan, source, &force()).unwrap_err().to_string();
        let name = source.file_name().unwrap().to_str().unwrap();
        assert!(message.contains(&format!("is the checkpoint's own {name}")), "{message}");
        let round = copy.model().join("..").join("model").join(source.file_name().unwrap());
        refused_for(&copy, &round, &Options::default(), "OutputIsSource");
    }
    assert!(contents(&copy.model()) == before);
}

/// In a download cache the checkpoint's files are links, and what they lead to may have any name.
#[cfg(unix)]
#[test]
fn what_the_source_links_to_is_never_the_output() {
    for blob in ["m.samara", "m.samara.part", "m.samara.part.journal"] {
        let copy = Copy::of(STRESS_MLX);
        std::fs::rename(copy.file("chat_template.jinja"), copy.out(blob)).unwrap();
        std::os::unix::fs::symlink(copy.out(blob), copy.file("chat_template.jinja")).unwrap();
        let before = contents(&copy.out(""));
        refused_for(&copy, &copy.out("m.samara"), &force(), "OutputIsSource");
        assert!(contents(&copy.out("")) == before, "{blob}");
    }
}

#[test]
fn the_output_needs_a_name_and_a_folder() {
    let copy = Copy::of(STRESS_MLX);
    let plan = plan(&copy.model(), &Options::default()).unwrap();
    let error = |out: &Path| check_target(&plan, out, &Options::default()).unwrap_err();
    assert!(matches!(error(Path::new("")), Error::Format(FormatError::NotReplaceable { .. })));
    assert!(matches!(error(&copy.out("..")), Error::Format(FormatError::NotReplaceable { .. })));
    refused_for(&copy, &copy.out("no/such/m.samara"), &Options::default(), "NoOutputFolder");
    assert!(error(&copy.out("no/such/m.samara")).to_string().contains("no/such"));
    std::fs::write(copy.out("m.samara"), "precious").unwrap();
    refused_for(&copy, &copy.out("m.samara"), &Options::default(), "OutputExists");
    refused_for(&copy, &copy.out("m.samara/x.samara"), &Options::default(), "NoOutputFolder");
    check_target(&plan, &copy.out("m.samara"), &force()).unwrap();
}

#[test]
fn leftovers_of_any_length_are_started_over() {
    let copy = Copy::of(STRESS_MLX);
    let out = copy.out("m.samara");
    for part in [&b""[..], &[0; 10], &[0; 64], &[0; 5000], b"\x89SAM", b"\x89SAMARA\n and more"] {
        std::fs::write(part_path(&out), part).unwrap();
        refused_for(&copy, &out, &Options::default(), "UnfinishedExists");
        copy.convert(&force()).unwrap();
        open(&out);
        assert!(!part_path(&out).exists() && !journal(&out).exists());
        std::fs::remove_file(&out).unwrap();
    }
}

#[test]
fn one_output_has_one_writer() {
    let copy = Copy::of(STRESS_MLX);
    let (out, whole) = (copy.out("m.samara"), copy.out("whole.samara"));
    convert_to(&copy.model(), &whole, &Options::default()).unwrap();
    let phases = Mutex::new(Vec::new());
    let second = AtPhase(|name| {
        phases.lock().unwrap().push(name.to_owned());
        for options in [Options::default(), force(), resume()] {
            refused_for(&copy, &out, &options, "Busy");
        }
        let error = convert_to(&copy.model(), &out, &force()).unwrap_err().to_string();
        assert!(error.contains("another samara is writing") && error.contains("m.samara.part"), "{error}");
    });
    let plan = plan(&copy.model(), &Options::default()).unwrap();
    convert(&plan, &out, &Options::default(), &second, &AtomicBool::new(false)).unwrap();
    assert_eq!(*phases.lock().unwrap(), ["hash", "convert", "verify"]);
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap());
    // The next one finds no lock.
    convert_to(&copy.model(), &out, &force()).unwrap();
}

#[test]
fn a_file_that_reads_back_wrong_never_gets_the_name() {
    let copy = Copy::of(STRESS_MLX);
    let out = copy.out("m.samara");
    std::fs::write(&out, "precious").unwrap();
    let plan = plan(&copy.model(), &force()).unwrap();
    let flip = AtPhase(|name| {
        if name == "verify" {
            let mut bytes = std::fs::read(part_path(&out)).unwrap();
            let last = bytes.iter().rposition(|&byte| byte != 0).unwrap();
            bytes[last] ^= 1;
            std::fs::write(part_path(&out), bytes).unwrap();
        }
    });
    let error = convert(&plan, &out, &force(), &flip, &AtomicBool::new(false)).unwrap_err();
    assert!(matches!(&error, Error::VerifyFailed { part, .. } if *part == part_path(&out)), "{error}");
    assert!(error.to_string().contains("read back wrong"), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    // Still wrong if continued; right if started over.
    let again = convert_to(&copy.model(), &out, &Options { resume: true, ..force() });
    assert!(matches!(again, Err(Error::VerifyFailed { .. })), "{again:?}");
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    copy.convert(&force()).unwrap();
    open(&out);
}

#[test]
fn a_stop_while_reading_back_costs_no_work() {
    let copy = Copy::of(STRESS_MLX);
    let out = copy.out("m.samara");
    std::fs::write(&out, "precious").unwrap();
    let cancel = AtomicBool::new(false);
    let stop = AtPhase(|name| cancel.store(name == "verify", Ordering::Relaxed));
    let plan = plan(&copy.model(), &force()).unwrap();
    let error = convert(&plan, &out, &force(), &stop, &cancel).unwrap_err();
    assert!(matches!(&error, Error::Cancelled { kept: Some(part) } if *part == part_path(&out)), "{error}");
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    let resumed = copy.convert(&Options { resume: true, ..force() }).unwrap();
    assert_eq!(resumed.resumed_tensors, resumed.tensors);
    convert_to(&copy.model(), &copy.out("whole.samara"), &Options::default()).unwrap();
    assert!(std::fs::read(&out).unwrap() == std::fs::read(copy.out("whole.samara")).unwrap());
    assert!(!part_path(&out).exists() && !journal(&out).exists());
}

#[test]
fn the_systems_reason_is_said_once() {
    let cause = std::io::Error::from(std::io::ErrorKind::StorageFull);
    let reason = cause.to_string();
    let error = Error::Io { action: "write", path: "m.samara".into(), cause };
    assert_eq!(error.to_string(), format!("cannot write m.samara: {reason}"));
    assert!(std::error::Error::source(&error).is_none());
}
