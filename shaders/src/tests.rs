//! The table says what the shaders say, and the check behind it refuses what it should.

use super::expand::{AXES, CHOICES, Expanded};
use super::validate::{Reflected, Refusal, validate};
use super::*;

fn no_pieces(name: &str) -> Result<String, String> {
    Err(format!("no piece called {name}"))
}

fn check(file: &str, source: &str) -> Result<Reflected, Refusal> {
    validate(&Expanded::new(file, source, CHOICES[0], &no_pieces).expect("no pieces are used"))
}

fn gemv() -> &'static Kernel {
    kernel("norm_gemv").expect("in the table")
}

#[test]
fn the_table_is_sorted_named_after_its_files_and_within_every_adapters_limits() {
    assert!(!KERNELS.is_empty());
    assert!(KERNELS.windows(2).all(|w| w[0].name < w[1].name));
    for k in KERNELS {
        assert_eq!(k.name, k.entry_point);
        for variant in Variant::ALL {
            assert!(k.source(variant).contains(&format!("fn {}(", k.entry_point)), "{}", k.name);
            assert_eq!(k.source(variant), k.source(k.reduced(variant)), "{} {variant}", k.name);
        }
        // WebGPU's default limits: 256 invocations, 16 KiB of workgroup memory, 8 storage buffers.
        assert!(k.workgroup_size.iter().product::<u32>() <= 256, "{}", k.name);
        assert!(k.workgroup_memory <= 16_384, "{} takes {}", k.name, k.workgroup_memory);
        assert!(k.bindings.len() <= 8, "{}", k.name);
        assert!(k.bindings.iter().zip(0..).all(|(b, i)| (b.group, b.binding) == (0, i)), "{}", k.name);
        assert_eq!(kernel(k.name), Some(k));
    }
    assert_eq!(kernel("no_such_kernel"), None);
    assert_eq!(kernel(""), None);
}

#[test]
fn variants_are_the_choices_in_order() {
    for (variant, choice) in Variant::ALL.into_iter().zip(CHOICES) {
        assert_eq!([variant.subgroups, variant.packed_dot], choice);
        assert_eq!(Variant::ALL[variant.index()], variant);
        let source = gemv().source(variant);
        assert_eq!(source.contains("subgroupShuffleXor("), variant.subgroups, "{variant}");
        assert_eq!(source.contains("dot4I8Packed("), variant.packed_dot, "{variant}");
    }
    assert_eq!(gemv().variants().count(), 4);
    assert_eq!(kernel("embed").expect("in the table").variants().count(), 1);
}

#[test]
fn norm_gemv_binds_what_its_text_declares() {
    let k = gemv();
    let found: Vec<_> = k.bindings.iter().map(|b| (b.name, b.stride, b.writable)).collect();
    assert_eq!(found, [("h", 16, false), ("norm", 16, false), ("w", 4, false), ("y", 4, true)]);
    assert_eq!(k.workgroup_size, [256, 1, 1]);
    let constants: Vec<_> = k.constants.iter().map(|c| (c.name, c.default)).collect();
    for expected in [("ROWS", 3072.0), ("COLS", 2048.0), ("PANELS", 1.0), ("SUBGROUP_MIN", 8.0)] {
        assert!(constants.contains(&expected), "{expected:?} in {constants:?}");
    }
    assert!(constants.iter().all(|(name, _)| *name != "COL_BLOCKS"), "computed from COLS: {constants:?}");
}

/// A faulty kernel, the line it is refused at (where the fault has one) and words of the message.
fn check_refused(what: &str, source: &str, line: Option<u32>, words: &str) {
    let refusal = check("broken.wgsl", source).expect_err(what);
    assert_eq!(refusal.at.map(|(line, _)| line), line, "{what}: {refusal}");
    let text = refusal.to_string();
    assert!(text.starts_with("broken.wgsl:"), "{what}: {text}");
    assert!(text.contains(words), "{what}: {text}");
}

