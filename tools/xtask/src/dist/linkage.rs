//! What a program asks of the system it runs on, read from the binary itself: libraries, versions of their symbols, where to look for
//! them, the kind of stack. What was built on a new machine must not need one.

use crate::target::{GLIBC, Link, Target};
use anyhow::{Context, Result, bail, ensure};
use object::read::elf::{FileHeader, ProgramHeader};
use object::read::pe::PeFile64;
use object::{Endianness, Object, elf};
use std::collections::BTreeSet;
use std::path::Path;

/// What a Linux system has without anything installed: glibc in its parts, and the unwinder.
const LINUX: &[&str] = &[
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
];

/// What is part of Windows 10 and later, in lower case. Names that start with `api-ms-win-` are too.
const WINDOWS: &[&str] = &[
    "advapi32.dll",
    "bcrypt.dll",
    "bcryptprimitives.dll",
    "combase.dll",
    "d3d12.dll",
    "d3dcompiler_47.dll",
    "dxgi.dll",
    "gdi32.dll",
    "iphlpapi.dll",
    "kernel32.dll",
    "msvcrt.dll",
    "netapi32.dll",
    "ntdll.dll",
    "ole32.dll",
    "oleaut32.dll",
    "opengl32.dll",
    "pdh.dll",
    "powrprof.dll",
    "propsys.dll",
    "psapi.dll",
    "rpcrt4.dll",
    "secur32.dll",
    "setupapi.dll",
    "shell32.dll",
    "user32.dll",
    "userenv.dll",
    "ws2_32.dll",
];

/// What a binary says of itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Linkage {
    architecture: String,
    libraries: BTreeSet<String>,
    /// Names of symbol versions it needs, such as `GLIBC_2.28`.
    versions: BTreeSet<String>,
    /// Folders to search for libraries before the system's.
    search: BTreeSet<String>,
    executable_stack: bool,
}

impl Linkage {
    /// Reads a 64-bit ELF or PE binary.
    pub(super) fn read(bytes: &[u8]) -> Result<Linkage> {
        match bytes {
            [0x7f, b'E', b'L', b'F', ..] => elf(bytes).context("not a sound ELF file"),
            [b'M', b'Z', ..] => pe(bytes).context("not a sound PE file"),
            _ => bail!("neither an ELF nor a PE file"),
        }
    }

    /// What it needs that the systems of `target` do not have, in sentences; nothing if it runs on all of them.
    fn faults(&self, target: &Target) -> Vec<String> {
        let Linkage { architecture, libraries, versions, search, executable_stack } = self;
        let mut faults = Vec::new();
        if !target.triple.starts_with(&format!("{architecture}-")) {
            faults.push(format!("it is for {architecture}"));
        }
        let windows = target.link == Link::Mingw;
        let known = |name: &str| {
            if windows {
                let name = name.to_lowercase();
                WINDOWS.contains(&name.as_str()) || name.starts_with("api-ms-win-")
            } else {
                LINUX.contains(&name)
            }
        };
        faults.extend(libraries.iter().filter(|name| !known(name)).map(|name| format!("it needs {name}")));
        let limit = version(GLIBC);
        let glibc = versions.iter().filter_map(|name| Some((name, name.strip_prefix("GLIBC_")?)));
        let new = glibc.filter(|(_, number)| version(number).is_none() || version(number) > limit);
        faults.extend(new.map(|(name, _)| format!("it needs {name}, newer than {GLIBC}")));
        // A file that says nothing proves nothing.
        if libraries.is_empty() {
            faults.push("it names no library that it needs".to_owned());
        }
        if !windows && !versions.iter().any(|name| name.starts_with("GLIBC_")) {
            faults.push("it names no version of glibc".to_owned());
        }
        faults.extend(search.iter().map(|path| format!("it looks for libraries in {path}")));
        if *executable_stack {
            faults.push("its stack is executable".to_owned());
        }
        faults
    }

    /// # Errors
    /// Names everything that keeps it from running on some system of `target`.
    pub(super) fn check(&self, target: &Target) -> Result<()> {
        let faults = self.faults(target);
        ensure!(
            faults.is_empty(),
            "the program of {} is not fit to be given away: {}",
            target.name,
            faults.join("; ")
        );
        Ok(())
    }

    /// One line for the log.
    pub(super) fn summary(&self) -> String {
        let glibc = self.versions.iter().filter_map(|name| name.strip_prefix("GLIBC_"));
        let glibc = glibc.max_by_key(|number| version(number));
        let glibc = glibc.map_or(String::new(), |number| format!(", glibc {number}"));
        let libraries: Vec<_> = self.libraries.iter().map(String::as_str).collect();
        format!("{}{glibc}, needs {}", self.architecture, libraries.join(" "))
    }
}

/// `2.2.5` as numbers; `None` for what is no version, such as `PRIVATE`.
fn version(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|part| part.parse().ok()).collect()
}

