//! Commands as they can be typed: what a message tells a person to run must run.

use std::path::Path;

/// One word of a command line, quoted where a shell would change it.
pub(crate) fn quoted(word: &str) -> String {
    quoted_for(word, cfg!(windows))
}

/// A path as an argument of its own: one that starts like an option does not stay one.
pub(crate) fn path(path: &Path) -> String {
    let text = path.display().to_string();
    if text.starts_with('-') { quoted(&format!("./{text}")) } else { quoted(&text) }
}

/// An option with its value, in one word where the value would pass for an option.
pub(crate) fn option(name: &str, value: &str) -> String {
    let separator = if value.starts_with('-') { '=' } else { ' ' };
    format!("{name}{separator}{}", quoted(value))
}

/// Single quotes stop a POSIX shell from expanding anything; the shells of Windows know double ones, and programs
/// there take a backslash in front of a double quote for a sign that the quote is meant.
fn quoted_for(word: &str, windows: bool) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/:._-+@".contains(c) || (windows && c == '\\');
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else if windows {
        let backslashes = |text: &str| text.len() - text.trim_end_matches('\\').len();
        let mut pieces = word.split('"');
        let mut text = format!("\"{}", pieces.next().unwrap_or_default());
        for piece in pieces {
            text += &"\\".repeat(backslashes(&text) + 1);
            text.push('"');
            text += piece;
        }
        text += &"\\".repeat(backslashes(&text));
        text + "\""
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_change_them() {
        let check = |word: &str, posix: &str, windows: &str| {
            assert_eq!((quoted_for(word, false).as_str(), quoted_for(word, true).as_str()), (posix, windows));
        };
        check("a/b-c.samara", "a/b-c.samara", "a/b-c.samara");
        check("модель.samara", "модель.samara", "модель.samara");
        check("a b", "'a b'", "\"a b\"");
        check("", "''", "\"\"");
        check("a;b", "'a;b'", "\"a;b\"");
        check("a$HOME`id`\"!", "'a$HOME`id`\"!'", "\"a$HOME`id`\\\"!\"");
        check("a \\\"b", "'a \\\"b'", "\"a \\\\\\\"b\"");
        check("C:\\my models\\", "'C:\\my models\\'", "\"C:\\my models\\\\\"");
        check("it's", "'it'\\''s'", "\"it's\"");
        check("~/a", "'~/a'", "\"~/a\"");
        check("C:\\a", "'C:\\a'", "C:\\a");
    }

    #[test]
    fn what_starts_with_a_hyphen_stays_a_value() {
        assert_eq!(path(Path::new("-x/m.samara")), "./-x/m.samara");
        assert_eq!(option("--name", "a"), "--name a");
        assert_eq!(option("--name", "-a"), "--name=-a");
    }
}
