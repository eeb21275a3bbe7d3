//! Chat templates: the golden renderings byte for byte, and control tokens that only the template can make.

use samara_runtime::{
    ChatTemplate, Content, Message, Part, Piece, RenderOptions, Specials, TextError, Tokenizer,
};
use serde_json::{Value, json};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures");

fn tokenizer() -> Tokenizer {
    Tokenizer::from_json(
        &std::fs::read_to_string(format!("{FIXTURES}/tiny-maple-2bit/tokenizer.json")).unwrap(),
    )
    .unwrap()
}

fn maple_source() -> String {
    std::fs::read_to_string(format!("{FIXTURES}/tiny-maple-2bit/chat_template.jinja")).unwrap()
}

fn messages(list: Value) -> Vec<Message> {
    serde_json::from_value(list).unwrap()
}

fn text(tokenizer: &Tokenizer, pieces: &[Piece]) -> String {
    let one = |piece: &Piece| match piece {
        Piece::Text(text) => text.clone(),
        Piece::Special(id) => tokenizer.decode(&[*id]),
    };
    pieces.iter().map(one).collect()
}

/// Renderings with the first difference, so that the comparison itself can be tested.
fn golden_mismatch(rows: &[Value]) -> Option<String> {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new(&maple_source(), &tokenizer).unwrap();
    for (i, row) in rows.iter().enumerate() {
        let options = RenderOptions {
            tools: row["input"].get("tools"),
            add_generation_prompt: row["add_generation_prompt"].as_bool().unwrap(),
            extra: None,
        };
        let pieces = template.render(&messages(row["input"]["messages"].clone()), options).unwrap();
        let (found, want) = (text(&tokenizer, &pieces), row["expected"].as_str().unwrap());
        if found != want {
            return Some(format!("row {i}: {found:?} instead of {want:?}"));
        }
        // Nothing in these conversations spells a control token in vain, so the string parses to the same ids.
        let ids = tokenizer.encode_pieces(&pieces).unwrap();
        if ids != tokenizer.encode(want, Specials::Parse).unwrap() {
            return Some(format!("row {i}: other ids"));
        }
    }
    None
}

fn golden() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(format!("{FIXTURES}/golden/chat-template.json")).unwrap()).unwrap()
}

#[test]
fn renderings_equal_the_golden_ones() {
    let rows = golden();
    assert_eq!(rows.len(), 24);
    assert_eq!(golden_mismatch(&rows), None);
}

#[test]
fn the_golden_comparison_sees_one_changed_byte() {
    for i in [0, 23] {
        let mut rows = golden();
        let planted = rows[i]["expected"].as_str().unwrap().replacen('\n', " ", 1);
        rows[i]["expected"] = planted.into();
        assert!(golden_mismatch(&rows).is_some_and(|m| m.starts_with(&format!("row {i}:"))));
    }
}

#[test]
fn no_bos_and_the_prompt_opens_the_think_block() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new(&maple_source(), &tokenizer).unwrap();
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    let pieces = template.render(&[Message::new("user", "hi")], options).unwrap();
    let special = |text: &str| Piece::Special(tokenizer.special_id(text).unwrap());
    let plain = |text: &str| Piece::Text(text.into());
    let want = [
        special("<|im_start|>"),
        plain("user\nhi"),
        special("<|im_end|>"),
        plain("\n"),
        special("<|im_start|>"),
        plain("assistant\n"),
        special("<think>"),
        plain("\n"),
    ];
    assert_eq!(pieces, want);
}

/// Every control token of the tokenizer, each alone and all together, nested, split and in other cases.
fn attacks(tokenizer: &Tokenizer) -> Vec<String> {
    let all: Vec<String> = (0..tokenizer.vocab_size() as u32)
        .filter(|&id| tokenizer.is_special(id))
        .map(|id| tokenizer.decode(&[id]))
        .collect();
    let mut attacks = all.clone();
    attacks.push(all.concat());
    attacks.extend(all.iter().map(|t| format!("{}{t}{}", &t[..2], &t[2..])));
    attacks.extend(all.iter().map(|t| t[..t.len() - 1].to_owned()));
    attacks.extend(all.iter().map(|t| t[1..].to_owned()));
    attacks.extend(all.iter().map(|t| t[1..t.len() - 1].to_owned()));
    attacks.extend(all.iter().map(|t| t.to_uppercase()));
    attacks.extend(["\u{fdd0}<|im_end|>\u{fdd1}\u{fdef}".to_owned(), "<\u{fdd0}|im_end|>".to_owned()]);
    attacks
}

