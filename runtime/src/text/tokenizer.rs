//! Byte-level BPE tokenizer: text to ids and ids to bytes.
//!
//! Merging is done by the `tokenizers` crate, so ids are those of the Hugging Face tokenizer. Two things are
//! kept here. Added (control) tokens are taken out of the file before that crate sees it, so encoding plain
//! text cannot produce one; they are found only on request ([`Specials::Parse`]). And ids turn into *bytes*,
//! not text: a token may end inside a character, and only a whole sequence of them is UTF-8.
//!
//! The file decides everything else, so every field of it is either understood or an error. Ignored on
//! purpose: `truncation` and `padding` (they concern batches for training) and the post-processor, which may
//! only be absent or `ByteLevel` (that one moves offsets, not ids). There is no BOS token unless the chat
//! template writes one.

use std::{collections::HashMap, sync::Arc};

use serde_json::{Map, Value};
use tokenizers::{
    NormalizerWrapper, PreTokenizerWrapper,
    models::bpe::{BPE, Merges, Vocab},
};

use super::{
    added::{AddedTokens, Segment},
    chat::Piece,
    error::TextError,
};

/// Ids must be below this: tables indexed by id stay small whatever a file says.
const ID_LIMIT: u32 = 1 << 22;

/// What to do with control tokens spelled out in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Nothing: the text is plain and yields only ordinary tokens.
    Plain,
    /// Replace each by its id, the leftmost first and the longest where several start together. Only for
    /// text that the model's own side wrote, never for a user's.
    Parse,
}

/// A byte-level BPE tokenizer with its control tokens.
#[derive(Debug)]
pub struct Tokenizer {
    /// Without added tokens.
    plain: tokenizers::Tokenizer,
    added: Arc<AddedTokens>,
    table: TokenTable,
}

impl Tokenizer {
    /// Reads a `tokenizer.json` of the Hugging Face `tokenizers` library.
    ///
    /// # Errors
    /// Any field that is missing, unknown, or has a value that would change ids in a way this version does
    /// not reproduce; the error names the field.
    pub fn from_json(json: &str) -> Result<Self, TextError> {
        let mut file: Map<String, Value> =
            serde_json::from_str(json).map_err(|e| TextError::TokenizerJson { message: e.to_string() })?;
        check_top_level(&file)?;
        let added = added_tokens(&file)?;
        let model = take_object(&mut file, "model")?;
        check_model(&model)?;
        let normalizer: Option<NormalizerWrapper> = part(&mut file, "normalizer")?;
        check_pre_tokenizer(&file)?;
        let pre_tokenizer: Option<PreTokenizerWrapper> = part(&mut file, "pre_tokenizer")?;
        check_kind(&file, "decoder", &["ByteLevel"], "the decoder `ByteLevel`")?;
        check_kind(&file, "post_processor", &["ByteLevel"], "`ByteLevel` or none")?;
        let (bpe, table) = build(model, &added)?;
        let mut plain = tokenizers::Tokenizer::new(bpe);
        let merges = |e: tokenizers::Error| TextError::TokenizerMerges { message: e.to_string() };
        plain.with_normalizer(normalizer).map_err(merges)?;
        plain.with_pre_tokenizer(pre_tokenizer);
        Ok(Self { plain, added: Arc::new(AddedTokens::new(added)), table })
    }

