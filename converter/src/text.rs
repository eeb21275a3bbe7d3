//! The texts a model file carries beside its weights: tokenizer, chat template, sampling defaults, stop ids.

use std::path::Path;

use serde_json::Value;

use crate::config::RawConfig;
use crate::error::Error;
use crate::json;
use crate::source;

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const GENERATION: &str = "generation_config.json";

/// The one version of tokenizer.json there has been.
const VERSION: &str = "1.0";

/// Names of the tokens that end an answer, whatever the configs say.
const STOP_TOKENS: [&str; 2] = ["<|endoftext|>", "<|im_end|>"];
/// Name of the token that ends reasoning.
const END_OF_THOUGHT: &str = "</think>";

/// Sampling defaults; the recommended ones unless generation_config.json says otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Generation {
    pub(crate) temperature: f64,
    pub(crate) top_p: f64,
    pub(crate) top_k: u64,
}

/// The texts as found, before they are checked against the model.
#[derive(Debug, Default)]
pub(crate) struct RawTexts {
    tokenizer: Option<Vec<u8>>,
    /// The file it comes from, and its text.
    template: Option<(&'static str, String)>,
    generation: Option<Vec<u8>>,
    /// Name and bytes of every file read, for the source hashes.
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// What has to be there and is not.
    pub(crate) missing: Vec<String>,
}

/// Texts checked against the model.
#[derive(Debug, Clone)]
pub(crate) struct Texts {
    pub(crate) tokenizer: String,
    pub(crate) template: String,
    pub(crate) stop_ids: Vec<u64>,
    /// The token that ends reasoning, if the tokenizer has one.
    pub(crate) end_of_thought: Option<u64>,
    pub(crate) generation: Generation,
}

/// Reads the text files of `dir`, noting what is missing.
pub(crate) fn read(dir: &Path) -> Result<RawTexts, Error> {
    let mut texts = RawTexts { tokenizer: source::read_text(dir, TOKENIZER)?, ..RawTexts::default() };
    match &texts.tokenizer {
        Some(bytes) => texts.files.push((TOKENIZER.to_owned(), bytes.clone())),
        None => texts.missing.push(TOKENIZER.to_owned()),
    }
    if let Some(bytes) = source::read_text(dir, TEMPLATE)? {
        texts.template = Some((TEMPLATE, utf8(TEMPLATE, &bytes)?));
        texts.files.push((TEMPLATE.to_owned(), bytes));
    } else if let Some(bytes) = source::read_text(dir, TOKENIZER_CONFIG)? {
        let template = embedded_template(&json::parse_value(TOKENIZER_CONFIG, &bytes)?);
        texts.template = template.map(|template| (TOKENIZER_CONFIG, template));
        texts.files.push((TOKENIZER_CONFIG.to_owned(), bytes));
    }
    if texts.template.is_none() {
        texts.missing.push(format!("{TEMPLATE} (or chat_template in {TOKENIZER_CONFIG})"));
    }
    if let Some(bytes) = source::read_text(dir, GENERATION)? {
        texts.files.push((GENERATION.to_owned(), bytes.clone()));
        texts.generation = Some(bytes);
    }
    Ok(texts)
}

fn utf8(file: &str, bytes: &[u8]) -> Result<String, Error> {
    let text = std::str::from_utf8(bytes);
    text.map(str::to_owned).map_err(|error| Error::Json { file: file.to_owned(), reason: error.to_string() })
}

/// tokenizer_config.json holds one template, or a list of named ones.
fn embedded_template(config: &Value) -> Option<String> {
    match config.get("chat_template")? {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => {
            let default =
                named.iter().find(|entry| entry.get("name").and_then(Value::as_str) == Some("default"))?;
            default.get("template")?.as_str().map(str::to_owned)
        }
        _ => None,
    }
}

impl RawTexts {
    /// Checks the texts against config.json. Nothing may be missing.
    pub(crate) fn check(&self, config: &RawConfig, vocab_size: u64) -> Result<Texts, Error> {
        let (Some(tokenizer), Some((template_file, template))) = (&self.tokenizer, &self.template) else {
            return Err(Error::Tokenizer { reason: "missing".to_owned() });
        };
        if template.trim().is_empty() {
            return Err(Error::EmptyTemplate { file: template_file });
        }
        let value = json::parse_value(TOKENIZER, tokenizer)?;
        let mut stop_ids = check_tokenizer(&value, vocab_size)?;
        let end_of_thought = added_id(&value, END_OF_THOUGHT);
        stop_ids.extend(config.token_ids("eos_token_id")?);
        let mut generation = Generation { temperature: 1.0, top_p: 0.95, top_k: 20 };
        if let Some(bytes) = &self.generation {
            let settings = json::parse_value(GENERATION, bytes)?;
            stop_ids.extend(generation_stop_ids(&settings, vocab_size)?);
            generation = read_generation(&settings, generation)?;
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        if let Some(id) = stop_ids.iter().find(|&&id| id >= vocab_size) {
            return Err(
                config.refuse("eos_token_id", format!("stop id {id} is not below vocab_size {vocab_size}"))
            );
        }
        if stop_ids.is_empty() {
            return Err(Error::ConfigMissing { key: "eos_token_id".to_owned() });
        }
        let (tokenizer, template) = (utf8(TOKENIZER, tokenizer)?, template.clone());
        Ok(Texts { tokenizer, template, stop_ids, end_of_thought, generation })
    }

    /// True if sampling defaults come with the checkpoint.
    pub(crate) fn has_generation(&self) -> bool {
        self.generation.is_some()
    }
}

/// Checks kind and ids; returns the ids of the stop tokens it knows by name.
fn check_tokenizer(tokenizer: &Value, vocab_size: u64) -> Result<Vec<u64>, Error> {
    let refuse = |reason: String| Error::Tokenizer { reason };
    if let Some(version) = tokenizer.get("version").filter(|version| *version != VERSION) {
        return Err(refuse(format!(
            "version is {version}, only {VERSION:?} is supported; it may be newer than this program"
        )));
    }
    let model = tokenizer.get("model").ok_or_else(|| refuse("no field \"model\"".to_owned()))?;
    let kind = model.get("type").and_then(Value::as_str).unwrap_or("unnamed");
    if kind != "BPE" {
        return Err(refuse(format!(
            "model.type is {kind:?}, only \"BPE\" is supported; it may be newer than this program"
        )));
    }
    let vocab = model.get("vocab").and_then(Value::as_object);
    let vocab = vocab.ok_or_else(|| refuse("model.vocab is not an object".to_owned()))?;
    for (token, id) in vocab {
        check_id(token, id, vocab_size)?;
    }
    let mut stops = Vec::new();
    for added in tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
        let content = added.get("content").and_then(Value::as_str).unwrap_or_default();
        let id = check_id(content, added.get("id").unwrap_or(&Value::Null), vocab_size)?;
        if STOP_TOKENS.contains(&content) {
            stops.push(id);
        }
    }
    Ok(stops)
}

/// Ids of the added tokens `names`, in that order, after the checks every tokenizer gets.
pub(crate) fn named_ids(tokenizer: &str, vocab_size: u64, names: &[&str]) -> Result<Vec<Option<u64>>, Error> {
    let value = json::parse_value(TOKENIZER, tokenizer.as_bytes())?;
    check_tokenizer(&value, vocab_size)?;
    Ok(names.iter().map(|name| added_id(&value, name)).collect())
}

/// Id of the added token `name`.
fn added_id(tokenizer: &Value, name: &str) -> Option<u64> {
    let mut added = tokenizer.get("added_tokens")?.as_array()?.iter();
    added.find(|added| added.get("content").and_then(Value::as_str) == Some(name))?.get("id")?.as_u64()
}

fn check_id(token: &str, id: &Value, vocab_size: u64) -> Result<u64, Error> {
    let reason = match id.as_u64() {
        Some(id) if id < vocab_size => return Ok(id),
        Some(id) => format!("token {token:?} has id {id}, config.json has vocab_size {vocab_size}"),
        None => format!("token {token:?} has the id {id}, which is not one"),
    };
    Err(Error::Tokenizer { reason })
}

fn refuse_generation(key: &str, found: &Value, wanted: &str) -> Error {
    Error::ConfigValue {
        file: GENERATION,
        key: key.to_owned(),
        found: found.to_string(),
        wanted: wanted.to_owned(),
    }
}

fn generation_stop_ids(settings: &Value, vocab_size: u64) -> Result<Vec<u64>, Error> {
    let found = settings.get("eos_token_id").unwrap_or(&Value::Null);
    let ids = match found {
        Value::Null => Some(Vec::new()),
        Value::Array(ids) => ids.iter().map(Value::as_u64).collect(),
        id => id.as_u64().map(|id| vec![id]),
    };
    let ids = ids.filter(|ids| ids.iter().all(|&id| id < vocab_size));
    ids.ok_or_else(|| {
        let wanted = format!("a token id below vocab_size {vocab_size}, or an array of them, is needed");
        refuse_generation("eos_token_id", found, &wanted)
    })
}

fn read_generation(settings: &Value, default: Generation) -> Result<Generation, Error> {
    let number = |key: &str, default: f64, good: fn(f64) -> bool, wanted: &str| match settings.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => {
            value.as_f64().filter(|&value| good(value)).ok_or_else(|| refuse_generation(key, value, wanted))
        }
    };
    let temperature =
        number("temperature", default.temperature, |t| (0.0..=100.0).contains(&t), "0 to 100 is needed")?;
    let top_p = number("top_p", default.top_p, |p| p > 0.0 && p <= 1.0, "more than 0, up to 1, is needed")?;
    let top_k = match settings.get("top_k") {
        None | Some(Value::Null) => default.top_k,
        Some(value) => {
            value.as_u64().ok_or_else(|| refuse_generation("top_k", value, "an integer is needed"))?
        }
    };
    Ok(Generation { temperature, top_p, top_k })
}
