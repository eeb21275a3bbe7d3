//! Machines that Samara is not for are refused when it is built, with a sentence.

use std::{fs, path::Path, process::Command};

use crate::program::{emulated, folder, skip};

/// What Cargo says when it checks a crate with the build script of `samara-format` for a target.
fn check_for(target: &str) -> Option<String> {
    let Some(cargo) = std::env::var_os("CARGO") else {
        skip("Cargo did not start this test");
        return None;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format/build.rs");
    let package = folder();
    let manifest = format!(
        "[package]\nname = \"refused\"\nedition = \"2024\"\nbuild = '{}'\n[lib]\npath = \"lib.rs\"\n[workspace]\n",
        script.display()
    );
    fs::write(package.path().join("Cargo.toml"), manifest).expect("written");
    // Needs no standard library, which most targets lack here.
    fs::write(package.path().join("lib.rs"), "#![feature(no_core)]\n#![no_core]\n").expect("written");
    let mut command = Command::new(cargo);
    command.args(["check", "--offline", "--target", target]).current_dir(package.path());
    command.env("CARGO_TARGET_DIR", package.path().join("target")).env("RUSTC_BOOTSTRAP", "1");
    command.env_remove("CARGO_BUILD_TARGET");
    let output = command.output().expect("Cargo starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Some(if output.status.success() { String::new() } else { said })
}

#[test]
fn big_endian_and_32_bit_targets_are_refused_with_a_sentence() {
    if emulated() {
        println!("skipped: optional: what is built where does not depend on an emulator");
        return;
    }
    for (target, why) in [
        ("i686-unknown-linux-gnu", "i686-unknown-linux-gnu is little-endian with 32-bit pointers"),
        ("s390x-unknown-linux-gnu", "s390x-unknown-linux-gnu is big-endian with 64-bit pointers"),
        ("powerpc-unknown-linux-gnu", "powerpc-unknown-linux-gnu is big-endian with 32-bit pointers"),
        ("wasm32-unknown-unknown", "wasm32-unknown-unknown is little-endian with 32-bit pointers"),
    ] {
        let Some(said) = check_for(target) else { return };
        assert!(
            said.contains("needs a little-endian 64-bit target") && said.contains(why),
            "{target}: {said}"
        );
    }
    for target in ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "x86_64-pc-windows-gnu"] {
        let Some(said) = check_for(target) else { return };
        assert_eq!(said, "", "{target}");
    }
}
