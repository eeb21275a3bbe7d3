//! The table says what the shaders say, and the check behind it refuses what it should.

use super::validate::validate;
use super::*;

#[test]
fn the_table_is_sorted_named_after_its_files_and_within_every_adapters_limits() {
    assert!(!KERNELS.is_empty());
    assert!(KERNELS.windows(2).all(|w| w[0].name < w[1].name));
    for k in KERNELS {
        assert_eq!(k.name, k.entry_point);
        assert!(k.source.contains(&format!("fn {}(", k.entry_point)), "{}", k.name);
        // WebGPU's default limits: 256 invocations, 16 KiB of workgroup memory, 8 storage buffers, 4 groups.
        assert!(k.workgroup_size.iter().product::<u32>() <= 256, "{}", k.name);
        assert!(k.workgroup_memory <= 16_384, "{}", k.name);
        assert!(k.bindings.iter().all(|b| b.group < 4), "{}", k.name);
        let storage = k.bindings.iter().filter(|b| matches!(b.kind, BindingKind::Storage { .. })).count();
        assert!(storage <= 8, "{}", k.name);
        assert_eq!(kernel(k.name), Some(k));
    }
    assert_eq!(kernel("no_such_kernel"), None);
    assert_eq!(kernel(""), None);
}

#[test]
fn ternary_gemv_binds_what_its_text_declares() {
    let k = kernel("ternary_gemv").expect("in the table");
    let storage = |writable| BindingKind::Storage { stride: 4, writable };
    let expected = [
        ("params", BindingKind::Uniform { size: 16 }),
        ("weights", storage(false)),
        ("x", storage(false)),
        ("x_scales", storage(false)),
        ("y", storage(true)),
    ];
    let found: Vec<_> = k.bindings.iter().map(|b| (b.name, b.kind)).collect();
    assert_eq!(found, expected);
    assert!(k.bindings.iter().zip(0..).all(|(b, i)| b.group == 0 && b.binding == i));
    assert_eq!(k.workgroup_size, [256, 1, 1]);
    assert_eq!(k.workgroup_memory, 256 * 4);
    assert_eq!(k.uniform_size("params"), Some(16));
    assert_eq!(k.uniform_size("weights"), None);
}

/// A faulty kernel, the line it is refused at (where the fault has one) and words of the message.
fn check_refused(what: &str, source: &str, line: Option<u32>, words: &str) {
    let refusal = validate("broken.wgsl", source).expect_err(what);
    assert_eq!(refusal.at.map(|(line, _)| line), line, "{what}: {refusal}");
    let text = refusal.to_string();
    assert!(text.starts_with("broken.wgsl:"), "{what}: {text}");
    assert!(text.contains(words), "{what}: {text}");
}

#[test]
fn a_broken_kernel_is_refused() {
    const MAIN: &str = "@compute @workgroup_size(1) fn k() {";
    let gemv = kernel("ternary_gemv").expect("in the table").source;
    let first_line_with = |text: &str| gemv.lines().zip(1..).find(|(l, _)| l.contains(text)).map(|(_, n)| n);

    check_refused("not WGSL", "void main() {}", Some(1), "expected global");
    check_refused(
        "an undeclared name",
        &gemv.replace("lane % 8u", "lanes % 8u"),
        first_line_with("lane % 8u"),
        "no definition in scope",
    );
    check_refused(
        "a sum of float and integer",
        &gemv.replace("* f32(dot)", "* dot"),
        first_line_with("* f32(dot)"),
        "f32",
    );
    check_refused(
        "a store to a read-only buffer",
        &gemv.replace("read_write", "read"),
        first_line_with("y[row] ="),
        "writing to this location",
    );
    check_refused("no entry point", "const A: u32 = 1u;", None, "0 entry points");
    check_refused(
        "two entry points",
        &format!("{MAIN}}} {}}}", MAIN.replace("k()", "l()")),
        None,
        "2 entry points",
    );
    check_refused("not a compute stage", "@fragment fn k() {}", None, "Fragment");
    check_refused(
        "one binding for two buffers",
        &format!(
            "@group(0) @binding(1) var<storage, read> a: array<u32>;\n\
             @group(0) @binding(1) var<storage, read> b: array<u32>;\n{MAIN}}}"
        ),
        None,
        "a and b share",
    );
    check_refused(
        "a buffer that is no array",
        &format!("@group(0) @binding(0) var<storage, read> a: u32;\n{MAIN}}}"),
        None,
        "not a run-time sized array",
    );
}

#[test]
fn a_changed_uniform_struct_changes_the_reflected_size() {
    let gemv = kernel("ternary_gemv").expect("in the table").source;
    let grown = validate("grown.wgsl", &gemv.replace("scales_at: u32,", "scales_at: u32,\n    extra: u32,"))
        .expect("still a valid kernel");
    assert_eq!(grown.bindings[0].kind, validate::ReflectedKind::Uniform { size: 20 });
}
