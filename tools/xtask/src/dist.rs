//! Release archives in `target/dist`: for each target the program, what documents it, and the licences of all that is in it.
//!
//! The same source and tools give the same bytes, whoever builds and wherever: `--twice` builds again elsewhere and compares. An archive is
//! written only after its program was seen to ask for nothing that a user's system may lack, to name no folder of this machine, and,
//! for Linux, to answer on an old C library.

mod archive;
mod licences;
mod linkage;
mod userland;

pub(crate) use userland::userland;

use crate::process::{answers, cargo, cargo_home, output, root, succeed};
use crate::sysroot;
use crate::target::{Link, Place, SHIPPED, Target, here};
use anyhow::{Context, Result, bail, ensure};
use archive::Files;
use linkage::Linkage;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Our own documents, which every archive has.
const DOCUMENTS: [&str; 3] = ["CHANGELOG.md", "LICENSE", "README.md"];

/// The shells that `samara completions` knows, and what each wants the file to be called.
const SHELLS: [(&str, &str); 5] = [
    ("bash", "samara.bash"),
    ("elvish", "samara.elv"),
    ("fish", "samara.fish"),
    ("powershell", "_samara.ps1"),
    ("zsh", "_samara"),
];

/// Archives by file name.
type Archives = BTreeMap<String, Vec<u8>>;

/// Gets what archives of all targets need.
///
/// # Errors
/// Says what is missing.
pub(crate) fn able() -> Result<()> {
    for target in SHIPPED {
        target.cargo("build", &Place::here())?;
        licences::able(target)?;
    }
    ensure!(
        answers("qemu-aarch64-static"),
        "qemu-aarch64-static is not installed (on Debian: apt install qemu-user-static)"
    );
    for arch in ["amd64", "arm64"] {
        userland(arch)?;
    }
    time().map(drop)
}

/// What follows `cargo xtask dist`, and the names it may be followed by.
pub(crate) fn help() -> String {
    format!(
        "cargo xtask dist [--twice] [TARGET]...   TARGET: {}",
        SHIPPED.map(|target| target.name).join(", ")
    )
}

/// Makes the archives of the targets called by `args`, or of all of them.
pub(crate) fn run(args: &[String]) -> ExitCode {
    let (options, names): (Vec<_>, Vec<_>) = args.iter().partition(|arg| arg.starts_with('-'));
    let known = |name: &&String| SHIPPED.iter().any(|target| target.name == name.as_str());
    let odd = options.iter().find(|option| option.as_str() != "--twice").or(names.iter().find(|n| !known(n)));
    if let Some(odd) = odd {
        eprintln!("{odd:?} is neither an option nor a target of dist\n{}", help());
        return ExitCode::from(2);
    }
    let wanted = |target: &&Target| names.is_empty() || names.iter().any(|name| name.as_str() == target.name);
    let targets: Vec<_> = SHIPPED.into_iter().filter(wanted).collect();
    let again = if options.is_empty() { &[] } else { &targets[..] };
    match make(&targets, again) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the archives of `targets` and SHA256SUMS; `target/dist` then holds these and nothing older. Those of `again` are made again
/// elsewhere and compared.
///
/// # Errors
/// If a build fails, a program is not fit to be given away, or the second build differs.
pub(crate) fn make(targets: &[&Target], again: &[&Target]) -> Result<()> {
    let folder = root().join("target/dist");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot empty {}", folder.display()))?;
    }
    let time = time()?;
    let archives = archives(targets, &Place::here(), time)?;
    for target in targets.iter().filter(|target| target.link == Link::Zig) {
        userland::demo(target, &target.exe(&Place::here()))?;
        println!("{}: the demo answers on an old C library", target.name);
    }
    if !again.is_empty() {
        let copy = tempfile::Builder::new().prefix("twice").tempdir_in(root().join("target"))?;
        println!("building again in {}", copy.path().display());
        let place = Place { root: copy.path().join("tree"), target_dir: copy.path().join("built") };
        copy_tree(&place.root)?;
        same(&archives, &self::archives(again, &place, time)?)?;
        println!(
            "the same bytes twice: {}",
            again.iter().map(|target| target.name).collect::<Vec<_>>().join(", ")
        );
    }
    fs::create_dir_all(&folder)?;
    let mut sums = String::new();
    for (name, bytes) in &archives {
        archive::write(&folder.join(name), bytes)?;
        sums += &archive::checksum(name, bytes);
    }
    print!("{sums}");
    archive::write(&folder.join("SHA256SUMS"), sums.as_bytes())
}

/// Builds the programs of `targets` in `place` and packs them.
fn archives(targets: &[&Target], place: &Place, time: u64) -> Result<Archives> {
    for target in targets {
        let mut build = target.cargo("build", place)?;
        build.args(["--package", "samara"]);
        succeed(build).with_context(|| format!("building for {}", target.name))?;
    }
    let common = common(targets, place)?;
    let folders = folders(place)?;
    let mut archives = Archives::new();
    for target in targets {
        let exe = target.exe(place);
        let program = archive::read(&exe)?;
        let linkage = Linkage::read(&program).with_context(|| exe.display().to_string())?;
        linkage.check(target)?;
        println!("{}: {}", target.name, linkage.summary());
        let name = exe.file_name().context("a program without a name")?.to_string_lossy().into_owned();
        let mut files = common.clone();
        files.add_program(name, program);
        let licences = licences::third_party(target, &place.root)?;
        files.add("THIRD-PARTY-LICENSES.txt", licences.into_bytes());
        for (path, bytes) in files.iter() {
            linkage::no_paths(bytes, &folders).with_context(|| format!("{path} of {}", target.name))?;
        }
        let top = format!("samara-{VERSION}-{}", target.name);
        let (ending, bytes) = match target.link {
            Link::Zig => ("tar.gz", files.tar_gz(&top, time)?),
            Link::Mingw => ("zip", files.zip(&top, time)?),
            Link::No => bail!("nothing is linked for {}", target.name),
        };
        archives.insert(format!("{top}.{ending}"), bytes);
    }
    Ok(archives)
}

