//! Interruptions: whatever happens, the final name means a finished file, and resuming gives the same bytes.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::*;
use samara_converter::{Error, Options, Report, convert, plan};
use samara_format::{Access, SamaraFile, part_path};

/// Converts until `limit` source bytes were used, then cancels.
fn interrupted(model: &Path, out: &Path, limit: u64, options: &Options) -> Result<Report, Error> {
    let cancel = AtomicBool::new(false);
    let plan = plan(model, options).unwrap();
    convert(&plan, out, options, &StopAfter::new(limit, &cancel), &cancel)
}

fn resume() -> Options {
    Options { resume: true, ..Options::default() }
}

fn journal(out: &Path) -> std::path::PathBuf {
    let mut name = part_path(out).into_os_string();
    name.push(".journal");
    name.into()
}

#[test]
fn any_number_of_threads_gives_the_same_bytes() {
    for name in [TINY, STRESS_MLX, STRESS_HF] {
        let copy = Copy::of(name);
        let bytes = |threads: usize| {
            let out = copy.out(&format!("{threads}.samara"));
            convert_to(&copy.model(), &out, &Options { threads, ..Options::default() }).unwrap();
            std::fs::read(out).unwrap()
        };
        let one = bytes(1);
        assert!(one == bytes(3) && one == bytes(8), "{name}");
    }
}

#[test]
fn an_interrupted_conversion_resumes_to_the_same_bytes() {
    for name in [TINY, STRESS_HF] {
        let copy = Copy::of(name);
        let whole = copy.out("whole.samara");
        let report = convert_to(&copy.model(), &whole, &Options::default()).unwrap();
        let whole = std::fs::read(whole).unwrap();
        for share in [0, 1, 3, 5, 8, 9] {
            let out = copy.out("m.samara");
            let error =
                interrupted(&copy.model(), &out, report.source_bytes * share / 10, &Options::default());
            assert!(matches!(&error, Err(Error::Cancelled { kept: Some(_) })), "{share}: {error:?}");
            assert!(!out.exists() && part_path(&out).exists() && journal(&out).exists(), "{share}");
            let message = SamaraFile::open(part_path(&out), Access::Read).unwrap_err().to_string();
            assert!(message.contains("unfinished"), "{message}");

            let resumed = convert_to(&copy.model(), &out, &resume()).unwrap();
            assert!(std::fs::read(&out).unwrap() == whole, "{name} at {share}");
            assert_eq!(resumed.counts, report.counts);
            assert!(!part_path(&out).exists() && !journal(&out).exists());
            if share >= 5 {
                assert!(resumed.resumed_tensors > 0, "{name} at {share}");
            }
            std::fs::remove_file(out).unwrap();
        }
    }
}

#[test]
fn resuming_redoes_the_tensor_that_was_cut_and_no_more() {
    // Source bytes of the largest tensors, a layer's experts: 2 bits and 16 bits a weight, and scales.
    for (name, largest) in [(TINY, 32 * (3 * 128 * 256 / 4 + 2 * 512)), (STRESS_HF, 12 * 3 * 64 * 128 * 2)] {
        let copy = Copy::of(name);
        let planned = plan(&copy.model(), &Options::default()).unwrap();
        for share in [2, 5, 8] {
            let out = copy.out("m.samara");
            let run = |limit: u64, options: &Options| {
                let cancel = AtomicBool::new(false);
                let watch = StopAfter::new(limit, &cancel);
                let result = convert(&planned, &out, options, &watch, &cancel);
                (result.is_ok(), watch.to_do_and_done())
            };
            let (finished, (to_do, done)) =
                run(planned.summary().source_bytes * share / 10, &Options::default());
            assert!(!finished && done < to_do, "{name} at {share}");
            let (finished, (left, done_now)) = run(u64::MAX, &resume());
            assert!(finished && done_now == left, "{name} at {share}");
            let redone = left - (to_do - done);
            assert!(redone <= largest, "{name} at {share}: {redone} bytes were converted again");
            std::fs::remove_file(out).unwrap();
        }
    }
}

#[test]
fn two_interruptions_in_a_row_lose_nothing() {
    let copy = Copy::of(TINY);
    let out = copy.out("m.samara");
    let total = plan(&copy.model(), &Options::default()).unwrap().summary().source_bytes;
    interrupted(&copy.model(), &out, total / 3, &Options::default()).unwrap_err();
    let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
    let first = lines(&journal(&out));
    interrupted(&copy.model(), &out, total * 2 / 3, &resume()).unwrap_err();
    assert!(lines(&journal(&out)) > first);
    // A power cut in the middle of a journal line loses that tensor, not the file.
    let text = std::fs::read(journal(&out)).unwrap();
    std::fs::write(journal(&out), &text[..text.len() - 20]).unwrap();
    convert_to(&copy.model(), &out, &resume()).unwrap();
    let whole = copy.out("whole.samara");
    convert_to(&copy.model(), &whole, &Options::default()).unwrap();
    assert!(std::fs::read(out).unwrap() == std::fs::read(whole).unwrap());
}

