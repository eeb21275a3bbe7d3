//! Files of other kinds that people hand to the program, known by their first bytes.

use std::fmt;

use crate::error::Error;
use crate::header::MAGIC;

/// A kind of file that is not a `.samara` file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// llama.cpp's model format.
    Gguf,
    /// One file of a Hugging Face checkpoint.
    Safetensors,
    /// A zip archive; PyTorch's `.bin` and `.pt` files are zip archives too.
    Zip,
    /// The text file that stands for a large file in a git repository.
    LfsPointer,
    /// A web page, saved in place of the file.
    Html,
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gguf => "a GGUF file",
            Self::Safetensors => "a safetensors file",
            Self::Zip => "a zip archive or a PyTorch checkpoint",
            Self::LfsPointer => "a git-LFS pointer",
            Self::Html => "a web page",
        })
    }
}

impl Foreign {
    /// What to do with such a file.
    pub fn advice(self) -> &'static str {
        match self {
            Self::Gguf => {
                "run it with llama.cpp, or run `samara convert` on the folder of the original checkpoint"
            }
            Self::Safetensors => "run `samara convert` on the folder it is in",
            Self::Zip => "unpack it, then run `samara convert` on the folder with its safetensors files",
            Self::LfsPointer => "fetch the real file with `git lfs pull`",
            Self::Html => "the download failed or needs a login, download the file again",
        }
    }

    /// The kind of file that starts with `head`, if it is one of these.
    pub(crate) fn recognise(head: &[u8]) -> Option<Self> {
        if head.starts_with(b"GGUF") || head.starts_with(b"FUGG") {
            Some(Self::Gguf)
        } else if head.starts_with(b"PK\x03\x04") {
            Some(Self::Zip)
        } else if head.starts_with(b"version https://git-lfs") {
            Some(Self::LfsPointer)
        } else if head.get(8) == Some(&b'{') && head[5..8] == [0; 3] {
            // The 8 bytes are the length of the JSON that follows, far below 2^40.
            Some(Self::Safetensors)
        } else if is_html(head) {
            Some(Self::Html)
        } else {
            None
        }
    }
}

fn is_html(head: &[u8]) -> bool {
    let text = head.trim_ascii_start();
    [&b"<!doctype"[..], b"<html"]
        .iter()
        .any(|tag| text.get(..tag.len()).is_some_and(|start| start.eq_ignore_ascii_case(tag)))
}

/// Why a file that starts with `head` (its first 64 bytes, or all of a shorter one) is no finished `.samara` file;
/// `Ok` when the magic is there.
pub(crate) fn check_magic(head: &[u8]) -> Result<(), Error> {
    if head.is_empty() {
        return Err(Error::Empty);
    }
    if head.starts_with(&MAGIC) {
        return Ok(());
    }
    if MAGIC.starts_with(head) {
        return Err(Error::HeaderCut { len: head.len() as u64 });
    }
    if let Some(kind) = Foreign::recognise(head) {
        return Err(Error::Foreign(kind));
    }
    let found = head[..head.len().min(MAGIC.len())].to_vec();
    if head.len() >= MAGIC.len() && head.iter().all(|&b| b == 0) {
        return Err(Error::Unfinished);
    }
    // Line ends changed, the high bit cut off, or byte 0x89 put through a character encoding.
    if head.windows(6).take(4).any(|w| w == b"SAMARA") {
        return Err(Error::TextMode { found });
    }
    Err(Error::NotSamara { found })
}
