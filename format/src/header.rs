//! The 64-byte header (rules R2 to R7): magic, version, required features, section sizes, and the hash of the index.

use std::fmt;
use std::mem::{offset_of, size_of};

use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::foreign::check_magic;

/// The first 8 bytes. The first is not ASCII and the last is a line end, so text-mode transfers show.
pub const MAGIC: [u8; 8] = *b"\x89SAMARA\n";
/// The version this crate writes, and the newest it reads.
pub const VERSION: Version = Version { major: 0, minor: 1 };
/// The required-feature bits this crate has. None is defined yet.
pub const KNOWN_FEATURES: u32 = 0;
/// The most bytes that header, metadata and directory may take together.
pub const MAX_INDEX_LEN: u64 = 100_000_000;

/// Tensors and the data section start at multiples of this.
const PAGE: u64 = 4096;
/// The sections start at multiples of this.
const SECTION_ALIGN: u64 = 8;
/// Bytes of the header that the hash covers: all before it.
const HASHED: usize = 48;

/// A version of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes when old readers cannot read the header any more.
    pub major: u16,
    /// Changes with every change of the format.
    pub minor: u16,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The header as it lies in the file, little endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// Major version.
    pub major: u16,
    /// Minor version.
    pub minor: u16,
    /// Required-feature bits: a reader that lacks one refuses the file.
    pub features: u32,
    /// Entries in the metadata.
    pub n_metadata: u32,
    /// Tensors in the directory.
    pub n_tensors: u32,
    /// Bytes of metadata, from byte 64.
    pub metadata_len: u32,
    /// Bytes of the directory, from the first multiple of 8 after the metadata.
    pub directory_len: u32,
    /// Where the data start: a multiple of 4096.
    pub data_offset: u64,
    /// Bytes of the whole file.
    pub file_len: u64,
    /// xxh3-128, little endian, of the 48 bytes before it and of bytes 64 to `data_offset`.
    pub hash: [u8; 16],
}

const _: () = assert!(size_of::<Header>() == Header::LEN);
const _: () = assert!(offset_of!(Header, features) == 12 && offset_of!(Header, metadata_len) == 24);
const _: () = assert!(offset_of!(Header, data_offset) == 32 && offset_of!(Header, hash) == HASHED);

impl Header {
    /// Bytes of the header.
    pub const LEN: usize = 64;

    /// Reads the header of a file of `actual_len` bytes from the file's first bytes, up to where that can be done
    /// without the index: the kind of file, its version, and section sizes that fit in the file.
    pub(crate) fn parse(head: &[u8], actual_len: u64) -> Result<Self, Error> {
        let head = &head[..head.len().min(Self::LEN)];
        check_magic(head)?;
        let Ok(bytes) = <&[u8; Self::LEN]>::try_from(head) else {
            return Err(Error::HeaderCut { len: actual_len });
        };
        let header = Self::decode(bytes);
        header.check_version()?;
        header.check_sections(actual_len)?;
        Ok(header)
    }

    fn check_version(&self) -> Result<(), Error> {
        let found = self.version();
        if found > VERSION {
            return Err(Error::NewerVersion { found, supported: VERSION });
        }
        if found < VERSION {
            return Err(Error::OlderVersion { found, supported: VERSION });
        }
        if self.features & !KNOWN_FEATURES != 0 {
            return Err(Error::UnknownFeatures { bits: self.features });
        }
        Ok(())
    }

    fn check_sections(&self, actual_len: u64) -> Result<(), Error> {
        let expected = data_offset(self.metadata_len, self.directory_len);
        if expected > MAX_INDEX_LEN {
            return Err(Error::IndexTooLarge { len: expected, max: MAX_INDEX_LEN });
        }
        if self.data_offset != expected {
            return Err(Error::DataOffset { found: self.data_offset, expected });
        }
        if actual_len < self.data_offset {
            return Err(Error::Truncated {
                actual: actual_len,
                expected: self.file_len.max(self.data_offset),
            });
        }
        Ok(())
    }

    /// The file's version.
    pub fn version(&self) -> Version {
        Version { major: self.major, minor: self.minor }
    }

    /// The hash as a number; it names the whole content, as the index holds every tensor's hash.
    pub fn digest(&self) -> u128 {
        u128::from_le_bytes(self.hash)
    }

    /// Where the directory starts.
    pub(crate) fn directory_offset(&self) -> usize {
        directory_offset(self.metadata_len) as usize
    }

    /// The hash that belongs into this header, in front of `index` (bytes 64 to `data_offset`).
    pub(crate) fn hash_with(&self, index: &[u8]) -> u128 {
        let mut hasher = Xxh3::new();
        hasher.update(&self.encode()[..HASHED]);
        hasher.update(index);
        hasher.digest128()
    }

    /// The 64 bytes of the header.
    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.magic);
        put(8, &self.major.to_le_bytes());
        put(10, &self.minor.to_le_bytes());
        put(12, &self.features.to_le_bytes());
        put(16, &self.n_metadata.to_le_bytes());
        put(20, &self.n_tensors.to_le_bytes());
        put(24, &self.metadata_len.to_le_bytes());
        put(28, &self.directory_len.to_le_bytes());
        put(32, &self.data_offset.to_le_bytes());
        put(40, &self.file_len.to_le_bytes());
        put(HASHED, &self.hash);
        out
    }

    fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | (u32::from(u16_at(at + 2)) << 16);
        let u64_at = |at: usize| u64::from(u32_at(at)) | (u64::from(u32_at(at + 4)) << 32);
        let (mut magic, mut hash) = ([0; 8], [0; 16]);
        magic.copy_from_slice(&bytes[..8]);
        hash.copy_from_slice(&bytes[HASHED..]);
        Self {
            magic,
            major: u16_at(8),
            minor: u16_at(10),
            features: u32_at(12),
            n_metadata: u32_at(16),
            n_tensors: u32_at(20),
            metadata_len: u32_at(24),
            directory_len: u32_at(28),
            data_offset: u64_at(32),
            file_len: u64_at(40),
            hash,
        }
    }
}

/// Where the directory starts behind `metadata_len` bytes of metadata (rule R6).
pub(crate) fn directory_offset(metadata_len: u32) -> u64 {
    (Header::LEN as u64 + u64::from(metadata_len)).next_multiple_of(SECTION_ALIGN)
}

/// Where the data start behind the two sections (rule R6). Cannot overflow: both lengths are below 2^32.
pub(crate) fn data_offset(metadata_len: u32, directory_len: u32) -> u64 {
    (directory_offset(metadata_len) + u64::from(directory_len)).next_multiple_of(PAGE)
}
