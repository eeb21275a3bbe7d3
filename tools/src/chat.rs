//! The chat: lines in, answers out, the conversation kept.
//!
//! The loop knows a source of lines and something that answers; terminals and models come from outside, so tests
//! put scripted ones in their place. What was said stays in the history, also when an answer was stopped.

use std::{io::Write, path::PathBuf, sync::atomic::Ordering};

use anyhow::{Context, Result};
use rustyline::{DefaultEditor, error::ReadlineError};
use samara_runtime::{Error as RuntimeError, Event, Message};

use crate::{
    cli::Run,
    failure::Failure,
    folders,
    interrupt::{self, CANCEL},
    output::{Printer, note},
    run::{Reply, Speaker, summary},
};

const HELP: &str = "\
/help    this list
/clear   forget the conversation
/exit    leave (so does Ctrl-D, and Ctrl-C twice at the prompt)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer.";

/// What came from the keyboard.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Line {
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// End of file.
    End,
}

/// Where lines come from.
trait LineSource {
    fn read(&mut self, prompt: &str) -> Result<Line>;
}

/// Who answers.
trait Responder {
    /// Answers the conversation, printing as it goes; what was said.
    fn respond(&mut self, messages: &[Message]) -> Result<Response>;
    /// Something for the person, beside the conversation.
    fn say(&mut self, text: &str);
}

/// What was said, up to where it was stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Response {
    reasoning: String,
    answer: String,
}

/// Talks until the person leaves.
pub(crate) fn run(speaker: &mut Speaker, args: &Run) -> Result<()> {
    if !args.quiet {
        note("Chat. /help lists commands, Ctrl-C stops an answer, Ctrl-D leaves.");
    }
    let mut keyboard = Keyboard::new()?;
    let mut responder = Printing { speaker, hide_reasoning: args.hide_reasoning, quiet: args.quiet };
    converse(&mut keyboard, &mut responder, args.system.as_deref())
}

/// The loop.
fn converse(lines: &mut dyn LineSource, responder: &mut dyn Responder, system: Option<&str>) -> Result<()> {
    let opening: Vec<Message> = system.iter().map(|text| Message::new("system", *text)).collect();
    let mut messages = opening.clone();
    let mut interrupted = false;
    loop {
        let text = match message(lines)? {
            Line::End => return Ok(()),
            Line::Interrupted if interrupted => return Err(Failure::Interrupted.into()),
            Line::Interrupted => {
                interrupted = true;
                responder.say("Ctrl-C again leaves; so does /exit");
                continue;
            }
            Line::Text(text) => text,
        };
        interrupted = false;
        match command(&text) {
            Command::Nothing => {}
            Command::Exit => return Ok(()),
            Command::Help => responder.say(HELP),
            Command::Clear => {
                messages.clone_from(&opening);
                responder.say("forgotten");
            }
            Command::Refused(why) => responder.say(&why),
            Command::Message => exchange(responder, &mut messages, text)?,
        }
    }
}

/// One question and its answer.
fn exchange(responder: &mut dyn Responder, messages: &mut Vec<Message>, text: String) -> Result<()> {
    messages.push(Message::new("user", text));
    match responder.respond(messages) {
        Ok(Response { reasoning, answer }) => {
            let mut reply = Message::new("assistant", answer);
            reply.reasoning_content = (!reasoning.is_empty()).then_some(reasoning);
            messages.push(reply);
            Ok(())
        }
        // The conversation stands as it was, and can go on with less.
        Err(error) if matches!(error.downcast_ref(), Some(RuntimeError::PromptTooLong { .. })) => {
            messages.pop();
            responder.say(&format!("{error}; /clear forgets the conversation"));
            Ok(())
        }
        Err(error) => Err(error),
    }
}

/// A line and those it goes on in.
fn message(lines: &mut dyn LineSource) -> Result<Line> {
    let mut text = String::new();
    loop {
        match lines.read(if text.is_empty() { "> " } else { ". " })? {
            Line::Text(line) => match line.strip_suffix('\\') {
                Some(start) => {
                    text.push_str(start);
                    text.push('\n');
                }
                None => return Ok(Line::Text(text + &line)),
            },
            // What was begun is sent rather than lost.
            Line::End if !text.is_empty() => return Ok(Line::Text(text)),
            other => return Ok(other),
        }
    }
}

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Command {
    Nothing,
    Exit,
    Help,
    Clear,
    /// Looks like a command and is none; with the reason.
    Refused(String),
    Message,
}

