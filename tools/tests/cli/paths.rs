//! Paths as systems have them: longer than old limits, of forms that only Windows knows, names that mean a device, and
//! files that may not be replaced.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::program::{convert, copy_folder, finish, fixture, folder, part_of, plain, run, samara, tiny};

/// Converts the checkpoint to `out`, and has every command that opens a file open it.
fn works(checkpoint: &Path, out: &Path) {
    convert(checkpoint, out, &["--force"]).expect(0);
    let place = out.parent().expect("a folder");
    let (text, saved) = (place.join("t.txt"), place.join("saved"));
    fs::write(&text, "The capital of Greece is Athens. ".repeat(12)).expect("written");
    run(["verify", plain(out)]).expect(0);
    run(["inspect", plain(out)]).expect(0);
    run(["run", plain(out), "-f", plain(&text), "--max-tokens", "1"]).expect(0);
    for force in [[].as_slice(), &["--force"]] {
        let args = ["ppl", plain(out), "--file", plain(&text), "--ctx", "40", "--save-logits", plain(&saved)];
        run(args.iter().chain(force)).expect(0);
    }
    assert!(out.is_file() && saved.is_file() && !part_of(out).exists());
}

/// A folder whose path is longer than the 260 characters that Windows counted on once.
fn deep(dir: &Path) -> PathBuf {
    let place = ["длинное имя ".repeat(6), "b".repeat(100), "c".repeat(100)]
        .iter()
        .fold(dir.to_owned(), |path, name| path.join(name.trim_end()));
    fs::create_dir_all(&place).expect("folders");
    assert!(place.to_str().expect("a plain path").chars().count() > 260);
    place
}

#[test]
fn long_paths_work() {
    let dir = folder();
    let place = deep(dir.path());
    let checkpoint = place.join("checkpoint");
    copy_folder(&fixture("stress-maple-2bit"), &checkpoint);
    works(&checkpoint, &place.join("m.samara"));
    let synthetic = place.join("synthetic");
    run(["synth", "-o", plain(&synthetic), "--quiet"]).expect(0);
    assert!(synthetic.join("config.json").is_file());
}

#[test]
fn a_path_from_the_current_folder_works() {
    let dir = folder();
    copy_folder(&fixture("stress-maple-2bit"), &dir.path().join("checkpoint"));
    let in_folder = |args: &[&str]| finish(samara().current_dir(dir.path()).args(args));
    for out in ["m.samara", "./m.samara", "checkpoint/../m.samara"] {
        in_folder(&["convert", "checkpoint", "-o", out]).expect(0);
        in_folder(&["verify", out]).expect(0);
        fs::remove_file(dir.path().join("m.samara")).expect("there, and nowhere else");
    }
    let refused = in_folder(&["convert", "checkpoint", "-o", "new/"]).expect(2);
    assert!(refused.error().contains("the name of a folder"), "{}", refused.err);
}

/// A file that someone has open stays as it was or is replaced whole.
#[test]
fn a_file_in_use_is_replaced_or_kept() {
    let dir = folder();
    let out = dir.path().join("m.samara");
    fs::copy(tiny(), &out).expect("copied");
    let before = fs::read(&out).expect("read");
    let held = fs::File::open(&out).expect("opens");
    let ran = convert(&fixture("stress-maple-2bit"), &out, &["--force", "--quiet"]);
    // What Windows does depends on its version and the drive.
    if ran.code == Some(0) || !cfg!(windows) {
        ran.expect(0);
    } else {
        let ran = ran.expect(1);
        assert!(ran.error().contains("one of which another program has open"), "{}", ran.err);
        assert!(ran.hint("to go on when nothing uses it any more: ").contains("--resume"), "{}", ran.err);
        assert!(fs::read(&out).expect("read") == before && part_of(&out).is_file());
        drop(held);
        // What it says to do does what it says.
        fs::remove_file(&out).expect("removed");
        convert(&fixture("stress-maple-2bit"), &out, &["--resume"]).expect(0);
    }
    run(["verify", plain(&out)]).expect(0);
    assert!(fs::read(&out).expect("read") != before && !part_of(&out).exists());
}

#[cfg(windows)]
mod windows {
    use std::process::Command;

    use super::*;
    use crate::program::{Ran, clean};

