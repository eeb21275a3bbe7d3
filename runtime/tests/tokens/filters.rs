//! What each step of the sampler keeps, on tables small enough to check by hand, and what it refuses.

use samara_runtime::{SampleError, Sampler, SamplerSpec};

const INF: f32 = f32::INFINITY;

fn spec() -> SamplerSpec {
    SamplerSpec::default()
}

/// Every token that comes out of many draws, ascending.
fn support(spec: &SamplerSpec, logits: &[f32], history: &[u32]) -> Vec<u32> {
    let mut sampler = Sampler::new(spec.clone()).unwrap();
    let mut seen: Vec<u32> =
        (0..4000).map(|_| sampler.sample(&mut logits.to_vec(), history).unwrap().id).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

/// Logits of these probabilities.
fn logits_of(p: &[f32]) -> Vec<f32> {
    p.iter().map(|p| p.ln()).collect()
}

#[test]
fn each_filter_keeps_exactly_its_set() {
    let check = |spec: SamplerSpec, p: &[f32], want: &[u32]| {
        assert_eq!(support(&spec, &logits_of(p), &[]), want, "{spec:?}");
    };
    let p = [0.1, 0.4, 0.2, 0.3];
    check(spec(), &p, &[0, 1, 2, 3]);
    for (k, want) in [
        (0, &[0u32, 1, 2, 3] as &[u32]),
        (1, &[1]),
        (2, &[1, 3]),
        (3, &[1, 2, 3]),
        (4, &[0, 1, 2, 3]),
        (5, &[0, 1, 2, 3]),
    ] {
        check(SamplerSpec { top_k: k, ..spec() }, &p, want);
    }
    for (top_p, want) in [
        (0.01, &[1u32] as &[u32]),
        (0.39, &[1]),
        (0.41, &[1, 3]),
        (0.69, &[1, 3]),
        (0.71, &[1, 2, 3]),
        (0.91, &[0, 1, 2, 3]),
    ] {
        check(SamplerSpec { top_p, ..spec() }, &p, want);
    }
    for (min_p, want) in [
        (0.2, &[0u32, 1, 2, 3] as &[u32]),
        (0.26, &[1, 2, 3]),
        (0.49, &[1, 2, 3]),
        (0.51, &[1, 3]),
        (0.76, &[1]),
        (1.0, &[1]),
    ] {
        check(SamplerSpec { min_p, ..spec() }, &p, want);
    }
}

#[test]
fn filters_see_what_the_ones_before_them_left() {
    let p = [0.1, 0.4, 0.2, 0.3];
    let check =
        |spec: SamplerSpec, want: &[u32]| assert_eq!(support(&spec, &logits_of(&p), &[]), want, "{spec:?}");
    // Of all tokens, 0.4 + 0.3 misses 0.75; of the best three (sum 0.9) the two have 0.778.
    check(SamplerSpec { top_p: 0.75, ..spec() }, &[1, 2, 3]);
    check(SamplerSpec { top_p: 0.75, top_k: 3, ..spec() }, &[1, 3]);
    // Temperature comes first: at 0.5 the probabilities are squared, 0.533 and 0.3 for the best two.
    check(SamplerSpec { top_p: 0.75, temperature: 0.5, ..spec() }, &[1, 3]);
    check(SamplerSpec { top_p: 0.75, temperature: 4.0, ..spec() }, &[1, 2, 3]);
    check(SamplerSpec { min_p: 0.51, temperature: 2.0, ..spec() }, &[1, 2, 3]);
    check(SamplerSpec { min_p: 0.51, top_p: 0.3, ..spec() }, &[1]);
}

#[test]
fn equal_logits_rank_by_id() {
    for n in [1usize, 63, 64, 65, 200, 1000] {
        let mut equal = vec![0.5f32; n];
        equal[n - 1] = 0.5;
        for k in [1usize, 2, 3, 64, 65] {
            let want: Vec<u32> = (0..k.min(n) as u32).collect();
            let found = support(&SamplerSpec { top_k: k, ..spec() }, &equal, &[]);
            assert_eq!(found, want, "{k} of {n}");
        }
    }
    assert_eq!(support(&SamplerSpec { top_k: 2, ..spec() }, &[-0.0, 0.0, -0.0, 0.0], &[]), [0, 1]);
    assert_eq!(support(&SamplerSpec { top_p: 0.5, ..spec() }, &[0.0; 4], &[]), [0, 1]);
}

/// The `k` largest by a full sort.
fn top_by_sorting(logits: &[f32], k: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..logits.len() as u32).filter(|&i| logits[i as usize] > -INF).collect();
    ids.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
    ids.truncate(k);
    ids.sort_unstable();
    ids
}

