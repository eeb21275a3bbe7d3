//! Drawing from the likeliest tokens alone: the same token as from all logits, with the same random numbers.

use proptest::prelude::*;
use samara_runtime::{MAX_CANDIDATES, Sampler, SamplerSpec};

/// The `k` largest logits, larger first, then lower ids, as a device that orders floats as numbers ranks them.
fn ranked(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
    all.truncate(k);
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn candidates_give_what_all_logits_give(
        // Few different values, so that many tie; -0 among them, and tokens that cannot come.
        logits in prop::collection::vec(
            prop_oneof![
                8 => (-20i8..20).prop_map(|x| f32::from(x) / 4.0),
                1 => Just(-0.0),
                1 => Just(f32::NEG_INFINITY),
                4 => -30.0f32..30.0,
            ],
            70..300,
        ),
        temperature in prop_oneof![Just(0.0f32), Just(1.0), 0.01f32..4.0],
        top_k in 1..=MAX_CANDIDATES,
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..1.0],
        seed: u64,
    ) {
        prop_assume!(logits.iter().any(|logit| *logit > f32::NEG_INFINITY));
        let spec = SamplerSpec { temperature, top_k, top_p, min_p, seed, ..SamplerSpec::default() };
        let mut all = Sampler::new(spec).unwrap();
        let mut few = all.clone();
        let draw = few.as_draw(logits.len()).unwrap();
        prop_assert_eq!(draw.top_k, if temperature == 0.0 { 1 } else { top_k });
        let candidates = ranked(&logits, draw.top_k);
        for _ in 0..4 {
            let want = all.sample(&mut logits.clone(), &[]).unwrap();
            prop_assert_eq!(few.choose(&candidates).unwrap(), want);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_largest_logits_decide(
        logits in prop::collection::vec(prop_oneof![(-20i8..20).prop_map(|x| f32::from(x) / 4.0), -30.0f32..30.0], 50..120),
        temperature in prop_oneof![Just(0.0f32), Just(1.0)],
        top_k in 1usize..8,
        repetition_penalty in prop_oneof![Just(1.0f32), 0.8f32..2.0],
        presence_penalty in prop_oneof![Just(0.0f32), -1.0f32..3.0],
        frequency_penalty in prop_oneof![Just(0.0f32), 0.0f32..3.0],
        repeat_window in prop_oneof![Just(None), (0usize..8).prop_map(Some)],
        bias in prop_oneof![Just(None), (0u32..50, -20.0f32..0.0).prop_map(Some)],
        history in prop::collection::vec(0u32..50, 0..12),
        seed: u64,
    ) {
        let spec = SamplerSpec {
            temperature, top_k, repetition_penalty, presence_penalty, frequency_penalty, repeat_window, seed,
            logit_bias: bias.into_iter().collect(),
            ..SamplerSpec::default()
        };
        let (mut all, mut few) = (Sampler::new(spec.clone()).unwrap(), Sampler::new(spec).unwrap());
        let top = all.top_of(logits.len(), history.len());
        // What ranks below is left out.
        let mut largest = vec![f32::NEG_INFINITY; logits.len()];
        ranked(&logits, top).into_iter().for_each(|(id, logit)| largest[id as usize] = logit);
        for _ in 0..4 {
            let want = all.sample(&mut logits.clone(), &history).unwrap();
            prop_assert_eq!(few.sample(&mut largest.clone(), &history).unwrap(), want, "of {}", top);
        }
    }
}

/// The comparison above is able to fail: one candidate too few is another distribution.
#[test]
fn a_missing_candidate_is_seen() {
    let logits: Vec<f32> = (0..100u8).map(|i| f32::from(i % 7)).collect();
    let spec = SamplerSpec { top_k: 20, ..SamplerSpec::default() };
    let (mut all, mut few) = (Sampler::new(spec.clone()).unwrap(), Sampler::new(spec).unwrap());
    let candidates = ranked(&logits, 19);
    let mut same =
        |_: &i32| few.choose(&candidates).unwrap().id == all.sample(&mut logits.clone(), &[]).unwrap().id;
    assert!((0..200).filter(|i| same(i)).count() < 200);
}

#[test]
fn settings_that_need_all_logits_draw_from_all() {
    let base = SamplerSpec { top_k: 20, ..SamplerSpec::default() };
    let check = |spec: SamplerSpec, vocab_size: usize, want: Option<usize>| {
        let draw = Sampler::new(spec.clone()).unwrap().as_draw(vocab_size);
        assert_eq!(draw.map(|draw| draw.top_k), want, "{spec:?} {vocab_size}");
    };
    check(base.clone(), 1000, Some(20));
    check(SamplerSpec { top_k: 64, ..base.clone() }, 1000, Some(64));
    check(SamplerSpec { top_k: 65, ..base.clone() }, 1000, None);
    check(SamplerSpec { top_k: 0, ..base.clone() }, 1000, None);
    // Where top-k keeps all, tokens are drawn in the order of their ids.
    check(base.clone(), 20, None);
    check(base.clone(), 21, Some(20));
    check(SamplerSpec { top_k: 0, temperature: 0.0, ..base.clone() }, 1000, Some(1));
    check(SamplerSpec { repetition_penalty: 1.1, ..base.clone() }, 1000, None);
    check(SamplerSpec { presence_penalty: 0.1, ..base.clone() }, 1000, None);
    check(SamplerSpec { frequency_penalty: 0.1, ..base.clone() }, 1000, None);
    check(SamplerSpec { logit_bias: vec![(1, 1.0)], ..base }, 1000, None);
}

#[test]
fn random_numbers_are_seen_before_they_are_used() {
    let spec = SamplerSpec { top_k: 64, seed: 11, ..SamplerSpec::default() };
    let mut sampler = Sampler::new(spec).unwrap();
    // Of 64 equal candidates the random number names one.
    let candidates: Vec<(u32, f32)> = (0..64).map(|id| (id, 1.0)).collect();
    let seen = sampler.peek(0, 50);
    assert_eq!(sampler.peek(10, 40), seen[10..]);
    for uniform in seen {
        let id = sampler.choose(&candidates).unwrap().id;
        assert_eq!(id, (64.0 * f64::from(uniform)) as u32);
    }
}

#[test]
fn bad_candidates_are_refused() {
    let mut sampler = Sampler::new(SamplerSpec { top_k: 2, ..SamplerSpec::default() }).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        assert!(sampler.choose(&[(1, 0.0), (2, bad)]).is_err());
    }
    assert!(sampler.choose(&[(1, f32::NEG_INFINITY)]).is_err());
    assert!(sampler.choose(&[]).is_err());
}
