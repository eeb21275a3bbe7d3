//! Feeds `Index::parse` arbitrary bytes, as they are and again as sections under a header and hash that are right, so
//! that the fuzzer is not stopped by the hash.
//!
//! `cargo fuzz run index` from the folder above, with `RUSTC_BOOTSTRAP=1` on a stable compiler.

#![no_main]

use libfuzzer_sys::fuzz_target;
use samara_format::{FileLayout, Index, MAGIC, Tensor};
use xxhash_rust::xxh3::Xxh3;

const HEADER: usize = 64;

fuzz_target!(|bytes: &[u8]| {
    let _ = Index::parse(bytes, bytes.len() as u64);
    if let Some((counts, sections)) = bytes.split_first_chunk::<16>() {
        let (head, file_len) = sealed(counts, sections);
        if let Ok(index) = Index::parse(&head, file_len) {
            check(&index);
        }
    }
});

/// Header and index from what the fuzzer chose: both counts (1 byte each), the metadata's length (2), the file's
/// length in pages (4), then the two sections.
fn sealed(counts: &[u8; 16], sections: &[u8]) -> (Vec<u8>, u64) {
    let metadata_len = usize::from(u16::from_le_bytes([counts[2], counts[3]])).min(sections.len());
    let (metadata, directory) = sections.split_at(metadata_len);
    let pages = u32::from_le_bytes([counts[4], counts[5], counts[6], counts[7]]);
    let directory_offset = (HEADER + metadata.len()).next_multiple_of(8);
    let data_offset = (directory_offset + directory.len()).next_multiple_of(4096);
    let file_len = data_offset as u64 + u64::from(pages) * 4096;

    let mut head = MAGIC.to_vec();
    head.extend([0, 0, 1, 0, 0, 0, 0, 0]);
    head.extend(u32::from(counts[0]).to_le_bytes());
    head.extend(u32::from(counts[1]).to_le_bytes());
    head.extend((metadata.len() as u32).to_le_bytes());
    head.extend((directory.len() as u32).to_le_bytes());
    head.extend((data_offset as u64).to_le_bytes());
    head.extend(file_len.to_le_bytes());
    head.resize(HEADER, 0);
    head.extend(metadata);
    head.resize(directory_offset, 0);
    head.extend(directory);
    head.resize(data_offset, 0);
    let mut hasher = Xxh3::new();
    hasher.update(&head[..48]);
    hasher.update(&head[HEADER..]);
    head[48..HEADER].copy_from_slice(&hasher.digest128().to_le_bytes());
    (head, file_len)
}

/// What is accepted lies inside the file, and can be planned again with the same places.
fn check(index: &Index) {
    let specs = index.tensors().iter().map(Tensor::spec).collect();
    let plan = FileLayout::new(index.metadata().clone(), specs, 0).expect("what was read can be written");
    for (read, planned) in index.tensors().iter().zip(plan.tensors()) {
        assert!(read.offset + read.len <= index.file_len());
        assert_eq!(
            (read.len, read.block_stride, &read.parts),
            (planned.len, planned.block_stride, &planned.parts)
        );
    }
}
