//! Bytes that no writer made: no panic, a typed error, and an accepted file is one whose every part lies inside it.

use proptest::prelude::*;
use samara_format::{Error, Index};

use crate::raw::{HEADER, seal, small};

/// Parses, and when that succeeds checks what a reader relies on.
fn parse(file: &[u8]) -> Result<(), Error> {
    let index = Index::parse(file, file.len() as u64)?;
    for tensor in index.tensors() {
        assert!(tensor.offset + tensor.len <= file.len() as u64);
        for part in &tensor.parts {
            assert!(part.offset + part.len <= tensor.block_stride);
        }
    }
    Ok(())
}

#[test]
fn every_bit_of_the_header_flipped() {
    let valid = small().build();
    for bit in 0..HEADER * 8 {
        let mut file = valid.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        assert!(parse(&file).is_err(), "bit {bit}");
        // With the hash made right, only a changed hash itself is undone.
        seal(&mut file);
        let is_hash = (48 * 8..).contains(&bit);
        assert_eq!(parse(&file).is_ok(), is_hash, "bit {bit}, sealed");
    }
}

#[test]
fn every_byte_of_the_index_changed() {
    let valid = small().build();
    for at in 0..4096 {
        for flip in [0x01, 0x80, 0xff] {
            let mut file = valid.clone();
            file[at] ^= flip;
            assert!(parse(&file).is_err(), "byte {at} ^ {flip:#x}");
        }
    }
}

/// As above with the hash made right, so that each check behind it meets the change.
#[test]
fn every_byte_of_the_sections_changed_and_sealed() {
    let raw = small();
    let valid = raw.build();
    let end = HEADER + raw.metadata.len().next_multiple_of(8) + raw.directory.len();
    let mut refused = 0;
    for at in HEADER..end {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut file = valid.clone();
            file[at] = value;
            seal(&mut file);
            refused += usize::from(parse(&file).is_err());
        }
    }
    // Values, names and hashes may be anything; places, shapes, lengths and codes may not.
    assert!(refused > 1000, "{refused} refused");
}

#[test]
fn every_length_of_the_index() {
    let valid = small().build();
    for len in 0..valid.len() {
        if len > 4200 && len % 97 != 0 {
            continue;
        }
        let error = parse(&valid[..len]).expect_err("a file cut short");
        let expected = match len {
            0 => matches!(error, Error::Empty),
            1..64 => matches!(error, Error::HeaderCut { .. }),
            _ => matches!(error, Error::Truncated { .. }),
        };
        assert!(expected, "{len} bytes: {error}");
        // The same length as before, but with zeros or noise from there on.
        for fill in [0, 0xa5] {
            let mut file = valid.clone();
            file[len..].fill(fill);
            let complete = (4096..).contains(&len);
            let Err(error) = parse(&file) else {
                assert!(complete || file[..4096] == valid[..4096], "{len} bytes, then {fill:#x}");
                continue;
            };
            assert!(!complete, "{len} bytes, then {fill:#x}: {error}");
        }
    }
}

/// Numbers that break those who compute with them unchecked.
const NASTY: [u64; 12] = [
    0,
    1,
    3,
    0x7fff_ffff,
    1 << 31,
    1 << 32,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    u64::MAX - 4095,
    u64::MAX - 1,
    u64::MAX,
];

/// Each number of the index replaced by each nasty one, in every width and at every place.
#[test]
fn nasty_numbers_everywhere() {
    let raw = small();
    let valid = raw.build();
    let end = HEADER + raw.metadata.len().next_multiple_of(8) + raw.directory.len();
    for at in 8..end {
        for number in NASTY {
            for width in [2, 4, 8] {
                let mut file = valid.clone();
                file[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
                seal(&mut file);
                let _ = parse(&file);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(parse(&bytes).is_err());
    }

    /// Noise behind a good magic and version.
    #[test]
    fn arbitrary_bytes_after_the_version(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut file = small().build();
        let n = bytes.len().min(file.len() - 12);
        file[12..12 + n].copy_from_slice(&bytes[..n]);
        prop_assert!(n == 0 || bytes[..n] == small().build()[12..12 + n] || parse(&file).is_err());
    }

    /// Noise as sections, under a header and a hash that are right.
    #[test]
    fn arbitrary_sections(
        metadata in proptest::collection::vec(any::<u8>(), 0..200),
        directory in proptest::collection::vec(any::<u8>(), 0..200),
        counts in (0u32..4, 0u32..4),
    ) {
        let mut raw = small();
        (raw.metadata, raw.directory) = (metadata, directory);
        (raw.n_metadata, raw.n_tensors) = counts;
        prop_assert!(parse(&raw.build()).is_err());
    }

    /// A valid file with some bytes changed, and the hash made right again.
    #[test]
    fn mutated(changes in proptest::collection::vec((8usize..1300, any::<u8>()), 1..6)) {
        let mut file = small().build();
        for (at, byte) in changes {
            file[at] = byte;
        }
        seal(&mut file);
        let _ = parse(&file);
    }
}
