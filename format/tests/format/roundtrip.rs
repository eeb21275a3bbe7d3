//! Whatever can be written is read back the same, and written again from what was read gives the same bytes (R27).

use std::path::Path;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use samara_format::{
    Access, Dtype, FileLayout, Index, Metadata, PART_ALIGN, PartSpec, SamaraFile, TENSOR_ALIGN, Tensor,
    TensorSpec, Value, Writer,
};

use crate::sample::{content, write};

fn value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        4 => "\\PC{0,20}",
        // Long enough to be compressed: well, badly, and too well for R12.
        1 => vec("[a-z]{1,8} ", 200..400).prop_map(|words| words.concat()),
        1 => vec(any::<char>(), 300..600).prop_map(|chars| chars.into_iter().collect()),
        1 => (1020usize..3000).prop_map(|n| "a".repeat(n)),
    ];
    let float = any::<f64>().prop_filter("R11", |number| number.is_finite());
    prop_oneof![
        any::<u64>().prop_map(Value::U64),
        float.clone().prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        text.prop_map(Value::Str),
        vec(any::<u64>(), 0..20).prop_map(Value::U64s),
        vec(float, 0..20).prop_map(Value::F64s),
        vec("\\PC{0,9}", 0..9).prop_map(Value::Strs),
    ]
}

fn metadata() -> impl Strategy<Value = Metadata> {
    btree_map("[a-z_.é]{1,30}", value(), 0..12).prop_map(|entries| {
        let mut metadata = Metadata::new();
        for (key, value) in entries {
            metadata.insert(key, value);
        }
        metadata
    })
}

/// A part's dtype, rows and columns.
type Shape = (Dtype, u64, u64);

fn part() -> impl Strategy<Value = Shape> {
    (proptest::sample::select(Dtype::ALL), 1u64..10, 1u64..300).prop_map(|(dtype, rows, cols)| match dtype {
        Dtype::Affine4 => (dtype, rows, cols.next_multiple_of(64)),
        _ => (dtype, rows, cols),
    })
}

fn tensors() -> impl Strategy<Value = Vec<TensorSpec>> {
    let tensor = (1u64..4, vec(part(), 1..4));
    btree_map("[a-zé.0-9]{1,20}", tensor, 0..5).prop_map(|tensors| {
        let spec = |(name, (n_blocks, parts)): (String, (u64, Vec<Shape>))| {
            let parts = parts.into_iter().enumerate();
            let parts =
                parts.map(|(i, (dtype, rows, cols))| PartSpec::new(format!("p{i}"), dtype, rows, cols));
            TensorSpec { name, n_blocks, parts: parts.collect() }
        };
        // Not in order of names: the directory's order is the plan's.
        tensors.into_iter().rev().map(spec).collect()
    })
}

/// R18 and R19, computed here once more.
fn check_places(tensors: &[Tensor], data_offset: u64, file_len: u64) {
    let mut at = data_offset;
    for tensor in tensors {
        assert_eq!(tensor.offset, at, "{}", tensor.name);
        let mut in_block = 0u64;
        for part in &tensor.parts {
            assert_eq!(part.offset, in_block.next_multiple_of(PART_ALIGN));
            in_block = part.offset + part.len;
        }
        let align = if tensor.n_blocks > 1 { TENSOR_ALIGN } else { PART_ALIGN };
        assert_eq!(tensor.block_stride, in_block.next_multiple_of(align));
        assert_eq!(tensor.len, tensor.block_stride * tensor.n_blocks);
        at = (at + tensor.len).next_multiple_of(TENSOR_ALIGN);
    }
    assert_eq!(at, file_len);
}

fn check_content(file: &SamaraFile) {
    for tensor in file.index().tensors() {
        let expected = content(&tensor.name, tensor.len);
        assert!(file.bytes(tensor) == expected, "{}", tensor.name);
        file.verify(tensor).unwrap();
        for block in 0..tensor.n_blocks as usize {
            for (i, part) in tensor.parts.iter().enumerate() {
                let start = block * tensor.block_stride as usize + part.offset as usize;
                let bytes = file.part(tensor, block, i);
                assert!(bytes == &expected[start..start + part.len as usize], "{} {block} {i}", tensor.name);
                assert_eq!(bytes.as_ptr().align_offset(64), 0, "{} {block} {i}", tensor.name);
            }
        }
    }
}

