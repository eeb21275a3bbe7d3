//! What is written where: answers to standard output, everything else to standard error.
//!
//! Style is used on terminals that can show it and nowhere else (`NO_COLOR`, `TERM=dumb`, a pipe: plain). Text of
//! the model goes out as it is to files and pipes; on a terminal its control characters are shown, not obeyed.

use std::{
    io::{self, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use anstyle::{AnsiColor, Style};
use samara_runtime::Event;
use serde_json::json;

const ERROR: Style = AnsiColor::Red.on_default().bold();
const DIM: Style = Style::new().dimmed();

/// A line on standard error. Nobody is left to tell when that is closed.
pub(crate) fn note(text: &str) {
    let _ = writeln!(anstream::stderr(), "{text}");
}

/// An error on standard error.
pub(crate) fn error(text: &str) {
    let _ = writeln!(anstream::stderr(), "{ERROR}error:{ERROR:#} {text}");
}

/// A line on standard output.
pub(crate) fn line(text: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{text}")
}

/// What a machine that reads standard output was promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Json {
    /// Nothing: a person reads it.
    No,
    /// One object.
    Object,
    /// An object on each line.
    Lines,
}

/// Whether the one object has been printed.
static OBJECT_PRINTED: AtomicBool = AtomicBool::new(false);

/// A JSON value on standard output, indented.
pub(crate) fn json(value: &serde_json::Value) -> io::Result<()> {
    OBJECT_PRINTED.store(true, Ordering::Relaxed);
    writeln!(io::stdout(), "{value:#}")
}

/// An error on standard output, for machines; where one object was promised and printed, that one stays alone.
pub(crate) fn json_error(json: Json, text: &str, exit_code: u8) {
    let value = match json {
        Json::Object if !OBJECT_PRINTED.load(Ordering::Relaxed) => {
            json!({ "error": text, "exit_code": exit_code })
        }
        Json::Lines => json!({ "event": "error", "error": text, "exit_code": exit_code }),
        _ => return,
    };
    // Standard error has the same, and nobody may be left to tell.
    let _ = writeln!(io::stdout(), "{value}");
}

/// How reasoning is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reasoning {
    /// As text, before the answer.
    Plain,
    /// Dimmed, on a terminal.
    Dim,
    /// Not at all.
    Hidden,
}

/// What was printed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Last {
    Nothing,
    Reasoning,
    Answer,
}

/// Prints an answer while it is generated: reasoning, an empty line, the answer.
#[derive(Debug)]
pub(crate) struct Printer<W> {
    out: W,
    reasoning: Reasoning,
    /// Control characters are replaced, and the last line is ended.
    terminal: bool,
    /// Nothing is added to what the model said, not even a line end.
    exact: bool,
    last: Last,
    line_open: bool,
    failed: Option<io::Error>,
}

impl Printer<io::Stdout> {
    /// Prints to standard output, dimmed reasoning where that can be shown.
    pub(crate) fn stdout(hide_reasoning: bool, exact: bool) -> Self {
        let stdout = io::stdout();
        let styled = anstream::AutoStream::choice(&stdout) != anstream::ColorChoice::Never;
        let reasoning = match (hide_reasoning, styled) {
            (true, _) => Reasoning::Hidden,
            (false, true) => Reasoning::Dim,
            (false, false) => Reasoning::Plain,
        };
        let terminal = stdout.is_terminal();
        if terminal {
            // Lets old Windows consoles understand styles.
            let _ = anstream::AutoStream::auto(io::stdout());
        }
        Self::new(stdout, reasoning, terminal, exact)
    }
}

impl<W: Write> Printer<W> {
    /// Prints to `out`.
    pub(crate) fn new(out: W, reasoning: Reasoning, terminal: bool, exact: bool) -> Self {
        Printer { out, reasoning, terminal, exact, last: Last::Nothing, line_open: false, failed: None }
    }

