//! The `tojson` filter with the output of Python's `json.dumps(..., ensure_ascii=False)`, which is what
//! models saw in training: ", " and ": " between items, keys in their order, floats as Python prints them.
//!
//! Not HTML-safe, on purpose. Arguments are those of the filter Hugging Face gives its templates:
//! `ensure_ascii`, `indent`, `separators`, `sort_keys`.

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, ValueKind},
};

/// Lists and objects may be nested this deep; deeper ones come only from a template that builds them.
const MAX_DEPTH: usize = 200;

struct Style {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The filter. Charges one unit of fuel for each 64 bytes written.
pub(crate) fn tojson(state: &State<'_, '_>, value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let style = Style::from_kwargs(&kwargs)?;
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    state.consume_fuel(out.len() as u64 / 64)?;
    Ok(out)
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {}", message.into()))
}

impl Style {
    fn from_kwargs(kwargs: &Kwargs) -> Result<Self, Error> {
        let indent: Option<Value> = kwargs.get("indent")?;
        let indent = match indent.filter(|v| !v.is_none() && !v.is_undefined()) {
            None => None,
            Some(v) => Some(match (v.as_str(), v.as_usize()) {
                (Some(text), _) => text.to_owned(),
                (_, Some(width)) if width <= 64 => " ".repeat(width),
                _ => return Err(invalid("indent must be a string or a number up to 64")),
            }),
        };
        let separators: Option<Vec<String>> = kwargs.get("separators")?;
        let (item, key) = match separators.as_deref() {
            None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
            None => (", ".to_owned(), ": ".to_owned()),
            Some([item, key]) => (item.clone(), key.clone()),
            Some(_) => return Err(invalid("separators must be two strings")),
        };
        let ensure_ascii: Option<bool> = kwargs.get("ensure_ascii")?;
        let sort_keys: Option<bool> = kwargs.get("sort_keys")?;
        kwargs.assert_all_used()?;
        Ok(Self {
            indent,
            item_separator: item,
            key_separator: key,
            ensure_ascii: ensure_ascii.unwrap_or(false),
            sort_keys: sort_keys.unwrap_or(false),
        })
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(invalid(format!("nested deeper than {MAX_DEPTH} levels")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.write_str(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_all(out, ['[', ']'], &items, depth, |style, out, item| {
                    style.write(out, item, depth + 1)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_all(out, ['{', '}'], &keys, depth, |style, out, key| {
                    style.write_key(out, key)?;
                    style.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            other => return Err(invalid(format!("{other} has no JSON form"))),
        }
        Ok(())
    }

    fn write_all(
        &self,
        out: &mut String,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        mut each: impl FnMut(&Self, &mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            each(self, out, item)?;
        }
        if !items.is_empty() {
            self.new_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.write_str(out, key.as_str().unwrap_or_default()),
            ValueKind::Bool => out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" }),
            ValueKind::None => out.push_str("\"null\""),
            ValueKind::Number => {
                out.push('"');
                out.push_str(&number(key)?);
                out.push('"');
            }
            other => return Err(invalid(format!("{other} cannot be a key"))),
        }
        out.push_str(&self.key_separator);
        Ok(())
    }

    fn write_str(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
                // Markers of `guard` live in this range and must stay characters.
                '\u{fdd0}'..='\u{fdef}' => out.push(c),
                c if self.ensure_ascii && !(' '..='~').contains(&c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() { Ok(value.to_string()) } else { Ok(python_float(f64::try_from(value.clone())?)) }
}

/// Python's `repr` of a float: the shortest digits that read back as the same number, in plain notation for
/// decimal exponents from -4 to 15, with at least one digit after the point.
fn python_float(v: f64) -> String {
    if v.is_nan() {
        return "NaN".into();
    }
    if v.is_infinite() {
        return if v > 0.0 { "Infinity".into() } else { "-Infinity".into() };
    }
    let scientific = format!("{v:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{v:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_pythons() {
        for (v, want) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (123456789.125, "123456789.125"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "-Infinity"),
        ] {
            assert_eq!(python_float(v), want);
        }
    }

    #[test]
    fn output_is_that_of_json_dumps() {
        let mut env = minijinja::Environment::new();
        env.add_filter("tojson", tojson);
        let check = |template: &str, want: &str| {
            assert_eq!(
                env.render_str(template, ()).map_err(|e| e.to_string()).as_deref(),
                Ok(want),
                "{template}"
            );
        };
        check("{{ [1, 2.0, true, none, 'é\"'] | tojson }}", r#"[1, 2.0, true, null, "é\""]"#);
        check("{{ {'b': 1, 'a': {}} | tojson }}", r#"{"b": 1, "a": {}}"#);
        check(
            "{{ {'b': [], 'a': [1]} | tojson(sort_keys=true, indent=1) }}",
            "{\n \"a\": [\n  1\n ],\n \"b\": []\n}",
        );
        check("{{ [1, [2]] | tojson(indent='\t') }}", "[\n\t1,\n\t[\n\t\t2\n\t]\n]");
        check("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]");
        check("{{ 'é🦙\\n<&' | tojson(ensure_ascii=true) }}", r#""\u00e9\ud83e\udd99\n<&""#);
        check("{{ '\\x01\\x7f' | tojson }}", "\"\\u0001\u{7f}\"");
        check("{{ {1: 2, none: 3} | tojson }}", r#"{"1": 2, "null": 3}"#);
        assert!(env.render_str("{{ nothing | tojson }}", ()).is_err());
        assert!(env.render_str("{{ 1 | tojson(indent=65) }}", ()).is_err());
        assert!(env.render_str("{{ 1 | tojson(colour=1) }}", ()).is_err());
    }
}
