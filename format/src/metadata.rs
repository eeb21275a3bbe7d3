//! Typed metadata (rules R8 to R12): sorted keys, seven value types, long strings compressed.
//!
//! What keys mean is not this crate's concern. The encoding is deterministic, so equal metadata give equal bytes.

use std::collections::BTreeMap;

use crate::decode::{Cursor, check_name};
use crate::error::{Error, Section};
use crate::header::{MAX_INDEX_LEN, Version};

/// Strings from this many bytes on are compressed when that makes them smaller (rule R12).
const COMPRESS_FROM: usize = 1024;
/// A compressed string is at most this many times its stored size (rule R12), so a small file cannot ask for much.
const MAX_RATIO: u64 = 64;
/// All compressed strings of a file together have at most this many bytes (rule R12).
const MAX_RAW: u64 = MAX_INDEX_LEN;
/// zstd level; part of no rule, but fixed so that the same input gives the same bytes.
const ZSTD_LEVEL: i32 = 9;
/// The smallest entry: key length, type, a key of one byte, a bool.
const MIN_ENTRY: usize = 2 + 1 + 1 + 1;

/// Type codes in the file (rule R9).
mod code {
    pub(super) const U64: u8 = 1;
    pub(super) const F64: u8 = 2;
    pub(super) const BOOL: u8 = 3;
    pub(super) const STR: u8 = 4;
    pub(super) const U64S: u8 = 5;
    pub(super) const F64S: u8 = 6;
    pub(super) const STRS: u8 = 7;
    pub(super) const STR_ZSTD: u8 = 8;
}

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// An unsigned integer.
    U64(u64),
    /// A finite number.
    F64(f64),
    /// A truth value.
    Bool(bool),
    /// A text.
    Str(String),
    /// Unsigned integers.
    U64s(Vec<u64>),
    /// Finite numbers.
    F64s(Vec<f64>),
    /// Texts.
    Strs(Vec<String>),
}

impl Value {
    /// The type's name, as messages use it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::U64(_) => "u64",
            Self::F64(_) => "f64",
            Self::Bool(_) => "bool",
            Self::Str(_) => "string",
            Self::U64s(_) => "list of u64",
            Self::F64s(_) => "list of f64",
            Self::Strs(_) => "list of strings",
        }
    }
}

macro_rules! value_from {
    ($($ty:ty => $variant:ident),* $(,)?) => {$(
        impl From<$ty> for Value {
            fn from(value: $ty) -> Self {
                Self::$variant(value.into())
            }
        }
    )*};
}
value_from!(u64 => U64, u32 => U64, f64 => F64, bool => Bool, String => Str, &str => Str, Vec<u64> => U64s,
    Vec<f64> => F64s, Vec<String> => Strs);

/// The metadata of a file: keys in ascending order, each with a typed value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata(BTreeMap<String, Value>);

macro_rules! getters {
    ($($name:ident, $opt:ident, $variant:ident, $ty:ty, $expected:literal;)*) => {$(
        #[doc = concat!("The ", $expected, " at `key`; an error when it is missing or of another type.")]
        pub fn $name(&self, key: &str) -> Result<$ty, Error> {
            self.$opt(key)?.ok_or_else(|| Error::MissingKey { key: key.to_owned() })
        }

        #[doc = concat!("The ", $expected, " at `key`, if the key is there; an error when it is of another type.")]
        pub fn $opt(&self, key: &str) -> Result<Option<$ty>, Error> {
            match self.0.get(key) {
                None => Ok(None),
                Some(Value::$variant(value)) => Ok(Some(getters!(@take $variant, value))),
                Some(other) => Err(Error::WrongType {
                    key: key.to_owned(),
                    expected: $expected,
                    found: other.type_name(),
                }),
            }
        }
    )*};
    (@take U64, $v:ident) => { *$v };
    (@take F64, $v:ident) => { *$v };
    (@take Bool, $v:ident) => { *$v };
    (@take $other:ident, $v:ident) => { $v };
}

