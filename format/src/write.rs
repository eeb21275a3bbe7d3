//! Planning and writing a file.
//!
//! The plan comes first: from the shapes alone, [`FileLayout`] knows every offset, so tensors stream to their places
//! and nothing is held back. [`Writer`] works on `{name}.part`, whose header stays zero (rule R25) until every byte is
//! on the disk. It is then sealed: complete, but still without its name, so that it can be read back before it takes
//! the place of anything. The plan lies in the `.part` file from the start, so a resumed conversion proves that it
//! continues the same file.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use crate::error::Error;
use crate::header::{Header, KNOWN_FEATURES, MAGIC, MAX_INDEX_LEN, VERSION, data_offset, directory_offset};
use crate::metadata::Metadata;
use crate::output::{check_output, check_part, look_at, other_than_file, part_path, rename, sync_folder};
use crate::tensor::{Placed, Tensor, TensorSpec, encode_entry, entry_len};

/// Bytes gathered before they go to the file, at multiples of this: a large page of x86-64 and aarch64. A system that caches files in
/// pages as large as what is written then has the file in large pages as soon as it is there, and maps them as such.
const BUFFER: usize = 2 << 20;

/// The plan of a file: metadata, and every tensor with its place.
#[derive(Debug)]
pub struct FileLayout {
    header: Header,
    metadata: Vec<u8>,
    placed: Placed,
}

impl FileLayout {
    /// Plans a file with these tensors in this order. `features` are required-feature bits, 0 for none.
    ///
    /// # Errors
    /// The same defects that a reader would find: names, shapes, dtypes, sizes.
    pub fn new(metadata: Metadata, tensors: Vec<TensorSpec>, features: u32) -> Result<Self, Error> {
        if features & !KNOWN_FEATURES != 0 {
            return Err(Error::UnknownFeatures { bits: features });
        }
        let n_metadata = count(metadata.len())?;
        let metadata = metadata.encode()?;
        let directory_len = count(tensors.iter().map(entry_len).sum())?;
        let metadata_len = count(metadata.len())?;
        let data_offset = data_offset(metadata_len, directory_len);
        if data_offset > MAX_INDEX_LEN {
            return Err(Error::IndexTooLarge { len: data_offset, max: MAX_INDEX_LEN });
        }
        let mut placed = Placed::new(data_offset);
        for spec in &tensors {
            placed.push(spec)?;
        }
        let header = Header {
            magic: MAGIC,
            major: VERSION.major,
            minor: VERSION.minor,
            features,
            n_metadata,
            n_tensors: count(placed.tensors.len())?,
            metadata_len,
            directory_len,
            data_offset,
            file_len: placed.end,
            hash: [0; 16],
        };
        Ok(Self { header, metadata, placed })
    }

    /// The tensors with their places, in the order of their bytes; hashes are 0.
    pub fn tensors(&self) -> &[Tensor] {
        &self.placed.tensors
    }

    /// The tensor named `name`.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.placed.by_name.get(name).map(|&i| &self.placed.tensors[i])
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.header.file_len
    }

    /// Where the data start: bytes of header and index.
    pub fn data_offset(&self) -> u64 {
        self.header.data_offset
    }

    /// A hash of the plan: metadata, names, shapes and places, but no tensor's content.
    pub fn digest(&self) -> u128 {
        self.header.hash_with(&self.encode_index(&[]))
    }

    /// Bytes 64 to `data_offset`, with the hashes of the first tensors; the others' are 0.
    fn encode_index(&self, hashes: &[u128]) -> Vec<u8> {
        // At most 100 MB: checked when planned.
        let mut out = Vec::with_capacity(self.header.data_offset as usize - Header::LEN);
        out.extend(&self.metadata);
        out.resize(directory_offset(self.header.metadata_len) as usize - Header::LEN, 0);
        for (i, tensor) in self.placed.tensors.iter().enumerate() {
            let hash = hashes.get(i).copied().unwrap_or(0);
            encode_entry(&Tensor { hash, ..tensor.clone() }, &mut out);
        }
        out.resize(self.header.data_offset as usize - Header::LEN, 0);
        out
    }

    /// Whether `index` (bytes 64 to `data_offset`) is this plan's, whatever the tensors' hashes are in it.
    fn is_plan_of(&self, index: &[u8]) -> bool {
        let zeros = self.encode_index(&[]);
        let ones = self.encode_index(&vec![u128::MAX; self.tensors().len()]);
        zeros.iter().zip(&ones).zip(index).all(|((zero, one), found)| zero != one || zero == found)
    }
}

