//! What can be wrong with a tokenizer, a template, a conversation or a stop string.

/// Errors of the text side. Each message says what was found and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// `tokenizer.json` is not JSON.
    #[error("tokenizer.json is not valid JSON: {message}; download the file again")]
    TokenizerJson {
        /// What the JSON parser said, with line and column.
        message: String,
    },
    /// A field whose meaning this version does not know: ignoring it could change every id.
    #[error(
        "tokenizer.json has the field `{field}`, which this version of samara does not know: the tokenizer is \
         newer than this program; update samara"
    )]
    TokenizerUnknownField {
        /// Path of the field, such as `model.new_option`.
        field: String,
    },
    /// A known field with a value this version cannot reproduce exactly.
    #[error(
        "tokenizer.json: `{field}` is {found}, and this version of samara supports only {supported}: the \
         tokenizer is newer than this program or of another kind"
    )]
    TokenizerUnsupported {
        /// Path of the field, such as `model.type`.
        field: String,
        /// Its value.
        found: String,
        /// What would be accepted.
        supported: &'static str,
    },
    /// A field every byte-level BPE tokenizer has is absent or of another JSON type.
    #[error("tokenizer.json: `{field}` is missing or not {wanted}; download the file again")]
    TokenizerMissing {
        /// Path of the field.
        field: String,
        /// The JSON type it must have.
        wanted: &'static str,
    },
    /// An id so large that a table of ids would be an attack on memory.
    #[error("tokenizer.json: token {token:?} has the id {id}; ids must be below {limit}")]
    TokenizerIdTooLarge {
        /// The token.
        token: String,
        /// Its id.
        id: u64,
        /// One more than the largest id accepted.
        limit: u32,
    },
    /// Two tokens share an id, or one token has two ids.
    #[error("tokenizer.json: {first:?} and {second:?} both claim the id {id}, or one token has two ids")]
    TokenizerConflict {
        /// The id claimed twice.
        id: u32,
        /// The token that had it.
        first: String,
        /// The token that wants it.
        second: String,
    },
    /// A vocabulary entry that no sequence of bytes maps to.
    #[error("tokenizer.json: token {id} ({token:?}) has a character outside the byte-level alphabet")]
    TokenizerNotByteLevel {
        /// Its id.
        id: u32,
        /// Its text in the vocabulary.
        token: String,
    },
    /// Without a token for each byte, some texts would lose characters without a word.
    #[error(
        "tokenizer.json: no token stands for the single byte {byte:#04x}, so some text could not be encoded"
    )]
    TokenizerMissingByte {
        /// The byte.
        byte: u8,
    },
    /// Merges and vocabulary contradict each other.
    #[error("tokenizer.json: the merges cannot be used: {message}")]
    TokenizerMerges {
        /// What is wrong with them.
        message: String,
    },
    /// The tokenizer gave up on a text.
    #[error("this text could not be encoded: {message}")]
    Encode {
        /// What it said.
        message: String,
    },
    /// The chat template does not parse.
    #[error("the chat template has an error: {message}")]
    TemplateSyntax {
        /// What and where.
        message: String,
    },
    /// The chat template failed on this conversation.
    #[error("the chat template failed on this conversation: {message}")]
    TemplateRender {
        /// What and where.
        message: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// The template did not end within its budget.
    #[error(
        "the chat template used up its budget of {fuel} steps: it loops without end, or the chat is too long"
    )]
    TemplateFuel {
        /// The budget, in template instructions.
        fuel: u64,
    },
    /// Messages, tools or extra values nested too deep.
    #[error("`{place}` is nested deeper than {limit} levels")]
    TooDeep {
        /// Top-level value it is in: `messages`, `tools` or the name of an extra value.
        place: String,
        /// Levels allowed.
        limit: usize,
    },
    /// A content part that is not text.
    #[error(
        "a message with the role {role:?} has a content part of type {kind:?}; this model reads only \"text\""
    )]
    ContentPart {
        /// Role of the message.
        role: String,
        /// `type` of the part.
        kind: String,
    },
    /// Every character usable as a marker already occurs in the conversation.
    #[error("the conversation uses all 32 noncharacters U+FDD0..U+FDEF; remove at least one of them")]
    NoMarker,
    /// A stop string of no characters matches everywhere.
    #[error("stop string {index} is empty; a stop string needs at least one character")]
    EmptyStop {
        /// Its position in the list, from 0.
        index: usize,
    },
}
