//! Tensors and their geometry (rules R14 to R19): blocks of named parts whose places follow from their shapes.
//!
//! A tensor is `n_blocks` equal blocks; a block is its parts one after another. A plain matrix is one block of one
//! part; the experts of a layer are one tensor with a block for each expert. The directory stores shapes, and an
//! offset and a length that must equal the computed ones, so two tensors cannot overlap and no part can lie outside.

use std::collections::{HashMap, HashSet};
use std::fmt;

use crate::decode::{Cursor, check_name};
use crate::error::{Error, Section};
use crate::header::{Header, Version};
use crate::layout::{Affine4Layout, Bf16PanelLayout, TernaryLayout};

/// Tensors start at multiples of this many bytes in the file, and so do the blocks of a tensor that has several.
pub const TENSOR_ALIGN: u64 = 4096;
/// Parts start at multiples of this many bytes in their block.
pub const PART_ALIGN: u64 = 128;

/// The part name of a tensor made by [`TensorSpec::single`].
const SINGLE_PART: &str = "weight";
/// A directory entry without its name and parts: name length, part count, three numbers, a hash (rule R14).
const ENTRY_FIXED: usize = 2 + 2 + 3 * 8 + 16;
/// A part without its name: name length, two codes, two dimensions (rule R14).
const PART_FIXED: usize = 2 + 1 + 1 + 2 * 8;
/// The smallest part and entry: names have at least one byte, tensors one part.
const MIN_PART: usize = PART_FIXED + 1;
const MIN_ENTRY: usize = ENTRY_FIXED + 1 + MIN_PART;
/// No length or offset reaches this, so sums of two do not overflow.
const LIMIT: u64 = 1 << 63;

macro_rules! codes {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $code:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant = $code,)* }

        impl $name {
            /// All, in the order of their codes.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The code in the file.
            pub fn code(self) -> u8 {
                self as u8
            }

            fn from_code(code: u8) -> Option<Self> {
                Self::ALL.iter().copied().find(|known| known.code() == code)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self { $(Self::$variant => $text,)* })
            }
        }
    };
}

codes! {
    /// How the elements of a part are stored.
    Dtype {
        /// f32, row-major.
        F32 = 1, "F32";
        /// bf16, row-major.
        Bf16 = 2, "BF16";
        /// u32, row-major.
        U32 = 3, "U32";
        /// bf16 in 4-row panels: [`Bf16PanelLayout`].
        Bf16Panels = 4, "BF16_PANELS";
        /// 4-bit with scale and bias, in 4-row panels: [`Affine4Layout`].
        Affine4 = 5, "AFFINE4";
        /// 2-bit ternary in 4-row panels: [`TernaryLayout`].
        Ternary2 = 6, "TERNARY2";
    }
}

codes! {
    /// What scales a part carries inside its bytes.
    ScaleKind {
        /// None.
        None = 0, "none";
        /// One bf16 scale for each row.
        RowBf16 = 1, "row bf16";
        /// A bf16 scale and a bf16 bias for each 64 columns of a row.
        AffineGroup64 = 2, "affine group 64";
    }
}

impl Dtype {
    /// The scale kind that goes with this dtype.
    pub fn scale(self) -> ScaleKind {
        match self {
            Self::F32 | Self::Bf16 | Self::U32 | Self::Bf16Panels => ScaleKind::None,
            Self::Affine4 => ScaleKind::AffineGroup64,
            Self::Ternary2 => ScaleKind::RowBf16,
        }
    }

    /// Bytes of a `[rows, cols]` matrix, or what keeps it from having any.
    fn matrix_len(self, rows: u64, cols: u64) -> Result<u64, &'static str> {
        if rows == 0 || cols == 0 {
            return Err("no dimension may be zero");
        }
        if self == Self::Affine4 && !cols.is_multiple_of(64) {
            return Err("the columns must be a multiple of 64");
        }
        let len =
            usize::try_from(rows).ok().zip(usize::try_from(cols).ok()).and_then(|(rows, cols)| match self {
                Self::F32 | Self::U32 => rows.checked_mul(cols)?.checked_mul(4),
                Self::Bf16 => rows.checked_mul(cols)?.checked_mul(2),
                Self::Bf16Panels => Some(Bf16PanelLayout::new(rows, cols)?.len()),
                Self::Affine4 => Some(Affine4Layout::new(rows, cols)?.len()),
                Self::Ternary2 => Some(TernaryLayout::new(rows, cols)?.len()),
            });
        len.map(|len| len as u64).filter(|&len| len < LIMIT).ok_or("its size overflows")
    }
}

/// One part as it is planned: a named matrix. A vector has one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartSpec {
    /// Name, unique in its tensor.
    pub name: String,
    /// How elements are stored.
    pub dtype: Dtype,
    /// The scales in the part; must be the ones that go with `dtype`.
    pub scale: ScaleKind,
    /// Rows, without padding.
    pub rows: u64,
    /// Columns, without padding.
    pub cols: u64,
}

impl PartSpec {
    /// A part with the scale kind that goes with its dtype.
    pub fn new(name: impl Into<String>, dtype: Dtype, rows: u64, cols: u64) -> Self {
        Self { name: name.into(), dtype, scale: dtype.scale(), rows, cols }
    }
}

