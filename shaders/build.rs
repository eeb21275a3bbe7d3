//! Validates every file of `wgsl/` and writes the table of kernels that the crate includes. A bad shader is a build error.

#[path = "src/validate.rs"]
mod validate;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};
use validate::{Reflected, ReflectedKind};

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=wgsl");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/validate.rs");
    match generate() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            for line in message.lines() {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}

fn generate() -> Result<(), String> {
    let mut table =
        String::from("/// Every kernel, by name, ascending.\npub static KERNELS: &[Kernel] = &[\n");
    for path in kernel_files(Path::new("wgsl")).map_err(|e| format!("wgsl: {e}"))? {
        let shown = path.display().to_string();
        let source = fs::read_to_string(&path).map_err(|e| format!("{shown}: {e}"))?;
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let reflected =
            validate::validate(&format!("shaders/{shown}"), &source).map_err(|e| e.to_string())?;
        if reflected.entry_point != stem {
            return Err(format!(
                "shaders/{shown}: entry point is {}, expected {stem}",
                reflected.entry_point
            ));
        }
        push_row(&mut table, &source, &reflected);
    }
    table.push_str("];\n");
    let out = env::var_os("OUT_DIR").ok_or("cargo did not set OUT_DIR")?;
    fs::write(Path::new(&out).join("kernels.rs"), table).map_err(|e| format!("kernels.rs: {e}"))
}

fn kernel_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "wgsl") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn push_row(table: &mut String, source: &str, kernel: &Reflected) {
    let Reflected { entry_point, workgroup_size, workgroup_memory, bindings } = kernel;
    let mut row = format!(
        "Kernel {{ name: {entry_point:?}, source: {source:?}, entry_point: {entry_point:?}, \
         workgroup_size: {workgroup_size:?}, workgroup_memory: {workgroup_memory}, bindings: &["
    );
    for b in bindings {
        let kind = match b.kind {
            ReflectedKind::Uniform { size } => format!("Uniform {{ size: {size} }}"),
            ReflectedKind::Storage { stride, writable } => {
                format!("Storage {{ stride: {stride}, writable: {writable} }}")
            }
        };
        write!(
            row,
            "Binding {{ group: {}, binding: {}, name: {:?}, kind: BindingKind::{kind} }}, ",
            b.group, b.binding, b.name
        )
        .expect("writing to a String cannot fail");
    }
    row.push_str("] },\n");
    table.push_str(&row);
}
