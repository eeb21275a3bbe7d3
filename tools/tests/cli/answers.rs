//! `samara run` on the trained model: the golden answers, and the same answer by every road.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use serde_json::Value;

use crate::program::{Ran, emulated, fixture, folder, run, run_with_input, tiny};

/// Below this margin of the two best logits, rounding may pick the other one.
const MARGIN: f64 = 0.02;

fn ask(more: &[&str]) -> Ran {
    let model = tiny().to_str().expect("a plain path");
    run(["run", model].iter().chain(more))
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id")).collect()
}

#[test]
fn golden_answers_are_reproduced_token_for_token() {
    let goldens = std::fs::read_to_string(fixture("golden/tiny-answers.jsonl")).expect("goldens");
    let goldens: Vec<Value> = goldens.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let clear: Vec<&Value> = goldens
        .iter()
        .filter(|golden| golden["smallest_margin"].as_f64().expect("a margin") >= MARGIN)
        .collect();
    assert!(clear.len() >= 50, "only {} goldens are clear", clear.len());
    // An emulated machine takes many seconds for each.
    let clear: Vec<&Value> = clear.into_iter().step_by(if emulated() { 20 } else { 1 }).collect();
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(golden) = clear.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let question = golden["question"].as_str().expect("a question");
                    let got = ask(&["-p", question, "--temp", "0", "--json", "-t", "1"]).expect(0).json();
                    let text = format!(
                        "{}\n</think>\n\n{}",
                        got["reasoning"].as_str().expect("text"),
                        got["answer"].as_str().expect("text")
                    );
                    let same = ids(&got["token_ids"]) == ids(&golden["ids"])
                        && text == golden["greedy"].as_str().expect("text");
                    if !same || got["finish_reason"] != "stop" {
                        wrong.lock().expect("no panic").push(format!("{question}: {got}"));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    assert!(wrong.is_empty(), "{} of {} differ: {}", wrong.len(), clear.len(), wrong.join("\n"));
}

#[test]
fn a_prompt_is_the_same_from_everywhere() {
    let dir = folder();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "Capital of Greece?\n").expect("written");
    let model = tiny().to_str().expect("a plain path");
    // An emulated machine takes seconds for a whole answer, and its first words show as much.
    let most = if emulated() { "4" } else { "100" };
    let args = ["run", model, "--temp", "0", "--max-tokens", most];
    let answer =
        "The user asks for the capital of Greece. It is Athens.\n\nThe capital of Greece is Athens.\n";
    let want = if emulated() { "The user asks for\n" } else { answer };
    let check = |ran: Ran| assert_eq!(ran.expect(0).out, want);
    check(run(args.iter().chain(&["-p", "Capital of Greece?"])));
    check(run(args.iter().chain(&["-f", file.to_str().expect("a plain path")])));
    check(run_with_input(args, b"Capital of Greece?\n"));
    check(run_with_input(args, b"Capital of Greece?"));
    check(run_with_input(args.iter().chain(&["-f", "-"]), b"Capital of Greece?\n"));
    check(run_with_input(args, b"Capital of Greece?\r\n"));
    check(run_with_input(args, b"\xef\xbb\xbfCapital of Greece?"));
    let utf16: Vec<u8> = "\u{feff}Capital of Greece?\r\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    check(run_with_input(args, &utf16));
    // What is on standard input is left alone when there is a prompt already.
    check(run_with_input(args.iter().chain(&["-p", "Capital of Greece?"]), b"something else"));
    let options = [
        ["--no-mmap"].as_slice(),
        &["-t", "3"],
        &["--verify"],
        &["--ctx", "100"],
        &["-t", "1"],
        &["--device", "cpu"],
    ];
    for more in if emulated() { &options[..2] } else { &options[..] } {
        check(run(args.iter().chain(&["-p", "Capital of Greece?"]).chain(*more)));
    }
    // The reference computes something else, but not here. It would take an emulated machine as long as all of this.
    if !emulated() {
        check(run(args.iter().chain(&["-p", "Capital of Greece?", "--device", "reference"])));
    }
    let hidden = ask(&["-p", "Capital of Greece?", "--temp", "0", "--hide-reasoning"]).expect(0);
    assert_eq!(hidden.out, "The capital of Greece is Athens.\n");
}

#[test]
fn line_ends_of_windows_are_line_ends() {
    let dir = folder();
    let file = dir.path().join("prompt.txt");
    let model = tiny().to_str().expect("a plain path");
    let tokens = |text: &str, more: &[&str]| {
        std::fs::write(&file, text).expect("written");
        let file = file.to_str().expect("a plain path");
        let options = ["--temp", "0", "--max-tokens", "1", "--json", "-f", file];
        let json = ask(&[&options, more].concat()).expect(0).json();
        let piped = run_with_input(["run", model].iter().chain(&options[..5]).chain(more), text.as_bytes());
        assert_eq!(piped.expect(0).json()["prompt_tokens"], json["prompt_tokens"], "{text:?}");
        json["prompt_tokens"].as_u64().expect("a number")
    };
    assert_eq!(tokens("a\r\n\r\nb\r\n", &[]), tokens("a\n\nb", &[]));
    // A text to continue is taken as it is.
    assert!(tokens("a\r\nb\r\n", &["--raw"]) > tokens("a\nb\n", &["--raw"]));
}

