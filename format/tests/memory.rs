//! Hostile files in a process of their own: however much they claim, memory stays small.

#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test's own failure")]

#[path = "format/raw.rs"]
mod raw;

use std::io::Read as _;
use std::time::{Duration, Instant};

use raw::{Entry, HEADER, Raw, counted, seal, small};
use samara_format::{Access, SamaraFile};

/// Most bytes of memory that this process ever had in use.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Files that ask for memory in every way the format has.
fn hostile() -> Vec<Vec<u8>> {
    // 32 MiB, made without ever holding them: the meter below shows a peak.
    let bomb = zstd::stream::encode_all(std::io::repeat(b'a').take(32 << 20), 1).unwrap();
    let bomb_claiming = |raw: u32| {
        let value = [counted(raw, &(bomb.len() as u32).to_le_bytes()), bomb.clone()].concat();
        Raw::new().meta(b"bomb", 8, &value).build()
    };
    let mut files =
        vec![bomb_claiming(32 << 20), bomb_claiming(u32::MAX), bomb_claiming(64 * bomb.len() as u32)];
    for type_code in 4..=8 {
        for count in [1 << 30, u32::MAX] {
            files.push(Raw::new().meta(b"k", type_code, &counted(count, &[0; 16])).build());
        }
    }
    let entry =
        Entry { name: b"t", n_blocks: 1, offset: 4096, len: 128, parts: &[(b"w", 6, 1, 1 << 30, 1 << 30)] };
    files.push(Raw::new().tensor(entry, &[]).build());
    files.push(
        Raw::new().tensor(Entry { n_blocks: 1 << 50, parts: &[(b"w", 1, 0, 1, 1)], ..entry }, &[]).build(),
    );
    for (at, width) in [(16, 4), (20, 4), (24, 4), (28, 4), (32, 8), (40, 8)] {
        for number in [99_000_000u64, 1 << 31, 1 << 40, 1 << 63, u64::MAX] {
            let mut file = small().build();
            file[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            seal(&mut file);
            files.push(file);
        }
    }
    // A header that is right about an index of 100 MB, in a file that ends after it.
    let mut file = small().build();
    file[24..28].copy_from_slice(&99_900_000u32.to_le_bytes());
    file[32..40].copy_from_slice(&99_905_536u64.to_le_bytes());
    file.truncate(HEADER);
    files.push(file);
    files
}

#[test]
fn stays_small() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<_> = hostile()
        .iter()
        .enumerate()
        .map(|(i, bytes)| {
            let path = folder.path().join(format!("{i}.samara"));
            std::fs::write(&path, bytes).unwrap();
            path
        })
        .collect();
    let (before, start) = (peak(), Instant::now());
    let mut refused = 0;
    for path in &files {
        for access in [Access::Mmap, Access::Read] {
            refused += usize::from(SamaraFile::open(path, access).is_err());
        }
    }
    // Truncated widths leave two numbers as they were: a header field set to its low half, which is 0, may be valid.
    assert!(refused >= 2 * files.len() - 4, "{refused} of {}", 2 * files.len());
    let grown = peak() - before;
    assert!(grown < 8 << 20, "memory grew by {grown} bytes");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());

    // The meter itself: what a believed claim of 64 MB would have cost is seen.
    let claimed = std::hint::black_box(vec![1u8; 64 << 20]);
    assert!(peak() - before > 32 << 20, "{} bytes in use are not seen", claimed.len());
}
