//! Ids equal those of the Hugging Face tokenizer, control tokens come only on request, and a file that says
//! something this version does not understand is refused by the name of the field.

use samara_runtime::{Piece, Specials, TextError, Tokenizer};
use serde_json::{Value, json};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");

fn qwen3() -> Tokenizer {
    let packed = std::fs::read(format!("{FIXTURES}/qwen3-tokenizer.json.zst")).unwrap();
    let json = String::from_utf8(zstd::decode_all(packed.as_slice()).unwrap()).unwrap();
    Tokenizer::from_json(&json).unwrap()
}

fn tiny_json() -> String {
    std::fs::read_to_string(format!("{FIXTURES}/tiny-maple-2bit/tokenizer.json")).unwrap()
}

fn tiny() -> Tokenizer {
    Tokenizer::from_json(&tiny_json()).unwrap()
}

#[test]
fn ids_equal_the_golden_ones() {
    let tokenizer = qwen3();
    let golden: Vec<Value> =
        serde_json::from_slice(&std::fs::read(format!("{FIXTURES}/golden/qwen3-tokens.json")).unwrap())
            .unwrap();
    assert_eq!(golden.len(), 39);
    for row in &golden {
        let text = row["text"].as_str().unwrap();
        let want: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, Specials::Parse).unwrap(), want, "{text:?}");
    }
    assert_eq!(tokenizer.vocab_size(), 151_669);
}

#[test]
fn greedy_answers_of_the_tiny_model_decode_to_their_text() {
    let tokenizer = tiny();
    let lines = std::fs::read_to_string(format!("{FIXTURES}/golden/tiny-answers.jsonl")).unwrap();
    let mut n = 0;
    for line in lines.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let mut ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
        if ids.last().is_some_and(|&id| id == tokenizer.special_id("<|im_end|>").unwrap()) {
            ids.pop();
        }
        assert_eq!(tokenizer.decode(&ids), row["greedy"].as_str().unwrap());
        n += 1;
    }
    assert!(n > 0);
}

#[test]
fn plain_text_never_becomes_a_control_token() {
    for tokenizer in [qwen3(), tiny()] {
        let specials: Vec<String> = (0..tokenizer.vocab_size() as u32)
            .filter(|&id| tokenizer.is_special(id))
            .map(|id| tokenizer.decode(&[id]))
            .collect();
        assert!(specials.len() >= 9);
        for text in specials.iter().chain([&specials.concat()]) {
            let ids = tokenizer.encode(text, Specials::Plain).unwrap();
            assert!(ids.iter().all(|&id| !tokenizer.is_special(id)), "{text:?} gave {ids:?}");
            assert_eq!(&tokenizer.decode(&ids), text);
        }
        let parsed = tokenizer.encode(&specials.concat(), Specials::Parse).unwrap();
        assert_eq!(parsed.len(), specials.len());
        assert!(parsed.iter().all(|&id| tokenizer.is_special(id)));
    }
}

#[test]
fn text_comes_back_from_its_ids() {
    let tokenizer = tiny();
    let long = "x".repeat(20_000) + &" ".repeat(100_000) + "\n\n\t漢字🦙\u{0}\u{7f}\r\n";
    for text in ["", "a", "Ωé", "👩‍👩‍👧‍👦🏳️‍🌈", "\u{fdd0}\u{ffff}", &long] {
        let ids = tokenizer.encode(text, Specials::Plain).unwrap();
        assert_eq!(tokenizer.decode(&ids), text);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        assert_eq!(bytes, text.as_bytes());
    }
}

#[test]
fn unused_rows_decode_to_nothing() {
    let tokenizer = tiny();
    let end = tokenizer.vocab_size() as u32;
    assert_eq!(end, 3999);
    for id in [end, end + 1, 4095, u32::MAX] {
        assert_eq!(tokenizer.token_bytes(id), b"");
        assert_eq!(tokenizer.decode(&[id]), "");
        assert!(!tokenizer.is_special(id));
    }
    assert_eq!(tokenizer.token_bytes(end - 1), b"</think>");
}

#[test]
fn decode_replaces_only_invalid_bytes() {
    let tokenizer = tiny();
    let byte = |b: u8| (0..256u32).find(|&id| tokenizer.token_bytes(id) == [b]).unwrap();
    let check = |bytes: &[u8]| {
        let ids: Vec<u32> = bytes.iter().map(|&b| byte(b)).collect();
        assert_eq!(tokenizer.decode(&ids), String::from_utf8_lossy(bytes));
    };
    check("é漢🦙".as_bytes());
    check(b"\xf0\x9f\xa6");
    check(b"a\xffb\xe6\xbc");
    check(b"\xc0\x80\xed\xa0\x80");
}

