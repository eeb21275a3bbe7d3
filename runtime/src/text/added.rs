//! Control tokens: the texts a tokenizer adds beside its vocabulary, and where they occur in a string.
//!
//! Every added token counts, whether the file calls it special or not: `<think>` is `special: false` in
//! Qwen's file and steers the model just like `<|im_end|>`.

/// The added tokens of one tokenizer.
#[derive(Debug, Clone, Default)]
pub(crate) struct AddedTokens {
    /// Texts and ids, longest text first, so that the first match at a place is the longest.
    tokens: Vec<(String, u32)>,
    /// Ids, ascending.
    ids: Vec<u32>,
    /// Whether any text starts with this byte, `[256]`.
    starts: Vec<bool>,
}

/// One stretch of a string cut at its control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Segment<'t> {
    /// No control token in here; never empty.
    Text(&'t str),
    /// The text of this control token.
    Token(u32),
}

impl AddedTokens {
    /// Takes texts (none empty) with their ids.
    pub(crate) fn new(mut tokens: Vec<(String, u32)>) -> Self {
        tokens.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then_with(|| a.0.cmp(&b.0)));
        let mut starts = vec![false; 256];
        for (text, _) in &tokens {
            if let Some(&first) = text.as_bytes().first() {
                starts[usize::from(first)] = true;
            }
        }
        let mut ids: Vec<u32> = tokens.iter().map(|t| t.1).collect();
        ids.sort_unstable();
        Self { tokens, ids, starts }
    }

    /// The texts, longest first.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        self.tokens.iter().map(|t| t.0.as_str())
    }

    /// The id of the token spelled exactly like this.
    pub(crate) fn id(&self, text: &str) -> Option<u32> {
        self.tokens.iter().find(|t| t.0 == text).map(|t| t.1)
    }

    /// Whether this id is a control token.
    pub(crate) fn contains(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }

    /// Cuts at every control token: the leftmost one first, the longest where several start together.
    pub(crate) fn split<'t>(&self, text: &'t str) -> Vec<Segment<'t>> {
        let mut segments = Vec::new();
        let (mut from, mut at) = (0, 0);
        while at < text.len() {
            let Some((len, id)) = self.match_at(text, at) else {
                at += 1;
                continue;
            };
            if from < at {
                segments.push(Segment::Text(&text[from..at]));
            }
            segments.push(Segment::Token(id));
            at += len;
            from = at;
        }
        if from < text.len() {
            segments.push(Segment::Text(&text[from..]));
        }
        segments
    }

    /// Length in bytes and id of the longest control token starting at byte `at`.
    fn match_at(&self, text: &str, at: usize) -> Option<(usize, u32)> {
        let rest = &text.as_bytes()[at..];
        if !self.starts[usize::from(*rest.first()?)] {
            return None;
        }
        self.tokens.iter().find(|t| rest.starts_with(t.0.as_bytes())).map(|t| (t.0.len(), t.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_at_the_leftmost_longest_token() {
        let added = AddedTokens::new(vec![("<a>".into(), 7), ("<a><b>".into(), 8), ("é".into(), 9)]);
        let check = |text: &str, want: &[Segment<'_>]| assert_eq!(added.split(text), want, "{text:?}");
        check("", &[]);
        check("x", &[Segment::Text("x")]);
        check("<a>", &[Segment::Token(7)]);
        check("<a><b>", &[Segment::Token(8)]);
        check("<a><a><b>y", &[Segment::Token(7), Segment::Token(8), Segment::Text("y")]);
        check("<<a><b", &[Segment::Text("<"), Segment::Token(7), Segment::Text("<b")]);
        check("漢é漢", &[Segment::Text("漢"), Segment::Token(9), Segment::Text("漢")]);
        assert_eq!(AddedTokens::new(vec![]).split("a"), [Segment::Text("a")]);
        assert!(added.contains(8) && !added.contains(6));
        assert_eq!((added.id("<a>"), added.id("<b>")), (Some(7), None));
    }
}