/// One tensor as it is planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name, unique in the file.
    pub name: String,
    /// Equal blocks, each with all parts.
    pub n_blocks: u64,
    /// The parts of a block, in order.
    pub parts: Vec<PartSpec>,
}

impl TensorSpec {
    /// A tensor of one block with one part named `weight`: a `[rows, cols]` matrix.
    pub fn single(name: impl Into<String>, dtype: Dtype, rows: u64, cols: u64) -> Self {
        Self { name: name.into(), n_blocks: 1, parts: vec![PartSpec::new(SINGLE_PART, dtype, rows, cols)] }
    }
}

/// One part with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name, dtype and shape.
    pub spec: PartSpec,
    /// Offset in the block, in bytes; a multiple of 128.
    pub offset: u64,
    /// Bytes, without the padding up to the next part.
    pub len: u64,
}

/// One tensor with its place in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name, unique in the file.
    pub name: String,
    /// Equal blocks, each with all parts.
    pub n_blocks: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// The parts of a block, in order.
    pub parts: Vec<Part>,
    /// Offset in the file, in bytes; a multiple of 4096.
    pub offset: u64,
    /// Bytes: `n_blocks * block_stride`.
    pub len: u64,
    /// xxh3-128 of the bytes; 0 in a plan.
    pub hash: u128,
}

impl Tensor {
    /// Places `spec` at `offset`, which is a multiple of 4096 below 2^63.
    pub(crate) fn place(spec: &TensorSpec, offset: u64) -> Result<Self, Error> {
        check_spec(spec)?;
        let too_large = || Error::TooLarge { tensor: spec.name.clone() };
        let mut parts = Vec::with_capacity(spec.parts.len());
        let mut end = 0u64;
        for part in &spec.parts {
            let len = part_len(&spec.name, part)?;
            parts.push(Part { spec: part.clone(), offset: end, len });
            let padded = len.next_multiple_of(PART_ALIGN);
            end = end.checked_add(padded).filter(|&end| end < LIMIT).ok_or_else(too_large)?;
        }
        let block_stride = if spec.n_blocks > 1 { end.next_multiple_of(TENSOR_ALIGN) } else { end };
        let len = block_stride.checked_mul(spec.n_blocks).filter(|&len| len < LIMIT).ok_or_else(too_large)?;
        let tensor = Self {
            name: spec.name.clone(),
            n_blocks: spec.n_blocks,
            block_stride,
            parts,
            offset,
            len,
            hash: 0,
        };
        if tensor.padded_end() >= LIMIT {
            return Err(too_large());
        }
        Ok(tensor)
    }

    /// Where the next tensor starts: the end of this one, padded. Offset and length are below 2^63.
    pub(crate) fn padded_end(&self) -> u64 {
        (self.offset + self.len).next_multiple_of(TENSOR_ALIGN)
    }

    /// Position of the part named `name`.
    pub fn part_index(&self, name: &str) -> Option<usize> {
        self.parts.iter().position(|part| part.spec.name == name)
    }

    /// The tensor without its place, as a plan has it.
    pub fn spec(&self) -> TensorSpec {
        let parts = self.parts.iter().map(|part| part.spec.clone()).collect();
        TensorSpec { name: self.name.clone(), n_blocks: self.n_blocks, parts }
    }
}

/// Rules R8, R15 and R16, as far as one tensor goes.
fn check_spec(spec: &TensorSpec) -> Result<(), Error> {
    check_name(&spec.name)?;
    let tensor = || spec.name.clone();
    if spec.n_blocks == 0 {
        return Err(Error::NoBlocks { tensor: tensor() });
    }
    if spec.parts.is_empty() {
        return Err(Error::NoParts { tensor: tensor() });
    }
    if u16::try_from(spec.parts.len()).is_err() {
        return Err(Error::TooManyParts { tensor: tensor(), n_parts: spec.parts.len() });
    }
    let mut names = HashSet::new();
    for part in &spec.parts {
        check_name(&part.name)?;
        if !names.insert(part.name.as_str()) {
            return Err(Error::DuplicatePart { tensor: tensor(), part: part.name.clone() });
        }
        if part.scale != part.dtype.scale() {
            let (part, dtype, scale) = (part.name.clone(), part.dtype, part.scale);
            return Err(Error::ScaleMismatch { tensor: tensor(), part, dtype, scale });
        }
    }
    Ok(())
}

/// Bytes of a part, without padding (rule R17).
fn part_len(tensor: &str, part: &PartSpec) -> Result<u64, Error> {
    let &PartSpec { ref name, dtype, scale: _, rows, cols } = part;
    dtype.matrix_len(rows, cols).map_err(|reason| {
        let (tensor, part) = (tensor.to_owned(), name.clone());
        Error::BadShape { tensor, part, dtype, rows, cols, reason }
    })
}

/// Tensors one after another from `data_offset` on, with the position of each name, and where they end.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) by_name: HashMap<String, usize>,
    pub(crate) end: u64,
}

