//! Run ahead, wrong, forgotten or lost: the tokens are those of the plain path.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    Finish, Outcome, ReasoningSplit, Request, Session,
    engine::Engine,
    error::Error,
    fake::{Faults, engine, sampler},
    generate::generate,
    sample::SamplerSpec,
    text::{Event, Tokenizer},
};

/// What came of two answers.
#[derive(Clone, Debug, PartialEq)]
struct Said {
    /// Their tokens and ends.
    turns: Vec<(Vec<u32>, Finish)>,
    /// What the session holds.
    tokens: Vec<u32>,
    notices: Vec<String>,
}

/// Two answers in a row of one session and sampler.
fn answers(engine: &mut Engine, spec: &SamplerSpec, stop_ids: &[u32], max_tokens: Option<usize>) -> Said {
    let (mut session, mut sampler) = (Session::new(1), sampler(spec));
    // That of the one model that all engines here have, which takes longer to make than an answer.
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let tokenizer = TOKENIZER.get_or_init(|| engine.model().tokenizer().expect("a tokenizer"));
    let (mut turns, mut notices) = (Vec::new(), Vec::new());
    let mut prompt: Vec<u32> = (5..40).collect();
    for _ in 0..2 {
        let request =
            Request { prompt: &prompt, stop: &[], stop_ids, max_tokens, split: ReasoningSplit::off() };
        let mut event = |event| {
            if let Event::Notice(text) = event {
                notices.push(text);
            }
        };
        let cancel = AtomicBool::new(false);
        let outcome = generate(engine, &mut session, tokenizer, &mut sampler, &request, &cancel, &mut event);
        let Outcome { tokens, finish, .. } = outcome.expect("answers");
        prompt.extend(&tokens);
        prompt.truncate(engine.limits().context - 1);
        turns.push((tokens, finish));
    }
    assert_eq!(engine.cached(1), session.tokens().len());
    Said { turns, tokens: session.tokens().to_vec(), notices }
}

fn specs() -> Vec<SamplerSpec> {
    let spec = SamplerSpec { seed: 3, ..SamplerSpec::default() };
    vec![
        SamplerSpec { temperature: 0.0, ..spec.clone() },
        SamplerSpec { temperature: 0.7, top_k: 20, top_p: 0.8, ..spec.clone() },
        SamplerSpec { temperature: 2.0, top_k: 64, min_p: 0.1, ..spec.clone() },
        // These need all logits.
        SamplerSpec { top_k: 65, ..spec.clone() },
        SamplerSpec { top_k: 5, repetition_penalty: 1.5, ..spec },
    ]
}

#[test]
fn what_is_generated_does_not_depend_on_running_ahead() {
    for spec in specs() {
        for (max_tokens, context) in
            [(Some(0), 100), (Some(1), 100), (Some(2), 100), (Some(30), 300), (None, 90)]
        {
            let (mut plain, _) = engine(context, false, Faults::default());
            let want = answers(&mut plain, &spec, &[], max_tokens);
            let stop = want.turns[0].0.get(20).copied();
            let want_stopped = stop.map(|stop| {
                answers(&mut engine(context, false, Faults::default()).0, &spec, &[stop], max_tokens)
            });
            for wrong_every in [0, 1, 2, 7] {
                for forgets in [None, Some(0), Some(3)] {
                    let faults = Faults { wrong_every, forgets, ..Faults::default() };
                    let case = format!("{spec:?} {max_tokens:?} {faults:?}");
                    let (mut ahead, total) = engine(context, true, faults);
                    assert_eq!(answers(&mut ahead, &spec, &[], max_tokens), want, "{case}");
                    let able = spec.top_k <= 64 && spec.repetition_penalty == 1.0;
                    let ran = total.load(Ordering::Relaxed) > 0;
                    assert_eq!(ran, able && max_tokens.is_none_or(|n| n > 1), "{case}");
                    if let Some(stop) = stop {
                        let (mut ahead, _) = engine(context, true, faults);
                        let stopped = answers(&mut ahead, &spec, &[stop], max_tokens);
                        assert_eq!(Some(stopped), want_stopped, "{case} stop {stop}");
                    }
                }
            }
        }
    }
}