#[test]
fn a_changed_source_or_option_cannot_be_resumed() {
    let check = |change: fn(&Copy), options: Options, wanted: &str| {
        let copy = Copy::of(STRESS_HF);
        let out = copy.out("m.samara");
        interrupted(&copy.model(), &out, 3_000_000, &Options::default()).unwrap_err();
        change(&copy);
        let part = std::fs::read(part_path(&out)).unwrap();
        let error =
            convert_to(&copy.model(), &out, &Options { resume: true, ..options.clone() }).unwrap_err();
        assert!(matches!(&error, Error::StaleJournal { reason, .. } if reason.contains(wanted)), "{error}");
        assert!(std::fs::read(part_path(&out)).unwrap() == part && !out.exists());
        convert_to(&copy.model(), &out, &Options { force: true, ..options }).unwrap();
    };
    let flip =
        |copy: &Copy| copy.edit_tensor("model.layers.3.self_attn.v_proj.weight", |bytes| bytes.fill(0));
    check(flip, Options::default(), "changed since it was begun: model-00003-of-00003.safetensors");
    let template = |copy: &Copy| std::fs::write(copy.file("chat_template.jinja"), "x").unwrap();
    check(template, Options::default(), "chat_template.jinja");
    check(|_| {}, Options { window: Some(17), ..Options::default() }, "another window");
    check(|_| {}, Options { ternarize: true, ..Options::default() }, "another ternarize");
    check(|_| {}, Options { name: Some("x".to_owned()), ..Options::default() }, "another name");
}

#[test]
fn nothing_is_overwritten_unasked() {
    let copy = Copy::of(STRESS_MLX);
    let out = copy.out("m.samara");
    std::fs::write(&out, "precious").unwrap();
    for options in [Options::default(), resume()] {
        assert!(matches!(copy.convert(&options), Err(Error::OutputExists { .. })));
    }
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    let force = Options { force: true, ..Options::default() };
    interrupted(&copy.model(), &out, 100_000, &force).unwrap_err();
    assert_eq!(std::fs::read(&out).unwrap(), b"precious", "replaced only when the new file is complete");
    copy.convert(&Options { resume: true, ..force.clone() }).unwrap();
    assert!(std::fs::read(&out).unwrap() != b"precious");

    std::fs::remove_file(&out).unwrap();
    interrupted(&copy.model(), &out, 100_000, &Options::default()).unwrap_err();
    assert!(matches!(copy.convert(&Options::default()), Err(Error::UnfinishedExists { .. })));
    copy.convert(&force).unwrap();
    assert!(!part_path(&out).exists() && !journal(&out).exists());

    std::fs::create_dir(copy.out("folder")).unwrap();
    let error = convert_to(&copy.model(), &copy.out("folder"), &force);
    assert!(matches!(error, Err(Error::Format(samara_format::Error::NotReplaceable { .. }))));
}

#[test]
fn resuming_without_anything_to_resume_converts() {
    let copy = Copy::of(STRESS_MLX);
    let report = copy.convert(&resume()).unwrap();
    assert_eq!(report.resumed_tensors, 0);
    let out = copy.out("other.samara");
    std::fs::write(part_path(&out), [0; 100]).unwrap();
    assert_eq!(convert_to(&copy.model(), &out, &resume()).unwrap().resumed_tensors, 0);
    assert!(std::fs::read(out).unwrap() == std::fs::read(copy.out("m.samara")).unwrap());
}

#[test]
fn a_cancelled_hash_leaves_nothing_behind() {
    let copy = Copy::of(STRESS_MLX);
    let plan = plan(&copy.model(), &Options::default()).unwrap();
    let out = copy.out("m.samara");
    let error = convert(&plan, &out, &Options::default(), &samara_converter::Quiet, &AtomicBool::new(true));
    assert!(matches!(error, Err(Error::Cancelled { kept: None })));
    assert!(!out.exists() && !part_path(&out).exists() && !journal(&out).exists());
}

#[test]
fn a_source_that_changes_meanwhile_is_noticed() {
    struct Touch<'a>(&'a Copy);
    impl samara_converter::Progress for Touch<'_> {
        fn phase(&self, name: &'static str, _total: u64) {
            if name == "convert" {
                let path = self.0.file("model-00001-of-00002.safetensors");
                let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
                file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
            }
        }
        fn advance(&self, _bytes: u64) {}
        fn message(&self, _text: &str) {}
    }
    let copy = Copy::of(STRESS_MLX);
    let plan = plan(&copy.model(), &Options::default()).unwrap();
    let out = copy.out("m.samara");
    let error = convert(&plan, &out, &Options::default(), &Touch(&copy), &AtomicBool::new(false));
    assert!(
        matches!(error, Err(Error::SourceChanged { file }) if file == "model-00001-of-00002.safetensors")
    );
    assert!(!out.exists());
}