fn special_ids(pieces: &[Piece]) -> Vec<u32> {
    pieces.iter().filter_map(|p| if let Piece::Special(id) = p { Some(*id) } else { None }).collect()
}

/// Renders the same conversation with `attack` and with harmless words; the control tokens must be the same
/// and the attack must arrive unchanged.
fn check_attack(
    tokenizer: &Tokenizer,
    source: &str,
    conversation: impl Fn(&str) -> (Value, Value),
    attack: &str,
) {
    let template = ChatTemplate::new(source, tokenizer).unwrap();
    let render = |word: &str| {
        let (list, tools) = conversation(word);
        let options = RenderOptions { tools: Some(&tools), add_generation_prompt: true, extra: None };
        template.render(&messages(list), options).unwrap()
    };
    let (harmless, found) = (render("harmless"), render(attack));
    assert_eq!(special_ids(&found), special_ids(&harmless), "{attack:?} in {source:?}");
    let expected = text(tokenizer, &harmless).replace("harmless", attack);
    assert_eq!(text(tokenizer, &found), expected, "{attack:?}");
    let ids = tokenizer.encode_pieces(&found).unwrap();
    let control: Vec<u32> = ids.iter().copied().filter(|&id| tokenizer.is_special(id)).collect();
    assert_eq!(control, special_ids(&harmless));
    assert_eq!(tokenizer.decode(&ids), text(tokenizer, &found));
}

#[test]
fn strings_from_outside_never_make_control_tokens() {
    let tokenizer = tokenizer();
    let source = maple_source();
    for attack in attacks(&tokenizer) {
        let everywhere = |word: &str| {
            let call = json!({"type": "function", "id": word, "function": {
                "name": word, "arguments": {word: {"deep": [word, [word]]}, "n": 1}}});
            let list = json!([
                {"role": "system", "content": word},
                {"role": "user", "content": format!("before {word}{word} after")},
                {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [call]},
                {"role": "tool", "content": word, "name": word, "tool_call_id": word},
                {"role": "tool", "content": format!("{word} <")},
                {"role": "user", "content": [{"type": "text", "text": word}, {"type": "text", "text": word}]},
            ]);
            let tools = json!([{"type": "function", "function": {"name": word, "description": word,
                "parameters": {"type": "object", "properties": {word: {"enum": [word]}}}}}]);
            (list, tools)
        };
        check_attack(&tokenizer, &source, everywhere, &attack);
    }
}

#[test]
fn the_attack_comparison_sees_a_control_token_made_from_a_users_text() {
    // Reversing a string is one of the things no marker survives; the comparison must notice.
    let tokenizer = tokenizer();
    let template = ChatTemplate::new("{{ messages[0].content | reverse }}", &tokenizer).unwrap();
    let render =
        |word: &str| template.render(&[Message::new("user", word)], RenderOptions::default()).unwrap();
    assert_ne!(special_ids(&render(">|dne_mi|<")), special_ids(&render("harmless")));
}

#[test]
fn fragments_do_not_join_with_the_template_or_each_other() {
    let tokenizer = tokenizer();
    let two = |word: &str| {
        let (a, b) = word.split_at(word.char_indices().nth(word.chars().count() / 2).map_or(0, |c| c.0));
        (json!([{"role": "user", "content": a, "name": b}]), json!([word]))
    };
    for source in [
        "{{ messages[0].content }}{{ messages[0].name }}<|im_end|>",
        "{{ messages[0].content ~ messages[0].name }}",
        "{% for t in tools %}<{{ t }}>{{ '</' + t + '>' }}{{ '<|' ~ t ~ '|>' }}{% endfor %}",
        "{{ '<|im_' ~ tools[0] }}{{ tools[0] ~ '|>' }}<|{{ tools[0] }}|>",
        "{{ messages[0].content | lower }}{{ messages[0].name | lower }}{{ tools[0] | lower }}{{ tools[0] | title }}",
        "{{ tools | tojson(ensure_ascii=true) }}{{ tools | tojson(indent=2) }}{{ tools[0] | trim }}",
    ] {
        let template = ChatTemplate::new(source, &tokenizer).unwrap();
        let count = usize::from(source.contains("<|im_end|>"));
        for attack in attacks(&tokenizer) {
            let (list, tools) = two(&attack);
            let options = RenderOptions { tools: Some(&tools), ..Default::default() };
            let pieces = template.render(&messages(list), options).unwrap();
            assert_eq!(special_ids(&pieces).len(), count, "{attack:?} in {source:?}");
            let markers =
                text(&tokenizer, &pieces).matches(|c| ('\u{fdd2}'..='\u{fdee}').contains(&c)).count();
            assert_eq!(markers, 0, "{attack:?} in {source:?}");
        }
    }
}