#[test]
fn a_broken_kernel_is_refused() {
    const MAIN: &str = "@compute @workgroup_size(1) fn k() {";
    let gemv = gemv().source(Variant::ALL[1]);
    let line_with = |text: &str| gemv.lines().zip(1..).find(|(l, _)| l.contains(text)).map(|(_, n)| n);

    check_refused("not WGSL", "void main() {}", Some(1), "expected global");
    check_refused(
        "an undeclared name",
        &gemv.replace("group.x * PANELS", "groups.x * PANELS"),
        line_with("group.x * PANELS"),
        "no definition in scope",
    );
    check_refused(
        "a sum of float and integer",
        &gemv.replace("* f32(ternary_dot", "* (ternary_dot"),
        line_with("fn ternary_part("), // naga names the function
        "Multiply",
    );
    check_refused(
        "a store to a read-only buffer",
        &gemv.replace("read_write", "read"),
        line_with("y[row] ="),
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
    check_refused(
        "a uniform buffer",
        &format!("@group(0) @binding(0) var<uniform> a: vec4<u32>;\n{MAIN}}}"),
        None,
        "which no backend binds",
    );
    check_refused("a constant without a default", &format!("override A: u32;\n{MAIN}}}"), None, "no default");
}

#[test]
fn defaults_size_workgroup_memory() {
    let source = "override N: u32 = 3u;\nvar<workgroup> a: array<u32, N>;\n\
        @compute @workgroup_size(1) fn k() { a[0] = 1u; }";
    assert_eq!(check("sized.wgsl", source).expect("valid").workgroup_memory, 12);
    let grown = source.replace("3u", "5u");
    assert_eq!(check("sized.wgsl", &grown).expect("valid").workgroup_memory, 20);
}

/// `lib` of the tests below: pieces by name.
fn pieces(name: &str) -> Result<String, String> {
    Ok(match name {
        "one" => "// use two\nfn one() -> u32 { return two(); }\n",
        "two" => "\nfn two() -> u32 { return 2u; }\n",
        "broken" => "const A: u32 = 1u;\nconst B: u32 = C;\n",
        "reduce.shared" => "fn r() {}\n",
        "reduce.subgroup" => "fn r() { }\n",
        _ => return no_pieces(name),
    }
    .to_owned())
}

#[test]
fn pieces_come_once_and_lines_remember_their_file() {
    let main =
        "// use one\n// use two\n// use the other thing\n@compute @workgroup_size(1) fn k() { _ = one(); }\n";
    let all = Expanded::new("k.wgsl", main, CHOICES[0], &pieces).expect("every piece exists");
    assert_eq!(all.text.matches("fn two").count(), 1);
    assert_eq!(all.place(1), ("shaders/wgsl/lib/two.wgsl", 1));
    assert_eq!(all.place(3), ("shaders/wgsl/lib/one.wgsl", 2));
    assert_eq!(all.place(4), ("k.wgsl", 3));
    assert_eq!(all.place(99), ("k.wgsl", 4));
    assert_eq!(all.uses, [false; AXES.len()]);
    validate(&all).expect("a valid kernel");

    let all = Expanded::new("k.wgsl", "// use broken\n", CHOICES[0], &pieces).expect("the piece exists");
    let refusal = validate(&all).expect_err("a name that is not declared").to_string();
    assert!(refusal.starts_with("shaders/wgsl/lib/broken.wgsl:2:16: "), "{refusal}");

    let error = Expanded::new("k.wgsl", "\n// use none\n", CHOICES[0], &pieces).expect_err("no such piece");
    assert_eq!(error, "k.wgsl:2: shaders/wgsl/lib/none.wgsl: no piece called none");
}

#[test]
fn an_axis_stands_for_the_file_chosen() {
    for choice in CHOICES {
        let all = Expanded::new("k.wgsl", "// use reduce\n", choice, &pieces).expect("the pieces exist");
        assert_eq!(all.text, if choice[0] { "fn r() { }\n" } else { "fn r() {}\n" });
        assert_eq!(all.uses, [true, false]);
    }
}
