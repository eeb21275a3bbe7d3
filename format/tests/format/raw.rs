//! Files built byte by byte from SPEC.md, without the crate's own writer, so that tests can break any rule.

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

pub(crate) const HEADER: usize = 64;
pub(crate) const PAGE: usize = 4096;

/// A file as its sections. `build` gives it places, padding and a valid hash, whatever the sections hold.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) n_metadata: u32,
    pub(crate) n_tensors: u32,
    pub(crate) metadata: Vec<u8>,
    pub(crate) directory: Vec<u8>,
    pub(crate) data: Vec<u8>,
}

impl Raw {
    pub(crate) fn new() -> Self {
        Self { n_metadata: 0, n_tensors: 0, metadata: vec![], directory: vec![], data: vec![] }
    }

    /// One more metadata entry, whatever its type code and bytes.
    pub(crate) fn meta(mut self, key: &[u8], type_code: u8, value: &[u8]) -> Self {
        self.n_metadata += 1;
        self.metadata.extend((key.len() as u16).to_le_bytes());
        self.metadata.push(type_code);
        self.metadata.extend(key);
        self.metadata.extend(value);
        self
    }

    /// One more directory entry, and `data` padded to a page as its bytes.
    pub(crate) fn tensor(mut self, entry: Entry<'_>, data: &[u8]) -> Self {
        self.n_tensors += 1;
        entry.put(&mut self.directory, xxh3_128(data));
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(PAGE), 0);
        self
    }

    /// The file's bytes.
    pub(crate) fn build(&self) -> Vec<u8> {
        let mut out = b"\x89SAMARA\n".to_vec();
        out.extend([0, 0, 1, 0, 0, 0, 0, 0]);
        out.extend(self.n_metadata.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend((self.metadata.len() as u32).to_le_bytes());
        out.extend((self.directory.len() as u32).to_le_bytes());
        let directory = (HEADER + self.metadata.len()).next_multiple_of(8);
        let data = (directory + self.directory.len()).next_multiple_of(PAGE);
        out.extend((data as u64).to_le_bytes());
        out.extend(((data + self.data.len()) as u64).to_le_bytes());
        out.resize(HEADER, 0);
        out.extend(&self.metadata);
        out.resize(directory, 0);
        out.extend(&self.directory);
        out.resize(data, 0);
        out.extend(&self.data);
        seal(&mut out);
        out
    }
}

/// A directory entry; offset and length are as stored.
#[derive(Clone, Copy)]
pub(crate) struct Entry<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) n_blocks: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) parts: &'a [RawPart<'a>],
}

/// A part: name, dtype code, scale code, rows, columns.
pub(crate) type RawPart<'a> = (&'a [u8], u8, u8, u64, u64);

impl Entry<'_> {
    pub(crate) fn put(&self, out: &mut Vec<u8>, hash: u128) {
        out.extend((self.name.len() as u16).to_le_bytes());
        out.extend((self.parts.len() as u16).to_le_bytes());
        out.extend(self.name);
        for number in [self.n_blocks, self.offset, self.len] {
            out.extend(number.to_le_bytes());
        }
        out.extend(hash.to_le_bytes());
        for &(name, dtype, scale, rows, cols) in self.parts {
            out.extend((name.len() as u16).to_le_bytes());
            out.extend([dtype, scale]);
            out.extend(name);
            out.extend(rows.to_le_bytes());
            out.extend(cols.to_le_bytes());
        }
    }
}

/// Writes the hash that belongs to the file's present bytes (R7), when its data offset lies inside it.
pub(crate) fn seal(file: &mut [u8]) {
    let Some(data_offset) = file.get(32..40).map(|b| u64::from_le_bytes(b.try_into().unwrap())) else {
        return;
    };
    let Some(index) = usize::try_from(data_offset).ok().and_then(|end| file.get(HEADER..end)) else { return };
    let mut hasher = Xxh3::new();
    hasher.update(&file[..48]);
    hasher.update(index);
    let hash = hasher.digest128().to_le_bytes();
    file[48..HEADER].copy_from_slice(&hash);
}

/// A length or count in front of bytes.
pub(crate) fn counted(n: u32, bytes: &[u8]) -> Vec<u8> {
    [&n.to_le_bytes()[..], bytes].concat()
}

/// A small valid file: every value type, and two tensors (one F32 vector, one of two ternary blocks).
pub(crate) fn small() -> Raw {
    let text = "a long text ".repeat(100) + &(0..400).map(|i| format!("{i} ")).collect::<String>();
    let packed = zstd::bulk::compress(text.as_bytes(), 3).unwrap();
    let strings = [counted(1, b"x"), counted(0, b"")].concat();
    Raw::new()
        .meta(b"bool", 3, &[1])
        .meta(b"f64", 2, &1.5f64.to_le_bytes())
        .meta(b"f64s", 6, &counted(1, &2.5f64.to_le_bytes()))
        .meta(
            b"long",
            8,
            &[counted(text.len() as u32, &(packed.len() as u32).to_le_bytes()), packed].concat(),
        )
        .meta(b"str", 4, &counted(2, "é".as_bytes()))
        .meta(b"strs", 7, &counted(2, &strings))
        .meta(b"u64", 1, &7u64.to_le_bytes())
        .meta(b"u64s", 5, &counted(1, &8u64.to_le_bytes()))
        .tensor(
            Entry { name: b"norm", n_blocks: 1, offset: 4096, len: 128, parts: &[(b"weight", 1, 0, 1, 5)] },
            &[3; 128],
        )
        .tensor(
            Entry {
                name: b"experts",
                n_blocks: 2,
                offset: 8192,
                len: 8192,
                parts: &[(b"gate", 6, 1, 5, 130), (b"down", 6, 1, 4, 1)],
            },
            &[0x55; 8192],
        )
}
