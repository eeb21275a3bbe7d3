//! Keeps strings from outside the template from becoming control tokens.
//!
//! A template mixes its own text with a user's, and afterwards nobody can tell them apart. So before
//! rendering, every string that comes in (messages, tools and extra values; values and keys, at any depth) is
//! **broken** wherever it spells a control token: a marker character goes in after the token's first
//! character. After rendering, an unbroken spelling was made by the template and is a control token; text
//! that carries markers is text, and loses them. The marker is a Unicode noncharacter (U+FDD0..U+FDEF, which
//! no text interchange uses) that occurs in no input and not in the template, so removing it restores the
//! text exactly.
//!
//! Two ways around the first rule are closed as well. Spellings are matched without regard to ASCII case, so
//! a template that changes case cannot complete one. And a string that is only a *fragment* of a spelling
//! (`think`, or text ending in `<|im_`) gets a marker at the end where it could join with text beside it,
//! except a string the template itself names (`'tool'`, `.name`): it may be compared with that name, and its
//! author wrote it. A template that cuts strings at fixed places or deletes characters inside them can still
//! build anything; no known chat template does.
//!
//! **The exception: an assistant's own think block.** Templates of reasoning models look for `</think>` in an
//! assistant's content to part reasoning from answer, and write their own tags around the parts. So for a
//! template that names `</think>` as a string, `<think>` and `</think>` stay whole in the content of an
//! assistant message that has a `</think>` and no `reasoning_content`. They are what the model itself wrote
//! in an earlier turn. With `reasoning_content` there is nothing to part, and tags in the content are text
//! that the model quoted: they are broken like everything else.

use minijinja::Value as TemplateValue;
use serde_json::Value;

use super::{added::AddedTokens, error::TextError};

/// Lists and objects in messages and tools may be nested this deep.
const MAX_DEPTH: usize = 128;
const FIRST_MARKER: u32 = 0xfdd0;
const N_MARKERS: u32 = 32;

const THINK_OPEN: &str = "<think>";
const THINK_CLOSE: &str = "</think>";

/// Breaks the strings of one conversation.
pub(crate) struct Guard<'a> {
    added: &'a AddedTokens,
    /// The template's source.
    template: &'a str,
    marker: char,
    /// Whether the template looks for `</think>` in strings.
    parts_reasoning: bool,
}

impl<'a> Guard<'a> {
    /// Chooses a marker that is neither in `root` (all values handed to the template) nor in the template.
    pub(crate) fn new(added: &'a AddedTokens, template: &'a str, root: &Value) -> Result<Self, TextError> {
        let mut used = 0u32;
        note_markers(template, &mut used);
        for (place, value) in root.as_object().into_iter().flatten() {
            note_value(value, &mut used, place, 0)?;
        }
        let free = (!used).trailing_zeros();
        let marker =
            char::from_u32(FIRST_MARKER + free).filter(|_| free < N_MARKERS).ok_or(TextError::NoMarker)?;
        let quoted = |q: char| template.contains(&format!("{q}{THINK_CLOSE}{q}"));
        Ok(Self { added, template, marker, parts_reasoning: quoted('\'') || quoted('"') })
    }

    /// The marker.
    pub(crate) fn marker(&self) -> char {
        self.marker
    }

    /// All values handed to the template, broken. Depth was checked by [`new`](Self::new).
    pub(crate) fn context(&self, root: &Value) -> TemplateValue {
        TemplateValue::from_pairs(root.as_object().into_iter().flatten().map(|(key, value)| {
            let value = match (key.as_str(), value) {
                ("messages", Value::Array(messages)) => messages.iter().map(|m| self.message(m)).collect(),
                _ => self.value(value),
            };
            (key.as_str(), value)
        }))
    }

    fn message(&self, message: &Value) -> TemplateValue {
        let Some(fields) = message.as_object() else { return self.value(message) };
        let content = fields.get("content").and_then(Value::as_str).unwrap_or_default();
        let own_block = self.parts_reasoning
            && fields.get("role").and_then(Value::as_str) == Some("assistant")
            && !fields.get("reasoning_content").is_some_and(Value::is_string)
            && content.contains(THINK_CLOSE);
        TemplateValue::from_pairs(fields.iter().map(|(key, value)| {
            let value = if own_block && key == "content" {
                TemplateValue::from(self.broken(content, &[THINK_OPEN, THINK_CLOSE]))
            } else {
                self.value(value)
            };
            (self.broken(key, &[]), value)
        }))
    }

    fn value(&self, value: &Value) -> TemplateValue {
        match value {
            Value::Null => TemplateValue::from(()),
            Value::Bool(b) => TemplateValue::from(*b),
            Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(i), _) => TemplateValue::from(i),
                (_, Some(u)) => TemplateValue::from(u),
                _ => TemplateValue::from(n.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => TemplateValue::from(self.broken(text, &[])),
            Value::Array(items) => items.iter().map(|v| self.value(v)).collect(),
            Value::Object(map) => {
                TemplateValue::from_pairs(map.iter().map(|(k, v)| (self.broken(k, &[]), self.value(v))))
            }
        }
    }

