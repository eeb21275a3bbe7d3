//! Validates every kernel of `wgsl/`, in each of its variants, and writes the table of kernels that the crate includes. A bad
//! shader is a build error.

#[path = "src/expand.rs"]
mod expand;
#[path = "src/validate.rs"]
mod validate;

use expand::{CHOICES, Choice, Expanded};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io};
use validate::Reflected;

fn main() -> ExitCode {
    for path in ["wgsl", "build.rs", "src/expand.rs", "src/validate.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
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
        push_row(&mut table, &path)?;
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

fn read_piece(name: &str) -> Result<String, String> {
    fs::read_to_string(Path::new("wgsl/lib").join(format!("{name}.wgsl"))).map_err(|e| e.to_string())
}

/// The row of the kernel in `path`: its text in each variant, of which those that are equal are validated once.
fn push_row(table: &mut String, path: &Path) -> Result<(), String> {
    let shown = format!("shaders/{}", path.display());
    let name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let text = fs::read_to_string(path).map_err(|e| format!("{shown}: {e}"))?;
    let mut texts: Vec<String> = Vec::new();
    let mut found: Option<(Reflected, Choice)> = None;
    for choice in CHOICES {
        let source = Expanded::new(&shown, &text, choice, &read_piece)?;
        let reflected = match texts.contains(&source.text) {
            true => None,
            false => Some(validate::validate(&source).map_err(|e| e.to_string())?),
        };
        texts.push(source.text);
        match (&mut found, reflected) {
            (_, None) => {}
            (Some((first, _)), Some(other)) => merge(first, other).map_err(|e| format!("{shown}: {e}"))?,
            (None, Some(first)) => found = Some((first, source.uses)),
        }
    }
    let (reflected, uses) = found.ok_or_else(|| format!("{shown}: no variant"))?;
    if reflected.entry_point != name {
        return Err(format!("{shown}: entry point is {}, expected {name}", reflected.entry_point));
    }
    write_row(table, &texts, &reflected, uses).map_err(|e| e.to_string())
}

/// Variants differ in nothing that a backend sees but for memory, of which the larger counts, and constants of the pieces.
fn merge(first: &mut Reflected, other: Reflected) -> Result<(), String> {
    let Reflected { entry_point, workgroup_size, workgroup_memory, bindings, constants } = other;
    if (&first.entry_point, first.workgroup_size, &first.bindings)
        != (&entry_point, workgroup_size, &bindings)
    {
        return Err("variants differ in entry point, workgroup size or bindings".to_owned());
    }
    first.workgroup_memory = first.workgroup_memory.max(workgroup_memory);
    if first.constants != constants {
        return Err("variants differ in constants".to_owned());
    }
    Ok(())
}

fn write_row(
    table: &mut String,
    texts: &[String],
    kernel: &Reflected,
    uses: Choice,
) -> Result<(), std::fmt::Error> {
    let Reflected { entry_point, workgroup_size, workgroup_memory, bindings, constants } = kernel;
    let [subgroups, packed_dot] = uses;
    write!(
        table,
        "Kernel {{ name: {entry_point:?}, sources: {texts:?}, uses: Variant {{ subgroups: {subgroups}, packed_dot: {packed_dot} }}, \
         entry_point: {entry_point:?}, workgroup_size: {workgroup_size:?}, workgroup_memory: {workgroup_memory}, bindings: &["
    )?;
    for b in bindings {
        write!(
            table,
            "Binding {{ group: {}, binding: {}, name: {:?}, stride: {}, writable: {} }}, ",
            b.group, b.binding, b.name, b.stride, b.writable
        )?;
    }
    table.push_str("], constants: &[");
    for c in constants {
        write!(table, "Constant {{ name: {:?}, default: {:?} }}, ", c.name, c.default)?;
    }
    table.push_str("] },\n");
    Ok(())
}