/// What is the same for every target: documents, completions, manual pages, the notices of Rust's library.
fn common(targets: &[&Target], place: &Place) -> Result<Files> {
    let mut files = Files::default();
    for name in DOCUMENTS {
        files.add(name, archive::read(&place.root.join(name))?);
    }
    files.add("RUST-STANDARD-LIBRARY.html", licences::rust_library()?);
    for (shell, file) in SHELLS {
        let mut completions = samara(targets, place);
        completions.args(["completions", shell]);
        files.add(format!("completions/{file}"), output(completions)?.into_bytes());
    }
    let pages = tempfile::tempdir()?;
    let mut man = samara(targets, place);
    man.arg("man").arg(pages.path());
    succeed(man)?;
    files.add_folder("man", pages.path())?;
    Ok(files)
}

/// The program on this machine: the one just built if it is for here, or else one that takes another build.
fn samara(targets: &[&Target], place: &Place) -> Command {
    let here = here();
    match targets.iter().find(|target| target.name == here) {
        Some(target) => Command::new(target.exe(place)),
        None => {
            let mut command = cargo(&["run", "--quiet", "--locked", "--package", "samara", "--"]);
            command.current_dir(&place.root);
            command
        }
    }
}

/// Folders that no file of an archive may name.
fn folders(place: &Place) -> Result<Vec<PathBuf>> {
    let mut folders =
        vec![root(), place.root.clone(), place.target_dir.clone(), sysroot::toolchain()?, cargo_home()];
    folders.extend(std::env::home_dir());
    Ok(folders)
}

/// What the files of an archive are dated, in seconds since 1970.
fn time() -> Result<u64> {
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds,
        Err(_) => output(git(&["log", "-1", "--format=%ct"]))
            .context("the date of the release is that of its commit; without git, set SOURCE_DATE_EPOCH")?,
    };
    seconds.trim().parse().with_context(|| format!("{seconds:?} is no number of seconds"))
}

fn git(args: &[&str]) -> Command {
    let mut git = Command::new("git");
    // The tree may belong to someone else, as in a container.
    git.arg("-c").arg(format!("safe.directory={}", root().display())).args(args).current_dir(root());
    git
}

/// Copies what git tracks, or would if it were told of it, to `to`.
fn copy_tree(to: &Path) -> Result<()> {
    let list = output(git(&["ls-files", "-z", "--cached", "--others", "--exclude-standard"]))?;
    for name in list.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root().join(name), to.join(name));
        // A tracked file may have been removed.
        if from.is_file() {
            fs::create_dir_all(to.parent().context("a file without a folder")?)?;
            fs::copy(&from, &to).with_context(|| format!("cannot copy {name}"))?;
        }
    }
    Ok(())
}

/// # Errors
/// Names every archive that was made again with other bytes, and where they begin to differ.
fn same(archives: &Archives, again: &Archives) -> Result<()> {
    let differ = again.iter().filter_map(|(name, again)| {
        let bytes = archives.get(name).map_or(&[][..], Vec::as_slice);
        let at = bytes.iter().zip(again).take_while(|(a, b)| a == b).count();
        let (first, second) = (bytes.len(), again.len());
        (bytes != again).then(|| format!("{name} from byte {at} on ({first} and {second} bytes)"))
    });
    let differ: Vec<_> = differ.collect();
    ensure!(differ.is_empty(), "a second build gives other bytes: {}", differ.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_between_two_builds_is_seen() {
        let archives = |bytes: &[u8]| Archives::from([("a.zip".to_owned(), bytes.to_vec())]);
        same(&archives(b"abc"), &archives(b"abc")).unwrap();
        let check = |other: &Archives, expected: &str| {
            assert_eq!(same(&archives(b"abc"), other).unwrap_err().to_string(), expected);
        };
        check(&archives(b"abx"), "a second build gives other bytes: a.zip from byte 2 on (3 and 3 bytes)");
        check(&archives(b"ab"), "a second build gives other bytes: a.zip from byte 2 on (3 and 2 bytes)");
        let unknown = Archives::from([("b.zip".to_owned(), b"b".to_vec())]);
        check(&unknown, "a second build gives other bytes: b.zip from byte 0 on (0 and 1 bytes)");
    }

    #[test]
    fn a_copy_of_the_tree_holds_what_builds_and_nothing_built() {
        let folder = tempfile::tempdir().unwrap();
        copy_tree(folder.path()).unwrap();
        for name in ["Cargo.lock", "LICENSE", "tools/src/main.rs"] {
            assert_eq!(fs::read(folder.path().join(name)).unwrap(), fs::read(root().join(name)).unwrap());
        }
        assert!(!folder.path().join("target").exists());
    }
}
