//! The licences of what a binary holds besides our own code: every crate that is linked into it, and what the toolchain adds. The
//! texts are the crates' own files, the SPDX text where a crate has none, and no crate goes without. A text that several use is
//! printed once; texts that differ by a name or a year are different texts.

use crate::dist::archive::read;
use crate::process::{cargo, output};
use crate::sysroot;
use crate::target::{Link, Target};
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// One work by others: what it is, and the texts it comes under.
#[derive(Clone, Debug)]
struct Work {
    name: String,
    licence: String,
    origin: String,
    texts: Vec<String>,
}

/// What the toolchain links that is no crate.
struct Runtime {
    name: &'static str,
    licence: &'static str,
    origin: &'static str,
    notice: &'static str,
    /// The linker that adds it; `None` if every one does.
    link: Option<Link>,
    /// Where a distribution puts the notices of the parts; the first that is there is printed too. Empty where there are none.
    notices: &'static [&'static str],
}

const RUNTIMES: &[Runtime] = &[
    Runtime {
        name: "Rust standard library",
        licence: "MIT OR Apache-2.0",
        origin: "https://github.com/rust-lang/rust",
        notice: "Copyright (c) The Rust Project Developers. Its parts, and the crates it uses, have their own notices:\n\
                 see RUST-STANDARD-LIBRARY.html beside this file.",
        link: None,
        notices: &[],
    },
    Runtime {
        name: "LLVM libunwind",
        licence: "Apache-2.0 WITH LLVM-exception",
        origin: "https://github.com/llvm/llvm-project",
        notice: "Copyright (c) the contributors of the LLVM project.",
        link: Some(Link::Zig),
        notices: &[],
    },
    Runtime {
        name: "compiler_rt of Zig",
        licence: "MIT",
        origin: "https://ziglang.org",
        notice: "Copyright (c) Zig contributors.",
        link: Some(Link::Zig),
        notices: &[],
    },
    Runtime {
        name: "start-up files of the GNU C Library",
        licence: "LGPL-2.1-or-later",
        origin: "https://www.gnu.org/software/libc",
        notice: "Copyright (c) Free Software Foundation, Inc., which permits linking these files with other programs, and\n\
                 distributing those, without any restriction that comes from their use. The library itself is not part of\n\
                 this program: it is the system's.",
        link: Some(Link::Zig),
        notices: &[],
    },
    Runtime {
        name: "MinGW-w64 runtime",
        licence: "ZPL-2.1",
        origin: "https://www.mingw-w64.org",
        notice: "Copyright (c) the mingw-w64 project.",
        link: Some(Link::Mingw),
        notices: &[
            "/usr/share/doc/mingw-w64-x86-64-dev/copyright",
            "/usr/share/doc/mingw-w64-common/copyright",
            "/usr/share/licenses/mingw64-crt/COPYING.MinGW-w64-runtime.txt",
        ],
    },
    Runtime {
        name: "libgcc",
        licence: "GPL-3.0-or-later WITH GCC-exception-3.1",
        origin: "https://gcc.gnu.org",
        notice: "Copyright (c) Free Software Foundation, Inc. The exception lets a program that holds parts of libgcc be\n\
                 under any licence.",
        link: Some(Link::Mingw),
        notices: &[],
    },
];

/// Texts of a licence that a crate offers and we do not take: its path in the crate, after the crate's name.
const NOT_TAKEN: &[(&str, &str)] = &[
    // zstd is BSD or GPL-2.0; LICENSE, beside it, is the former.
    ("zstd-sys", "zstd/COPYING"),
];

/// How the name of a file starts that is a licence, and of one that only goes with it.
const LICENCE_FILES: &[&str] = &["license", "licence", "copying", "unlicense"];
const NOTICE_FILES: &[&str] = &["notice", "copyright"];

