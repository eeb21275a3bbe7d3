//! Puts a kernel together: its own file, and the pieces of `wgsl/lib` that it names.
//!
//! A line `// use NAME` stands for the text of `lib/NAME.wgsl`, once, wherever it is named first; a piece may name others. Where
//! NAME is an axis, the text is that of one of its two files, so a kernel has a text for each choice: variants are files, not
//! strings put together in Rust. Every line remembers where it came from, for messages.

use std::fmt::Write as _;

/// An axis of variants: the name a kernel uses, and the files it may stand for, the one that runs anywhere first.
pub(crate) struct Axis {
    pub(crate) name: &'static str,
    pub(crate) choices: [&'static str; 2],
}

/// Every axis, in the order of [`Choice`].
pub(crate) const AXES: [Axis; 2] = [
    Axis { name: "reduce", choices: ["reduce.shared", "reduce.subgroup"] },
    Axis { name: "dot", choices: ["dot.plain", "dot.packed"] },
];

/// For each axis, whether its second file is taken.
pub(crate) type Choice = [bool; AXES.len()];

/// Every choice, in the order of the variants.
pub(crate) const CHOICES: [Choice; 4] = [[false, false], [false, true], [true, false], [true, true]];

/// A kernel's whole text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expanded {
    pub(crate) text: String,
    /// Files the text is from, the kernel's own first.
    files: Vec<String>,
    /// For each line of the text, its file and its number there, from 1.
    lines: Vec<(usize, u32)>,
    /// For each axis, whether the text depends on it.
    pub(crate) uses: Choice,
}

impl Expanded {
    /// Expands `text`, the contents of `file`. `read` returns the text of a piece by its name.
    pub(crate) fn new(
        file: &str,
        text: &str,
        choice: Choice,
        read: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<Self, String> {
        let mut all =
            Self { text: String::new(), files: Vec::new(), lines: Vec::new(), uses: Choice::default() };
        all.add(file.to_owned(), text, choice, read)?;
        Ok(all)
    }

    fn add(
        &mut self,
        file: String,
        text: &str,
        choice: Choice,
        read: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<(), String> {
        let index = self.files.len();
        self.files.push(file);
        for (line, number) in text.lines().zip(1..) {
            let Some(name) = used(line) else {
                writeln!(self.text, "{line}").expect("writing to a String cannot fail");
                self.lines.push((index, number));
                continue;
            };
            let axis = AXES.iter().position(|axis| axis.name == name);
            let piece = match axis {
                Some(axis) => {
                    self.uses[axis] = true;
                    AXES[axis].choices[usize::from(choice[axis])]
                }
                None => name,
            };
            let file = format!("shaders/wgsl/lib/{piece}.wgsl");
            if !self.files.contains(&file) {
                let text = read(piece).map_err(|e| format!("{}:{number}: {file}: {e}", self.files[index]))?;
                self.add(file, &text, choice, read)?;
            }
        }
        Ok(())
    }

    /// File and line that line `line` of the text, from 1, was taken from.
    pub(crate) fn place(&self, line: u32) -> (&str, u32) {
        let at = self.lines.get(line.saturating_sub(1) as usize).or(self.lines.last());
        at.map_or((self.file(), line), |&(file, line)| (&self.files[file], line))
    }

    /// The kernel's own file.
    pub(crate) fn file(&self) -> &str {
        &self.files[0]
    }
}

/// The piece that a line names, if it does nothing else.
fn used(line: &str) -> Option<&str> {
    let name = line.strip_prefix("// use ")?;
    name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_').then_some(name)
}