/// A count or length that has a 32-bit field.
fn count(n: usize) -> Result<u32, Error> {
    u32::try_from(n).map_err(|_| Error::IndexTooLarge { len: n as u64, max: MAX_INDEX_LEN })
}

/// Streams one file to disk.
///
/// Dropping a writer leaves the `.part` file, for [`Writer::resume`] or for the caller to delete.
#[derive(Debug)]
pub struct Writer {
    layout: FileLayout,
    final_path: PathBuf,
    part_path: PathBuf,
    overwrite: bool,
    out: Blocks,
    hashes: Vec<u128>,
}

impl Writer {
    /// Starts `{final_path}.part`, at its full length, in place of an unfinished one that is there.
    ///
    /// # Errors
    /// [`Error::Exists`] when `final_path` is there and `overwrite` is false, [`Error::NotReplaceable`] when it is not
    /// a regular file, [`Error::ForeignPart`] when the `.part` file is no writer's; [`Error::Io`].
    pub fn create(final_path: &Path, layout: FileLayout, overwrite: bool) -> Result<Self, Error> {
        check_output(final_path, overwrite)?;
        let part_path = part_path(final_path);
        if check_part(final_path)?.is_some() {
            std::fs::remove_file(&part_path).map_err(Error::io("remove", &part_path))?;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&part_path)
            .map_err(Error::io("create", &part_path))?;
        file.set_len(layout.file_len()).map_err(Error::io("reserve space for", &part_path))?;
        let mut writer = Self::new(final_path, layout, overwrite, file, Vec::new());
        let plan = writer.layout.encode_index(&[]);
        writer.write_at(Header::LEN as u64, &plan)?;
        Ok(writer)
    }

    /// Continues `{final_path}.part` after the tensors whose hashes are `done`, the first of the plan.
    ///
    /// `final_path` itself may exist by now only if the caller means to replace it: it is overwritten.
    /// The bytes of the tensors done are not read again; the caller recorded them after [`Writer::sync`].
    ///
    /// # Errors
    /// [`Error::ResumeLength`], [`Error::ResumePlan`] or [`Error::ResumeDone`] when the `.part` file is not one of
    /// this plan, [`Error::ForeignPart`] when it is no regular file; [`Error::Io`].
    pub fn resume(final_path: &Path, layout: FileLayout, done: &[u128]) -> Result<Self, Error> {
        let part_path = part_path(final_path);
        let n_tensors = layout.tensors().len();
        if done.len() > n_tensors {
            return Err(Error::ResumeDone { done: done.len(), n_tensors });
        }
        if let Some(found) = look_at(&part_path)?.and_then(|meta| other_than_file(&meta)) {
            return Err(Error::ForeignPart { path: part_path, found });
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(&part_path)
            .map_err(Error::io("open", &part_path))?;
        let found = file.metadata().map_err(Error::io("read the size of", &part_path))?.len();
        if found != layout.file_len() {
            return Err(Error::ResumeLength { path: part_path, found, expected: layout.file_len() });
        }
        let mut head = vec![0; layout.data_offset() as usize];
        file.read_exact(&mut head).map_err(Error::io("read", &part_path))?;
        let (header, index) = head.split_at(Header::LEN);
        // A stop while finishing leaves hashes in the index and perhaps a header; both are then written again.
        let complete = done.len() == n_tensors;
        if !layout.is_plan_of(index) || !(complete || header.iter().all(|&b| b == 0)) {
            return Err(Error::ResumePlan { path: part_path });
        }
        Ok(Self::new(final_path, layout, true, file, done.to_vec()))
    }

    fn new(final_path: &Path, layout: FileLayout, overwrite: bool, file: File, hashes: Vec<u128>) -> Self {
        let part_path = part_path(final_path);
        let out = Blocks { file, at: 0, bytes: Vec::with_capacity(BUFFER) };
        Self { layout, final_path: final_path.to_owned(), part_path, overwrite, out, hashes }
    }

    /// The plan.
    pub fn layout(&self) -> &FileLayout {
        &self.layout
    }

    /// Where the bytes go until the file is finished.
    pub fn part_path(&self) -> &Path {
        &self.part_path
    }

    /// Hashes of the tensors written so far, in order: what [`Writer::resume`] wants back.
    pub fn done(&self) -> &[u128] {
        &self.hashes
    }

    /// The next tensor of the plan. One that was not finished is started again.
    ///
    /// # Errors
    /// [`Error::NoMoreTensors`]; [`Error::Io`].
    pub fn tensor(&mut self) -> Result<TensorWriter<'_>, Error> {
        let index = self.hashes.len();
        let Some(tensor) = self.layout.placed.tensors.get(index) else {
            return Err(Error::NoMoreTensors { n_tensors: index });
        };
        let offset = tensor.offset;
        self.out.go_to(offset).map_err(Error::io("write to", &self.part_path))?;
        Ok(TensorWriter { writer: self, index, written: 0, hasher: Box::new(Xxh3::new()) })
    }