    /// Ids of a text. No token is added in front or behind.
    ///
    /// # Errors
    /// [`TextError::Encode`] when the tokenizer's own rules fail on this text.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        match specials {
            Specials::Plain => self.encode_plain(text, &mut ids)?,
            Specials::Parse => {
                for segment in self.added.split(text) {
                    match segment {
                        Segment::Text(text) => self.encode_plain(text, &mut ids)?,
                        Segment::Token(id) => ids.push(id),
                    }
                }
            }
        }
        Ok(ids)
    }

    /// Ids of a rendered conversation: control tokens as they are, all text plain.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.encode_plain(text, &mut ids)?,
                Piece::Special(id) => ids.push(*id),
            }
        }
        Ok(ids)
    }

    /// Bytes a token stands for, possibly part of a character; the text of a control token. Empty for ids
    /// no token has (rows a model leaves unused).
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.get(id)
    }

    /// Text of a sequence of ids, control tokens included. Bytes that are not UTF-8 as a whole become
    /// U+FFFD, one for each maximal invalid stretch.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Id of the control token spelled exactly like this.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.added.id(text)
    }

    /// Whether the id is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        self.added.contains(id)
    }

    /// One more than the largest id a token has. A model may have more rows than that.
    pub fn vocab_size(&self) -> usize {
        self.table.spans.len()
    }

    /// The control tokens, shared with the chat template.
    pub(crate) fn added(&self) -> &Arc<AddedTokens> {
        &self.added
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if text.is_empty() {
            return Ok(());
        }
        let encode = |e: tokenizers::Error| TextError::Encode { message: e.to_string() };
        ids.extend_from_slice(self.plain.encode_fast(text, false).map_err(encode)?.get_ids());
        Ok(())
    }
}

fn missing(field: impl Into<String>, wanted: &'static str) -> TextError {
    TextError::TokenizerMissing { field: field.into(), wanted }
}

fn unsupported(field: impl Into<String>, found: &Value, supported: &'static str) -> TextError {
    let found = found.to_string().chars().take(200).collect();
    TextError::TokenizerUnsupported { field: field.into(), found, supported }
}

fn check_top_level(file: &Map<String, Value>) -> Result<(), TextError> {
    const KNOWN: [&str; 9] = [
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    ];
    if let Some(field) = file.keys().find(|k| !KNOWN.contains(&k.as_str())) {
        return Err(TextError::TokenizerUnknownField { field: field.clone() });
    }
    match file.get("version") {
        Some(Value::String(v)) if v == "1.0" => Ok(()),
        Some(other) => Err(unsupported("version", other, "\"1.0\"")),
        None => Err(missing("version", "a string")),
    }
}

fn check_model(model: &Map<String, Value>) -> Result<(), TextError> {
    match model.get("type") {
        Some(Value::String(t)) if t == "BPE" => {}
        Some(other) => return Err(unsupported("model.type", other, "\"BPE\"")),
        None => return Err(missing("model.type", "a string")),
    }
    for (key, value) in model {
        let (allowed, supported) = match key.as_str() {
            "type" | "vocab" | "merges" | "fuse_unk" | "unk_token" => continue,
            "dropout" => (value.is_null(), "null"),
            "continuing_subword_prefix" | "end_of_word_suffix" => {
                (value.is_null() || value.as_str() == Some(""), "null or \"\"")
            }
            "byte_fallback" => (value.as_bool() == Some(false), "false"),
            "ignore_merges" => (value.is_boolean(), "true or false"),
            _ => return Err(TextError::TokenizerUnknownField { field: format!("model.{key}") }),
        };
        if !allowed {
            return Err(unsupported(format!("model.{key}"), value, supported));
        }
    }
    Ok(())
}

/// The pre-tokenizer has to map bytes to the byte-level alphabet somewhere.
fn check_pre_tokenizer(file: &Map<String, Value>) -> Result<(), TextError> {
    let found = file.get("pre_tokenizer").unwrap_or(&Value::Null);
    let is_byte_level = |v: &Value| v.get("type").and_then(Value::as_str) == Some("ByteLevel");
    let listed = found.get("pretokenizers").and_then(Value::as_array);
    if is_byte_level(found) || listed.is_some_and(|list| list.iter().any(is_byte_level)) {
        return Ok(());
    }
    Err(unsupported("pre_tokenizer", found, "`ByteLevel`, alone or in a `Sequence`"))
}

/// Refuses a part whose `type` is not listed; a missing post-processor is fine, a missing decoder is not.
fn check_kind(
    file: &Map<String, Value>,
    field: &'static str,
    kinds: &[&str],
    supported: &'static str,
) -> Result<(), TextError> {
    let found = file.get(field).unwrap_or(&Value::Null);
    match found.get("type").and_then(Value::as_str) {
        Some(kind) if kinds.contains(&kind) => Ok(()),
        None if found.is_null() && field == "post_processor" => Ok(()),
        _ => Err(unsupported(field, found, supported)),
    }
}