#[test]
fn input_that_is_no_text_is_refused_with_the_place() {
    let model = tiny().to_str().expect("a plain path");
    // The code page of a console of Windows, UTF-8 that was cut, half a character of UTF-16.
    let rows: [(&[u8], &str); 3] = [
        (b"caf\x82\r\n", "the byte at offset 3"),
        ("é漢".as_bytes().split_last().expect("bytes").1, "the byte at offset 2"),
        (b"\xff\xfea\x00\x3e\xd8", "starts like UTF-16"),
    ];
    for (input, say) in rows {
        let refused = run_with_input(["run", model], input).expect(3);
        assert!(refused.error().contains(say), "{}", refused.err);
        assert_eq!(refused.error().contains("chcp 65001"), cfg!(windows), "{}", refused.err);
    }
}

#[test]
fn an_empty_prompt_is_refused_wherever_it_comes_from() {
    let dir = folder();
    let empty = dir.path().join("empty.txt");
    std::fs::write(&empty, "").expect("written");
    let model = tiny().to_str().expect("a plain path");
    let empty = empty.to_str().expect("a plain path");
    let check = |ran: Ran, place: &str| {
        let ran = ran.expect(3);
        assert!(
            ran.error().contains(&format!("{place} is empty: there is nothing to answer")),
            "{}",
            ran.err
        );
        ran.out
    };
    assert_eq!(check(ask(&["-p", ""]), "the prompt given with -p"), "");
    assert_eq!(check(ask(&["-p", "", "--raw"]), "the prompt given with -p"), "");
    assert_eq!(check(ask(&["-f", empty]), empty), "");
    for (input, more) in
        [("", [].as_slice()), ("\n", &[]), ("\r\n", &[]), ("", &["--raw"]), ("", &["-f", "-"])]
    {
        let ran = run_with_input(["run", model].iter().chain(more), input.as_bytes());
        assert_eq!(check(ran, "standard input"), "");
    }
    let json = run_with_input(["run", model, "--json"], b"").expect(3).json();
    assert!(json["error"].as_str().is_some_and(|text| text.contains("is empty")), "{json}");
    assert_eq!(json["exit_code"], 3);
    // The null device too, where an answer was asked for by --json.
    assert_eq!(run(["run", model, "--json"]).expect(3).json()["exit_code"], 3);
}

#[test]
fn no_standard_input_is_a_chat_that_is_over() {
    let model = tiny().to_str().expect("a plain path");
    let check = |ran: Ran| {
        let ran = ran.expect(0);
        assert_eq!(ran.out, "");
        assert!(ran.err.contains("nothing on standard input"), "{}", ran.err);
    };
    check(run(["run", model]));
    #[cfg(unix)]
    check(crate::program::shell(&format!("samara run '{model}' <&-")));
}

#[test]
fn only_the_answer_is_on_standard_output() {
    let loud = ask(&["-p", "Capital of Greece?", "--temp", "0", "--explain"]).expect(0);
    assert!(loud.err.contains("memory: ") && loud.err.contains("largest context: 4096"), "{}", loud.err);
    assert!(loud.err.contains("on cpu: ") && loud.err.contains("ternary_gemv/"), "{}", loud.err);
    assert!(loud.err.contains("complete"), "{}", loud.err);
    let quiet = ask(&["-p", "Capital of Greece?", "--temp", "0", "--quiet"]).expect(0);
    assert_eq!((quiet.out.as_str(), quiet.err.as_str()), (loud.out.as_str(), ""));
    let json = ask(&["-p", "Capital of Greece?", "--temp", "0", "--json", "--quiet"]).expect(0);
    assert_eq!(json.err, "");
    let json = json.json();
    for key in [
        "answer",
        "reasoning",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "token_ids",
        "seed",
        "kernels",
        "timings",
    ] {
        assert!(!json[key].is_null(), "{key} is missing: {json}");
    }
    assert_eq!(json["completion_tokens"], ids(&json["token_ids"]).len());
}

#[test]
fn a_seed_decides_the_answer() {
    let sample = |seed: &str| {
        let json = ask(&[
            "-p",
            "Explain a samara.",
            "--temp",
            "6",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--seed",
            seed,
            "--max-tokens",
            "20",
            "--json",
        ]);
        ids(&json.expect(0).json()["token_ids"])
    };
    assert_eq!(sample("7"), sample("7"));
    assert_ne!(sample("7"), sample("8"));
}

