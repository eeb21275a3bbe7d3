//! What can be wrong with a `.samara` file, one variant for each defect.
//!
//! A message says what was found, where, and what to do where that is not plain; the rule of `SPEC.md` that was
//! broken stands in brackets. Causes from the operating system are part of the message, so nothing is lost by
//! printing only the top error.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::foreign::Foreign;
use crate::header::{KNOWN_FEATURES, Version};
use crate::tensor::{Dtype, ScaleKind};

/// Which part of the index an error is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// The typed key-value pairs.
    Metadata,
    /// The list of tensors.
    Directory,
}

impl fmt::Display for Section {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Metadata => "metadata",
            Self::Directory => "tensor directory",
        })
    }
}

/// A defect of a file, of a planned file, or of the way a file was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // The operating system.
    /// An input or output operation failed.
    #[error("cannot {action} {}: {cause}", .path.display())]
    Io {
        /// What was being done: a verb and its object, up to the path.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's answer.
        cause: io::Error,
    },
    /// The file could be opened and read but not mapped.
    #[error("cannot map {}: {cause}", .path.display())]
    Unmappable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },
    /// The path names a folder or a device.
    #[error("{} is {found}, not a regular file", .path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The path names a folder with a `config.json`.
    #[error("{} is a folder with a config.json, so perhaps a checkpoint: make a .samara file of it with `samara convert`", .path.display())]
    CheckpointFolder {
        /// The folder.
        path: PathBuf,
    },
    /// A file has a defect; the path is put before its description.
    #[error("{}: {defect}", .path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        defect: Box<Error>,
    },

    // What the first bytes say.
    /// The file has no bytes.
    #[error("the file is empty: copy or convert it again")]
    Empty,
    /// The file is of another, known kind.
    #[error("this is {0}, not a .samara file: {advice}", advice = .0.advice())]
    Foreign(Foreign),
    /// The file is of no known kind.
    #[error("this is not a .samara file: it starts with the bytes {found:02x?} [R2]")]
    NotSamara {
        /// The first bytes, up to 8.
        found: Vec<u8>,
    },
    /// The magic is there but for a change that text-mode transfers make.
    #[error(
        "the file was changed by a transfer in text mode (it starts with the bytes {found:02x?}): copy it again in binary mode [R2]"
    )]
    TextMode {
        /// The first bytes, up to 8.
        found: Vec<u8>,
    },
    /// The header is all zeros: the writer did not finish.
    #[error(
        "the header is empty: this is an unfinished conversion (run `samara convert --resume` to complete it) or an unfinished download [R25]"
    )]
    Unfinished,
    /// The file ends inside the header.
    #[error("the file is {len} bytes, less than the 64-byte header: incomplete download, copy it again [R2]")]
    HeaderCut {
        /// The file's length in bytes.
        len: u64,
    },

    // Versions.
    /// The file is of a later version of the format.
    #[error(
        "the file is of format version {found}, this program reads up to {supported}: update samara [R3]"
    )]
    NewerVersion {
        /// The file's version.
        found: Version,
        /// The newest version this crate reads.
        supported: Version,
    },
    /// The file is of a version that is no longer read.
    #[error(
        "the file is of format version {found}, this program reads {supported}: convert the checkpoint again [R3]"
    )]
    OlderVersion {
        /// The file's version.
        found: Version,
        /// The version this crate reads.
        supported: Version,
    },
    /// The file needs features that this crate does not have.
    #[error(
        "the file needs features this program does not have (bits {:#x} of {bits:#x}): update samara [R4]",
        bits & !KNOWN_FEATURES
    )]
    UnknownFeatures {
        /// All required-feature bits of the file.
        bits: u32,
    },

    // Lengths and sections.
    /// The file is shorter than its header says.
    #[error("file is {actual} bytes, header says {expected}: incomplete download [R5]")]
    Truncated {
        /// The file's real length in bytes.
        actual: u64,
        /// The length the header gives, in bytes.
        expected: u64,
    },
    /// The file is longer than its header says.
    #[error("file is {actual} bytes, header says {expected}: something was appended to it [R5]")]
    TrailingBytes {
        /// The file's real length in bytes.
        actual: u64,
        /// The length the header gives, in bytes.
        expected: u64,
    },
    /// The index is larger than any index may be.
    #[error("metadata and tensor directory take {len} bytes, more than the {max} allowed [R6]")]
    IndexTooLarge {
        /// Bytes from the start of the file to its data.
        len: u64,
        /// The most there may be.
        max: u64,
    },
    /// The data do not start where the sections' lengths put them.
    #[error("header says the data start at byte {found}, its section lengths put them at {expected} [R6]")]
    DataOffset {
        /// The offset in the header.
        found: u64,
        /// The offset computed from the lengths.
        expected: u64,
    },
    /// The header and index do not match their hash.
    #[error("header or index is damaged (its hash differs): copy or convert the file again [R7]")]
    IndexHash,
    /// Bytes that must be zero are not.
    #[error("byte {offset} is padding but not zero [R6]")]
    IndexPadding {
        /// Offset of the byte in the file.
        offset: u64,
    },
    /// The caller gave fewer bytes than the index has.
    #[error("the index takes {need} bytes, only {have} were given to parse")]
    IndexCut {
        /// Bytes given.
        have: u64,
        /// Bytes from the start of the file to its data.
        need: u64,
    },

    // Records in the sections.
    /// A record, or a length in one, reaches past the end of its section.
    #[error(
        "{section}: a field at byte {offset} needs {need} bytes, only {left} are left in the section [R13]"
    )]
    SectionEnd {
        /// The section.
        section: Section,
        /// Offset of the field in the file.
        offset: u64,
        /// Bytes needed.
        need: u64,
        /// Bytes left.
        left: u64,
    },
    /// The header's count of entries cannot fit in the section.
    #[error("{section}: {count} entries cannot fit in {len} bytes [R13]")]
    TooManyEntries {
        /// The section.
        section: Section,
        /// The count in the header.
        count: u64,
        /// The section's length in bytes.
        len: u64,
    },
    /// Bytes follow the last entry of a section.
    #[error("{section}: {left} bytes are left over after the last entry, at byte {offset} [R13]")]
    SectionRest {
        /// The section.
        section: Section,
        /// Offset of the first byte left over.
        offset: u64,
        /// Bytes left over.
        left: u64,
    },
    /// A key or name is not UTF-8, or a string value is not.
    #[error("{section}: the string at byte {offset} is not UTF-8 [R8]")]
    NotUtf8 {
        /// The section.
        section: Section,
        /// Offset of the string in the file.
        offset: u64,
    },
    /// A key or name breaks the rule for names.
    #[error("{name:?} is not a valid key or name: {reason} [R8]")]
    BadName {
        /// The key or name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    // Metadata.
    /// The same key twice.
    #[error("metadata: key {key:?} is there twice [R10]")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Keys are not in order.
    #[error("metadata: key {key:?} comes after {previous:?}, keys must ascend [R10]")]
    KeyOrder {
        /// The key.
        key: String,
        /// The key before it.
        previous: String,
    },
    /// A value has an unknown type code.
    #[error(
        "metadata: key {key:?} has value type {code}, unknown to format {version}, the file's own version: the file is damaged, or needs a newer samara [R9]"
    )]
    UnknownValueType {
        /// The key.
        key: String,
        /// The code found.
        code: u8,
        /// The file's version.
        version: Version,
    },
    /// A Bool is neither 0 nor 1.
    #[error("metadata: key {key:?} is a bool with the byte {byte} [R11]")]
    BadBool {
        /// The key.
        key: String,
        /// The byte found.
        byte: u8,
    },
    /// A number is NaN or infinite.
    #[error("metadata: key {key:?} holds the number {value}, which is not finite [R11]")]
    NotFinite {
        /// The key.
        key: String,
        /// The number.
        value: f64,
    },
    /// A compressed string claims a size its stored bytes do not allow.
    #[error(
        "metadata: key {key:?} claims {raw} bytes from {stored} compressed ones, which is not allowed [R12]"
    )]
    BadStringSize {
        /// The key.
        key: String,
        /// Claimed length after decompression, in bytes.
        raw: u64,
        /// Stored length in bytes.
        stored: u64,
    },
    /// A compressed string does not decompress to the size it claims.
    #[error("metadata: key {key:?} cannot be decompressed: {reason} [R12]")]
    Decompress {
        /// The key.
        key: String,
        /// The decoder's answer.
        reason: String,
    },
    /// A key that is needed is not there.
    #[error("metadata: key {key:?} is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key has a value of another type than the one asked for.
    #[error("metadata: key {key:?} is a {found}, not a {expected}")]
    WrongType {
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
        /// The type in the file.
        found: &'static str,
    },

    // Tensors.
    /// Two tensors have the same name.
    #[error("tensor {tensor:?} is in the directory twice [R15]")]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
    },
    /// Two parts of a tensor have the same name.
    #[error("tensor {tensor:?} has two parts named {part:?} [R15]")]
    DuplicatePart {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
    },
    /// A tensor has no parts.
    #[error("tensor {tensor:?} has no parts [R15]")]
    NoParts {
        /// The tensor.
        tensor: String,
    },
    /// A tensor has more parts than its entry can count.
    #[error("tensor {tensor:?} has {n_parts} parts, more than 65535 [R14]")]
    TooManyParts {
        /// The tensor.
        tensor: String,
        /// Parts planned.
        n_parts: usize,
    },
    /// A tensor has no blocks.
    #[error("tensor {tensor:?} has no blocks [R15]")]
    NoBlocks {
        /// The tensor.
        tensor: String,
    },
    /// A dtype code that the file's version does not have.
    #[error(
        "tensor {tensor:?}, part {part:?} has dtype code {code}, unknown to format {version}, the file's own version: the file is damaged, or needs a newer samara [R16]"
    )]
    UnknownDtype {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
        /// The code found.
        code: u8,
        /// The file's version.
        version: Version,
    },
    /// A scale-kind code that the file's version does not have.
    #[error(
        "tensor {tensor:?}, part {part:?} has scale kind {code}, unknown to format {version}, the file's own version: the file is damaged, or needs a newer samara [R16]"
    )]
    UnknownScale {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
        /// The code found.
        code: u8,
        /// The file's version.
        version: Version,
    },
    /// A dtype with a scale kind it does not go with.
    #[error(
        "tensor {tensor:?}, part {part:?} has dtype {dtype} with scale kind {scale}, which do not go together [R16]"
    )]
    ScaleMismatch {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
        /// The dtype.
        dtype: Dtype,
        /// The scale kind.
        scale: ScaleKind,
    },
    /// A shape that the dtype cannot have.
    #[error(
        "tensor {tensor:?}, part {part:?} has shape [{rows}, {cols}], which {dtype} cannot have: {reason} [R17]"
    )]
    BadShape {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
        /// The dtype.
        dtype: Dtype,
        /// Rows.
        rows: u64,
        /// Columns.
        cols: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// The sizes of a tensor overflow.
    #[error("tensor {tensor:?} is larger than 2^63 bytes [R17]")]
    TooLarge {
        /// The tensor.
        tensor: String,
    },
    /// A tensor is not where the tensors before it put it.
    #[error(
        "tensor {tensor:?} is said to start at byte {found}, the tensors before it put it at {expected} [R19]"
    )]
    TensorOffset {
        /// The tensor.
        tensor: String,
        /// Offset in the directory.
        found: u64,
        /// Offset computed.
        expected: u64,
    },
    /// A tensor does not have the length its shape gives.
    #[error("tensor {tensor:?} is said to have {found} bytes, its shape gives {expected} [R19]")]
    TensorLength {
        /// The tensor.
        tensor: String,
        /// Length in the directory.
        found: u64,
        /// Length computed.
        expected: u64,
    },
    /// A tensor ends after the file.
    #[error("tensor {tensor:?} ends at byte {end}, the file at {file_len} [R19]")]
    TensorPastEnd {
        /// The tensor.
        tensor: String,
        /// The tensor's end, padded.
        end: u64,
        /// The length in the header.
        file_len: u64,
    },
    /// The header's file length is not the end of the last tensor.
    #[error("header says the file has {found} bytes, its tensors end at {expected} [R19]")]
    FileLength {
        /// The length in the header.
        found: u64,
        /// The length computed.
        expected: u64,
    },
    /// A tensor's bytes do not match their hash.
    #[error(
        "tensor {tensor:?} is damaged: its hash is {found:032x}, the directory says {expected:032x}: copy or convert the file again [R20]"
    )]
    TensorHash {
        /// The tensor.
        tensor: String,
        /// Hash of the bytes.
        found: u128,
        /// Hash in the directory.
        expected: u128,
    },
    /// The padding after a tensor is not zero.
    #[error("the padding after tensor {tensor:?} is damaged: byte {offset} is not zero [R19]")]
    TensorPadding {
        /// The tensor.
        tensor: String,
        /// Offset of the byte in the file.
        offset: u64,
    },

    // Writing.
    /// The output is there already.
    #[error("{} exists already: choose another name or allow overwriting", .path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// The output is not a regular file, or no name at all, and so is never replaced.
    #[error("{:?} is {found}: choose the name of a new or a regular file for the output", .path.display())]
    NotReplaceable {
        /// The output.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The new file is complete and cannot get its name: on Windows, where another program has it open, or the file
    /// that it is to replace.
    #[error("cannot rename {} to {}, one of which another program has open: {cause}; the new file is complete", .part.display(), .path.display())]
    InUse {
        /// The output.
        path: PathBuf,
        /// The new file under its unfinished name.
        part: PathBuf,
        /// The system's reason.
        cause: io::Error,
    },
    /// What has the name of the unfinished file is something else.
    #[error("{} is {found}, not an unfinished conversion, and is left as it is: move it, or choose another output", .path.display())]
    ForeignPart {
        /// The `.part` file.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// More bytes were written than the tensor has.
    #[error("tensor {tensor:?} has {expected} bytes, {written} were written")]
    TensorLong {
        /// The tensor.
        tensor: String,
        /// Bytes written, with those refused.
        written: u64,
        /// Bytes of the tensor.
        expected: u64,
    },
    /// A tensor was finished early.
    #[error("tensor {tensor:?} has {expected} bytes, only {written} were written")]
    TensorShort {
        /// The tensor.
        tensor: String,
        /// Bytes written.
        written: u64,
        /// Bytes of the tensor.
        expected: u64,
    },
    /// Padding was asked for inside a part.
    #[error(
        "tensor {tensor:?}: part {part:?} ends at byte {end} of its block, padding was asked for at {at}"
    )]
    PartShort {
        /// The tensor.
        tensor: String,
        /// The part.
        part: String,
        /// Where in the block the writer stands.
        at: u64,
        /// Where the part ends.
        end: u64,
    },
    /// All tensors are written; there is no next one.
    #[error("all {n_tensors} tensors are written already")]
    NoMoreTensors {
        /// Tensors in the plan.
        n_tensors: usize,
    },
    /// The file was to be finished before all tensors were written.
    #[error("tensor {tensor:?} and those after it are not written yet")]
    TensorsMissing {
        /// The first tensor not written.
        tensor: String,
    },
    /// A `.part` file is of another length than the plan.
    #[error("{} is {found} bytes, this conversion plans {expected}: start again without --resume", .path.display())]
    ResumeLength {
        /// The `.part` file.
        path: PathBuf,
        /// Its length in bytes.
        found: u64,
        /// Planned length in bytes.
        expected: u64,
    },
    /// A `.part` file holds another plan.
    #[error("{} was begun with other settings or another source: start again without --resume", .path.display())]
    ResumePlan {
        /// The `.part` file.
        path: PathBuf,
    },
    /// More tensors are said to be done than the plan has.
    #[error("{done} tensors are said to be done, the plan has {n_tensors}: start again without --resume")]
    ResumeDone {
        /// Tensors said to be done.
        done: usize,
        /// Tensors in the plan.
        n_tensors: usize,
    },
}

impl Error {
    /// The same defect, with the file it is in.
    pub(crate) fn in_file(self, path: &std::path::Path) -> Self {
        Self::InFile { path: path.to_owned(), defect: Box::new(self) }
    }

    /// A closure for `map_err` on an [`io::Error`].
    pub(crate) fn io<'a>(
        action: &'static str,
        path: &'a std::path::Path,
    ) -> impl FnOnce(io::Error) -> Self + 'a {
        move |cause| Self::Io { action, path: path.to_owned(), cause }
    }

    /// The defect itself, without the file it is in.
    pub fn defect(&self) -> &Self {
        match self {
            Self::InFile { defect, .. } => defect.defect(),
            other => other,
        }
    }
}
