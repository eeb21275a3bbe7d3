//! Reading and writing the records of the index: a cursor that cannot leave its section.

use crate::error::{Error, Section};

/// Longest key or name in bytes (rule R8).
const MAX_NAME: usize = 255;

/// A cursor over one section of the index.
pub(crate) struct Cursor<'a> {
    section: Section,
    bytes: &'a [u8],
    at: usize,
    /// Offset of the section in the file, for messages.
    base: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(section: Section, bytes: &'a [u8], base: usize) -> Self {
        Self { section, bytes, at: 0, base }
    }

    /// Offset in the file of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        (self.base + self.at) as u64
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `n` bytes.
    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        self.require(n as u64)?;
        let bytes = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(bytes)
    }

    /// Fails unless `n` more bytes are there.
    pub(crate) fn require(&self, n: u64) -> Result<(), Error> {
        if n > self.left() as u64 {
            let (section, left) = (self.section, self.left() as u64);
            return Err(Error::SectionEnd { section, offset: self.offset(), need: n, left });
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Error> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Error> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn u128(&mut self) -> Result<u128, Error> {
        Ok(u128::from_le_bytes(self.array()?))
    }

    pub(crate) fn f64(&mut self) -> Result<f64, Error> {
        Ok(f64::from_le_bytes(self.array()?))
    }

    /// The next `n` bytes as text.
    pub(crate) fn text(&mut self, n: usize) -> Result<String, Error> {
        let (section, offset) = (self.section, self.offset());
        let bytes = self.take(n)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Error::NotUtf8 { section, offset })
    }

    /// The next `n` bytes as a key or name.
    pub(crate) fn name(&mut self, n: usize) -> Result<String, Error> {
        let name = self.text(n)?;
        check_name(&name)?;
        Ok(name)
    }

    /// A count in the header must be one that the section has room for, before anything is sized by it.
    pub(crate) fn check_count(&self, count: u32, min_entry: usize) -> Result<(), Error> {
        if u64::from(count) * min_entry as u64 > self.left() as u64 {
            let (section, len) = (self.section, self.bytes.len() as u64);
            return Err(Error::TooManyEntries { section, count: count.into(), len });
        }
        Ok(())
    }

    /// The section must end here.
    pub(crate) fn finish(self) -> Result<(), Error> {
        if self.left() > 0 {
            let (section, left) = (self.section, self.left() as u64);
            return Err(Error::SectionRest { section, offset: self.offset(), left });
        }
        Ok(())
    }
}

/// Rule R8, for keys and for names of tensors and parts.
pub(crate) fn check_name(name: &str) -> Result<(), Error> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_NAME {
        "it is longer than 255 bytes"
    } else if name.chars().any(char::is_control) {
        "it has a control character"
    } else {
        return Ok(());
    };
    Err(Error::BadName { name: name.chars().take(MAX_NAME).collect(), reason })
}