impl Metadata {
    /// No metadata.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `key`, returning the value it had. Keys and values are checked when a file is planned.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        self.0.insert(key.into(), value.into())
    }

    /// The value at `key`, of whatever type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// All entries, keys ascending.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    getters! {
        u64, opt_u64, U64, u64, "u64";
        f64, opt_f64, F64, f64, "f64";
        bool, opt_bool, Bool, bool, "bool";
        str, opt_str, Str, &str, "string";
        u64s, opt_u64s, U64s, &[u64], "list of u64";
        f64s, opt_f64s, F64s, &[f64], "list of f64";
        strs, opt_strs, Strs, &[String], "list of strings";
    }

    /// Reads `n_entries` entries that fill `bytes`, a section at `base` in a file of `version`.
    pub(crate) fn decode(bytes: &[u8], base: usize, n_entries: u32, version: Version) -> Result<Self, Error> {
        let mut cursor = Cursor::new(Section::Metadata, bytes, base);
        cursor.check_count(n_entries, MIN_ENTRY)?;
        let mut entries = BTreeMap::<String, Value>::new();
        let mut budget = MAX_RAW;
        for _ in 0..n_entries {
            let key_len = cursor.u16()?;
            let type_code = cursor.u8()?;
            let key = cursor.name(key_len.into())?;
            if let Some((previous, _)) = entries.last_key_value() {
                match previous.as_bytes().cmp(key.as_bytes()) {
                    std::cmp::Ordering::Less => {}
                    std::cmp::Ordering::Equal => return Err(Error::DuplicateKey { key }),
                    std::cmp::Ordering::Greater => {
                        return Err(Error::KeyOrder { key, previous: previous.clone() });
                    }
                }
            }
            let value = decode_value(&mut cursor, &key, type_code, version, &mut budget)?;
            entries.insert(key, value);
        }
        cursor.finish()?;
        Ok(Self(entries))
    }

    /// The bytes of the metadata section.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut out = Vec::new();
        let mut budget = MAX_RAW;
        for (key, value) in &self.0 {
            check_name(key)?;
            check_finite(key, value)?;
            // A name has at most 255 bytes.
            out.extend((key.len() as u16).to_le_bytes());
            let type_at = out.len();
            out.push(0);
            out.extend(key.as_bytes());
            out[type_at] = encode_value(value, &mut out, &mut budget)?;
        }
        Ok(out)
    }
}

fn check_finite(key: &str, value: &Value) -> Result<(), Error> {
    let numbers = match value {
        Value::F64(number) => std::slice::from_ref(number),
        Value::F64s(numbers) => numbers,
        _ => return Ok(()),
    };
    match numbers.iter().find(|n| !n.is_finite()) {
        Some(&value) => Err(Error::NotFinite { key: key.to_owned(), value }),
        None => Ok(()),
    }
}

/// `budget`: bytes that compressed strings may still take.
fn decode_value(
    cursor: &mut Cursor<'_>,
    key: &str,
    type_code: u8,
    version: Version,
    budget: &mut u64,
) -> Result<Value, Error> {
    let value = match type_code {
        code::U64 => Value::U64(cursor.u64()?),
        code::F64 => Value::F64(cursor.f64()?),
        code::BOOL => match cursor.u8()? {
            0 => Value::Bool(false),
            1 => Value::Bool(true),
            byte => return Err(Error::BadBool { key: key.to_owned(), byte }),
        },
        code::STR => Value::Str(decode_text(cursor)?),
        code::U64S => Value::U64s(decode_list(cursor, 8, Cursor::u64)?),
        code::F64S => Value::F64s(decode_list(cursor, 8, Cursor::f64)?),
        code::STRS => Value::Strs(decode_list(cursor, 4, decode_text)?),
        code::STR_ZSTD => Value::Str(decode_zstd(cursor, key, budget)?),
        code => return Err(Error::UnknownValueType { key: key.to_owned(), code, version }),
    };
    check_finite(key, &value)?;
    Ok(value)
}

fn decode_text(cursor: &mut Cursor<'_>) -> Result<String, Error> {
    let len = cursor.u32()?;
    cursor.text(len as usize)
}