#[test]
fn sampling_options_reach_the_sampler() {
    let first = |more: &[&str]| {
        let json = ask(&[&["-p", "Capital of Greece?", "--max-tokens", "4", "--json"], more].concat())
            .expect(0)
            .json();
        ids(&json["token_ids"])
    };
    let greedy = first(&["--temp", "0"]);
    assert_eq!(greedy, [299, 275, 510, 541]);
    // Each of these leaves one token to choose from, at any temperature.
    for only_one in [["--top-k", "1"], ["--top-p", "0.000001"], ["--min-p", "1"]] {
        assert_eq!(first(&[&["--temp", "1.5"], only_one.as_slice()].concat()), greedy, "{only_one:?}");
    }
    assert_ne!(first(&["--temp", "0", "--logit-bias", "299=-inf"])[0], 299);
    assert_eq!(first(&["--temp", "0", "--logit-bias", "1234=1000", "--logit-bias", "299=-5"]), [1234; 4]);
    let biased = ["--temp", "0", "--logit-bias", "1234=60"];
    for penalty in
        [["--presence-penalty", "100"], ["--frequency-penalty", "100"], ["--repetition-penalty", "100"]]
    {
        let ids = first(&[biased.as_slice(), &penalty].concat());
        assert!(ids[0] == 1234 && ids[1..].iter().all(|id| *id != 1234), "{penalty:?}: {ids:?}");
    }
}

#[test]
fn an_answer_ends_for_a_reason() {
    let check = |more: &[&str], want: &str| {
        let json = ask(&[&["-p", "462+520=", "--temp", "0", "--json"], more].concat()).expect(0).json();
        assert_eq!(json["finish_reason"], want, "{more:?}: {json}");
        json
    };
    check(&[], "stop");
    let cut = check(&["--max-tokens", "5"], "length");
    assert_eq!((&cut["completion_tokens"], &cut["answer"]), (&5.into(), &"".into()));
    let speed = |json: &Value| {
        let (rate, seconds) = (&json["timings"]["decode_tokens_per_s"], &json["timings"]["decode_seconds"]);
        rate.as_f64().map(|rate| (rate * seconds.as_f64().expect("a number")).round())
    };
    // Five tokens are four decode steps, and one is none.
    assert_eq!(speed(&cut), Some(4.0), "{cut}");
    assert_eq!(speed(&check(&["--max-tokens", "1"], "length")), None);
    let full = check(&["--ctx", "40"], "context");
    assert!(full["completion_tokens"].as_u64().expect("a number") <= 21, "{full}");
    let said = ask(&["-p", "462+520=", "--temp", "0", "--ctx", "40"]).expect(0);
    assert!(said.err.contains("the context of 40 tokens is full"), "{}", said.err);
}

#[test]
fn a_system_message_and_raw_text_change_what_the_model_sees() {
    let tokens = |more: &[&str]| {
        let json = ask(
            &[&["-p", "Capital of Greece?", "--temp", "0", "--max-tokens", "3", "--json"], more].concat()
        );
        json.expect(0).json()["prompt_tokens"].as_u64().expect("a number")
    };
    let (plain, system, raw) = (tokens(&[]), tokens(&["--system", "Be brief."]), tokens(&["--raw"]));
    assert!(raw < plain && plain < system, "{raw} {plain} {system}");
    // Without the template there is no line end to drop, and a control token's name is text.
    let model = tiny().to_str().expect("a plain path");
    let raw_tokens = |text: &[u8]| {
        let ran = run_with_input(["run", model, "--raw", "--temp", "0", "--max-tokens", "1", "--json"], text);
        ran.expect(0).json()["prompt_tokens"].as_u64().expect("a number")
    };
    assert_eq!(raw_tokens(b"hello\n"), raw_tokens(b"hello") + 1);
    assert!(raw_tokens(b"<|im_end|>") > 1);
}

#[test]
fn what_a_user_types_is_never_a_control_token() {
    let tokens = |prompt: &str| {
        let json = ask(&["-p", prompt, "--temp", "0", "--max-tokens", "1", "--json"]).expect(0).json();
        json["prompt_tokens"].as_u64().expect("a number")
    };
    let one = tokens("a");
    for special in ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>"] {
        // As a control token it would be one.
        assert!(tokens(special) > one, "{special}");
    }
}

#[test]
fn what_starts_with_a_hyphen_can_be_said() {
    let json = ask(&["-p", "-5+3=", "--temp", "0", "--max-tokens", "1", "--json"]).expect(0).json();
    assert_eq!(json["completion_tokens"], 1);
    let system = ["--system", "- Be brief.", "--stop", "--", "--prompt", "--help"];
    ask(&[&["--max-tokens", "1"], system.as_slice()].concat()).expect(0);
    run(["demo", "-p", "-1+2="]).expect(0);
}