impl Placed {
    pub(crate) fn new(data_offset: u64) -> Self {
        Self { tensors: Vec::new(), by_name: HashMap::new(), end: data_offset }
    }

    /// Places one more tensor; names are unique (rule R15).
    pub(crate) fn push(&mut self, spec: &TensorSpec) -> Result<&mut Tensor, Error> {
        let tensor = Tensor::place(spec, self.end)?;
        if self.by_name.insert(spec.name.clone(), self.tensors.len()).is_some() {
            return Err(Error::DuplicateTensor { tensor: tensor.name });
        }
        self.end = tensor.padded_end();
        Ok(self.tensors.push_mut(tensor))
    }
}

/// Reads the directory, which fills `bytes`, and checks every entry against the place its shape gives it.
pub(crate) fn decode_directory(bytes: &[u8], header: &Header) -> Result<Placed, Error> {
    let mut cursor = Cursor::new(Section::Directory, bytes, header.directory_offset());
    cursor.check_count(header.n_tensors, MIN_ENTRY)?;
    let mut placed = Placed::new(header.data_offset);
    for _ in 0..header.n_tensors {
        let entry = Entry::decode(&mut cursor, header.version())?;
        let tensor = placed.push(&entry.spec)?;
        entry.check(tensor, header.file_len)?;
        tensor.hash = entry.hash;
    }
    cursor.finish()?;
    if placed.end != header.file_len {
        return Err(Error::FileLength { found: header.file_len, expected: placed.end });
    }
    Ok(placed)
}

/// A directory entry as it is stored.
struct Entry {
    spec: TensorSpec,
    offset: u64,
    len: u64,
    hash: u128,
}

impl Entry {
    fn decode(cursor: &mut Cursor<'_>, version: Version) -> Result<Self, Error> {
        let name_len = cursor.u16()?;
        let n_parts = cursor.u16()?;
        let name = cursor.name(name_len.into())?;
        let n_blocks = cursor.u64()?;
        let offset = cursor.u64()?;
        let len = cursor.u64()?;
        let hash = cursor.u128()?;
        cursor.require(u64::from(n_parts) * MIN_PART as u64)?;
        let parts = (0..n_parts).map(|_| decode_part(cursor, &name, version)).collect::<Result<_, _>>()?;
        Ok(Self { spec: TensorSpec { name, n_blocks, parts }, offset, len, hash })
    }

    fn check(&self, placed: &Tensor, file_len: u64) -> Result<(), Error> {
        let tensor = || self.spec.name.clone();
        if self.offset != placed.offset {
            return Err(Error::TensorOffset {
                tensor: tensor(),
                found: self.offset,
                expected: placed.offset,
            });
        }
        if self.len != placed.len {
            return Err(Error::TensorLength { tensor: tensor(), found: self.len, expected: placed.len });
        }
        let end = placed.padded_end();
        if end > file_len {
            return Err(Error::TensorPastEnd { tensor: tensor(), end, file_len });
        }
        Ok(())
    }
}

fn decode_part(cursor: &mut Cursor<'_>, tensor: &str, version: Version) -> Result<PartSpec, Error> {
    let name_len = cursor.u16()?;
    let dtype_code = cursor.u8()?;
    let scale_code = cursor.u8()?;
    let name = cursor.name(name_len.into())?;
    let (rows, cols) = (cursor.u64()?, cursor.u64()?);
    let place = || (tensor.to_owned(), name.clone());
    let dtype = Dtype::from_code(dtype_code).ok_or_else(|| {
        let (tensor, part) = place();
        Error::UnknownDtype { tensor, part, code: dtype_code, version }
    })?;
    let scale = ScaleKind::from_code(scale_code).ok_or_else(|| {
        let (tensor, part) = place();
        Error::UnknownScale { tensor, part, code: scale_code, version }
    })?;
    Ok(PartSpec { name, dtype, scale, rows, cols })
}

/// Bytes of a tensor's directory entry.
pub(crate) fn entry_len(spec: &TensorSpec) -> usize {
    ENTRY_FIXED + spec.name.len() + spec.parts.iter().map(|part| PART_FIXED + part.name.len()).sum::<usize>()
}

/// Appends one directory entry. The 16-bit lengths fit: a placed tensor's names and parts are checked.
pub(crate) fn encode_entry(tensor: &Tensor, out: &mut Vec<u8>) {
    out.extend((tensor.name.len() as u16).to_le_bytes());
    out.extend((tensor.parts.len() as u16).to_le_bytes());
    out.extend(tensor.name.as_bytes());
    out.extend(tensor.n_blocks.to_le_bytes());
    out.extend(tensor.offset.to_le_bytes());
    out.extend(tensor.len.to_le_bytes());
    out.extend(tensor.hash.to_le_bytes());
    for Part { spec, offset: _, len: _ } in &tensor.parts {
        let PartSpec { name, dtype, scale, rows, cols } = spec;
        out.extend((name.len() as u16).to_le_bytes());
        out.push(dtype.code());
        out.push(scale.code());
        out.extend(name.as_bytes());
        out.extend(rows.to_le_bytes());
        out.extend(cols.to_le_bytes());
    }
}
