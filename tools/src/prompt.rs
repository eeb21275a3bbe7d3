//! Where a prompt comes from, and its text: UTF-8, or UTF-16 with a mark, as some shells write files.

use std::{
    io::{IsTerminal, Read},
    path::Path,
};

use anyhow::{Context, Result};

use crate::{cli::Run, failure::Failure};

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    /// Answer this and end.
    Once(String),
    /// Standard input is closed or the null device: a chat that is over before it begins.
    Nothing,
    /// Talk.
    Chat,
}

/// `-p`, `-f`, standard input unless it is a terminal, or a chat.
pub(crate) fn find(args: &Run) -> Result<Prompt> {
    if let Some(prompt) = &args.prompt {
        let text = prompt.to_str().ok_or_else(|| {
            Failure::Usage("the prompt given with -p is not Unicode text; use -f with a file".to_owned())
        })?;
        let text = if args.raw { text.to_owned() } else { line_ends(text.to_owned()) };
        return once(text, "the prompt given with -p");
    }
    match &args.file {
        Some(path) if path.as_os_str() != "-" => {
            return once(shorten(read(path)?, args.raw), &path.display().to_string());
        }
        None if std::io::stdin().is_terminal() => return chat(args),
        _ => {}
    }
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("cannot read standard input")?;
    if bytes.is_empty() && args.file.is_none() && !args.json && !args.raw && is_nothing() {
        return Ok(Prompt::Nothing);
    }
    let text =
        decode(&bytes).map_err(|reason| Failure::Input(format!("standard input {reason}{PIPE_ADVICE}")))?;
    once(shorten(text, args.raw), "standard input")
}

/// Programs that write to a pipe on Windows use the code page of the console.
const PIPE_ADVICE: &str =
    if cfg!(windows) { "; `chcp 65001` makes this console UTF-8, and -f reads a file" } else { "" };

fn once(text: String, place: &str) -> Result<Prompt> {
    if text.is_empty() {
        return Err(Failure::Input(format!("{place} is empty: there is nothing to answer")).into());
    }
    Ok(Prompt::Once(text))
}

/// A chat needs somebody who sees it, and nothing that asks for a single answer.
fn chat(args: &Run) -> Result<Prompt> {
    let why = if args.json {
        "--json needs a prompt"
    } else if args.raw {
        "--raw needs a prompt"
    } else if !std::io::stdout().is_terminal() {
        "standard output is not a terminal, so there is no chat, and one answer needs a prompt"
    } else {
        return Ok(Prompt::Chat);
    };
    Err(Failure::Usage(format!("{why}: give one with -p, -f or standard input")).into())
}

/// Whether standard input is the null device, which also stands in for one that was closed; a pipe or a file that is
/// empty was meant to hold something.
#[cfg(unix)]
fn is_nothing() -> bool {
    use std::os::{fd::AsFd, unix::fs::FileTypeExt};
    let file = std::io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
    file.and_then(|file| file.metadata()).is_ok_and(|meta| meta.file_type().is_char_device())
}

#[cfg(windows)]
fn is_nothing() -> bool {
    // A handle without a type is none: standard input was closed.
    winapi_util::file::typ(std::io::stdin()).map_or(true, |kind| kind.is_char())
}

/// A text file.
pub(crate) fn read(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(decode(&bytes).map_err(|reason| Failure::Input(format!("{} {reason}", path.display())))?)
}

/// The line end that editors and `echo` put last is not part of a question, and the line ends of Windows are line
/// ends; a text to continue stays as it is.
fn shorten(text: String, raw: bool) -> String {
    if raw {
        return text;
    }
    let mut text = line_ends(text);
    if text.ends_with('\n') {
        text.pop();
    }
    text
}

/// A text with the line ends that models are trained on, so that an editor's choice does not change an answer.
pub(crate) fn line_ends(text: String) -> String {
    if text.contains("\r\n") { text.replace("\r\n", "\n") } else { text }
}

/// UTF-8 with or without a mark, or UTF-16 with one; otherwise what is wrong, for "X ...".
pub(crate) fn decode(bytes: &[u8]) -> Result<String, String> {
    match bytes {
        [0xff, 0xfe, rest @ ..] => utf16(rest, u16::from_le_bytes),
        [0xfe, 0xff, rest @ ..] => utf16(rest, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, rest @ ..] => utf8(rest, 3),
        _ => utf8(bytes, 0),
    }
}

fn utf8(bytes: &[u8], skipped: usize) -> Result<String, String> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => {
            Err(format!("is not UTF-8 text: the byte at offset {} is wrong", skipped + error.valid_up_to()))
        }
    }
}

fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> Result<String, String> {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let units: Vec<u16> = pairs.iter().map(|pair| unit(*pair)).collect();
    match String::from_utf16(&units) {
        Ok(text) if rest.is_empty() => Ok(text),
        _ => Err("starts like UTF-16 text but is not".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_decoded_by_their_mark() {
        let check = |bytes: &[u8], want: Result<&str, &str>| {
            let got = decode(bytes);
            assert_eq!(got.as_deref().map_err(String::as_str), want, "{bytes:02x?}");
        };
        check(b"", Ok(""));
        check("é漢🦙".as_bytes(), Ok("é漢🦙"));
        check(b"\xef\xbb\xbfhi", Ok("hi"));
        check(b"\xff\xfeh\0i\0", Ok("hi"));
        check(b"\xfe\xff\0h\0i", Ok("hi"));
        check(b"\xff\xfeh\0i", Err("starts like UTF-16 text but is not"));
        check(b"\xff\xfe\x00\xd8", Err("starts like UTF-16 text but is not"));
        check(b"ab\xe9", Err("is not UTF-8 text: the byte at offset 2 is wrong"));
        check(b"\xef\xbb\xbfab\xe9", Err("is not UTF-8 text: the byte at offset 5 is wrong"));
    }

    #[test]
    fn one_line_end_is_dropped_from_a_question() {
        let check = |text: &str, raw: bool, want: &str| assert_eq!(shorten(text.to_owned(), raw), want);
        check("hi\n", false, "hi");
        check("hi\r\n", false, "hi");
        check("hi\n\n", false, "hi\n");
        check("hi\r", false, "hi\r");
        check("a\r\nb\r\n\r\n", false, "a\nb\n");
        check("a\r\nb\r\n", true, "a\r\nb\r\n");
        check("hi", false, "hi");
        check("\n", false, "");
        check("hi\n", true, "hi\n");
    }
}
