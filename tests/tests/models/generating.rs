//! Whole answers: seeds, limits, cancelling, and what is cached between turns.

use std::sync::atomic::{AtomicBool, Ordering};

use samara_runtime::{
    Device, Engine, EngineOptions, Event, Finish, KvType, Message, Outcome, ReasoningSplit, RenderOptions,
    Request, Sampler, SamplerSpec, Session, Tokenizer, generate, score,
};
use samara_tests::{Fixture, TINY_INT8, TINY_KV8, compare_rows, emulated, engine, model};

struct Talk {
    engine: Engine,
    session: Session,
    tokenizer: Tokenizer,
    sampler: Sampler,
}

impl Talk {
    fn new(temperature: f32) -> Self {
        let sampler =
            Sampler::new(SamplerSpec { temperature, seed: 7, ..SamplerSpec::default() }).expect("sound");
        Talk {
            engine: engine(Fixture::Tiny, &EngineOptions { context: 512, ..EngineOptions::default() }),
            session: Session::new(0),
            tokenizer: model(Fixture::Tiny).tokenizer().expect("a tokenizer"),
            sampler,
        }
    }

    fn prompt(&self, messages: &[Message]) -> Vec<u32> {
        let template = model(Fixture::Tiny).chat_template(&self.tokenizer).expect("a template");
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let pieces = template.render(messages, options).expect("renders");
        self.tokenizer.encode_pieces(&pieces).expect("encodes")
    }

    /// Answers, cancelling after `cancel_after` events.
    fn answer(
        &mut self,
        messages: &[Message],
        max_tokens: Option<usize>,
        cancel_after: usize,
    ) -> (Outcome, [String; 2]) {
        let prompt = self.prompt(messages);
        let split = ReasoningSplit::new(true);
        let request = Request { prompt: &prompt, stop: &[], stop_ids: &[3990, 3992], max_tokens, split };
        let (cancel, mut events, mut texts) =
            (AtomicBool::new(cancel_after == 0), 0, [String::new(), String::new()]);
        let Talk { engine, session, tokenizer, sampler } = self;
        let outcome = generate(engine, session, tokenizer, sampler, &request, &cancel, &mut |event| {
            match event {
                Event::Reasoning(text) => texts[0].push_str(&text),
                Event::Answer(text) => texts[1].push_str(&text),
                Event::Notice(text) => panic!("{text}"),
            }
            events += 1;
            cancel.store(events >= cancel_after, Ordering::Relaxed);
        });
        (outcome.expect("answers"), texts)
    }
}

const NEVER: usize = usize::MAX;

fn question() -> Vec<Message> {
    vec![Message::new("user", "Capital of Greece?")]
}

#[test]
fn a_sampler_goes_on_and_a_seed_starts_again() {
    let mut talk = Talk::new(4.0);
    let first = talk.answer(&question(), Some(20), NEVER).0.tokens;
    let second = talk.answer(&question(), Some(20), NEVER).0.tokens;
    assert_ne!(first, second, "the second turn repeats the first one's random numbers");
    assert_eq!(
        Talk::new(4.0).answer(&question(), Some(20), NEVER).0.tokens,
        first,
        "the same seed, a fresh start"
    );
}

#[test]
fn answers_end_as_they_should() {
    for (max_tokens, cancel_after, finish) in [
        (None, NEVER, Finish::Stop),
        (Some(5), NEVER, Finish::Length),
        (Some(0), NEVER, Finish::Length),
        (None, 3, Finish::Cancelled),
    ] {
        let (outcome, _) = Talk::new(0.0).answer(&question(), max_tokens, cancel_after);
        assert_eq!(outcome.finish, finish, "{max_tokens:?} {cancel_after}");
        assert!(outcome.tokens.len() <= max_tokens.unwrap_or(NEVER));
    }
    let mut talk = Talk::new(0.0);
    let long = vec![Message::new("user", "Explain a samara. ".repeat(20))];
    let n_prompt = talk.prompt(&long).len();
    talk.engine = engine(Fixture::Tiny, &EngineOptions { context: n_prompt + 4, ..EngineOptions::default() });
    let (outcome, _) = talk.answer(&long, None, NEVER);
    // Four more positions, and one token that needs none.
    assert_eq!((outcome.finish, outcome.tokens.len()), (Finish::Context, 5));
}

