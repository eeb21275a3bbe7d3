//! Whole answers: seeds, limits, cancelling, and what is cached between turns.

use std::sync::atomic::{AtomicBool, Ordering};

use samara_runtime::{
    Engine, EngineOptions, Event, Finish, Message, Outcome, ReasoningSplit, RenderOptions, Request, Sampler,
    SamplerSpec, Session, Tokenizer, generate,
};
use samara_tests::{Fixture, engine, model};

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