#[test]
fn top_k_equals_a_full_sort() {
    // A fixed scramble with ties and holes, over the sizes where the block scan changes its path. Temperature
    // is so high that every kept token is equally likely.
    for n in [1usize, 2, 63, 64, 65, 127, 128, 129, 1000, 5000] {
        let logits: Vec<f32> = (0..n as u64)
            .map(|i| match i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56 {
                0..30 if i > 0 => -INF,
                v => v as f32 / 16.0,
            })
            .collect();
        for k in [1usize, 2, 5, 20, 79, 200] {
            let hot = SamplerSpec { top_k: k, temperature: 1e6, ..spec() };
            assert_eq!(support(&hot, &logits, &[]), top_by_sorting(&logits, k), "{k} of {n}");
        }
    }
}

#[test]
fn top_p_over_a_large_vocabulary_ranks_as_far_as_it_must() {
    // 5,000 equal tokens, 499.75 of which reach p: 500 are kept, more than are ranked at first.
    let mut sampler = Sampler::new(SamplerSpec { top_p: 0.09995, ..spec() }).unwrap();
    let mut largest = 0;
    for _ in 0..6_000 {
        let token = sampler.sample(&mut [1.0; 5000], &[]).unwrap();
        assert!((token.logprob - (1.0f32 / 500.0).ln()).abs() < 1e-5, "{token:?}");
        largest = largest.max(token.id);
    }
    assert_eq!(largest, 499);
}

#[test]
fn greedy_takes_the_lowest_id_of_the_largest() {
    let check = |logits: &[f32], want: u32| {
        let greedy = SamplerSpec { temperature: 0.0, top_k: 1, top_p: 0.1, ..spec() };
        let token = Sampler::new(greedy).unwrap().sample(&mut logits.to_vec(), &[]).unwrap();
        assert_eq!((token.id, token.logprob), (want, 0.0), "{logits:?}");
    };
    check(&[0.0], 0);
    check(&[1.0, 1.0, 1.0], 0);
    check(&[0.0, 2.0, 2.0], 1);
    check(&[-INF, -5.0, -INF], 1);
    check(&[-0.0, 0.0], 0);
    check(&[-1e30, -2e30], 0);
}

#[test]
fn bias_and_penalties_follow_their_formulas() {
    let check = |spec: SamplerSpec, history: &[u32], want: &[f32]| {
        let mut logits = [2.0, -2.0, 0.0, 1.0];
        Sampler::new(spec.clone()).unwrap().sample(&mut logits, history).unwrap();
        assert_eq!(logits, want, "{spec:?} {history:?}");
    };
    let original = [2.0, -2.0, 0.0, 1.0];
    check(spec(), &[0, 1], &original);
    check(SamplerSpec { logit_bias: vec![(3, 1.5), (1, -INF)], ..spec() }, &[], &[2.0, -INF, 0.0, 2.5]);
    let repetition = SamplerSpec { repetition_penalty: 2.0, ..spec() };
    check(repetition.clone(), &[0, 1, 2, 0], &[1.0, -4.0, 0.0, 1.0]);
    check(repetition.clone(), &[], &original);
    check(SamplerSpec { presence_penalty: 0.5, ..spec() }, &[0, 0, 3], &[1.5, -2.0, 0.0, 0.5]);
    check(SamplerSpec { frequency_penalty: 0.25, ..spec() }, &[0, 0, 3], &[1.5, -2.0, 0.0, 0.75]);
    check(
        SamplerSpec { presence_penalty: -1.0, frequency_penalty: 0.5, ..spec() },
        &[2, 2],
        &[2.0, -2.0, 0.0, 1.0],
    );
    // Bias first, then repetition, then presence and frequency: (2 + 1) / 2 - 0.5 - 2 * 0.25.
    let all = SamplerSpec {
        logit_bias: vec![(0, 1.0)],
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..repetition.clone()
    };
    check(all, &[0, 0], &[0.5, -2.0, 0.0, 1.0]);
    check(SamplerSpec { repeat_window: Some(1), ..repetition.clone() }, &[0, 1], &[2.0, -4.0, 0.0, 1.0]);
    check(SamplerSpec { repeat_window: Some(0), ..repetition.clone() }, &[0, 1], &original);
    check(SamplerSpec { repeat_window: Some(99), ..repetition }, &[0, 1], &[1.0, -4.0, 0.0, 1.0]);
}

