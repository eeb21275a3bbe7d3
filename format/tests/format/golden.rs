//! A file of this version, kept: it must stay readable, and writing its content must give its bytes.

use std::path::{Path, PathBuf};

use samara_format::{
    Access, Affine4Layout, Bf16PanelLayout, Dtype, FileLayout, Metadata, PartSpec, SamaraFile, TensorSpec,
    TernaryLayout, Value, Writer,
};

use crate::roundtrip::rewrite;

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/v0.1.samara")
}

fn metadata() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "golden");
    metadata.insert("model.norm_topk", true);
    metadata.insert("model.rms_norm_eps", 1e-6);
    metadata.insert("model.layer_kinds", vec!["sliding".to_owned(), "full".to_owned()]);
    metadata.insert("model.vocab_size", 151_936u64);
    metadata.insert("model.weights", vec![0.5, -0.25]);
    metadata.insert("tokenizer.json", (0..600).map(|i| format!("{{\"id\": {i}}}, ")).collect::<String>());
    metadata.insert("tokenizer.stop_ids", vec![151_645u64, 151_643]);
    metadata
}

fn specs() -> Vec<TensorSpec> {
    let part = PartSpec::new;
    vec![
        TensorSpec::single("final_norm", Dtype::Bf16, 1, 5),
        TensorSpec {
            name: "one.of.each".to_owned(),
            n_blocks: 1,
            parts: vec![
                part("f32", Dtype::F32, 2, 3),
                part("bf16", Dtype::Bf16, 1, 3),
                part("u32", Dtype::U32, 1, 3),
                part("bf16_panels", Dtype::Bf16Panels, 5, 17),
                part("affine4", Dtype::Affine4, 5, 64),
                part("ternary2", Dtype::Ternary2, 5, 129),
            ],
        },
        TensorSpec {
            name: "layers.0.experts".to_owned(),
            n_blocks: 2,
            parts: vec![
                part("gate", Dtype::Ternary2, 4, 128),
                part("up", Dtype::Ternary2, 4, 128),
                part("down", Dtype::Ternary2, 128, 4),
            ],
        },
    ]
}

/// The bytes of a part whose element (row r, column c) is a small function of 10 r + c.
fn part_bytes(part: &PartSpec) -> Vec<u8> {
    let (rows, cols) = (part.rows as usize, part.cols as usize);
    let elements = || (0..rows * cols).map(|i| i / cols * 10 + i % cols);
    let halves = |n: usize| (0..n).map(|i| 0x3f80 + i as u16).collect::<Vec<u16>>();
    match part.dtype {
        Dtype::F32 => elements().flat_map(|n| (n as f32).to_le_bytes()).collect(),
        Dtype::Bf16 => elements().flat_map(|n| (0x3f80 + n as u16).to_le_bytes()).collect(),
        Dtype::U32 => elements().flat_map(|n| (n as u32).to_le_bytes()).collect(),
        Dtype::Bf16Panels => {
            let layout = Bf16PanelLayout::new(rows, cols).unwrap();
            let mut out = vec![0; layout.len()];
            layout.pack(&elements().map(|n| 0x3f80 + n as u16).collect::<Vec<_>>(), &mut out);
            out
        }
        Dtype::Affine4 => {
            let layout = Affine4Layout::new(rows, cols).unwrap();
            let mut out = vec![0; layout.len()];
            let nibbles: Vec<u8> = elements().map(|n| (n % 16) as u8).collect();
            let pairs = halves(2 * rows * cols / 64);
            let (scales, biases) = pairs.split_at(rows * cols / 64);
            layout.pack(&nibbles, scales, biases, &mut out);
            out
        }
        Dtype::Ternary2 => {
            let layout = TernaryLayout::new(rows, cols).unwrap();
            let mut out = vec![0; layout.len()];
            layout.pack(&elements().map(|n| (n % 3) as u8).collect::<Vec<_>>(), &halves(rows), &mut out);
            out
        }
    }
}

fn write(path: &Path) {
    let layout = FileLayout::new(metadata(), specs(), 0).unwrap();
    let mut writer = Writer::create(path, layout, true).unwrap();
    for spec in specs() {
        let mut tensor = writer.tensor().unwrap();
        for _ in 0..spec.n_blocks {
            for part in &spec.parts {
                tensor.append(&part_bytes(part)).unwrap();
                tensor.pad().unwrap();
            }
        }
        tensor.finish().unwrap();
    }
    writer.finish().unwrap();
}

#[test]
#[ignore = "optional: writes the golden file anew, only together with a new format version"]
fn renew() {
    write(&golden());
}

#[test]
fn is_read() {
    for access in [Access::Mmap, Access::Read] {
        let file = SamaraFile::open(golden(), access).unwrap();
        assert_eq!(file.index().version().to_string(), "0.1");
        assert_eq!(file.index().metadata(), &metadata());
        assert_eq!(file.index().metadata().get("model.norm_topk"), Some(&Value::Bool(true)));
        for (tensor, spec) in file.index().tensors().iter().zip(specs()) {
            assert_eq!(tensor.spec(), spec);
            file.verify(tensor).unwrap();
            for block in 0..spec.n_blocks as usize {
                for (i, part) in spec.parts.iter().enumerate() {
                    assert_eq!(file.part(tensor, block, i), part_bytes(part), "{} {}", spec.name, part.name);
                }
            }
        }
    }
}

#[test]
fn is_written_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let expected = std::fs::read(golden()).unwrap();
    let path = folder.path().join("from-content.samara");
    write(&path);
    assert!(std::fs::read(&path).unwrap() == expected, "written from its content");
    let path = folder.path().join("from-file.samara");
    rewrite(&SamaraFile::open(golden(), Access::Mmap).unwrap(), &path);
    assert!(std::fs::read(&path).unwrap() == expected, "written from what was read");
}