fn name(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn elf(bytes: &[u8]) -> Result<Linkage> {
    let header = elf::FileHeader64::<Endianness>::parse(bytes)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, bytes)?;
    let mut linkage = Linkage {
        architecture: match header.e_machine(endian) {
            elf::EM_X86_64 => "x86_64".to_owned(),
            elf::EM_AARCH64 => "aarch64".to_owned(),
            other => format!("machine {}", other.0),
        },
        ..Linkage::default()
    };
    let dynamic = sections.dynamic_table(endian, bytes)?;
    for entry in dynamic.iter() {
        let into = match entry.tag {
            elf::DT_NEEDED => &mut linkage.libraries,
            elf::DT_RPATH | elf::DT_RUNPATH => &mut linkage.search,
            _ => continue,
        };
        into.insert(name(dynamic.string(entry)?));
    }
    if let Some((mut needs, strings)) = sections.gnu_verneed(endian, bytes)? {
        let strings = sections.strings(endian, bytes, strings)?;
        while let Some((_, mut versions)) = needs.next()? {
            while let Some(version) = versions.next()? {
                linkage.versions.insert(name(version.name(endian, strings)?));
            }
        }
    }
    let stack = header.program_headers(endian, bytes)?.iter().find(|h| h.p_type(endian) == elf::PT_GNU_STACK);
    // Without a word about it, Linux makes the stack executable.
    linkage.executable_stack = stack.is_none_or(|h| h.p_flags(endian).0 & elf::PF_X.0 != 0);
    Ok(linkage)
}

fn pe(bytes: &[u8]) -> Result<Linkage> {
    let file = PeFile64::parse(bytes)?;
    let architecture = match file.architecture() {
        object::Architecture::X86_64 => "x86_64".to_owned(),
        other => format!("{other:?}").to_lowercase(),
    };
    let mut linkage = Linkage { architecture, ..Linkage::default() };
    if let Some(table) = file.import_table()? {
        let mut imports = table.descriptors()?;
        while let Some(import) = imports.next()? {
            linkage.libraries.insert(name(table.name(import.name.get(object::LittleEndian))?));
        }
    }
    if let Some(table) = file.delay_load_import_table()? {
        let mut imports = table.descriptors()?;
        while let Some(import) = imports.next()? {
            linkage.libraries.insert(name(table.name(import.dll_name_rva.get(object::LittleEndian))?));
        }
    }
    Ok(linkage)
}

