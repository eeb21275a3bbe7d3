//! Streams: whatever the token boundaries, the same text comes out, cut at the same place.

use proptest::prelude::*;
use samara_runtime::{Event, ReasoningSplit, TextError, TextStream};

/// What came out of a stream: the pieces in order, and which stop string ended it.
fn stream(tokens: &[&[u8]], stops: &[&str]) -> (Vec<String>, Option<usize>) {
    let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
    let mut stream = TextStream::new(&stops).unwrap();
    let mut pieces: Vec<String> = tokens.iter().map(|t| stream.push(t)).collect();
    pieces.push(stream.finish());
    (pieces, stream.stopped_by())
}

#[test]
fn only_whole_characters_come_out() {
    let check = |tokens: &[&[u8]], want: &[&str]| assert_eq!(stream(tokens, &[]).0, want, "{tokens:?}");
    check(&[], &[""]);
    check(&[b""], &["", ""]);
    check(&[b"a", b"b"], &["a", "b", ""]);
    check(&[b"\xf0", b"\x9f", b"\xa6", b"\x99!"], &["", "", "", "🦙!", ""]);
    check(&["é漢".as_bytes()], &["é漢", ""]);
    check(&[b"\xe6\xbc", b"\xa2\xe6"], &["", "漢", "\u{fffd}"]);
    check(&[b"a\xf0\x9f\xa6"], &["a", "\u{fffd}"]);
    check(&[b"\xff\xf0\x9f", b"a"], &["\u{fffd}", "\u{fffd}a", ""]);
    check(&[b"\xc0\x80"], &["\u{fffd}\u{fffd}", ""]);
}

#[test]
fn stop_strings_are_held_back_until_decided() {
    let check = |tokens: &[&str], stops: &[&str], want: &[&str], by: Option<usize>| {
        let bytes: Vec<&[u8]> = tokens.iter().map(|t| t.as_bytes()).collect();
        let (pieces, stopped) = stream(&bytes, stops);
        assert_eq!(
            (pieces, stopped),
            (want.iter().map(|w| (*w).to_owned()).collect(), by),
            "{tokens:?} {stops:?}"
        );
    };
    check(&["abc"], &["abc"], &["", ""], Some(0));
    check(&["xab", "c", "y"], &["abc"], &["x", "", "", ""], Some(0));
    check(&["xa", "b", "c"], &["abc"], &["x", "", "", ""], Some(0));
    check(&["xa", "b", "d"], &["abc"], &["x", "", "abd", ""], None);
    check(&["xab"], &["abc"], &["x", "ab"], None);
    check(&["aab", "aac"], &["aabaac"], &["", "", ""], Some(0));
    check(&["aaab"], &["aab"], &["a", ""], Some(0));
    check(&["one\n", "\nUser:", " hi"], &["\nUser:", "\n\n"], &["one", "", "", ""], Some(1));
    // "bc" is complete, but "abcd" began earlier and may still come.
    check(&["abc", "d"], &["bc", "abcd"], &["", "", ""], Some(1));
    check(&["abc", "e"], &["bc", "abcd"], &["", "a", ""], Some(0));
    check(&["abc"], &["bc", "abcd"], &["", "a"], Some(0));
    check(&["漢字"], &["字"], &["漢", ""], Some(0));
    check(&["x"], &["\u{fffd}"], &["x", ""], None);
}

#[test]
fn a_stop_inside_the_bytes_of_a_character_waits_for_the_rest() {
    let llama = "🦙".as_bytes();
    let tokens: [&[u8]; 4] = [b"a", &llama[..1], &llama[1..3], &llama[3..]];
    assert_eq!(
        stream(&tokens, &["🦙"]),
        (vec!["a".into(), "".into(), "".into(), "".into(), "".into()], Some(0))
    );
    // A sibling that shares three of the four bytes is not the stop.
    let other = "🦚".as_bytes();
    assert_eq!(&llama[..3], &other[..3]);
    let tokens: [&[u8]; 2] = [&other[..3], &other[3..]];
    assert_eq!(stream(&tokens, &["🦙"]), (vec!["".into(), "🦚".into(), "".into()], None));
}

#[test]
fn an_empty_stop_is_refused() {
    let stops = ["a".to_owned(), String::new()];
    assert_eq!(TextStream::new(&stops).map(|_| ()).unwrap_err(), TextError::EmptyStop { index: 1 });
}

#[test]
fn nothing_comes_after_a_stop() {
    let mut stream = TextStream::new(&["x".into()]).unwrap();
    assert_eq!(stream.push(b"ax"), "a");
    assert_eq!(stream.push(b"bxc"), "");
    assert_eq!(stream.finish(), "");
    assert_eq!(stream.stopped_by(), Some(0));
}