/// The whole of THIRD-PARTY-LICENSES.txt for the program that the tree in `root` makes for `target`.
pub(super) fn third_party(target: &Target, root: &Path) -> Result<String> {
    let mut works = runtimes(target)?;
    works.extend(crates(target.triple, root)?);
    Ok(render(target.name, &works))
}

/// Finds what a distribution or a toolchain may lack of the notices for `target`.
///
/// # Errors
/// Says what is missing.
pub(super) fn able(target: &Target) -> Result<()> {
    runtimes(target)?;
    rust_library().map(drop)
}

fn runtimes(target: &Target) -> Result<Vec<Work>> {
    RUNTIMES
        .iter()
        .filter(|runtime| runtime.link.is_none_or(|link| link == target.link))
        .map(runtime)
        .collect()
}

/// The notices of the Rust standard library, as its project publishes them with the toolchain.
pub(super) fn rust_library() -> Result<Vec<u8>> {
    let path = sysroot::toolchain()?.join("share/doc/rust/COPYRIGHT-library.html");
    read(&path).context("the notices of Rust's standard library come with the rustc that rustup installs")
}

fn runtime(runtime: &Runtime) -> Result<Work> {
    let Runtime { name, licence, origin, notice, link: _, notices } = *runtime;
    let mut texts = vec![notice.to_owned()];
    texts.extend(spdx_texts(licence).with_context(|| name.to_owned())?);
    if !notices.is_empty() {
        let path = notices.iter().find(|path| Path::new(path).exists());
        let path =
            path.with_context(|| format!("the notices of {name} are at none of {}", notices.join(", ")))?;
        texts.push(text(Path::new(path))?);
    }
    Ok(Work { name: name.to_owned(), licence: licence.to_owned(), origin: origin.to_owned(), texts })
}

/// The crates of others in the program's binary: those of its normal dependencies that are no macros, which only write code.
fn crates(triple: &str, root: &Path) -> Result<Vec<Work>> {
    let cargo = |args: &[&str]| {
        let mut command = cargo(args);
        command.current_dir(root);
        output(command)
    };
    let tree =
        ["tree", "--locked", "--package", "samara", "--edges", "normal,no-proc-macro", "--target", triple];
    let tree = cargo(&[&tree[..], &["--prefix", "none", "--no-dedupe", "--format", "{p}"]].concat())?;
    let linked: BTreeSet<(&str, &str)> = tree.lines().filter_map(name_and_version).collect();
    let metadata = ["metadata", "--locked", "--format-version", "1", "--filter-platform", triple];
    let metadata: Value = serde_json::from_str(&cargo(&metadata)?)?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let packages: HashMap<_, _> =
        packages.iter().map(|p| ((string(p, "name"), string(p, "version")), p)).collect();
    let mut works = Vec::new();
    for key in linked {
        let package = packages
            .get(&key)
            .with_context(|| format!("cargo metadata does not know {} {}", key.0, key.1))?;
        // A crate without a source is one of ours.
        if !package["source"].is_null() {
            works.push(of_crate(package)?);
        }
    }
    Ok(works)
}

/// Of `NAME vVERSION`, and more after that.
fn name_and_version(line: &str) -> Option<(&str, &str)> {
    let mut words = line.split(' ');
    Some((words.next()?, words.next()?.strip_prefix('v')?))
}

fn string<'a>(package: &'a Value, key: &str) -> &'a str {
    package[key].as_str().unwrap_or_default()
}