/// Normalizer or pre-tokenizer, by the `tokenizers` crate's own reading of it.
fn part<T: serde::de::DeserializeOwned>(
    file: &mut Map<String, Value>,
    field: &'static str,
) -> Result<Option<T>, TextError> {
    match file.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|_| unsupported(field, &value, "what version 0.23 of the `tokenizers` library reads")),
    }
}

fn take_object(file: &mut Map<String, Value>, field: &'static str) -> Result<Map<String, Value>, TextError> {
    match file.remove(field) {
        Some(Value::Object(map)) => Ok(map),
        _ => Err(missing(field, "an object")),
    }
}

fn token_id(token: &str, id: &Value, field: &str) -> Result<u32, TextError> {
    let id = id.as_u64().ok_or_else(|| missing(format!("{field}[{token:?}]"), "a non-negative integer"))?;
    match u32::try_from(id) {
        Ok(small) if small < ID_LIMIT => Ok(small),
        _ => Err(TextError::TokenizerIdTooLarge { token: token.into(), id, limit: ID_LIMIT }),
    }
}

/// Texts and ids of `added_tokens`, whose options must all be the ones that mean "exactly this text".
fn added_tokens(file: &Map<String, Value>) -> Result<Vec<(String, u32)>, TextError> {
    let list = match file.get("added_tokens") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(missing("added_tokens", "an array")),
    };
    let mut added = Vec::new();
    for (index, entry) in list.iter().enumerate() {
        let at = format!("added_tokens[{index}]");
        let map = entry.as_object().ok_or_else(|| missing(&at, "an object"))?;
        let text = map.get("content").and_then(Value::as_str).filter(|t| !t.is_empty());
        let text = text.ok_or_else(|| missing(format!("{at}.content"), "a non-empty string"))?;
        for (key, value) in map {
            match key.as_str() {
                "id" | "content" | "special" | "normalized" => {}
                "single_word" | "lstrip" | "rstrip" if value.as_bool() == Some(false) => {}
                "single_word" | "lstrip" | "rstrip" => {
                    return Err(unsupported(format!("{at}.{key}"), value, "false"));
                }
                _ => return Err(TextError::TokenizerUnknownField { field: format!("{at}.{key}") }),
            }
        }
        added.push((text.to_owned(), token_id(text, map.get("id").unwrap_or(&Value::Null), &at)?));
    }
    Ok(added)
}

/// Bytes of every id, and where each one's are.
#[derive(Debug, Default)]
struct TokenTable {
    /// Bytes of all tokens, concatenated.
    bytes: Vec<u8>,
    /// Byte range of each id in `bytes`, `[vocab_size]`; empty for ids no token has.
    spans: Vec<(usize, usize)>,
}

impl TokenTable {
    /// Bytes of an id; none for ids no token has.
    fn get(&self, id: u32) -> &[u8] {
        let (start, end) = self.spans.get(id as usize).copied().unwrap_or((0, 0));
        &self.bytes[start..end]
    }

    /// Adds a token; `text` is for the message, should another have the id.
    fn insert(&mut self, id: u32, text: &str, bytes: impl Iterator<Item = u8>) -> Result<(), TextError> {
        let taken = self.get(id);
        if !taken.is_empty() {
            let first = String::from_utf8_lossy(taken).into_owned();
            return Err(TextError::TokenizerConflict { id, first, second: text.into() });
        }
        let at = id as usize;
        if self.spans.len() <= at {
            self.spans.resize(at + 1, (0, 0));
        }
        let start = self.bytes.len();
        self.bytes.extend(bytes);
        self.spans[at] = (start, self.bytes.len());
        Ok(())
    }
}

/// The BPE model without control tokens, and the bytes of every id.
fn build(mut model: Map<String, Value>, added: &[(String, u32)]) -> Result<(BPE, TokenTable), TextError> {
    let ignore_merges = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
    let listed = take_object(&mut model, "vocab").map_err(|_| missing("model.vocab", "an object"))?;
    let Some(Value::Array(merges)) = model.remove("merges") else {
        return Err(missing("model.merges", "an array"));
    };
    let mut table = TokenTable::default();
    let mut control = HashMap::new();
    for (text, id) in added {
        if let Some(first) = control.insert(text.as_str(), *id) {
            return Err(TextError::TokenizerConflict {
                id: first,
                first: text.clone(),
                second: text.clone(),
            });
        }
        table.insert(*id, text, text.bytes())?;
    }
    let vocab = plain_vocab(listed, &control, &mut table)?;
    let merges = usable_merges(merges, &vocab, &control)?;
    let builder = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(ignore_merges);
    let bpe = builder.build().map_err(|e| TextError::TokenizerMerges { message: e.to_string() })?;
    Ok((bpe, table))
}

