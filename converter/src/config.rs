//! config.json, read without defaults.
//!
//! A key that changes what the model computes must be there and must have a value this converter knows; anything
//! else is refused by key and value. Where some exporters write one number per layer, an array of equal numbers
//! stands for that number and an array of different ones is refused. Keys without influence are not looked at.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::Error;
use crate::json;
use crate::source;

pub(crate) const CONFIG: &str = "config.json";

/// Largest size (rows, columns, counts) accepted; products of two of them fit u64 with room to spare.
const MAX_SIZE: u64 = 1 << 28;

/// A JSON object of settings with getters that refuse by name.
#[derive(Debug, Clone)]
pub(crate) struct RawConfig {
    map: Map<String, Value>,
    /// Put before each key in messages: empty, or "flash_head.".
    prefix: String,
}

impl RawConfig {
    /// Reads config.json of `dir`; `None` if it is not there.
    pub(crate) fn read(dir: &Path) -> Result<Option<(Self, Vec<u8>)>, Error> {
        let Some(bytes) = source::read_text(dir, CONFIG)? else { return Ok(None) };
        match json::parse_value(CONFIG, &bytes)? {
            Value::Object(map) => Ok(Some((Self { map, prefix: String::new() }, bytes))),
            _ => Err(Error::Json { file: CONFIG.to_owned(), reason: "not an object".to_owned() }),
        }
    }

    /// The value of `key`; null counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn require(&self, key: &str) -> Result<&Value, Error> {
        self.get(key).ok_or_else(|| Error::ConfigMissing { key: format!("{}{key}", self.prefix) })
    }

    /// An error about the value of `key`.
    pub(crate) fn refuse(&self, key: &str, wanted: impl Into<String>) -> Error {
        let found = self.map.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string);
        Error::ConfigValue {
            file: CONFIG,
            key: format!("{}{key}", self.prefix),
            found,
            wanted: wanted.into(),
        }
    }

    /// The nested object `key`, if there.
    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Self { map: map.clone(), prefix: format!("{}{key}.", self.prefix) }))
            }
            Some(_) => Err(self.refuse(key, "an object is needed")),
        }
    }

    /// The value of `key`, or the common value of a uniform array.
    fn scalar(&self, key: &str) -> Result<&Value, Error> {
        match self.require(key)? {
            Value::Array(values) => match values.split_first() {
                Some((first, rest)) if rest.iter().all(|value| value == first) => Ok(first),
                _ => Err(self.refuse(key, "one value, or an array of equal values, is needed")),
            },
            value => Ok(value),
        }
    }

    /// A size or count: an integer from 1 to 2^28.
    pub(crate) fn size(&self, key: &str) -> Result<u64, Error> {
        let value = self.scalar(key)?.as_u64().filter(|&value| (1..=MAX_SIZE).contains(&value));
        value.ok_or_else(|| self.refuse(key, format!("an integer from 1 to {MAX_SIZE} is needed")))
    }

    /// A finite number greater than zero.
    pub(crate) fn positive(&self, key: &str) -> Result<f64, Error> {
        let value = self.scalar(key)?.as_f64().filter(|value| value.is_finite() && *value > 0.0);
        value.ok_or_else(|| self.refuse(key, "a number greater than zero is needed"))
    }

    /// A boolean.
    pub(crate) fn bool(&self, key: &str) -> Result<bool, Error> {
        self.scalar(key)?.as_bool().ok_or_else(|| self.refuse(key, "true or false is needed"))
    }

    /// A string.
    pub(crate) fn string(&self, key: &str) -> Result<&str, Error> {
        self.scalar(key)?.as_str().ok_or_else(|| self.refuse(key, "a string is needed"))
    }

    /// An array of strings.
    pub(crate) fn strings(&self, key: &str) -> Result<Vec<&str>, Error> {
        let strings =
            self.require(key)?.as_array().and_then(|values| values.iter().map(Value::as_str).collect());
        strings.ok_or_else(|| self.refuse(key, "an array of strings is needed"))
    }

    /// Token ids: one integer or an array of them; empty if absent.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u64>, Error> {
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(values)) => values.iter().map(Value::as_u64).collect(),
            Some(value) => value.as_u64().map(|id| vec![id]),
        };
        ids.ok_or_else(|| self.refuse(key, "a token id or an array of token ids is needed"))
    }

    /// Refuses any value of `key` but `wanted`; an absent key passes.
    pub(crate) fn only(&self, key: &str, wanted: &Value) -> Result<(), Error> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if value == wanted => Ok(()),
            Some(_) if wanted.is_null() => Err(self.refuse(key, "only null is")),
            Some(_) => Err(self.refuse(key, format!("only {wanted} is"))),
        }
    }

    /// The architecture's class name, or else its model type.
    pub(crate) fn architecture(&self) -> Option<&str> {
        let class = self.get("architectures").and_then(Value::as_array).and_then(|classes| classes.first());
        class.or_else(|| self.get("model_type")).and_then(Value::as_str)
    }

    /// What the config says of its architecture, for messages.
    pub(crate) fn describe(&self) -> String {
        let said =
            ["architectures", "model_type"].map(|key| self.get(key).map(|value| format!("{key} {value}")));
        let said: Vec<String> = said.into_iter().flatten().collect();
        if said.is_empty() { "no architectures and no model_type".to_owned() } else { said.join(" and ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> RawConfig {
        let Value::Object(map) = serde_json::from_str(text).unwrap() else { panic!("not an object") };
        RawConfig { map, prefix: String::new() }
    }

    #[test]
    fn sizes_are_integers_in_range_or_uniform_arrays() {
        let check = |value: &str, wanted: Option<u64>| {
            let config = config(&format!(r#"{{"n": {value}}}"#));
            assert_eq!(config.size("n").ok(), wanted, "{value}");
        };
        check("1", Some(1));
        check("268435456", Some(268_435_456));
        check("[512, 512, 512]", Some(512));
        check("[7]", Some(7));
        check("0", None);
        check("268435457", None);
        check("-1", None);
        check("1.5", None);
        check("\"512\"", None);
        check("[512, 513]", None);
        check("[]", None);
        check("null", None);
        check("true", None);
    }

    #[test]
    fn refusals_name_key_and_value() {
        let config = config(r#"{"n": [1, 2], "hidden_act": "gelu", "flash_head": {"n_probes": 0}}"#);
        let message = |error: Error| error.to_string();
        assert!(message(config.size("n").unwrap_err()).contains("n = [1,2]"));
        assert!(message(config.size("m").unwrap_err()).contains("\"m\""));
        assert!(
            message(config.only("hidden_act", &"silu".into()).unwrap_err()).contains("hidden_act = \"gelu\"")
        );
        let flash = config.object("flash_head").unwrap().unwrap();
        assert!(message(flash.size("n_probes").unwrap_err()).contains("flash_head.n_probes = 0"));
    }
}
