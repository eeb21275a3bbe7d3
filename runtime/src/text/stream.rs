//! Text as it is generated: whole characters, stop strings, and reasoning apart from the answer.
//!
//! A token may end inside a character, a stop string may span tokens, and so may `</think>`. All three are
//! one problem: text is **held back** only as long as what follows could still change its meaning. Whatever
//! the token boundaries, the pieces add up to the same text.

use super::error::TextError;

/// Finds the first of several strings in text that arrives in pieces.
///
/// The match that *starts* first wins, so the text in front of it is that of a search in the whole text,
/// wherever the pieces end. Of several needles that start there, the one that is complete first is named.
#[derive(Debug, Clone)]
struct Finder {
    needles: Vec<String>,
    /// Text not given out yet, because a needle may have begun in it.
    held: String,
}

/// What a [`Finder`] knows after some more text.
struct Found {
    /// Text in front of any needle.
    before: String,
    /// Index of the needle found, and the text after it.
    hit: Option<(usize, String)>,
}

impl Finder {
    fn new(needles: Vec<String>) -> Self {
        Self { needles, held: String::new() }
    }

    fn push(&mut self, text: &str) -> Found {
        self.held.push_str(text);
        self.search(false)
    }

    /// Decides everything still open: nothing more will come.
    fn finish(&mut self) -> Found {
        self.search(true)
    }

    fn search(&mut self, at_end: bool) -> Found {
        let held = std::mem::take(&mut self.held);
        for (at, _) in held.char_indices() {
            let rest = &held[at..];
            if let Some(index) = self.needles.iter().position(|n| rest.starts_with(n.as_str())) {
                let after = rest[self.needles[index].len()..].to_owned();
                return Found { before: held[..at].to_owned(), hit: Some((index, after)) };
            }
            if !at_end && self.needles.iter().any(|n| n.starts_with(rest)) {
                self.held = rest.to_owned();
                return Found { before: held[..at].to_owned(), hit: None };
            }
        }
        Found { before: held, hit: None }
    }
}

/// Turns the bytes of tokens into text that ends at a stop string.
///
/// Only whole characters come out; invalid UTF-8 becomes U+FFFD exactly as in
/// [`Tokenizer::decode`](super::Tokenizer::decode). Without a stop, everything pushed adds up to that text.
/// With one, the text ends in front of the first place where any stop string begins; the stop string and
/// what follows are never given out.
#[derive(Debug, Clone)]
pub struct TextStream {
    finder: Finder,
    /// Beginning of a character whose end has not come yet; at most 3 bytes.
    partial: Vec<u8>,
    stopped_by: Option<usize>,
}

impl TextStream {
    /// A stream that ends at any of these strings.
    ///
    /// # Errors
    /// [`TextError::EmptyStop`].
    pub fn new(stops: &[String]) -> Result<Self, TextError> {
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        Ok(Self { finder: Finder::new(stops.to_vec()), partial: Vec::new(), stopped_by: None })
    }

    /// Takes the bytes of the next token and returns the text that is now certain. Once
    /// [`stopped_by`](Self::stopped_by) is set, nothing more comes.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        if self.stopped_by.is_some() {
            return String::new();
        }
        self.partial.extend_from_slice(bytes);
        let text = take_whole(&mut self.partial);
        let found = self.finder.push(&text);
        self.settle(found)
    }

    /// The rest, when no token will follow. A character cut off here becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        if self.stopped_by.is_some() {
            return String::new();
        }
        let tail = if std::mem::take(&mut self.partial).is_empty() { "" } else { "\u{fffd}" };
        self.finder.held.push_str(tail);
        let found = self.finder.finish();
        self.settle(found)
    }

    /// Index of the stop string that ended the text.
    pub fn stopped_by(&self) -> Option<usize> {
        self.stopped_by
    }

    fn settle(&mut self, found: Found) -> String {
        self.stopped_by = found.hit.map(|hit| hit.0);
        found.before
    }
}