/// Writes what was read once more.
pub(crate) fn rewrite(file: &SamaraFile, to: &Path) {
    let index = file.index();
    let specs = index.tensors().iter().map(Tensor::spec).collect();
    let layout = FileLayout::new(index.metadata().clone(), specs, index.header().features).unwrap();
    let mut writer = Writer::create(to, layout, false).unwrap();
    for tensor in index.tensors() {
        let mut out = writer.tensor().unwrap();
        out.append(file.bytes(tensor)).unwrap();
        assert_eq!(out.finish().unwrap(), tensor.hash);
    }
    writer.finish().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_file(metadata in metadata(), tensors in tensors(), piece in 1usize..5000) {
        let folder = tempfile::tempdir().unwrap();
        let (path, again) = (folder.path().join("a.samara"), folder.path().join("b.samara"));
        write(&path, &metadata, &tensors, piece);
        for access in [Access::Mmap, Access::Read] {
            let file = SamaraFile::open(&path, access).unwrap();
            let index = file.index();
            prop_assert_eq!(index.metadata(), &metadata);
            prop_assert_eq!(index.tensors().iter().map(Tensor::spec).collect::<Vec<_>>(), tensors.clone());
            for tensor in index.tensors() {
                prop_assert_eq!(index.tensor(&tensor.name), Some(tensor));
            }
            prop_assert_eq!(index.tensor("no such tensor"), None);
            check_places(index.tensors(), index.header().data_offset, index.file_len());
            check_content(&file);
        }
        rewrite(&SamaraFile::open(&path, Access::Mmap).unwrap(), &again);
        prop_assert!(std::fs::read(&path).unwrap() == std::fs::read(&again).unwrap());
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "no .part is left");
    }
}

/// Long strings are stored compressed when R12 allows it, and every length around its bounds comes back.
#[test]
fn strings_around_the_compression_bounds() {
    let words: String = (0..5000).map(|i| format!("{i} ")).collect();
    let stored = |text: &str| {
        let mut metadata = Metadata::new();
        metadata.insert("k", text);
        let layout = FileLayout::new(metadata, vec![], 0).unwrap();
        layout.data_offset()
    };
    // As it is, the text would take 6 pages.
    assert_eq!((words.len(), stored(&words)), (23_890, 4096));
    // Too compressible to be stored compressed.
    assert_eq!(stored(&"a".repeat(40_000)), 10 * 4096);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.samara");
    for len in [0, 1, 1022, 1023, 1024, 1025, 23_890] {
        let mut metadata = Metadata::new();
        metadata.insert("k", &words[..len]);
        write(&path, &metadata, &[], 1);
        let bytes = std::fs::read(&path).unwrap();
        let expected_type = if len < 1024 { 4 } else { 8 };
        assert_eq!(bytes[64 + 2], expected_type, "{len} bytes");
        let index = Index::parse(&bytes, bytes.len() as u64).unwrap();
        assert_eq!(index.metadata().str("k").unwrap(), &words[..len]);
    }
}

/// An index much larger than any page, and names at their longest.
#[test]
fn many_tensors_and_long_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.samara");
    let name = |i: usize| format!("{i:0>255}");
    let specs: Vec<_> = (0..300).map(|i| TensorSpec::single(name(i), Dtype::U32, 1, 1)).collect();
    let mut metadata = Metadata::new();
    metadata.insert(name(0), 1u64);
    write(&path, &metadata, &specs, 128);
    let file = SamaraFile::open(&path, Access::Read).unwrap();
    assert_eq!(file.index().tensors().len(), 300);
    assert_eq!(file.index().tensor(&name(299)).unwrap().parts[0].len, 4);
    assert_eq!(file.path(), path);
    check_content(&file);
}