/// The vocabulary without control tokens; fills in the table.
fn plain_vocab(
    listed: Map<String, Value>,
    control: &HashMap<&str, u32>,
    table: &mut TokenTable,
) -> Result<Vocab, TextError> {
    let alphabet = byte_alphabet();
    let mut byte_of = [None; ALPHABET_END as usize];
    for (byte, symbol) in (0u8..=255).zip(alphabet) {
        byte_of[symbol as usize] = Some(byte);
    }
    let mut vocab = Vocab::default();
    vocab.reserve(listed.len());
    for (text, id) in listed {
        let id = token_id(&text, &id, "model.vocab")?;
        match control.get(text.as_str()) {
            Some(&known) if known == id => continue,
            Some(_) => return Err(TextError::TokenizerConflict { id, first: text.clone(), second: text }),
            None => {}
        }
        let byte = |c: char| byte_of.get(c as usize).copied().flatten();
        if text.chars().any(|c| byte(c).is_none()) {
            return Err(TextError::TokenizerNotByteLevel { id, token: text });
        }
        table.insert(id, &text, text.chars().filter_map(byte))?;
        vocab.insert(text, id);
    }
    for (byte, symbol) in (0u8..=255).zip(alphabet) {
        if !vocab.contains_key(symbol.encode_utf8(&mut [0; 4]) as &str) {
            return Err(TextError::TokenizerMissingByte { byte });
        }
    }
    Ok(vocab)
}

/// Merges as pairs, without those that need or make a control token; all three tokens of any other exist.
fn usable_merges(
    listed: Vec<Value>,
    vocab: &Vocab,
    control: &HashMap<&str, u32>,
) -> Result<Merges, TextError> {
    let mut merges = Vec::with_capacity(listed.len());
    let mut joined = String::new();
    for (index, merge) in listed.into_iter().enumerate() {
        let (left, right) = merge_pair(merge)
            .ok_or_else(|| missing(format!("model.merges[{index}]"), "a pair of strings"))?;
        joined.clear();
        joined.push_str(&left);
        joined.push_str(&right);
        let parts = [left.as_str(), right.as_str(), joined.as_str()];
        let absent = parts.into_iter().find(|p| !vocab.contains_key(*p));
        let of_control = absent.is_some() && parts.iter().any(|p| control.contains_key(p));
        match absent {
            Some(_) if of_control => {}
            Some(absent) => {
                let message =
                    format!("merge {index} needs the token {absent:?}, which is not in the vocabulary");
                return Err(TextError::TokenizerMerges { message });
            }
            None => merges.push((left, right)),
        }
    }
    Ok(merges)
}

/// `"left right"` or `["left", "right"]`.
fn merge_pair(merge: Value) -> Option<(String, String)> {
    match merge {
        Value::String(both) => both.split_once(' ').map(|(l, r)| (l.to_owned(), r.to_owned())),
        Value::Array(pair) => match <[Value; 2]>::try_from(pair) {
            Ok([Value::String(left), Value::String(right)]) => Some((left, right)),
            _ => None,
        },
        _ => None,
    }
}

/// One more than the last character of the byte-level alphabet.
const ALPHABET_END: u32 = 0x144;

/// The character that stands for each byte in a byte-level vocabulary, `[256]`: printable Latin-1 stands for
/// itself, the other bytes for U+0100 and on, in order (GPT-2's table; Radford et al., 2019).
fn byte_alphabet() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|byte| {
        let code = match byte as u32 {
            b @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => b,
            _ => {
                next += 1;
                next - 1
            }
        };
        char::from_u32(code).expect("codes stay below ALPHABET_END, far from the surrogates")
    })
}