    #[test]
    fn forms_of_a_path_that_only_windows_knows() {
        let dir = folder();
        let checkpoint = fixture("stress-maple-2bit");
        // Taken as it is, whatever its length.
        let verbatim = dir.path().canonicalize().expect("there");
        assert!(plain(&verbatim).starts_with(r"\\?\"), "{}", verbatim.display());
        works(&checkpoint.canonicalize().expect("there"), &verbatim.join("модель é.samara"));
        // From the current folder of a drive.
        let drive = &plain(&verbatim)[4..6];
        assert!(drive.ends_with(':'), "{drive}");
        let in_folder = |args: &[&str]| finish(samara().current_dir(dir.path()).args(args));
        let relative = format!("{drive}用户.samara");
        in_folder(&["convert", plain(&checkpoint), "-o", &relative]).expect(0);
        in_folder(&["verify", &relative]).expect(0);
        assert!(dir.path().join("用户.samara").is_file());
        // Slashes of either kind, in either case.
        let other = plain(&dir.path().join("用户.SAMARA")).replace('\\', "/");
        run(["verify", &other]).expect(0);
    }

    /// The folder as any machine of the network would name it, by the share that Windows makes of each drive.
    fn shared(verbatim: &Path) -> Option<PathBuf> {
        let (drive, path) = plain(verbatim).strip_prefix(r"\\?\")?.split_once(':')?;
        let place = PathBuf::from(format!(r"\\localhost\{}${path}", drive.to_lowercase()));
        place.is_dir().then_some(place)
    }

    #[test]
    fn paths_of_a_server_work() {
        let dir = folder();
        let canonical = |path: &Path| path.canonicalize().expect("there");
        let (checkpoint, place) = (canonical(&fixture("stress-maple-2bit")), canonical(dir.path()));
        let (Some(checkpoint), Some(place)) = (shared(&checkpoint), shared(&place)) else {
            assert!(std::env::var_os("SAMARA_NO_SKIPS").is_none(), "the drives are not shared");
            println!("skipped: the drives are not shared");
            return;
        };
        works(&checkpoint, &place.join("m.samara"));
        // As Windows itself spells it, and longer than it counted on once.
        let verbatim = plain(&place).replacen(r"\\", r"\\?\UNC\", 1);
        works(&checkpoint, &deep(Path::new(&verbatim)).join("m.samara"));
        works(&checkpoint, &deep(&place.join("plain")).join("m.samara"));
        assert!(deep(dir.path()).join("m.samara").is_file());
    }

    #[test]
    fn names_that_mean_something_else_are_refused_before_any_work() {
        let dir = folder();
        let at = |name: &str| dir.path().join(name);
        let text = fixture("tiny-maple-2bit/config.json");
        for (name, say) in [
            ("NUL", "the name of a device"),
            ("con.samara", "the name of a device"),
            ("m.samara.", "a dot or a space"),
            ("m.samara:stream", "a colon"),
        ] {
            let refused = convert(&fixture("stress-maple-2bit"), &at(name), &["--force"]).expect(2);
            assert!(refused.error().contains(say), "{name}: {}", refused.err);
            let save = ["ppl", plain(tiny()), "--file", plain(&text)];
            let refused = run(save.iter().chain(&["--save-logits", plain(&at(name))])).expect(2);
            assert!(refused.error().contains(say), "{name}: {}", refused.err);
        }
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
        for name in [Path::new("NUL"), &at("nul.samara")] {
            let refused = run(["inspect", plain(name)]).expect(3);
            assert!(refused.error().contains("the name of a device"), "{}", refused.err);
        }
        run(["inspect", plain(&at("a?b"))]).expect(3);
    }

    #[test]
    fn a_file_that_may_only_be_read_is_refused_before_any_work() {
        let dir = folder();
        let out = dir.path().join("m.samara");
        fs::copy(tiny(), &out).expect("copied");
        let set = |readonly: bool| {
            let mut rights = fs::metadata(&out).expect("there").permissions();
            rights.set_readonly(readonly);
            fs::set_permissions(&out, rights).expect("set");
        };
        set(true);
        let refused = convert(&fixture("stress-maple-2bit"), &out, &["--force"]).expect(2);
        assert!(refused.error().contains("may only be read"), "{}", refused.err);
        run(["verify", plain(&out)]).expect(0);
        set(false);
        convert(&fixture("stress-maple-2bit"), &out, &["--force"]).expect(0);
    }

    /// The command that an error gives is one that cmd.exe understands.
    #[test]
    fn a_command_to_type_is_one_for_cmd() {
        use std::os::windows::process::CommandExt;
        let dir = folder();
        let place = dir.path().join("it's (a) & b");
        fs::create_dir(&place).expect("a folder");
        let out = place.join("m.samara");
        fs::write(&out, "old").expect("written");
        let checkpoint = fixture("stress-maple-2bit");
        let refused = convert(&checkpoint, &out, &["--name", "a \"b\" c\\", "--quiet"]).expect(2);
        let hint = refused.hint("to replace it: ");
        let samara = samara();
        let program = Path::new(samara.get_program()).parent().expect("a folder");
        let mut cmd = Command::new("cmd");
        cmd.args(["/s", "/c"]).raw_arg(format!("\"{hint}\"")).env("PATH", program);
        Ran::from(clean(&mut cmd).output().expect("a shell")).expect(0);
        let name = run(["inspect", plain(&out), "--metadata", "general.name"]).expect(0).out;
        assert_eq!(name, "a \"b\" c\\\n");
    }
}