/// A slash and letters, in either case, are a command. With text behind it a known one is refused, since it may have
/// been meant either way; a path or another sentence that starts with a slash is a message.
fn command(text: &str) -> Command {
    let text = text.trim();
    let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
    let is_word = word
        .strip_prefix('/')
        .is_some_and(|letters| !letters.is_empty() && letters.chars().all(|c| c.is_ascii_alphabetic()));
    let known = match word.to_ascii_lowercase().as_str() {
        "/exit" => Some(Command::Exit),
        "/help" => Some(Command::Help),
        "/clear" => Some(Command::Clear),
        _ => None,
    };
    match known {
        _ if text.is_empty() => Command::Nothing,
        Some(command) if rest.is_empty() => command,
        Some(_) => Command::Refused(format!("{word} stands alone: nothing was done, and nothing was sent")),
        None if is_word && rest.is_empty() => {
            Command::Refused(format!("there is no {word}; /help lists commands"))
        }
        None => Command::Message,
    }
}

/// The terminal, with editing and a history that outlives the program.
struct Keyboard {
    editor: DefaultEditor,
    history: Option<PathBuf>,
}

impl Keyboard {
    fn new() -> Result<Self> {
        let mut editor = DefaultEditor::new().context("cannot use this terminal")?;
        let history = history_path();
        if let Some(path) = &history {
            // A history is a convenience: there may be none yet, or no place for one.
            let _ = editor.load_history(path);
        }
        Ok(Keyboard { editor, history })
    }

    fn remember(&mut self, line: &str) {
        let _ = self.editor.add_history_entry(line);
        if let Some(path) = &self.history {
            let _ = path.parent().map(std::fs::create_dir_all);
            let _ = self.editor.append_history(path);
        }
    }
}

impl LineSource for Keyboard {
    fn read(&mut self, prompt: &str) -> Result<Line> {
        match self.editor.readline(prompt) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    self.remember(&line);
                }
                Ok(Line::Text(line))
            }
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(error) => Err(error).context("cannot read from the terminal"),
        }
    }
}

/// `samara/history` in the user's folder for state.
fn history_path() -> Option<PathBuf> {
    folders::samara("XDG_STATE_HOME", ".local/state").map(|folder| folder.join("history"))
}

/// A model whose words go to the terminal.
struct Printing<'a> {
    speaker: &'a mut Speaker,
    hide_reasoning: bool,
    quiet: bool,
}

impl Responder for Printing<'_> {
    fn respond(&mut self, messages: &[Message]) -> Result<Response> {
        interrupt::reset();
        let mut printer = Printer::stdout(self.hide_reasoning, false);
        let reply = self.speaker.answer(messages, &mut |event: &Event| {
            printer.event(event);
            if printer.failed() {
                CANCEL.store(true, Ordering::SeqCst);
            }
        });
        // The one that stopped the answer does not count at the prompt.
        interrupt::reset();
        printer.finish()?;
        let Reply { reasoning, answer, n_prompt: _, outcome } = reply?;
        if !self.quiet {
            note(&format!("[{}]", summary(&outcome, self.speaker.engine.limits().context)));
        }
        Ok(Response { reasoning, answer })
    }

    fn say(&mut self, text: &str) {
        let _ = std::io::stdout().flush();
        note(text);
    }
}

#[cfg(test)]
mod tests {
    use samara_runtime::Content;

    use super::*;
    use crate::failure::{INTERRUPTED, code};

    struct Script(std::vec::IntoIter<Line>);

    impl LineSource for Script {
        fn read(&mut self, _prompt: &str) -> Result<Line> {
            Ok(self.0.next().unwrap_or(Line::End))
        }
    }

    /// Answers with the number of messages; `long` does not fit.
    #[derive(Default)]
    struct Echo {
        asked: Vec<Vec<String>>,
        said: Vec<String>,
    }

    fn flat(message: &Message) -> String {
        let Some(Content::Text(text)) = &message.content else { panic!("text") };
        let why = message.reasoning_content.as_deref().map_or(String::new(), |why| format!("({why})"));
        format!("{}:{why}{text}", message.role)
    }