    /// Brings everything written so far to the disk: what is done then survives a power cut.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.out.flush().map_err(Error::io("write to", &self.part_path))?;
        self.out.file.sync_data().map_err(Error::io("sync", &self.part_path))
    }

    /// Completes the file and gives it its final name: [`Writer::seal`], then [`Sealed::commit`].
    ///
    /// # Errors
    /// Those of the two.
    pub fn finish(self) -> Result<(), Error> {
        self.seal()?.commit()
    }

    /// Completes the `.part` file: index and data reach the disk, then the header. It can be opened and read back
    /// now; the final name is as it was.
    ///
    /// # Errors
    /// [`Error::TensorsMissing`]; [`Error::Io`].
    pub fn seal(mut self) -> Result<Sealed, Error> {
        if let Some(next) = self.layout.tensors().get(self.hashes.len()) {
            return Err(Error::TensorsMissing { tensor: next.name.clone() });
        }
        let index = self.layout.encode_index(&self.hashes);
        let mut header = self.layout.header;
        header.hash = header.hash_with(&index).to_le_bytes();
        self.write_at(Header::LEN as u64, &index)?;
        self.sync()?;
        self.write_at(0, &header.encode())?;
        let Self { final_path, part_path, overwrite, out, .. } = self;
        out.file.sync_all().map_err(Error::io("sync", &part_path))?;
        Ok(Sealed { final_path, part_path, overwrite })
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.out
            .go_to(offset)
            .and_then(|()| self.out.write_all(bytes))
            .and_then(|()| self.out.flush())
            .map_err(Error::io("write to", &self.part_path))
    }
}

/// A file that is written in pieces that end at multiples of [`BUFFER`].
#[derive(Debug)]
struct Blocks {
    file: File,
    /// Where in the file `bytes` go.
    at: u64,
    bytes: Vec<u8>,
}

impl Blocks {
    /// Writes what is gathered; what comes next goes to `offset`.
    fn go_to(&mut self, offset: u64) -> io::Result<()> {
        self.flush()?;
        self.at = offset;
        Ok(())
    }
}

/// What is gathered reaches the file, as far as it can: a writer that is dropped can be resumed with all tensors that are done.
impl Drop for Blocks {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

impl Write for Blocks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end = self.at as usize + self.bytes.len();
        let room = BUFFER - end % BUFFER;
        let n = bytes.len().min(room);
        self.bytes.extend_from_slice(&bytes[..n]);
        if n == room {
            self.flush()?;
        }
        Ok(n)
    }

    /// If this fails, it can be done again.
    fn flush(&mut self) -> io::Result<()> {
        if !self.bytes.is_empty() {
            self.file.seek(SeekFrom::Start(self.at))?;
            self.file.write_all(&self.bytes)?;
            self.at += self.bytes.len() as u64;
            self.bytes.clear();
        }
        Ok(())
    }
}

/// A complete file that does not have its final name yet.
///
/// Dropping it leaves the `.part` file, which [`Writer::resume`] continues with every tensor done.
#[derive(Debug)]
#[must_use = "the file gets its final name by `commit`"]
pub struct Sealed {
    final_path: PathBuf,
    part_path: PathBuf,
    overwrite: bool,
}

impl Sealed {
    /// Where the file is: open it to read it back.
    pub fn part_path(&self) -> &Path {
        &self.part_path
    }

    /// Gives the file its final name, for good once this returns.
    ///
    /// # Errors
    /// [`Error::Exists`] or [`Error::NotReplaceable`] when the final name was taken in the meantime, [`Error::InUse`]
    /// when another program holds one of the two files; [`Error::Io`].
    pub fn commit(self) -> Result<(), Error> {
        let Self { final_path, part_path, overwrite } = self;
        check_output(&final_path, overwrite)?;
        rename(&part_path, &final_path)?;
        sync_folder(&final_path)
    }
}

/// Takes the bytes of one tensor, exactly as many as it has, and hashes them as they pass.
pub struct TensorWriter<'a> {
    writer: &'a mut Writer,
    index: usize,
    written: u64,
    hasher: Box<Xxh3>,
}