    /// Prints a piece. After a failure nothing more is written; see [`Printer::finish`].
    pub(crate) fn event(&mut self, event: &Event) {
        let (kind, text) = match event {
            Event::Reasoning(text) => (Last::Reasoning, text),
            Event::Answer(text) => (Last::Answer, text),
            // Beside the reply: whoever has the event says it.
            Event::Notice(_) => return,
        };
        let hidden = kind == Last::Reasoning && self.reasoning == Reasoning::Hidden;
        if hidden || text.is_empty() || self.failed.is_some() {
            return;
        }
        if let Err(error) = self.write(kind, text) {
            self.failed = Some(error);
        }
    }

    /// Whether writing has failed.
    pub(crate) fn failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Ends the last line.
    ///
    /// # Errors
    /// The first failure of writing.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let open = self.line_open && (self.terminal || !self.exact);
        if open {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }

    fn write(&mut self, kind: Last, text: &str) -> io::Result<()> {
        if self.last == Last::Reasoning && kind == Last::Answer {
            self.out.write_all(if self.line_open { b"\n\n" } else { b"\n" })?;
        }
        let shown;
        let text = if self.terminal {
            shown = visible(text);
            &shown
        } else {
            text
        };
        // A style ends with each piece, so that a killed program leaves the terminal as it was.
        if kind == Last::Reasoning && self.reasoning == Reasoning::Dim {
            write!(self.out, "{DIM}{text}{DIM:#}")?;
        } else {
            self.out.write_all(text.as_bytes())?;
        }
        (self.last, self.line_open) = (kind, !text.ends_with('\n'));
        self.out.flush()
    }
}

/// Control characters but line ends and tabs as U+FFFD: a model cannot move the cursor or name the window.
pub(crate) fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasoning(text: &str) -> Event {
        Event::Reasoning(text.into())
    }

    fn answer(text: &str) -> Event {
        Event::Answer(text.into())
    }

    #[test]
    fn pieces_become_reasoning_an_empty_line_and_the_answer() {
        let check = |events: &[Event], reasoning: Reasoning, terminal: bool, exact: bool, want: &str| {
            let mut out = Vec::new();
            let mut printer = Printer::new(&mut out, reasoning, terminal, exact);
            events.iter().for_each(|event| printer.event(event));
            printer.finish().expect("memory takes everything");
            assert_eq!(String::from_utf8(out).expect("text"), want, "{events:?}");
        };
        let both = [reasoning("a"), reasoning("b"), answer("c"), answer("d")];
        check(&both, Reasoning::Plain, false, false, "ab\n\ncd\n");
        check(&both, Reasoning::Dim, true, false, "\x1b[2ma\x1b[0m\x1b[2mb\x1b[0m\n\ncd\n");
        check(&both, Reasoning::Hidden, false, false, "cd\n");
        check(&[reasoning("a\n"), answer("c\n")], Reasoning::Plain, false, false, "a\n\nc\n");
        check(&[reasoning("a")], Reasoning::Plain, false, false, "a\n");
        check(&[reasoning("a")], Reasoning::Hidden, false, false, "");
        check(&[answer("c")], Reasoning::Plain, false, false, "c\n");
        check(&[], Reasoning::Plain, false, false, "");
        check(&[answer(""), reasoning("")], Reasoning::Plain, false, false, "");
        check(&[answer("x\x1b[2J")], Reasoning::Plain, false, true, "x\x1b[2J");
        check(&[answer("x\x1b[2J\ty")], Reasoning::Plain, true, true, "x\u{fffd}[2J\ty\n");
    }

    #[test]
    fn a_closed_output_is_reported_once_and_not_written_to_again() {
        struct Closed(usize);
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut closed = Closed(0);
        let mut printer = Printer::new(&mut closed, Reasoning::Plain, false, false);
        printer.event(&answer("a"));
        assert!(printer.failed());
        printer.event(&answer("b"));
        assert_eq!(printer.finish().expect_err("closed").kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(closed.0, 1);
    }
}