fn of_crate(package: &Value) -> Result<Work> {
    let name = string(package, "name");
    let title = format!("{name} {}", string(package, "version"));
    let manifest = Path::new(string(package, "manifest_path"));
    let folder = manifest.parent().with_context(|| format!("{title} has no manifest"))?;
    let licence = string(package, "license");
    let mut files = Vec::new();
    licence_files(folder, &mut files)?;
    files.extend(package["license_file"].as_str().map(|file| folder.join(file)));
    files.retain(|file| !NOT_TAKEN.iter().any(|(of, path)| *of == name && file.ends_with(path)));
    files.sort();
    files.dedup();
    let declared = package["license_file"].is_string();
    let complete = declared || files.iter().any(|file| starts(file, LICENCE_FILES));
    let mut texts = files.iter().map(|file| text(file)).collect::<Result<Vec<_>>>()?;
    if !complete {
        if licence.is_empty() {
            bail!(
                "{title} states no licence and has no licence file: leave it out, or ask its authors for one"
            );
        }
        texts.push(format!("{title} comes without a licence file. Its authors: {}", authors(package)));
        texts.extend(spdx_texts(licence).with_context(|| format!("{title} has no licence file"))?);
    }
    let origin = match string(package, "repository") {
        "" => format!("https://crates.io/crates/{name}"),
        repository => repository.to_owned(),
    };
    let licence = if licence.is_empty() { "see its text" } else { licence };
    Ok(Work { name: title, licence: licence.to_owned(), origin, texts })
}