#[test]
fn pieces_are_encoded_each_by_its_kind() {
    let tokenizer = tiny();
    let end = tokenizer.special_id("<|im_end|>").unwrap();
    let pieces = [Piece::Text("<|im_end|>".into()), Piece::Special(end), Piece::Text(String::new())];
    let ids = tokenizer.encode_pieces(&pieces).unwrap();
    assert_eq!(ids.iter().filter(|&&id| tokenizer.is_special(id)).count(), 1);
    assert_eq!(ids.last(), Some(&end));
    assert_eq!(tokenizer.decode(&ids), "<|im_end|><|im_end|>");
    assert_eq!(tokenizer.special_id("<|im_"), None);
}

/// The tiny tokenizer with one value replaced (`null` is a value) or, with `None`, removed.
fn changed(path: &str, value: Option<Value>) -> Result<Tokenizer, TextError> {
    let mut file: Value = serde_json::from_str(&tiny_json()).unwrap();
    let (parent, key) = path.rsplit_once('/').unwrap();
    let parent = file.pointer_mut(parent).unwrap();
    match (parent, value) {
        (Value::Object(map), Some(value)) => drop(map.insert(key.into(), value)),
        (Value::Object(map), None) => drop(map.remove(key)),
        (Value::Array(list), Some(value)) => list.push(value),
        _ => panic!("{path} cannot be changed"),
    }
    Tokenizer::from_json(&file.to_string())
}

#[test]
fn files_that_are_not_understood_are_refused_by_field() {
    let check = |path: &str, value: Option<Value>, want: &str| {
        let error = changed(path, value).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(want), "{path}: {error}");
    };
    check("/surprise", Some(json!(1)), "field `surprise`");
    check("/model/surprise", Some(json!(1)), "field `model.surprise`");
    check("/added_tokens/0/surprise", Some(json!(1)), "field `added_tokens[0].surprise`");
    check("/version", Some(json!("2.0")), "`version` is \"2.0\"");
    check("/version", None, "`version` is missing");
    check("/model", None, "`model` is missing");
    check("/model/type", Some(json!("Unigram")), "`model.type` is \"Unigram\"");
    check("/model/type", None, "`model.type` is missing");
    check("/model/vocab", None, "`model.vocab` is missing");
    check("/model/merges", None, "`model.merges` is missing");
    check("/model/dropout", Some(json!(0.1)), "`model.dropout` is 0.1");
    check("/model/byte_fallback", Some(json!(true)), "`model.byte_fallback` is true");
    check("/model/continuing_subword_prefix", Some(json!("##")), "`model.continuing_subword_prefix`");
    check("/model/ignore_merges", Some(json!(1)), "`model.ignore_merges` is 1");
    check("/normalizer", Some(json!({"type": "NFX"})), "`normalizer` is {\"type\":\"NFX\"}");
    check("/pre_tokenizer", None, "`pre_tokenizer` is null");
    check("/pre_tokenizer/pretokenizers/2", Some(json!({"type": "New"})), "`pre_tokenizer`");
    check("/decoder", Some(json!(null)), "`decoder` is null");
    check("/post_processor", Some(json!({"type": "TemplateProcessing"})), "`post_processor`");
    check("/added_tokens/0/lstrip", Some(json!(true)), "`added_tokens[0].lstrip` is true");
    check("/added_tokens/0/content", Some(json!("")), "`added_tokens[0].content`");
    check("/added_tokens/0/id", Some(json!(-1)), "`added_tokens[0]");
    check("/added_tokens/0/id", Some(json!(1u64 << 40)), "has the id 1099511627776");
    check("/added_tokens/0/id", Some(json!(5)), "both claim the id 5");
    check("/added_tokens/1/content", Some(json!("<|endoftext|>")), "both claim the id 3990");
    check("/model/vocab/漢", Some(json!(3999)), "token 3999 (\"漢\")");
    check("/model/vocab/zzzz", Some(json!(4_000_000_000u64)), "has the id 4000000000");
    check("/model/vocab/A", None, "the single byte 0x41");
    check("/model/merges/+", Some(json!(["A", "漢"])), "which is not in the vocabulary");
    check("/model/merges/+", Some(json!("A")), "a pair of strings");
    let error = Tokenizer::from_json("{").map(|_| ()).unwrap_err();
    assert!(matches!(error, TextError::TokenizerJson { .. }), "{error}");
    assert!(Tokenizer::from_json("[]").is_err());
}

#[test]
fn a_control_token_in_the_vocabulary_stays_out_of_reach_of_plain_text() {
    // Some files list added tokens in the vocabulary too, where merges or `ignore_merges` could make them.
    let mut file: Value = serde_json::from_str(&tiny_json()).unwrap();
    file["model"]["vocab"]["ab"] = json!(3999);
    file["added_tokens"].as_array_mut().unwrap().push(json!({"id": 3999, "content": "ab", "special": true}));
    file["model"]["merges"].as_array_mut().unwrap().insert(0, json!("a b"));
    file["model"]["ignore_merges"] = json!(true);
    let tokenizer = Tokenizer::from_json(&file.to_string()).unwrap();
    assert_eq!(tokenizer.encode("ab", Specials::Parse).unwrap(), [3999]);
    assert!(!tokenizer.encode("ab", Specials::Plain).unwrap().contains(&3999));
}