impl fmt::Debug for TensorWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorWriter").field("tensor", self.spec()).field("written", &self.written).finish()
    }
}

impl TensorWriter<'_> {
    /// The tensor being written.
    pub fn spec(&self) -> &Tensor {
        &self.writer.layout.placed.tensors[self.index]
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// [`Error::TensorLong`] when that is more than the tensor has, and then nothing is written; [`Error::Io`].
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let written = self.written + bytes.len() as u64;
        let tensor = self.spec();
        if written > tensor.len {
            return Err(Error::TensorLong { tensor: tensor.name.clone(), written, expected: tensor.len });
        }
        let writer = &mut *self.writer;
        writer.out.write_all(bytes).map_err(Error::io("write to", &writer.part_path))?;
        self.hasher.update(bytes);
        self.written = written;
        Ok(())
    }

    /// Writes zeros up to the next part or the end of the block; nothing when already there.
    ///
    /// # Errors
    /// [`Error::PartShort`] when the current part is not complete; [`Error::Io`].
    pub fn pad(&mut self) -> Result<(), Error> {
        const ZEROS: [u8; 4096] = [0; 4096];
        let tensor = self.spec();
        let at = self.written % tensor.block_stride;
        let next = tensor.parts.iter().position(|part| part.offset >= at).unwrap_or(tensor.parts.len());
        let target = tensor.parts.get(next).map_or(tensor.block_stride, |part| part.offset);
        let previous = next.checked_sub(1).map(|i| &tensor.parts[i]);
        if let Some(part) = previous.filter(|part| target > at && at < part.offset + part.len) {
            let (tensor, end) = (tensor.name.clone(), part.offset + part.len);
            return Err(Error::PartShort { tensor, part: part.spec.name.clone(), at, end });
        }
        let mut left = target - at;
        while left > 0 {
            let n = left.min(ZEROS.len() as u64);
            self.append(&ZEROS[..n as usize])?;
            left -= n;
        }
        Ok(())
    }

    /// Ends the tensor and returns the hash of its bytes. Padding after its last part is written if it is missing.
    ///
    /// # Errors
    /// [`Error::TensorShort`] when bytes are missing; [`Error::Io`].
    pub fn finish(mut self) -> Result<u128, Error> {
        let tensor = self.spec();
        let last = tensor.parts.last().map_or(0, |part| part.offset + part.len);
        if self.written >= tensor.len - tensor.block_stride + last {
            self.pad()?;
        }
        let tensor = self.spec();
        if self.written != tensor.len {
            let (tensor, expected) = (tensor.name.clone(), tensor.len);
            return Err(Error::TensorShort { tensor, written: self.written, expected });
        }
        let hash = self.hasher.digest128();
        self.writer.hashes.push(hash);
        Ok(hash)
    }
}

impl Write for TensorWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map_err(|error| match &error {
            Error::Io { cause, .. } => io::Error::new(cause.kind(), error),
            _ => io::Error::new(io::ErrorKind::InvalidInput, error),
        })?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::tensor::Dtype;

    /// A writer whose disk is full from the start.
    fn full() -> Writer {
        let spec = TensorSpec::single("embed", Dtype::F32, 1 << 10, 1 << 10);
        let layout = FileLayout::new(Metadata::new(), vec![spec], 0).expect("a valid plan");
        let file = OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
        Writer::new(Path::new("model.samara"), layout, false, file, Vec::new())
    }

    fn check_full(error: &Error) {
        let Error::Io { action: "write to", path, cause } = error else { panic!("{error}") };
        assert_eq!(path, Path::new("model.samara.part"));
        assert_eq!(cause.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().starts_with("cannot write to model.samara.part: "), "{error}");
    }

    #[test]
    fn full_disk_names_the_file() {
        let bytes = vec![0; 2 * BUFFER];
        check_full(&full().tensor().unwrap().append(&bytes).unwrap_err());
        let error = full().tensor().unwrap().write_all(&bytes).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        check_full(error.get_ref().and_then(|inner| inner.downcast_ref()).expect("the error of this crate"));
        // Still in the buffer when the tensor ends: the next step reports it.
        let mut writer = full();
        writer.tensor().unwrap().append(&bytes[..100]).unwrap();
        check_full(&writer.sync().unwrap_err());
        check_full(&writer.tensor().unwrap_err());
        check_full(&writer.write_at(0, &[1]).unwrap_err());
    }
}