fn authors(package: &Value) -> String {
    let authors: Vec<_> =
        package["authors"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if authors.is_empty() { "its contributors".to_owned() } else { authors.join(", ") }
}

/// Every file of `folder` and the folders below whose name is that of a licence or a notice.
fn licence_files(folder: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            licence_files(&entry.path(), found)?;
        } else if starts(&entry.path(), LICENCE_FILES) || starts(&entry.path(), NOTICE_FILES) {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn starts(file: &Path, starts: &[&str]) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    !name.ends_with(".rs") && starts.iter().any(|start| name.starts_with(start))
}

/// The SPDX texts of every licence and exception that `expression` names, in its order.
fn spdx_texts(expression: &str) -> Result<Vec<String>> {
    let parsed = spdx::Expression::parse_mode(expression, spdx::ParseMode::LAX)?;
    let mut texts = Vec::new();
    for node in parsed.requirements() {
        let id = node.req.license.id().with_context(|| format!("{} is not in SPDX's list", node.req))?;
        texts.push(id.text().to_owned());
        if let Some(addition) = &node.req.addition {
            let id = addition.id().with_context(|| format!("{} is not in SPDX's list", node.req))?;
            texts.push(id.text().to_owned());
        }
    }
    Ok(texts)
}

fn text(path: &Path) -> Result<String> {
    Ok(String::from_utf8_lossy(&read(path)?).into_owned())
}

/// A text is another one if it differs in more than its line ends and the white space around it.
fn tidy(text: &str) -> String {
    let lines: Vec<_> = text.trim_start_matches('\u{feff}').lines().map(str::trim_end).collect();
    lines.join("\n").trim_matches('\n').to_owned()
}

fn render(target: &str, works: &[Work]) -> String {
    let mut texts: Vec<(String, Vec<&str>)> = Vec::new();
    let mut list = String::new();
    for work in works {
        let mut numbers = Vec::new();
        for text in work.texts.iter().map(|text| tidy(text)).filter(|text| !text.is_empty()) {
            let at = texts.iter().position(|(known, _)| *known == text).unwrap_or_else(|| {
                texts.push((text, Vec::new()));
                texts.len() - 1
            });
            if !numbers.contains(&at) {
                texts[at].1.push(&work.name);
                numbers.push(at);
            }
        }
        let numbers: Vec<_> = numbers.iter().map(|at| format!("[{}]", at + 1)).collect();
        let Work { name, licence, origin, texts: _ } = work;
        let _ = writeln!(list, "{name}\n    {licence}\n    {origin}\n    {}", numbers.join(" "));
    }
    let mut out = format!(
        "Works of others in samara for {target}: name and version, licence, origin, and the numbers of the\n\
         texts below.\n\n{list}"
    );
    let rule = "-".repeat(80);
    for (at, (text, users)) in texts.iter().enumerate() {
        let _ = write!(out, "\n{rule}\n[{}] {}\n{rule}\n\n{text}\n", at + 1, users.join(", "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// The names of the texts that a crate with `files` gets, or why it is refused.
    fn check(
        licence: Option<&str>,
        licence_file: Option<&str>,
        files: &[&str],
        expected: Result<&[&str], &str>,
    ) {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("text of {file}\r\n")).unwrap();
        }
        let package = json!({
            "name": "zstd-sys", "version": "1.2.3", "manifest_path": folder.path().join("Cargo.toml"),
            "license": licence, "license_file": licence_file, "authors": ["A. Author"], "repository": null,
        });
        match (of_crate(&package), expected) {
            (Ok(work), Ok(expected)) => {
                let first = |text: &String| text.lines().next().unwrap_or_default().to_owned();
                assert_eq!(work.texts.iter().map(first).collect::<Vec<_>>(), expected);
                assert_eq!(work.origin, "https://crates.io/crates/zstd-sys");
            }
            (Err(e), Err(expected)) => assert!(format!("{e:#}").contains(expected), "{e:#}"),
            (found, expected) => panic!("{found:?} is not {expected:?}"),
        }
    }

    #[test]
    fn a_crate_has_its_own_texts_or_those_of_spdx_and_never_none() {
        const ALONE: &str = "zstd-sys 1.2.3 comes without a licence file. Its authors: A. Author";
        check(Some("MIT"), None, &["LICENSE"], Ok(&["text of LICENSE"]));
        check(
            Some("MIT"),
            None,
            &["license-mit", "NOTICE", "src/UNLICENSE", "src/lib.rs"],
            Ok(&["text of NOTICE", "text of license-mit", "text of src/UNLICENSE"]),
        );
        check(None, Some("terms.txt"), &["terms.txt"], Ok(&["text of terms.txt"]));
        check(Some("MIT/Zlib"), None, &["license.rs"], Ok(&[ALONE, "MIT License", "zlib License"]));
        check(
            Some("Apache-2.0 WITH LLVM-exception"),
            None,
            &[],
            Ok(&[ALONE, "Apache License", "---- LLVM Exceptions to the Apache 2.0 License ----"]),
        );
        check(Some("MIT"), None, &["COPYRIGHT"], Ok(&["text of COPYRIGHT", ALONE, "MIT License"]));
        check(Some("BSD-3-Clause"), None, &["zstd/LICENSE", "zstd/COPYING"], Ok(&["text of zstd/LICENSE"]));
        check(None, None, &["src/lib.rs"], Err("states no licence and has no licence file"));
        check(Some("LicenseRef-ours"), None, &[], Err("not in SPDX's list"));
    }

    #[test]
    fn every_runtime_has_a_licence_text() {
        for runtime in RUNTIMES {
            assert!(!spdx_texts(runtime.licence).unwrap().is_empty(), "{}", runtime.name);
        }
    }

    #[test]
    fn a_text_is_printed_once() {
        let work = |name: &str, texts: &[&str]| Work {
            name: name.to_owned(),
            licence: "MIT".to_owned(),
            origin: "here".to_owned(),
            texts: texts.iter().map(|&text| text.to_owned()).collect(),
        };
        let shown = render(
            "t",
            &[work("a 1", &["one\n", "two"]), work("b 1", &["one \r\n\r\n"]), work("c 1", &["One"])],
        );
        assert!(
            shown.contains("a 1\n    MIT\n    here\n    [1] [2]\nb 1\n    MIT\n    here\n    [1]\nc 1\n"),
            "{shown}"
        );
        assert!(shown.contains("[1] a 1, b 1\n"), "{shown}");
        assert_eq!((shown.matches("\none\n").count(), shown.matches("\nOne\n").count()), (1, 1), "{shown}");
    }

    #[test]
    fn the_lines_of_cargo_tree_are_read() {
        assert_eq!(name_and_version("half v2.7.1"), Some(("half", "2.7.1")));
        assert_eq!(name_and_version("samara v0.1.0 (/a b/tools)"), Some(("samara", "0.1.0")));
        assert_eq!(name_and_version(""), None);
    }
}