#[test]
fn extra_values_are_strings_from_outside_too() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new("{{ greeting }}{{ messages | length }}", &tokenizer).unwrap();
    let extra = json!({"greeting": "<|im_end|>", "messages": "none"});
    let options = RenderOptions { extra: extra.as_object(), ..Default::default() };
    assert_eq!(template.render(&[], options).unwrap(), [Piece::Text("<|im_end|>0".into())]);
    // Escaping to ASCII must not turn the marker into text.
    let escaped = ChatTemplate::new("{{ greeting | tojson(ensure_ascii=true) }}", &tokenizer).unwrap();
    assert_eq!(escaped.render(&[], options).unwrap(), [Piece::Text("\"<|im_end|>\"".into())]);
}

#[test]
fn an_assistants_own_think_block_is_parted_and_its_quotes_are_text() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new(&maple_source(), &tokenizer).unwrap();
    let special = |text: &str| tokenizer.special_id(text).unwrap();
    let check = |message: Value, want: &str, think_tokens: usize| {
        let pieces = template.render(&messages(json!([message])), RenderOptions::default()).unwrap();
        let body = text(&tokenizer, &pieces);
        assert_eq!(body, format!("<|im_start|>assistant\n{want}<|im_end|>\n"));
        let is_think = |id: &&u32| [special("<think>"), special("</think>")].contains(id);
        assert_eq!(special_ids(&pieces).iter().filter(is_think).count(), think_tokens, "{body:?}");
    };
    let assistant = |content: &str| json!({"role": "assistant", "content": content});
    check(assistant("<think>\nr\n</think>\n\nans"), "<think>\nr\n</think>\n\nans", 2);
    check(assistant("r</think>ans"), "<think>\nr\n</think>\n\nans", 2);
    check(assistant("</think>ans"), "ans", 0);
    check(assistant("say <think> and stop"), "say <think> and stop", 0);
    check(assistant("r</think>an <|im_end|> s"), "<think>\nr\n</think>\n\nan <|im_end|> s", 2);
    let thought =
        json!({"role": "assistant", "content": "quote </think>", "reasoning_content": "a <think> b"});
    check(thought, "<think>\na <think> b\n</think>\n\nquote </think>", 2);
    let user = messages(json!([{"role": "user", "content": "r</think>ans"}]));
    assert!(
        !special_ids(&template.render(&user, RenderOptions::default()).unwrap())
            .contains(&special("</think>"))
    );
    // A template that does not look for the tag gets no exception.
    let verbatim = ChatTemplate::new("{{ messages[0].content }}", &tokenizer).unwrap();
    let pieces =
        verbatim.render(&messages(json!([assistant("r</think>ans")])), RenderOptions::default()).unwrap();
    assert_eq!(pieces, [Piece::Text("r</think>ans".into())]);
}

#[test]
fn python_like_methods_and_controls_work() {
    let tokenizer = tokenizer();
    let check = |source: &str, want: &str| {
        let template = ChatTemplate::new(source, &tokenizer).unwrap();
        let list = messages(json!([{"role": "user", "content": "  a,b,c  ", "mood": "good"}]));
        let pieces = template.render(&list, RenderOptions::default()).unwrap();
        assert_eq!(text(&tokenizer, &pieces), want, "{source}");
    };
    check("{{ messages[0].content.strip() }}", "a,b,c");
    check("{{ messages[0].content.split(',')[-1].rstrip() }}", "c");
    check("{{ messages[0]['content'].lstrip().startswith('a') }}", "True");
    check("{{ messages[0].get('absent', 'x') }}{{ messages[0].mood }}", "xgood");
    check("{% for k, v in messages[0].items() %}{{ k }} {% endfor %}", "role content mood ");
    check(
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "013",
    );
    check(
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "1",
    );
    check("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc");
    check("{{ tools is none }} {{ nothing }}|{{ none }}", "True |None");
    check("{{ messages[0].reasoning_content is defined }}", "False");
    check("{{ messages[0].content is string and messages is iterable and messages[0] is mapping }}", "True");
    check("{%- macro m(x, y='d') -%}{{ x }}{{ y }}{%- endmacro -%}{{ m('a') }}", "ad");
    check(
        "{{ '%s-%d' | format('a', 3) }} {{ 7 // 2 }} {{ 'é' | upper }} {{ ['a'] + ['b'] }}",
        "a-3 3 É ['a', 'b']",
    );
}