/// Takes all whole characters out of `bytes`, invalid stretches as U+FFFD, and leaves an unfinished one.
fn take_whole(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut from = 0;
    while from < bytes.len() {
        match std::str::from_utf8(&bytes[from..]) {
            Ok(valid) => {
                text.push_str(valid);
                from = bytes.len();
            }
            Err(e) => {
                let valid = &bytes[from..from + e.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                from += e.valid_up_to();
                let Some(invalid) = e.error_len() else { break };
                text.push('\u{fffd}');
                from += invalid;
            }
        }
    }
    bytes.drain(..from);
    text
}

/// A stretch of a model's reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// The answer.
    Answer(String),
    /// Something beside the reply that a user should know, such as the loss of a device.
    Notice(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far, and the prompt has not opened a think block.
    Start,
    Reasoning,
    /// After `</think>`, before the answer's first character that is not a newline.
    Gap,
    Answer,
}

/// Splits a reply at `</think>`.
///
/// Text in front of it is reasoning, less one newline directly before the tag; text behind it is the answer,
/// less its leading newlines. The template writes exactly those newlines back when the turn becomes history,
/// so the tokens of a past turn stay the same. A reply that never closes the block is all reasoning.
#[derive(Debug, Clone)]
pub struct ReasoningSplit {
    state: State,
    close: Finder,
    /// White space in front of a possible `<think>`, and the beginning of that tag.
    start: String,
}

const OPEN: &str = "<think>";

impl ReasoningSplit {
    /// `opened`: whether the prompt already ended inside a think block. If not, a reply that begins with
    /// `<think>` opens one itself, and any other is all answer.
    pub fn new(opened: bool) -> Self {
        let close = Finder::new(vec!["\n</think>".to_owned(), "</think>".to_owned()]);
        let state = if opened { State::Reasoning } else { State::Start };
        Self { state, close, start: String::new() }
    }

    /// No splitting: all text is answer, tags and all.
    pub fn off() -> Self {
        Self { state: State::Answer, ..Self::new(false) }
    }

    /// Takes the next text and returns what is now certain; no event is empty.
    pub fn push(&mut self, text: &str) -> Vec<Event> {
        let mut events = Vec::new();
        self.advance(text, &mut events);
        events
    }

    /// The rest, when no text will follow.
    pub fn finish(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        match self.state {
            State::Start => emit(&mut events, Event::Answer, std::mem::take(&mut self.start)),
            State::Reasoning => {
                let found = self.close.finish();
                emit(&mut events, Event::Reasoning, found.before);
            }
            State::Gap | State::Answer => {}
        }
        events
    }

    /// Whether the text so far is inside a think block.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Reasoning
    }

    fn advance(&mut self, text: &str, events: &mut Vec<Event>) {
        match self.state {
            State::Start => {
                self.start.push_str(text);
                let begun = self.start.trim_start();
                if let Some(inside) = begun.strip_prefix(OPEN).map(str::to_owned) {
                    self.state = State::Reasoning;
                    self.start.clear();
                    self.advance(&inside, events);
                } else if !OPEN.starts_with(begun) {
                    self.state = State::Answer;
                    emit(events, Event::Answer, std::mem::take(&mut self.start));
                }
            }
            State::Reasoning => {
                let found = self.close.push(text);
                emit(events, Event::Reasoning, found.before);
                if let Some((_, after)) = found.hit {
                    self.state = State::Gap;
                    self.advance(&after, events);
                }
            }
            State::Gap => {
                let answer = text.trim_start_matches('\n');
                if !answer.is_empty() {
                    self.state = State::Answer;
                    emit(events, Event::Answer, answer.to_owned());
                }
            }
            State::Answer => emit(events, Event::Answer, text.to_owned()),
        }
    }
}

fn emit(events: &mut Vec<Event>, kind: fn(String) -> Event, text: String) {
    if !text.is_empty() {
        events.push(kind(text));
    }
}