    /// `text` with markers; the spellings in `whole` are left as they are.
    fn broken(&self, text: &str, whole: &[&str]) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        for (at, c) in text.char_indices() {
            out.push(c);
            if self.spells_at(text, at, whole) {
                out.push(self.marker);
            }
        }
        let (front, back) = self.fragment(text);
        if (front || back) && !self.named(text) {
            if front {
                out.insert(0, self.marker);
            }
            if back {
                out.push(self.marker);
            }
        }
        out
    }

    /// Whether a control token is spelled at byte `at`, in any ASCII case.
    fn spells_at(&self, text: &str, at: usize, whole: &[&str]) -> bool {
        let rest = &text.as_bytes()[at..];
        self.added.texts().any(|token| {
            let same = |head: &[u8]| head.eq_ignore_ascii_case(token.as_bytes());
            rest.get(..token.len()).is_some_and(same) && !whole.iter().any(|w| rest.starts_with(w.as_bytes()))
        })
    }

    /// Whether `text` could complete a control token with text in front of it, and with text behind it.
    fn fragment(&self, text: &str) -> (bool, bool) {
        let text = text.to_ascii_lowercase();
        let (mut front, mut back) = (false, false);
        for token in self.added.texts().map(str::to_ascii_lowercase) {
            for (cut, _) in token.char_indices().skip(1) {
                front |= text.starts_with(&token[cut..]);
                back |= text.ends_with(&token[..cut]);
            }
            back |= !text.is_empty() && text.len() < token.len() && token.contains(&text);
        }
        (front, back)
    }

    /// Whether the template's source has this string as a literal or an attribute.
    fn named(&self, text: &str) -> bool {
        let attribute = format!(".{text}");
        let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
        self.template.contains(&format!("'{text}'"))
            || self.template.contains(&format!("\"{text}\""))
            || self
                .template
                .match_indices(&attribute)
                .any(|(at, _)| !self.template[at + attribute.len()..].starts_with(part_of_name))
    }
}

fn note_value(value: &Value, used: &mut u32, place: &str, depth: usize) -> Result<(), TextError> {
    if depth > MAX_DEPTH {
        return Err(TextError::TooDeep { place: place.into(), limit: MAX_DEPTH });
    }
    match value {
        Value::String(text) => note_markers(text, used),
        Value::Array(items) => items.iter().try_for_each(|v| note_value(v, used, place, depth + 1))?,
        Value::Object(map) => {
            for (key, value) in map {
                note_markers(key, used);
                note_value(value, used, place, depth + 1)?;
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    Ok(())
}

fn note_markers(text: &str, used: &mut u32) {
    for c in text.chars() {
        if let Some(index) = u32::from(c).checked_sub(FIRST_MARKER).filter(|&i| i < N_MARKERS) {
            *used |= 1 << index;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPLATE: &str = "{{ '<think>' }}{% if m.role == 'tool' %}{{ m.call }}{{ m.imagine }}{% endif %}";

    #[test]
    fn breaks_spellings_and_fragments() {
        let added = ["<|im_end|>", "<think>", "</think>", "<tool_call>"].iter().zip(0u32..);
        let added = AddedTokens::new(added.map(|(t, i)| ((*t).to_owned(), i)).collect());
        let guard = Guard::new(&added, TEMPLATE, &Value::Null).unwrap();
        let check = |text: &str, want: &str| {
            assert_eq!(guard.broken(text, &[]).replace(guard.marker(), "^"), want, "{text:?}");
        };
        check("", "");
        check("plain 漢字", "plain 漢字");
        check("<|im_end|>", "<^|im_end|>");
        check("a<|IM_END|>b<think>c", "a<^|IM_END|>b<^think>c");
        check("<|im_<|im_end|>end|>.", "<|im_<^|im_end|>end|>.");
        check("think", "think^");
        check("text <", "text <^");
        check("text <|im_e", "text <|im_e^");
        check("_call> text", "^_call> text");
        check("tool", "tool");
        check("call", "call");
        check("im", "im^");
        check("<think>", "<^think>");
        assert_eq!(
            guard.broken("<think>a<|im_end|>", &[THINK_OPEN]).replace(guard.marker(), "^"),
            "<think>a<^|im_end|>"
        );
    }

    #[test]
    fn the_marker_is_one_nobody_uses() {
        let added = AddedTokens::default();
        let all: String = (0..N_MARKERS).filter_map(|i| char::from_u32(FIRST_MARKER + i)).collect();
        let but_last: String = all.chars().take(31).collect();
        let root = |text: &str| serde_json::json!({"messages": [{"content": text}], "tools": [{text: 1}]});
        let marker = |text: &str| Guard::new(&added, "", &root(text)).map(|g| g.marker());
        assert_eq!(marker("a"), Ok('\u{fdd0}'));
        assert_eq!(marker("\u{fdd0}\u{fdd2}"), Ok('\u{fdd1}'));
        assert_eq!(marker(&but_last), Ok('\u{fdef}'));
        assert_eq!(marker(&all), Err(TextError::NoMarker));
        assert_eq!(Guard::new(&added, &but_last, &root("")).map(|g| g.marker()), Ok('\u{fdef}'));
    }

    #[test]
    fn depth_is_bounded() {
        let nested = |n: usize| (0..n).fold(Value::Null, |v, _| Value::Array(vec![v]));
        let root = |n: usize| serde_json::json!({ "tools": nested(n) });
        let added = AddedTokens::default();
        assert!(Guard::new(&added, "", &root(MAX_DEPTH)).is_ok());
        let error = Guard::new(&added, "", &root(MAX_DEPTH + 1)).map(|_| ()).unwrap_err();
        assert_eq!(error, TextError::TooDeep { place: "tools".into(), limit: MAX_DEPTH });
    }
}
