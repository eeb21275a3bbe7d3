//! Synthetic checkpoints: exact published sizes, the same weights in both layouts, and converters that accept them.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::checkpoint::*;
use samara_converter::{
    Error, Options, Progress, Quiet, SynthFlash, SynthLayout, SynthReport, SynthSpec, SynthTexts, plan,
    synthesise,
};

fn write(spec: &SynthSpec, dir: &Path) -> Result<SynthReport, Error> {
    let read = |name: &str| std::fs::read_to_string(fixture(TINY).join(name)).unwrap();
    let (tokenizer, chat_template) = (read("tokenizer.json"), read("chat_template.jinja"));
    let texts = SynthTexts { tokenizer: &tokenizer, chat_template: &chat_template };
    synthesise(spec, &texts, dir, &Quiet, &AtomicBool::new(false))
}

#[test]
fn full_size_has_the_published_counts() {
    assert_eq!(SynthSpec::full(SynthLayout::Mlx2Bit).payload().unwrap(), (463, 5_308_186_624));
    assert_eq!(SynthSpec::full(SynthLayout::HuggingFace).payload().unwrap(), (18_651, 40_428_060_672));
}

#[test]
fn both_layouts_of_a_seed_convert_to_the_same_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let convert = |name: &str, spec: &SynthSpec| {
        let report = write(spec, &dir.path().join(name)).unwrap();
        assert_eq!((report.tensors, report.payload_bytes), spec.payload().unwrap());
        let out = dir.path().join(format!("{name}.samara"));
        let converted = convert_to(&dir.path().join(name), &out, &Options::default()).unwrap();
        (open(&out), converted.counts)
    };
    let plain = |layout| SynthSpec { flash: None, ..SynthSpec::tiny(layout) };
    let (mlx, mlx_counts) = convert("mlx", &plain(SynthLayout::Mlx2Bit));
    let (hf, hf_counts) = convert("hf", &plain(SynthLayout::HuggingFace));
    assert_eq!(mlx.index().tensors(), hf.index().tensors());
    assert_eq!((mlx_counts.rows, mlx_counts.zero_rows), (hf_counts.rows, hf_counts.zero_rows));
    assert!(mlx_counts.zero_rows > 0 && hf_counts.negative_zeros > 0, "the cases worth testing are in it");
    let (other, _) = convert("other", &SynthSpec { seed: 1, ..plain(SynthLayout::Mlx2Bit) });
    assert_ne!(mlx.index().tensors(), other.index().tensors());
}

#[test]
fn flashhead_data_are_in_the_small_and_awkward_sizes_too() {
    let check = |spec: SynthSpec| {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        write(&spec, &model).unwrap();
        let summary = plan(&model, &Options::default()).unwrap();
        assert!(
            summary.summary().flash_head && summary.summary().notes.len() == 2,
            "{:?}",
            summary.summary().notes
        );
        convert_to(&model, &dir.path().join("m.samara"), &Options::default()).unwrap();
    };
    let tiny = SynthSpec::tiny(SynthLayout::Mlx2Bit);
    check(tiny.clone());
    check(SynthSpec {
        vocab_size: 4100,
        flash: Some(SynthFlash { cluster_size: 4, n_probes: 1 }),
        ..tiny.clone()
    });
    check(SynthSpec {
        n_experts: 1,
        n_experts_used: 1,
        n_layers: 1,
        n_shards: 1,
        expert_size: 16,
        ..tiny.clone()
    });
    check(SynthSpec { head_dim: 16, n_heads: 3, n_kv_heads: 3, n_shards: 7, full_every: 1, ..tiny });
}

#[test]
fn the_flashhead_file_of_full_size_has_the_published_payload() {
    // It would take an emulated machine ten seconds.
    if emulated() {
        return;
    }
    // All clusters and tokens with a narrow residual; the bytes of a centroid grow by 4 bits an input and 4 a group.
    let full = SynthSpec::full(SynthLayout::Mlx2Bit);
    let spec = SynthSpec { hidden_size: 128, n_layers: 1, n_experts: 1, n_experts_used: 1, ..full };
    let dir = tempfile::tempdir().unwrap();
    write(&spec, dir.path()).unwrap();
    let bytes = std::fs::read(dir.path().join("model-flashhead.safetensors")).unwrap();
    let centroid = |width: usize| width / 2 + width / 64 * 4;
    // The published file is 6,087,456 bytes with a header of 520.
    assert_eq!(split_shard(&bytes).1.len() + 4748 * (centroid(2048) - centroid(128)), 6_087_456 - 520);
}