/// # Errors
/// If `bytes` hold the path of one of `folders`, which say where and by whom something was built.
pub(super) fn no_paths(bytes: &[u8], folders: &[impl AsRef<Path>]) -> Result<()> {
    for folder in folders {
        let needle = folder.as_ref().as_os_str().as_encoded_bytes();
        // A path as short as / or /a is found by chance, and /src is a part of other paths.
        let of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-/".contains(byte);
        let whole = |at: usize| !bytes[..at].last().is_some_and(of_name);
        let mut found = bytes.windows(needle.len().max(1)).enumerate();
        if needle.len() > 3
            && let Some((at, _)) = found.find(|&(at, window)| window == needle && whole(at))
        {
            let end = bytes.len().min(at + 120);
            bail!("it holds a path of this machine, at byte {at}: {}", name(&bytes[at..end]).escape_debug());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{LINUX_AARCH64, LINUX_X86_64, WINDOWS_X86_64};

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    /// Of a sound binary, changed by `change`.
    fn check(target: &Target, change: fn(&mut Linkage), faults: &[&str]) {
        let libraries = if target.link == Link::Mingw { "KERNEL32.dll" } else { "libc.so.6" };
        let mut linkage = Linkage {
            architecture: target.triple.split('-').next().unwrap().to_owned(),
            libraries: set(&[libraries]),
            versions: set(&["GLIBC_2.2.5", "GLIBC_2.28", "GCC_3.0"]),
            ..Linkage::default()
        };
        change(&mut linkage);
        assert_eq!(linkage.faults(target), faults);
        assert_eq!(linkage.check(target).is_ok(), faults.is_empty());
    }

    #[test]
    fn what_a_system_may_lack_is_named() {
        for target in [&LINUX_X86_64, &LINUX_AARCH64, &WINDOWS_X86_64] {
            check(target, |_| {}, &[]);
        }
        let linux = &LINUX_X86_64;
        check(linux, |l| l.architecture = "aarch64".to_owned(), &["it is for aarch64"]);
        check(linux, |l| l.versions = set(&["GLIBC_2.29"]), &["it needs GLIBC_2.29, newer than 2.28"]);
        check(linux, |l| l.versions = set(&["GLIBC_2.28.1"]), &["it needs GLIBC_2.28.1, newer than 2.28"]);
        check(linux, |l| l.versions = set(&["GLIBC_2.9", "GLIBC_2.27"]), &[]);
        check(linux, |l| l.versions = set(&["GLIBC_PRIVATE"]), &["it needs GLIBC_PRIVATE, newer than 2.28"]);
        check(linux, |l| l.versions = set(&["GCC_3.0"]), &["it names no version of glibc"]);
        check(linux, |l| l.libraries = set(&[]), &["it names no library that it needs"]);
        check(linux, |l| l.libraries = set(&["libstdc++.so.6"]), &["it needs libstdc++.so.6"]);
        check(linux, |l| l.search = set(&["/opt/lib"]), &["it looks for libraries in /opt/lib"]);
        check(linux, |l| l.executable_stack = true, &["its stack is executable"]);
        let windows = &WINDOWS_X86_64;
        check(windows, |l| l.libraries = set(&["api-ms-win-core-synch-l1-2-0.dll"]), &[]);
        check(
            windows,
            |l| l.libraries = set(&["libgcc_s_seh-1.dll", "libwinpthread-1.dll"]),
            &["it needs libgcc_s_seh-1.dll", "it needs libwinpthread-1.dll"],
        );
    }

    /// The running test is a binary too. Its strings and its header are changed in place.
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn faults_planted_in_an_elf_file_are_seen() {
        fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
            let mut bytes = bytes.to_vec();
            let mut at = 0;
            while let Some(next) = bytes[at..].windows(from.len()).position(|window| window == from) {
                at += next;
                bytes[at..at + to.len()].copy_from_slice(to);
            }
            bytes
        }
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let sound = Linkage::read(&bytes).unwrap();
        assert_eq!(sound.architecture, std::env::consts::ARCH);
        assert!(sound.libraries.contains("libc.so.6") && sound.versions.contains("GLIBC_2.17"), "{sound:?}");
        assert!(sound.search.is_empty() && !sound.executable_stack, "{sound:?}");

        let odd = Linkage::read(&replaced(&bytes, b"\0libc.so.6\0", b"\0libx.so.6\0")).unwrap();
        assert!(odd.libraries.contains("libx.so.6") && !odd.libraries.contains("libc.so.6"), "{odd:?}");
        let new = Linkage::read(&replaced(&bytes, b"\0GLIBC_2.17\0", b"\0GLIBC_2.99\0")).unwrap();
        assert!(new.versions.contains("GLIBC_2.99") && !new.versions.contains("GLIBC_2.17"), "{new:?}");
        // The type and the flags of the segment that speaks of the stack, readable and writable.
        let stack = [0x51, 0xe5, 0x74, 0x64, 6, 0, 0, 0];
        let executable = [0x51, 0xe5, 0x74, 0x64, 7, 0, 0, 0];
        assert!(Linkage::read(&replaced(&bytes, &stack, &executable)).unwrap().executable_stack);
        assert!(Linkage::read(&replaced(&bytes, &stack, &[0; 8])).unwrap().executable_stack);
        assert!(Linkage::read(&bytes[..100]).is_err() && Linkage::read(b"#!/bin/sh").is_err());
    }

    /// The smallest PE file with an import table: one section at 0x1000 that holds one descriptor and the name of `library`.
    fn small_pe(library: &str) -> Vec<u8> {
        let mut bytes = vec![0; 0x400];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, b"MZ");
        put(0x3c, &[0x40]);
        put(0x40, b"PE\0\0");
        put(0x44, &[0x64, 0x86, 1, 0]); // x86-64, one section
        put(0x54, &[240, 0, 0x22, 0]); // size of the optional header, flags
        put(0x58, &[0x0b, 0x02]); // PE32+
        put(0x78, &[0, 0x10, 0, 0, 0, 2]); // alignments of sections, in memory and in the file
        put(0xc4, &[16]); // data directories
        put(0xd0, &[0, 0x10, 0, 0, 40]); // imports: address and size
        put(0x148, b".idata\0\0");
        put(0x150, &[0, 0x10, 0, 0, 0, 0x10, 0, 0, 0, 2, 0, 0, 0, 2]); // sizes and places of the section
        put(0x20c, &[0x80, 0x10]); // the name's address
        put(0x280, library.as_bytes());
        bytes
    }

    #[test]
    fn imports_of_a_pe_file_are_read() {
        for library in ["KERNEL32.dll", "libwinpthread-1.dll"] {
            let linkage = Linkage::read(&small_pe(library)).unwrap();
            assert_eq!((linkage.architecture.as_str(), &linkage.libraries), ("x86_64", &set(&[library])));
            assert_eq!(linkage.check(&WINDOWS_X86_64).is_ok(), library == "KERNEL32.dll");
        }
    }

    #[test]
    fn a_path_of_the_machine_is_seen() {
        let folders = [Path::new("/"), Path::new("/disk/me/samara")];
        no_paths(b"a /disk/me and /samara/src/lib.rs", &folders).unwrap();
        no_paths(b"/cargo/disk/me/samara", &folders).unwrap();
        let e = no_paths(b"a /disk/me/samara/src/lib.rs", &folders).unwrap_err().to_string();
        assert!(e.contains("at byte 2: /disk/me/samara/src/lib.rs"), "{e}");
    }
}