/// A count, then that many items of at least `min_item` bytes each.
fn decode_list<'a, T>(
    cursor: &mut Cursor<'a>,
    min_item: u64,
    item: impl Fn(&mut Cursor<'a>) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let count = cursor.u32()?;
    cursor.require(u64::from(count) * min_item)?;
    (0..count).map(|_| item(cursor)).collect()
}

/// Lengths, then the zstd frame. The claimed length is bounded by the stored one before it sizes anything.
fn decode_zstd(cursor: &mut Cursor<'_>, key: &str, budget: &mut u64) -> Result<String, Error> {
    let offset = cursor.offset();
    let (raw, stored) = (cursor.u32()?, cursor.u32()?);
    let packed = cursor.take(stored as usize)?;
    let allowed = (COMPRESS_FROM as u64)..=(*budget).min(MAX_RATIO * u64::from(stored));
    if !allowed.contains(&raw.into()) {
        return Err(Error::BadStringSize { key: key.to_owned(), raw: raw.into(), stored: stored.into() });
    }
    *budget -= u64::from(raw);
    let fail = |reason: String| Error::Decompress { key: key.to_owned(), reason };
    let mut text = vec![0; raw as usize];
    let n = zstd::bulk::decompress_to_buffer(packed, &mut text).map_err(|e| fail(e.to_string()))?;
    if n != text.len() {
        return Err(fail(format!("it gives {n} bytes, not the {raw} it claims")));
    }
    String::from_utf8(text).map_err(|_| Error::NotUtf8 { section: Section::Metadata, offset })
}

/// Appends the value's bytes and returns its type code.
fn encode_value(value: &Value, out: &mut Vec<u8>, budget: &mut u64) -> Result<u8, Error> {
    Ok(match value {
        Value::U64(number) => {
            out.extend(number.to_le_bytes());
            code::U64
        }
        Value::F64(number) => {
            out.extend(number.to_le_bytes());
            code::F64
        }
        Value::Bool(truth) => {
            out.push(u8::from(*truth));
            code::BOOL
        }
        Value::Str(text) => return encode_str(text, out, budget),
        Value::U64s(numbers) => {
            put_len(out, numbers.len())?;
            out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
            code::U64S
        }
        Value::F64s(numbers) => {
            put_len(out, numbers.len())?;
            out.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
            code::F64S
        }
        Value::Strs(texts) => {
            put_len(out, texts.len())?;
            texts.iter().try_for_each(|text| encode_text(out, text))?;
            code::STRS
        }
    })
}

fn encode_str(text: &str, out: &mut Vec<u8>, budget: &mut u64) -> Result<u8, Error> {
    let Some(packed) = compress(text, budget) else {
        encode_text(out, text)?;
        return Ok(code::STR);
    };
    put_len(out, text.len())?;
    put_len(out, packed.len())?;
    out.extend(packed);
    Ok(code::STR_ZSTD)
}

fn encode_text(out: &mut Vec<u8>, text: &str) -> Result<(), Error> {
    put_len(out, text.len())?;
    out.extend(text.as_bytes());
    Ok(())
}

fn put_len(out: &mut Vec<u8>, len: usize) -> Result<(), Error> {
    let too_large = |_| Error::IndexTooLarge { len: len as u64, max: MAX_INDEX_LEN };
    let len = u32::try_from(len).map_err(too_large)?;
    out.extend(len.to_le_bytes());
    Ok(())
}

/// The zstd form of a long text, when it is smaller and within what a reader allows.
fn compress(text: &str, budget: &mut u64) -> Option<Vec<u8>> {
    let raw = text.len() as u64;
    if text.len() < COMPRESS_FROM || raw > *budget {
        return None;
    }
    let packed = zstd::bulk::compress(text.as_bytes(), ZSTD_LEVEL).ok()?;
    if packed.len() >= text.len() || raw > MAX_RATIO * packed.len() as u64 {
        return None;
    }
    *budget -= raw;
    Some(packed)
}
