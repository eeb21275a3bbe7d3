//! The `.samara` container: one file that holds a whole ternary model.
//!
//! The idea: what a kernel reads is what lies on disk. A file is a checked index (typed metadata and a tensor
//! directory) in front of page-aligned tensors in the kernels' own packed layouts, so loading is a memory map and
//! nothing is repacked. `SPEC.md` beside this crate numbers the rules of the format; errors and tests cite them.
//!
//! * [`FileLayout`] and [`Writer`] plan a file and stream it to disk; nothing appears under the final name before
//!   it is complete and on the disk.
//! * [`Index`] parses the front of a file and validates all of it before handing anything out; [`SamaraFile`] adds
//!   the bytes of the tensors, mapped or read.
//! * [`layout`] packs and unpacks the three panel layouts.
//!
//! The crate knows bytes and shapes. Layers, experts and tokens are names to it.
//!
//! ```
//! use samara_format::{Access, Dtype, FileLayout, Metadata, SamaraFile, TensorSpec, TernaryLayout, Writer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("small.samara");
//! let mut metadata = Metadata::new();
//! metadata.insert("general.architecture", "example");
//! let tensors = vec![TensorSpec::single("proj", Dtype::Ternary2, 2, 3)];
//!
//! // Codes are sign + 1; 0x3f80 is 1.0 in bf16.
//! let matrix = TernaryLayout::new(2, 3).ok_or("no such matrix")?;
//! let mut packed = vec![0; matrix.len()];
//! matrix.pack(&[0, 1, 2, 2, 2, 1], &[0x3f80, 0x3f80], &mut packed);
//!
//! let mut writer = Writer::create(&path, FileLayout::new(metadata, tensors, 0)?, false)?;
//! let mut tensor = writer.tensor()?;
//! tensor.append(&packed)?;
//! tensor.finish()?;
//! writer.finish()?;
//!
//! let file = SamaraFile::open(&path, Access::Mmap)?;
//! let proj = file.index().tensor("proj").ok_or("no such tensor")?;
//! file.verify(proj)?;
//! let mut codes = [0; 3];
//! matrix.unpack_row(file.part(proj, 0, 0), 1, &mut codes);
//! assert_eq!(codes, [2, 2, 1]);
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

mod decode;
mod error;
mod file;
mod foreign;
mod header;
mod index;
pub mod layout;
mod metadata;
mod output;
mod tensor;
mod write;

pub use error::{Error, Section};
pub use file::{Access, SamaraFile};
pub use foreign::Foreign;
pub use header::{Header, KNOWN_FEATURES, MAGIC, MAX_INDEX_LEN, VERSION, Version};
pub use index::Index;
pub use layout::{Affine4Layout, Bf16PanelLayout, TernaryLayout};
pub use metadata::{Metadata, Value};
pub use output::{check_output, check_part, part_path};
pub use tensor::{Dtype, PART_ALIGN, Part, PartSpec, ScaleKind, TENSOR_ALIGN, Tensor, TensorSpec};
pub use write::{FileLayout, Sealed, TensorWriter, Writer};