#[test]
fn impossible_sizes_and_full_folders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = SynthSpec::tiny(SynthLayout::Mlx2Bit);
    let refused = |spec: SynthSpec, wanted: &str| {
        let message = write(&spec, &dir.path().join("x")).unwrap_err().to_string();
        assert!(message.contains(wanted), "{message}");
        assert!(!message.contains("SynthFlash") && !message.contains("multiple of 1 "), "{message}");
        assert!(!dir.path().join("x").exists());
    };
    refused(
        SynthSpec { hidden_size: 100, ..tiny.clone() },
        "hidden_size = 100, but a multiple of 128 from 128 to 65536 is needed",
    );
    refused(SynthSpec { n_layers: 0, ..tiny.clone() }, "n_layers = 0, but a number from 1 to 1024 is needed");
    refused(SynthSpec { n_experts_used: 9, ..tiny.clone() }, "n_experts_used = 9");
    refused(SynthSpec { n_heads: 3, ..tiny.clone() }, "n_heads = 3, but a multiple of 2 from 2");
    refused(SynthSpec { n_kv_heads: 0, ..tiny.clone() }, "n_kv_heads = 0");
    let flash = |cluster_size, n_probes| Some(SynthFlash { cluster_size, n_probes });
    refused(SynthSpec { flash: flash(0, 1), ..tiny.clone() }, "clusters of 0");
    refused(SynthSpec { flash: flash(32, 0), ..tiny.clone() }, "0 of 128 FlashHead clusters");
    refused(SynthSpec { flash: flash(32, 129), ..tiny.clone() }, "129 of 128 FlashHead clusters");
    refused(SynthSpec { vocab_size: 4097, ..tiny.clone() }, "a vocabulary of 4097 cannot be cut into");
    refused(
        SynthSpec { flash: None, strong_clusters: Some(1), ..tiny.clone() },
        "strong clusters were asked for, but no FlashHead data",
    );
    refused(SynthSpec { vocab_size: 64, flash: None, ..tiny.clone() }, "vocab_size 64");
    std::fs::write(dir.path().join("file"), "x").unwrap();
    assert!(matches!(write(&tiny, dir.path()), Err(Error::FolderNotEmpty { .. })));
    assert!(matches!(write(&tiny, &dir.path().join("file")), Err(Error::OutputNotAFolder { .. })));
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"x");
}

/// Progress that asks for a stop after `limit` bytes.
struct Stop<'a> {
    limit: u64,
    done: AtomicU64,
    cancel: &'a AtomicBool,
}

impl Progress for Stop<'_> {
    fn phase(&self, _name: &'static str, _total: u64) {}
    fn advance(&self, bytes: u64) {
        if self.done.fetch_add(bytes, Ordering::Relaxed) + bytes >= self.limit {
            self.cancel.store(true, Ordering::Relaxed);
        }
    }
    fn message(&self, _text: &str) {}
}

#[test]
fn a_cancelled_one_can_be_made_again_at_once() {
    let spec = SynthSpec::tiny(SynthLayout::HuggingFace);
    let (_, payload) = spec.payload().unwrap();
    let read = |name: &str| std::fs::read_to_string(fixture(TINY).join(name)).unwrap();
    let (tokenizer, chat_template) = (read("tokenizer.json"), read("chat_template.jinja"));
    let texts = SynthTexts { tokenizer: &tokenizer, chat_template: &chat_template };
    // At the start, in the first shard, in the second.
    for (limit, there) in [(0, false), (payload / 4, true), (payload * 3 / 4, false)] {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        if there {
            std::fs::create_dir(&model).unwrap();
        }
        let cancel = AtomicBool::new(limit == 0);
        let stop = Stop { limit, done: AtomicU64::new(0), cancel: &cancel };
        let error = synthesise(&spec, &texts, &model, &stop, &cancel);
        assert!(matches!(error, Err(Error::Cancelled { kept: None })), "{error:?}");
        assert_eq!(model.exists(), there, "only a folder that was there before stays");
        write(&spec, &model).unwrap();
        plan(&model, &Options::default()).unwrap();
    }
}