#[test]
fn a_forbidden_token_never_comes() {
    let logits = [9.0, 1.0, 1.0];
    let banned = SamplerSpec { logit_bias: vec![(0, -INF)], ..spec() };
    assert_eq!(support(&banned, &logits, &[]), [1, 2]);
    assert_eq!(support(&SamplerSpec { top_k: 2, ..banned.clone() }, &logits, &[]), [1, 2]);
    assert_eq!(support(&SamplerSpec { repetition_penalty: 1.5, ..banned }, &logits, &[0, 0]), [1, 2]);
    assert_eq!(support(&spec(), &[-INF, 0.0, -INF], &[]), [1]);
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    let check = |spec: SamplerSpec, want: &str| {
        let error = Sampler::new(spec).map(|_| ()).unwrap_err();
        assert!(
            matches!(&error, SampleError::Setting { setting, .. } if *setting == want),
            "{want}: {error}"
        );
    };
    for bad in [f32::NAN, INF, -INF, -0.1] {
        check(SamplerSpec { temperature: bad, ..spec() }, "temperature");
        check(SamplerSpec { top_p: bad, ..spec() }, "top_p");
        check(SamplerSpec { min_p: bad, ..spec() }, "min_p");
        check(SamplerSpec { repetition_penalty: bad, ..spec() }, "repetition_penalty");
    }
    for bad in [f32::NAN, INF, -INF] {
        check(SamplerSpec { presence_penalty: bad, ..spec() }, "presence_penalty");
        check(SamplerSpec { frequency_penalty: bad, ..spec() }, "frequency_penalty");
    }
    check(SamplerSpec { top_p: 0.0, ..spec() }, "top_p");
    check(SamplerSpec { top_p: 1.01, ..spec() }, "top_p");
    check(SamplerSpec { min_p: 1.01, ..spec() }, "min_p");
    check(SamplerSpec { repetition_penalty: 0.0, ..spec() }, "repetition_penalty");
    check(SamplerSpec { logit_bias: vec![(0, f32::NAN)], ..spec() }, "logit_bias");
    check(SamplerSpec { logit_bias: vec![(0, INF)], ..spec() }, "logit_bias");
    let twice = SamplerSpec { logit_bias: vec![(4, 1.0), (3, 1.0), (4, 2.0)], ..spec() };
    assert_eq!(Sampler::new(twice).map(|_| ()).unwrap_err(), SampleError::RepeatedBias { id: 4 });
    let limits = SamplerSpec { temperature: 0.0, top_p: 1.0, min_p: 1.0, top_k: usize::MAX, ..spec() };
    assert!(Sampler::new(limits).is_ok());
}

#[test]
fn broken_logits_are_refused_for_every_setting() {
    for spec in [
        spec(),
        SamplerSpec { temperature: 0.0, ..spec() },
        SamplerSpec { top_k: 1, ..spec() },
        SamplerSpec { top_p: 0.5, min_p: 0.1, ..spec() },
    ] {
        let fail = |logits: &[f32], history: &[u32]| {
            let spec = SamplerSpec { presence_penalty: 1.0, ..spec.clone() };
            Sampler::new(spec).unwrap().sample(&mut logits.to_vec(), history).unwrap_err()
        };
        assert!(
            matches!(fail(&[0.0, f32::NAN], &[]), SampleError::BadLogit { id: 1, value } if value.is_nan())
        );
        assert_eq!(fail(&[0.0, 1.0, INF], &[]), SampleError::BadLogit { id: 2, value: INF });
        assert_eq!(fail(&[-INF, -INF], &[]), SampleError::NothingLeft { vocab_size: 2 });
        assert_eq!(fail(&[], &[]), SampleError::NothingLeft { vocab_size: 0 });
        assert_eq!(fail(&[0.0], &[7]), SampleError::HistoryOutOfRange { id: 7, vocab_size: 1 });
        let bias = SamplerSpec { logit_bias: vec![(1, 0.0)], ..spec.clone() };
        let error = Sampler::new(bias).unwrap().sample(&mut [0.0], &[]).unwrap_err();
        assert_eq!(error, SampleError::BiasOutOfRange { id: 1, vocab_size: 1 });
    }
}

#[test]
fn extreme_numbers_stay_in_order() {
    for temperature in [f32::MIN_POSITIVE, 1e-45, 1e-6] {
        let cold = SamplerSpec { temperature, ..spec() };
        assert_eq!(support(&cold, &[1.0, 1.5, -3.0], &[]), [1]);
    }
    assert_eq!(support(&SamplerSpec { temperature: f32::MAX, ..spec() }, &[1.0, -1e30], &[]), [0, 1]);
    assert_eq!(support(&spec(), &[f32::MAX, f32::MIN], &[]), [0]);
}
