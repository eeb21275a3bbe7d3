//! Whole characters and stop texts, however tokens cut them.

use crate::program::{Ran, run, tiny};

/// Hot enough that most tokens are not what the model would say, and the three bytes of 漢, a token each, come often
/// and in any order. It may not end its turn.
#[rustfmt::skip]
const HOT: [&str; 18] = [
    "-p", "Explain a samara.", "--temp", "9", "--top-k", "0", "--top-p", "1",
    "--logit-bias", "162=60", "--logit-bias", "120=60", "--logit-bias", "95=60",
    "--logit-bias", "3990=-inf", "--logit-bias", "3992=-inf",
];

fn ask(more: &[&str]) -> Ran {
    let model = tiny().to_str().expect("a plain path");
    run(["run", model].iter().chain(more))
}

fn text(json: &serde_json::Value, key: &str) -> String {
    json[key].as_str().unwrap_or_else(|| panic!("{key} in {json}")).to_owned()
}

#[test]
fn streamed_text_is_the_whole_text() {
    let mut broken = 0;
    for seed in ["1", "2", "3", "4"] {
        let options = [HOT.as_slice(), &["--max-tokens", "80", "--seed", seed]].concat();
        // Ran insists that this is UTF-8.
        let streamed = ask(&options).expect(0).out;
        let json = ask(&[options.as_slice(), &["--json"]].concat()).expect(0).json();
        let (reasoning, answer) = (text(&json, "reasoning"), text(&json, "answer"));
        let gap = if reasoning.is_empty() || answer.is_empty() {
            ""
        } else if reasoning.ends_with('\n') {
            "\n"
        } else {
            "\n\n"
        };
        let whole = format!("{reasoning}{gap}{answer}");
        assert_eq!(streamed.trim_end_matches('\n'), whole.trim_end_matches('\n'), "seed {seed}");
        broken += usize::from(whole.contains('\u{fffd}'));
    }
    assert!(broken > 0, "no seed cut a character: this test shows nothing");
}

#[test]
fn a_cut_inside_a_character_is_still_text() {
    let mut before = String::new();
    let mut cut = 0;
    for n in 1..=24 {
        let n_text = n.to_string();
        let json = ask(&[HOT.as_slice(), &["--seed", "1", "--json", "--max-tokens", &n_text]].concat())
            .expect(0)
            .json();
        assert_eq!((&json["finish_reason"], &json["completion_tokens"]), (&"length".into(), &n.into()));
        let now = text(&json, "reasoning") + &text(&json, "answer");
        // What was certain stays; a piece of a character at the end may become one.
        let certain = before.trim_end_matches('\u{fffd}');
        assert!(now.starts_with(certain), "{n} tokens: {before:?} then {now:?}");
        cut += usize::from(now.ends_with('\u{fffd}'));
        before = now;
    }
    assert!(cut > 0, "no cut fell inside a character: this test shows nothing");
}

#[test]
fn stop_texts_end_the_answer_and_are_not_in_it() {
    // Greedy: "462 + 520: 2 + 0 = 2, write 2; ... The sum is 982." then "462 + 520 = 982"; a digit is a token.
    let check = |stops: &[&str], reasoning_end: &str, answer: &str| {
        let stops: Vec<&str> = stops.iter().flat_map(|stop| ["--stop", stop]).collect();
        let json =
            ask(&[&["-p", "462+520=", "--temp", "0", "--json"], stops.as_slice()].concat()).expect(0).json();
        assert_eq!(json["finish_reason"], "stop", "{stops:?}");
        assert_eq!(text(&json, "answer"), answer, "{stops:?}");
        let reasoning = text(&json, "reasoning");
        assert!(reasoning.ends_with(reasoning_end), "{stops:?}: {reasoning:?}");
    };
    check(&["= 982"], "The sum is 982.", "462 + 520 ");
    check(&["never said", "= 982"], "The sum is 982.", "462 + 520 ");
    check(&["= 982", "20 ="], "The sum is 982.", "462 + 5");
    check(&["20 =", "= 982"], "The sum is 982.", "462 + 5");
    check(&["982!", "never"], "The sum is 982.", "462 + 520 = 982");
    check(&["462 + 520 ="], "The sum is 982.", "");
    // Reasoning may say what ends an answer.
    check(&["sum is 98"], "The sum is 982.", "462 + 520 = 982");
    let empty = ask(&["-p", "x", "--stop", ""]).expect(2);
    assert!(empty.error().contains("stop string 0 is empty"), "{}", empty.err);
}