    impl Responder for Echo {
        fn respond(&mut self, messages: &[Message]) -> Result<Response> {
            self.asked.push(messages.iter().map(flat).collect());
            let last = flat(messages.last().expect("a question"));
            if last.contains("long") {
                return Err(RuntimeError::PromptTooLong { prompt: 9, context: 8, max: 8 }.into());
            }
            let reasoning = if last.contains("plain") { String::new() } else { "why".to_owned() };
            Ok(Response { reasoning, answer: messages.len().to_string() })
        }

        fn say(&mut self, text: &str) {
            self.said.push(text.to_owned());
        }
    }

    /// Runs a chat; lines are text but for `^C` and `^D`.
    fn talk(lines: &[&str], system: Option<&str>) -> (Result<()>, Echo) {
        let lines = lines.iter().map(|line| match *line {
            "^C" => Line::Interrupted,
            "^D" => Line::End,
            text => Line::Text(text.to_owned()),
        });
        let mut echo = Echo::default();
        let end = converse(&mut Script(lines.collect::<Vec<_>>().into_iter()), &mut echo, system);
        (end, echo)
    }

    #[test]
    fn what_was_said_stays_with_its_reasoning() {
        let check = |lines: &[&str], system: Option<&str>, asked: &[&[&str]]| {
            let (end, echo) = talk(lines, system);
            end.expect("end of file is a good end");
            assert_eq!(echo.asked, asked, "{lines:?}");
        };
        check(&["a", "b"], None, &[&["user:a"], &["user:a", "assistant:(why)1", "user:b"]]);
        check(&["plain", "b"], None, &[&["user:plain"], &["user:plain", "assistant:1", "user:b"]]);
        check(&["a", "/clear", "b"], Some("s"), &[&["system:s", "user:a"], &["system:s", "user:b"]]);
        check(
            &["a\\", "b", "c\\", "^D"],
            None,
            &[&["user:a\nb"], &["user:a\nb", "assistant:(why)1", "user:c\n"]],
        );
        check(&["a long one", "b"], None, &[&["user:a long one"], &["user:b"]]);
        check(&["", "  ", "/help", "/nonsense", "/exit", "b"], None, &[]);
        check(&["/etc/passwd"], None, &[&["user:/etc/passwd"]]);
        check(&[], None, &[]);
    }

    #[test]
    fn the_second_interrupt_leaves() {
        let check = |lines: &[&str], want: Option<u8>| {
            let (end, _) = talk(lines, None);
            assert_eq!(end.err().as_ref().map(code), want, "{lines:?}");
        };
        check(&["^C", "^D"], None);
        check(&["^C", "^C"], Some(INTERRUPTED));
        check(&["^C", "a", "^C", "^D"], None);
        // One that stopped an answer does not count: it came before this prompt.
        check(&["a", "^C", "^D"], None);
        check(&["^C", "a", "^C", "^C"], Some(INTERRUPTED));
        check(&["a\\", "^C", "^C"], Some(INTERRUPTED));
    }

    #[test]
    fn other_errors_end_the_chat() {
        struct Broken;
        impl Responder for Broken {
            fn respond(&mut self, _: &[Message]) -> Result<Response> {
                Err(RuntimeError::NonFinite { layer: 3, what: "x" }.into())
            }
            fn say(&mut self, _: &str) {}
        }
        let mut script = Script(vec![Line::Text("a".into())].into_iter());
        assert!(converse(&mut script, &mut Broken, None).is_err());
    }

    #[test]
    fn a_slash_and_letters_are_a_command() {
        let check = |text: &str, want: Command| assert_eq!(command(text), want, "{text:?}");
        check("", Command::Nothing);
        check(" \t", Command::Nothing);
        check("/exit", Command::Exit);
        check(" /Exit ", Command::Exit);
        check("/HELP", Command::Help);
        check("/Clear", Command::Clear);
        for text in ["/clear now", "/Help me", "/exit\tplease", "/nonsense", "/Nonsense"] {
            assert!(matches!(command(text), Command::Refused(_)), "{text:?}");
        }
        for text in ["/", "/etc/passwd", "/1", "/s are slashes", "a /clear", "hi"] {
            check(text, Command::Message);
        }
    }

    #[test]
    fn commands_and_mistyped_ones_are_answered() {
        let (_, echo) = talk(&["/help", "/nonsense", "/clear", "^C"], None);
        assert_eq!(echo.said[0], HELP);
        assert_eq!(echo.said[1], "there is no /nonsense; /help lists commands");
        assert_eq!(echo.said[2..], ["forgotten", "Ctrl-C again leaves; so does /exit"]);
    }
}