/// The comparison above is able to fail.
#[test]
fn candidates_that_lie_are_another_answer() {
    let spec = &specs()[1];
    let said =
        |lies| answers(&mut engine(300, true, Faults { lies, ..Faults::default() }).0, spec, &[], Some(30));
    assert_ne!(said(true), said(false));
}

#[test]
fn a_lost_device_changes_nothing_but_a_notice() {
    let n_prefill = 3;
    for spec in specs() {
        let (mut plain, _) = engine(200, false, Faults::default());
        let want = answers(&mut plain, &spec, &[], Some(40));
        for ahead in [false, true] {
            for lost_after in [0, 1, n_prefill, n_prefill + 1, n_prefill + 9, 60] {
                let faults = Faults { lost_after: Some(lost_after), ..Faults::default() };
                let said = answers(&mut engine(200, ahead, faults).0, &spec, &[], Some(40));
                let notice = "fake was lost: unplugged; from here on the CPU runs the model";
                let want = Said { notices: vec![notice.to_owned()], ..want.clone() };
                assert_eq!(said, want, "{spec:?} {faults:?}");
            }
        }
    }
}

#[test]
fn sessions_that_did_not_see_the_loss_run_their_history_again() {
    let mut logits = (Vec::new(), Vec::new());
    let cancel = AtomicBool::new(false);
    let (mut plain, _) = engine(64, false, Faults::default());
    let (mut losing, _) = engine(64, false, Faults { lost_after: Some(2), ..Faults::default() });
    for (engine, logits) in [(&mut plain, &mut logits.0), (&mut losing, &mut logits.1)] {
        let (mut a, mut b) = (Session::new(0), Session::new(1));
        a.prefill(engine, &[1, 2, 3], logits, &cancel).expect("runs");
        b.prefill(engine, &[4, 5], logits, &cancel).expect("runs");
        match b.decode(engine, 6, None, logits) {
            Err(Error::MovedToCpu { .. }) => b.decode(engine, 6, None, logits).expect("runs again"),
            other => other.expect("runs"),
        }
        a.decode(engine, 7, None, logits).expect("runs");
        assert_eq!((a.tokens(), b.tokens()), (&[1, 2, 3, 7][..], &[4, 5, 6][..]));
    }
    assert_eq!(logits.0, logits.1);
}

#[test]
fn a_second_loss_is_an_error() {
    let faults = Faults { lost_after: Some(0), ..Faults::default() };
    let (mut engine, _) = engine(64, false, faults);
    let lost = || Error::DeviceLost { device: "x".into(), reason: "y".into() };
    assert!(matches!(engine.fall_back(Error::NonFiniteHead), Error::NonFiniteHead));
    assert!(matches!(engine.fall_back(lost()), Error::MovedToCpu { .. }));
    assert!(matches!(engine.fall_back(lost()), Error::DeviceLost { .. }));
}

#[test]
fn a_cancelled_answer_leaves_what_was_said() {
    let spec = SamplerSpec { temperature: 0.0, ..SamplerSpec::default() };
    let (mut engine, _) = engine(200, true, Faults::default());
    let (mut session, mut sampler) = (Session::new(0), sampler(&spec));
    let tokenizer = engine.model().tokenizer().expect("a tokenizer");
    let cancel = AtomicBool::new(false);
    let request = Request {
        prompt: &[1, 2, 3],
        stop: &[],
        stop_ids: &[],
        max_tokens: Some(100),
        split: ReasoningSplit::off(),
    };
    let mut events = 0;
    let outcome =
        generate(&mut engine, &mut session, &tokenizer, &mut sampler, &request, &cancel, &mut |_| {
            events += 1;
            cancel.store(events == 5, Ordering::Relaxed);
        })
        .expect("answers");
    assert_eq!(outcome.finish, Finish::Cancelled);
    let said = [request.prompt, &outcome.tokens].concat();
    assert_eq!(session.tokens(), &said[..said.len() - 1]);
    assert_eq!(engine.cached(0), session.tokens().len());
}