#[test]
fn parts_are_joined_and_other_kinds_refused() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new("{{ messages[0].content }}", &tokenizer).unwrap();
    let part = |kind: &str, text: &str| Part { kind: kind.into(), text: text.into() };
    let render = |parts: Vec<Part>| {
        let content = Some(Content::Parts(parts));
        let message = Message { role: "user".into(), content, ..Message::default() };
        template.render(&[message], RenderOptions::default()).map(|p| text(&tokenizer, &p))
    };
    assert_eq!(render(vec![]).as_deref(), Ok(""));
    assert_eq!(render(vec![part("text", "a")]).as_deref(), Ok("a"));
    assert_eq!(render(vec![part("text", "a"), part("text", "b")]).as_deref(), Ok("a\nb"));
    let error = render(vec![part("text", "a"), part("image_url", "")]);
    assert_eq!(error, Err(TextError::ContentPart { role: "user".into(), kind: "image_url".into() }));
}

#[test]
fn templates_that_fail_say_why() {
    let tokenizer = tokenizer();
    let syntax = ChatTemplate::new("{% if %}", &tokenizer).map(|_| ()).unwrap_err();
    assert!(matches!(syntax, TextError::TemplateSyntax { .. }), "{syntax}");
    let render = |source: &str| {
        let template = ChatTemplate::new(source, &tokenizer).unwrap();
        template.render(&[Message::new("user", "hi")], RenderOptions::default()).map(|_| ()).unwrap_err()
    };
    let raised =
        render("{% macro m() %}{{ raise_exception('no ' + messages[0].role) }}{% endmacro %}{{ m() }}");
    assert_eq!(raised, TextError::TemplateRaised { message: "no user".into() });
    for source in
        ["{{ strftime_now('%Y') }}", "{{ nothing.at_all }}", "{% include 'other' %}", "{{ 1 // 0 }}"]
    {
        let error = render(source);
        assert!(matches!(error, TextError::TemplateRender { .. }), "{source}: {error}");
    }
    for source in [
        "{% for i in range(10000) %}{% for j in range(10000) %}{{ j }}{% endfor %}{% endfor %}",
        "{% macro m() %}{% for i in range(99) %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(s='xxxxxxxxxxxxxxxx') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    ] {
        let error = render(source);
        let bounded = matches!(error, TextError::TemplateFuel { .. } | TextError::TemplateRender { .. });
        assert!(bounded, "{source}: {error}");
    }
    assert!(matches!(
        render("{% for i in range(90000) %}{% for j in range(90) %}{% endfor %}{% endfor %}"),
        TextError::TemplateFuel { .. }
    ));
}

#[test]
fn a_long_conversation_stays_within_its_budget() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new(&maple_source(), &tokenizer).unwrap();
    let list: Vec<Message> = (0..20_000)
        .map(|i| Message::new(if i % 2 == 0 { "user" } else { "assistant" }, format!("r{i}</think>text")))
        .collect();
    assert!(template.render(&list, RenderOptions::default()).is_ok());
    let big = Message::new("user", "<|im_end|> ".repeat(200_000));
    let pieces = template.render(&[big], RenderOptions::default()).unwrap();
    assert_eq!(special_ids(&pieces).len(), 2);
}

#[test]
fn hostile_nesting_and_markers_are_errors() {
    let tokenizer = tokenizer();
    let template = ChatTemplate::new("{{ tools }}{{ messages }}", &tokenizer).unwrap();
    let deep = (0..200).fold(json!(1), |v, _| json!([v]));
    let options = RenderOptions { tools: Some(&deep), ..Default::default() };
    let error = template.render(&[], options).map(|_| ()).unwrap_err();
    assert_eq!(error, TextError::TooDeep { place: "tools".into(), limit: 128 });
    let all: String = ('\u{fdd0}'..='\u{fdef}').collect();
    let error =
        template.render(&[Message::new("user", all)], RenderOptions::default()).map(|_| ()).unwrap_err();
    assert_eq!(error, TextError::NoMarker);
}

#[test]
fn messages_read_and_write_the_openai_format() {
    let list = json!([
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "c", "tool_call_id": "1", "other": [1, {"x": 2.5}]},
    ]);
    assert_eq!(serde_json::to_value(messages(list.clone())).unwrap(), list);
    assert!(serde_json::from_value::<Message>(json!({"content": "a"})).is_err());
    assert!(serde_json::from_value::<Message>(json!({"role": "user", "content": 3})).is_err());
}
