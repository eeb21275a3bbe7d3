//! Tests of what makes tokens of text, text of tokens, and a token of logits.
#![expect(clippy::unwrap_used, reason = "a fixture or setting that fails here fails the test")]

mod candidates;
mod chat;
mod draws;
mod filters;
mod stream;
mod tokenizer;
