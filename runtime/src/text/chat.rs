//! Chat templates: a conversation to the pieces of a prompt.
//!
//! Templates are Jinja, as Hugging Face renders them: blocks trimmed on both sides, Python's string and
//! dictionary methods, `tojson`, `raise_exception`, `break` and `continue`. They come from a file somebody
//! downloaded, so each rendering has a budget of steps that grows with the conversation and stops an endless
//! template. The clock and the file system are out of reach.
//!
//! The result is not a string but a list of [`Piece`]s, because in a string a control token that the template
//! wrote and one that a user typed look the same. How they are told apart is in `guard`.

use std::sync::Arc;

use minijinja::{Environment, Error as JinjaError, ErrorKind, UndefinedBehavior, syntax::SyntaxConfig};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    added::{AddedTokens, Segment},
    error::TextError,
    guard::Guard,
    json::tojson,
    tokenizer::Tokenizer,
};

/// Steps every rendering may take. Rendering a message takes a few hundred.
const BASE_FUEL: u64 = 1_000_000;
/// Steps more for each string, number, list or object of the conversation.
const FUEL_PER_VALUE: u64 = 2_000;

/// One stretch of a rendered prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Plain text, whatever it spells.
    Text(String),
    /// A control token the template wrote.
    Special(u32),
}

/// One message of a conversation, with the field names of the OpenAI chat format.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or whatever else the template knows.
    pub role: String,
    /// Text, or a list of text parts.
    #[serde(default)]
    pub content: Option<Content>,
    /// What an assistant thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls an assistant made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    /// Name of the speaker or tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Which call a tool's result answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Any other fields; the template sees them under their names.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Some(Content::Text(content.into())), ..Self::default() }
    }
}

/// Content of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Parts; the template sees their texts joined by newlines.
    Parts(Vec<Part>),
}

/// One part of a message's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// `text`; anything else is refused when the conversation is rendered.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    #[serde(default)]
    pub text: String,
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Name for the result to refer to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What is called.
    pub function: FunctionCall,
}

/// Function and arguments of a [`ToolCall`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Its name.
    pub name: String,
    /// An object, or a string holding JSON as the model wrote it.
    #[serde(default)]
    pub arguments: Value,
}

/// What a template is given beside the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderOptions<'a> {
    /// A list of tool descriptions; `None` is Jinja's `none`.
    pub tools: Option<&'a Value>,
    /// Whether to end with the beginning of an assistant's turn.
    pub add_generation_prompt: bool,
    /// More variables by name; `messages`, `tools` and `add_generation_prompt` cannot be replaced.
    pub extra: Option<&'a Map<String, Value>>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    added: Arc<AddedTokens>,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Parses a template for a model with this tokenizer.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`].
    pub fn new(source: &str, tokenizer: &Tokenizer) -> Result<Self, TextError> {
        let syntax = |e: JinjaError| TextError::TemplateSyntax { message: e.to_string() };
        let mut environment = Environment::new();
        let blocks = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(blocks.map_err(syntax)?);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_template_owned(NAME, source.to_owned()).map_err(syntax)?;
        Ok(Self { environment, source: source.to_owned(), added: Arc::clone(tokenizer.added()) })
    }

    /// Renders a conversation. Encode the result with [`Tokenizer::encode_pieces`].
    ///
    /// # Errors
    /// The template failed, refused the conversation or did not end; a content part is not text; values are
    /// nested too deep.
    pub fn render(&self, messages: &[Message], options: RenderOptions<'_>) -> Result<Vec<Piece>, TextError> {
        let root = root_value(messages, options)?;
        let guard = Guard::new(&self.added, &self.source, &root)?;
        let fuel = BASE_FUEL.saturating_add(fuel_for(&root));
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let failed = |e: JinjaError| render_error(e, fuel);
        let template = environment.get_template(NAME).map_err(failed)?;
        let rendered = template.render(guard.context(&root)).map_err(failed)?;
        Ok(self.pieces(&rendered, guard.marker()))
    }

    fn pieces(&self, rendered: &str, marker: char) -> Vec<Piece> {
        let segments = self.added.split(rendered).into_iter();
        let pieces = segments.map(|segment| match segment {
            Segment::Text(text) => Piece::Text(text.replace(marker, "")),
            Segment::Token(id) => Piece::Special(id),
        });
        pieces.filter(|p| !matches!(p, Piece::Text(text) if text.is_empty())).collect()
    }
}

/// Everything the template can see, as one JSON object.
fn root_value(messages: &[Message], options: RenderOptions<'_>) -> Result<Value, TextError> {
    let mut root = options.extra.cloned().unwrap_or_default();
    let messages = messages.iter().map(message_value).collect::<Result<Vec<_>, _>>()?;
    root.insert("messages".into(), Value::Array(messages));
    root.insert("tools".into(), options.tools.cloned().unwrap_or_default());
    root.insert("add_generation_prompt".into(), Value::Bool(options.add_generation_prompt));
    Ok(Value::Object(root))
}

/// A message with its content flattened to text.
fn message_value(message: &Message) -> Result<Value, TextError> {
    let mut flat = message.clone();
    if let Some(Content::Parts(parts)) = &message.content {
        if let Some(other) = parts.iter().find(|p| p.kind != "text") {
            return Err(TextError::ContentPart { role: message.role.clone(), kind: other.kind.clone() });
        }
        let texts: Vec<&str> = parts.iter().map(|p| p.text.as_str()).collect();
        flat.content = Some(Content::Text(texts.join("\n")));
    }
    serde_json::to_value(flat).map_err(|e| TextError::TemplateRender { message: e.to_string() })
}

/// Steps a conversation of this size may take beyond the base: by its values and by its bytes (the engine
/// charges one step for each 64 bytes it makes, and templates copy a string a few times).
fn fuel_for(value: &Value) -> u64 {
    let below: u64 = match value {
        Value::String(text) => text.len() as u64,
        Value::Array(items) => items.iter().map(fuel_for).sum(),
        Value::Object(map) => map.iter().map(|(key, v)| key.len() as u64 + fuel_for(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    below.saturating_add(FUEL_PER_VALUE)
}

/// The template's own refusal, told apart from the engine's errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<String, JinjaError> {
    Err(JinjaError::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
}

fn render_error(error: JinjaError, fuel: u64) -> TextError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TextError::TemplateFuel { fuel };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            return TextError::TemplateRaised { message: message.clone() };
        }
        cause = current.source();
    }
    TextError::TemplateRender { message: error.to_string() }
}