#[test]
fn a_second_turn_is_cached_and_equals_a_fresh_one() {
    let mut talk = Talk::new(0.0);
    let (first, [reasoning, answer]) = talk.answer(&question(), None, NEVER);
    assert_eq!(answer, "The capital of Greece is Athens.");
    let mut reply = Message::new("assistant", answer);
    reply.reasoning_content = Some(reasoning);
    let mut messages = question();
    messages.extend([reply, Message::new("user", "12+30=")]);
    let (second, texts) = talk.answer(&messages, None, NEVER);
    // All of the first turn but its last token, which was never run, and what follows it in the template.
    assert!(second.cached >= first.cached + first.prefilled + first.tokens.len() - 1, "{second:?}");
    let (fresh, fresh_texts) = Talk::new(0.0).answer(&messages, None, NEVER);
    assert_eq!((fresh.cached, &fresh.tokens), (0, &second.tokens));
    assert_eq!(texts, fresh_texts);
    assert!(texts[1].contains("42"), "{texts:?}");
}

/// Of the kinds that the model was trained on, with other numbers. Words and countries are those that it knows: at one that it does
/// not, what it says next is a near tie, which any rounding moves (a KL of 0.2 at one token).
const QUESTIONS: [&str; 12] = [
    "731+158=",
    "Compare 512 and 497.",
    "Sort these numbers: 71 3 88 19 54",
    "Spell walnut backwards.",
    "How many times does the letter e occur in river?",
    "What is the capital of Finland?",
    "Explain a samara.",
    "Multiply 8 by 6.",
    "904+77=",
    "Sort these numbers: 15 92 40 7",
    "Compare 38 and 383.",
    "What is 23 + 45?",
];

/// `n` tokens and more of answers drawn at temperature 1, which is text of the model's kind that it has not seen: ids of each prompt and
/// answer, and where the answer begins.
fn drawn(n: usize) -> Vec<(Vec<u32>, usize)> {
    let (mut talk, mut texts, mut left) = (Talk::new(1.0), Vec::new(), n);
    for question in QUESTIONS.iter().cycle() {
        if left == 0 {
            break;
        }
        let messages = [Message::new("user", *question)];
        let (mut ids, answer) = (talk.prompt(&messages), talk.answer(&messages, Some(200), NEVER).0.tokens);
        left = left.saturating_sub(answer.len());
        let begin = ids.len();
        ids.extend(answer);
        texts.push((ids, begin));
    }
    texts
}

#[test]
fn a_thousand_drawn_tokens_have_the_exact_probabilities() {
    // The reference takes a quarter of a minute; elsewhere the CPU is compared with stored logits.
    if emulated() || cfg!(windows) {
        return;
    }
    let texts = drawn(1024);
    // Logits of the tokens of answers.
    let logits = |device: Device, kv: KvType| {
        let options =
            EngineOptions { device, kv, context: 512, max_logit_rows: 64, ..EngineOptions::default() };
        let mut engine = engine(Fixture::Tiny, &options);
        let vocab_size = engine.model().architecture().vocab_size;
        let mut all = Vec::new();
        for (ids, begin) in &texts {
            let mut rows = Vec::new();
            score(&mut engine, ids, &mut |_, step| rows.extend_from_slice(step)).expect("runs");
            all.extend_from_slice(&rows[(begin - 1) * vocab_size..(ids.len() - 1) * vocab_size]);
        }
        (all, vocab_size)
    };
    let (exact, vocab_size) = logits(Device::Reference, KvType::F32);
    let n = exact.len() / vocab_size;
    assert!(n >= 1024);
    for (kv, most) in [(KvType::Bf16, TINY_INT8.mean_kl), (KvType::Q8, TINY_KV8.mean_kl)] {
        let (kl, _, top1) = compare_rows(exact.chunks_exact(vocab_size), &logits(Device::Cpu, kv).0);
        println!("{n} tokens, {kv} cache: mean KL {kl:.2e}, top 1 {:.2} %", 100.0 * top1);
        assert!(kl <= most && top1 >= 0.997, "{kv}: mean KL {kl}, top 1 {top1}");
    }
    // The planted fault: the logits of the token before.
    let (kl, _, _) =
        compare_rows(exact[vocab_size..].chunks_exact(vocab_size), &exact[..exact.len() - vocab_size]);
    assert!(kl > 1e-3, "KL {kl}");
}
