//! Text on both sides of the model: what goes in (tokenizer, chat template) and what comes out (streams).
//!
//! One rule runs through all of it: **control tokens are made by the chat template and by nothing else**.
//! The tokenizer is loaded without its added tokens, so plain text cannot turn into one; the template's
//! output is cut into [`Piece`]s, so a string a user typed stays text even when it spells a control token;
//! the streams give text back in whole characters wherever the model's tokens end.

mod added;
mod chat;
mod error;
mod guard;
mod json;
mod stream;
mod tokenizer;

pub use chat::{ChatTemplate, Content, FunctionCall, Message, Part, Piece, RenderOptions, ToolCall};
pub use error::TextError;
pub use stream::{Event, ReasoningSplit, TextStream};
pub use tokenizer::{Specials, Tokenizer};
