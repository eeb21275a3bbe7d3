//! JSON that refuses duplicate keys.
//!
//! serde_json keeps the last of two equal keys, so two programs can read two different models from one file.
//! Everything a checkpoint brings as JSON passes through here instead.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::Error;

/// Parses `bytes` as one JSON value, refusing duplicate keys at any depth. `file` is for the message.
pub(crate) fn parse_value(file: &str, bytes: &[u8]) -> Result<Value, Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value =
        StrictValue.deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| Error::Json { file: file.to_owned(), reason: error.to_string() })
}

/// Parses `bytes` into `T`; only as strict about duplicate keys as `T` is.
pub(crate) fn parse<'de, T: Deserialize<'de>>(file: &str, bytes: &'de [u8]) -> Result<T, Error> {
    serde_json::from_slice(bytes)
        .map_err(|error| Error::Json { file: file.to_owned(), reason: error.to_string() })
}

/// A JSON object in file order whose keys were seen to be unique.
#[derive(Debug)]
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
        let mut seen = HashSet::new();
        let mut entries = Vec::new();
        while let Some((key, value)) = access.next_entry::<String, V>()? {
            if !seen.insert(key.clone()) {
                return Err(de::Error::custom(duplicate(&key)));
            }
            entries.push((key, value));
        }
        Ok(UniqueMap(entries))
    }
}

/// What is said about a key that stands in an object twice.
pub(crate) fn duplicate(key: &str) -> String {
    format!("the key {key:?} is there twice")
}

struct StrictValue;

impl<'de> DeserializeSeed<'de> for StrictValue {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for StrictValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| de::Error::custom("a number that is not finite"))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E: de::Error>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = access.next_element_seed(StrictValue)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(StrictValue)?;
            if map.contains_key(&key) {
                return Err(de::Error::custom(duplicate(&key)));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_keys_are_refused_at_any_depth() {
        let check = |text: &str, good: bool| {
            assert_eq!(parse_value("x.json", text.as_bytes()).is_ok(), good, "{text}")
        };
        check(r#"{"a":1,"b":{"a":[1,-2,2.5,null,true,"s"]}}"#, true);
        check(r#"{"a":1,"a":1}"#, false);
        check(r#"{"b":{"a":1,"\u0061":2}}"#, false);
        check(r#"[{"a":1},{"a":1}]"#, true);
        check("{}{}", false);
        check("", false);
    }

    #[test]
    fn a_strict_value_equals_a_plain_one() {
        let text = r#"{"a":1,"b":{"z":[1,-2,2.5,null,true,"s"],"y":18446744073709551615}}"#;
        let plain: Value = serde_json::from_str(text).unwrap();
        assert_eq!(parse_value("x.json", text.as_bytes()).unwrap(), plain);
    }
}
