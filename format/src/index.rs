//! The index: header, metadata and tensor directory, parsed and validated as a whole.
//!
//! Nothing is handed out before everything holds (rule R26), so whoever has an [`Index`] need not check geometry
//! again. No allocation is larger than a small multiple of the bytes that are really there.

use crate::error::Error;
use crate::header::{Header, Version};
use crate::metadata::Metadata;
use crate::tensor::{Placed, Tensor, decode_directory};

/// A valid index.
#[derive(Debug)]
pub struct Index {
    header: Header,
    metadata: Metadata,
    placed: Placed,
}

impl Index {
    /// Parses the index of a file of `file_len` bytes.
    ///
    /// `head`: the file's bytes from byte 0 to at least the start of its data; more is allowed and not looked at.
    ///
    /// # Errors
    /// One variant for each defect; see [`Error`].
    pub fn parse(head: &[u8], file_len: u64) -> Result<Self, Error> {
        let header = Header::parse(head, file_len)?;
        // At most 100 MB: checked by the header.
        let data_offset = header.data_offset as usize;
        let Some(index) = head.get(Header::LEN..data_offset) else {
            return Err(Error::IndexCut { have: head.len() as u64, need: header.data_offset });
        };
        if header.hash_with(index) != header.digest() {
            return Err(Error::IndexHash);
        }
        check_len(&header, file_len)?;
        let metadata_end = Header::LEN + header.metadata_len as usize;
        let directory_start = header.directory_offset();
        let directory_end = directory_start + header.directory_len as usize;
        check_zero(head, metadata_end, directory_start)?;
        check_zero(head, directory_end, data_offset)?;
        let metadata = &head[Header::LEN..metadata_end];
        let metadata = Metadata::decode(metadata, Header::LEN, header.n_metadata, header.version())?;
        let placed = decode_directory(&head[directory_start..directory_end], &header)?;
        Ok(Self { header, metadata, placed })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The version that the file was written as.
    pub fn version(&self) -> Version {
        self.header.version()
    }

    /// The hash of the header and index. It covers every tensor's hash, so it names the file's whole content.
    pub fn digest(&self) -> u128 {
        self.header.digest()
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.header.file_len
    }

    /// The metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors, in the order of their bytes.
    pub fn tensors(&self) -> &[Tensor] {
        &self.placed.tensors
    }

    /// The tensor named `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.placed.by_name.get(name).map(|&i| &self.placed.tensors[i])
    }
}

fn check_len(header: &Header, actual: u64) -> Result<(), Error> {
    let expected = header.file_len;
    match actual.cmp(&expected) {
        std::cmp::Ordering::Less => Err(Error::Truncated { actual, expected }),
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(Error::TrailingBytes { actual, expected }),
    }
}

fn check_zero(head: &[u8], from: usize, to: usize) -> Result<(), Error> {
    match head[from..to].iter().position(|&b| b != 0) {
        Some(i) => Err(Error::IndexPadding { offset: (from + i) as u64 }),
        None => Ok(()),
    }
}