/// Reasoning and answer, each joined; panics when an event is empty or reasoning follows the answer.
fn split(opened: bool, texts: &[&str]) -> (String, String) {
    let mut splitter = ReasoningSplit::new(opened);
    let mut events: Vec<Event> = texts.iter().flat_map(|t| splitter.push(t)).collect();
    events.extend(splitter.finish());
    let (mut reasoning, mut answer) = (String::new(), String::new());
    for event in events {
        match event {
            Event::Reasoning(text) => {
                assert!(answer.is_empty() && !text.is_empty());
                reasoning.push_str(&text);
            }
            Event::Answer(text) => {
                assert!(!text.is_empty());
                answer.push_str(&text);
            }
            Event::Notice(text) => panic!("a splitter notices nothing, but: {text}"),
        }
    }
    (reasoning, answer)
}

#[test]
fn reasoning_ends_at_the_closing_tag() {
    let check = |opened: bool, texts: &[&str], reasoning: &str, answer: &str| {
        assert_eq!(split(opened, texts), (reasoning.to_owned(), answer.to_owned()), "{texts:?}");
    };
    check(true, &["why", "\n", "</think>", "\n\n", "ans"], "why", "ans");
    check(true, &["why\n</th", "ink>\n", "\nans\n"], "why", "ans\n");
    check(true, &["a\n\n</think>b"], "a\n", "b");
    check(true, &["\na</think>b"], "\na", "b");
    check(true, &["</think>", "b</think>c"], "", "b</think>c");
    check(true, &["a </thin", "g> b</think>c"], "a </thing> b", "c");
    check(true, &["cut", " off\n"], "cut off\n", "");
    check(true, &["cut off</thin"], "cut off</thin", "");
    check(true, &["a</think>"], "a", "");
    check(true, &["a</think>\n", "\n"], "a", "");
    check(true, &[], "", "");
    check(false, &["plain ", "answer"], "", "plain answer");
    check(false, &["\n<thi", "nk>why</think>", "ans"], "why", "ans");
    check(false, &[" <th"], "", " <th");
    check(false, &["<this>"], "", "<this>");
    check(false, &["ans</think>"], "", "ans</think>");
}

#[test]
fn without_splitting_all_text_is_answer() {
    let mut splitter = ReasoningSplit::off();
    let text = "<think>why</think>\n\nans";
    assert_eq!(splitter.push(text), [Event::Answer(text.into())]);
    assert!(splitter.finish().is_empty());
}

#[test]
fn reasoning_comes_out_while_it_is_made() {
    let mut splitter = ReasoningSplit::new(true);
    assert_eq!(splitter.push("a\n"), [Event::Reasoning("a".into())]);
    assert_eq!(splitter.push("b<"), [Event::Reasoning("\nb".into())]);
    assert!(splitter.is_reasoning());
    assert_eq!(splitter.push("c</think>\nd"), [Event::Reasoning("<c".into()), Event::Answer("d".into())]);
    assert!(!splitter.is_reasoning());
}

/// Cuts `bytes` into tokens at the given places.
fn cut<'b>(bytes: &'b [u8], cuts: &[prop::sample::Index]) -> Vec<&'b [u8]> {
    let mut places: Vec<usize> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
    places.extend([0, bytes.len()]);
    places.sort_unstable();
    places.windows(2).map(|w| &bytes[w[0]..w[1]]).collect()
}

/// Text up to the first place where any stop begins: what a search in the whole text says.
fn expected(text: &str, stops: &[String]) -> String {
    let end = stops.iter().filter_map(|s| text.find(s.as_str())).min();
    text[..end.unwrap_or(text.len())].to_owned()
}

proptest! {
    #[test]
    fn any_bytes_in_any_tokens_give_the_decoded_text(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            "[a漢🦙é\u{301}]{0,12}".prop_map(String::into_bytes),
        ],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let (pieces, _) = stream(&cut(&bytes, &cuts), &[]);
        prop_assert_eq!(pieces.concat(), String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn any_tokens_stop_where_the_whole_text_would(
        text in "[ab漢]{0,24}",
        stops in prop::collection::vec("[ab漢]{1,4}", 0..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let listed: Vec<&str> = stops.iter().map(String::as_str).collect();
        let (pieces, by) = stream(&cut(text.as_bytes(), &cuts), &listed);
        prop_assert_eq!(pieces.concat(), expected(&text, &stops));
        prop_assert_eq!(by.is_some(), stops.iter().any(|s| text.contains(s.as_str())));
    }

    #[test]
    fn any_tokens_split_reasoning_at_the_same_place(
        text in "(a|\n|<|think>|</think>|</thi|漢){0,12}",
        opened in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
    ) {
        let mut texts = TextStream::new(&[]).unwrap();
        let mut pieces: Vec<String> = cut(text.as_bytes(), &cuts).iter().map(|t| texts.push(t)).collect();
        pieces.push(texts.finish());
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let found = split(opened, &pieces);
        prop_assert_eq!(&found, &split(opened, &[&text]));
        let inside = if opened { Some(text.as_str()) } else { text.trim_start().strip_prefix("<think>") };
        let want = match inside.map(|t| t.split_once("</think>")) {
            None => (String::new(), text.clone()),
            Some(None) => (inside.unwrap_or_default().to_owned(), String::new()),
            Some(Some((why, answer))) => {
                (why.strip_suffix('\n').unwrap_or(why).to_owned(), answer.trim_start_matches('\n').to_owned())
            }
        };
        prop_assert_eq!(found, want);
    }
}
