//! Heads that leave rows out: what is left out, that a certificate is one, and that a wrong bound does not stay hidden.

use std::{
    ops::Range,
    sync::{Arc, atomic::AtomicBool},
};

use samara_format::{Access, Metadata};
use samara_runtime::{
    Device, Engine, EngineOptions, Error, HeadKind, Logits, Model, ReasoningSplit, Request, Sampler,
    SamplerSpec, Sequence, Session, Step, argmax, generate,
};
use samara_tests::{Fixture, emulated, golden, ids, model, rewrite};

const N_CLUSTERS: usize = 128;
const CLUSTER: usize = 32;
/// Words of a cluster in `head.bounds`, the third of which is its radius.
const BOUND_WORDS: usize = 6;

fn engine(model: &Arc<Model>, device: Device, head: HeadKind, n_probes: usize) -> Engine {
    let n_probes = (n_probes > 0).then_some(n_probes);
    let options = EngineOptions { device, head, n_probes, context: 256, ..EngineOptions::default() };
    Engine::new(Arc::clone(model), &options).expect("the fixture runs")
}

/// A copy of the tiny model with other bounds.
fn with_bounds(patch: impl Fn(usize, &mut f32)) -> Arc<Model> {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("changed.samara");
    rewrite(
        model(Fixture::Tiny).file(),
        &path,
        |_, _| {},
        |name, bytes| {
            if name == "head.bounds" {
                for (i, word) in bytes.as_chunks_mut().0.iter_mut().take(BOUND_WORDS * N_CLUSTERS).enumerate()
                {
                    let mut value = f32::from_le_bytes(*word);
                    patch(i, &mut value);
                    *word = value.to_le_bytes();
                }
            }
        },
    );
    Arc::new(Model::open(&path, Access::Read).expect("opens"))
}

/// Ids in rank order: larger logits first, then lower ids.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    ids
}

/// For each position of a text the exact logits, and those of the engine's head of which the `top` largest matter.
fn each(engine: &mut Engine, text: &[u32], top: usize, mut check: impl FnMut(usize, &[f32], &[f32])) {
    let (mut session, mut exact) = (Session::new(0), Vec::new());
    session.clear(engine);
    for (position, token) in text.iter().enumerate() {
        session.decode(engine, *token, None, &mut exact).expect("runs");
        check(position, &exact, engine.logits_again(Some(top)).expect("runs"));
    }
}

/// A trained model's own text, whose likeliest tokens stand out, and ids that mean nothing, after which none does.
fn texts() -> Vec<Vec<u32>> {
    let mut texts: Vec<Vec<u32>> = golden("tiny-maple").into_iter().map(|golden| golden.ids).collect();
    texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
    texts.truncate(if emulated() { 1 } else { 4 });
    texts.iter_mut().for_each(|text| text.truncate(if emulated() { 40 } else { 100 }));
    texts.push(ids(if emulated() { 10 } else { 60 }));
    texts
}

/// Positions at which the `top` largest logits are not those of the exact head, or any other logit is wrong.
fn wrong(model: &Arc<Model>, device: Device, n_probes: usize, top: usize) -> usize {
    let mut engine = engine(model, device, HeadKind::Certified, n_probes);
    let mut n = 0;
    for text in texts() {
        each(&mut engine, &text, top, |_, exact, head| {
            let best = &ranked(exact)[..top];
            let same = ranked(head)[..top] == *best && best.iter().all(|id| exact[*id] == head[*id]);
            let others = exact.iter().zip(head).all(|(a, b)| *b == f32::NEG_INFINITY || a == b);
            n += usize::from(!same || !others);
        });
    }
    let counts = engine.head_counts().expect("a head that counts");
    assert_eq!(counts.tokens as usize, texts().iter().map(Vec::len).sum::<usize>());
    n
}

#[test]
fn what_is_certified_is_exact() {
    let rows = [(1, 3), (0, 20), (0, 1), (1, 1), (40, 7), (N_CLUSTERS, 1), (0, 4096)];
    for (n_probes, top) in rows.into_iter().take(if emulated() { 2 } else { 7 }) {
        assert_eq!(
            wrong(&model(Fixture::Tiny), Device::Cpu, n_probes, top),
            0,
            "{n_probes} probes, top {top}"
        );
    }
    if !emulated() {
        assert_eq!(wrong(&model(Fixture::Tiny), Device::Reference, 0, 1), 0, "reference");
    }
}

#[test]
fn a_wrong_bound_is_caught() {
    let radius = with_bounds(|i, value| *value = if i % BOUND_WORDS == 2 { 0.0 } else { *value });
    assert!(wrong(&radius, Device::Cpu, 1, 1) > 0, "no radius");
    let range = with_bounds(|i, value| *value = if i % BOUND_WORDS == 0 { -10.0 } else { value.min(-11.0) });
    let options =
        EngineOptions { device: Device::Cpu, head: HeadKind::Certified, ..EngineOptions::default() };
    let engine = Engine::new(range, &options);
    assert!(matches!(engine, Err(Error::HeadBounds { cluster: 0, .. })), "{:?}", engine.err());
}

#[test]
fn certificates_read_less() {
    let share = |top| {
        let mut engine = engine(&model(Fixture::Tiny), Device::Cpu, HeadKind::Certified, 0);
        each(&mut engine, &texts()[0], top, |_, _, _| {});
        let counts = engine.head_counts().expect("a head that counts");
        counts.bytes as f64 / counts.tokens as f64 / engine.model().head_bytes() as f64
    };
    let (one, twenty, all) = (share(1), share(20), share(4000));
    assert!(one < 0.3 && one < twenty && twenty < all && all < 1.05, "{one} {twenty} {all}");
}

#[test]
fn probed_clusters_and_forced_tokens_have_their_logits() {
    let model = model(Fixture::Tiny);
    let map: Vec<usize> = {
        let tensor =
            model.file().index().tensors().iter().find(|t| t.name == "head.token_map").expect("a map");
        let words = model.file().part(tensor, 0, 0).as_chunks().0;
        words[..N_CLUSTERS * CLUSTER].iter().map(|word| u32::from_le_bytes(*word) as usize).collect()
    };
    let forced: Vec<usize> = [3992, 3998, 3990].to_vec();
    for device in [Device::Cpu, Device::Reference] {
        for n_probes in [1, 14, N_CLUSTERS] {
            let mut engine = engine(&model, device, HeadKind::Flash, n_probes);
            each(&mut engine, &texts()[0][..if emulated() { 2 } else { 40 }], 1, |position, exact, head| {
                let rows: Vec<Range<usize>> = (0..N_CLUSTERS)
                    .map(|cluster| cluster * CLUSTER..(cluster + 1) * CLUSTER)
                    .filter(|rows| rows.clone().all(|row| head[map[row]] > f32::NEG_INFINITY))
                    .collect();
                assert_eq!(rows.len(), n_probes, "{device:?}, position {position}");
                for (row, &token) in map.iter().enumerate() {
                    let read = rows.iter().any(|rows| rows.contains(&row)) || forced.contains(&token);
                    let wanted = if read { exact[token] } else { f32::NEG_INFINITY };
                    assert_eq!(head[token], wanted, "{device:?}, position {position}, token {token}");
                }
            });
        }
    }
}

#[test]
fn both_backends_probe_the_same_clusters() {
    let of = |device| {
        let mut all = Vec::new();
        let mut engine = engine(&model(Fixture::Tiny), device, HeadKind::Flash, 0);
        each(&mut engine, &texts()[0][..if emulated() { 4 } else { 100 }], 1, |_, exact, head| {
            all.push((
                argmax(exact),
                argmax(head),
                head.iter().map(|logit| logit.is_finite()).collect::<Vec<_>>(),
            ));
        });
        all
    };
    let (cpu, reference) = (of(Device::Cpu), of(Device::Reference));
    let tokens =
        cpu.iter().zip(&reference).map(|(a, b)| a.2.iter().zip(&b.2).filter(|(a, b)| a != b).count());
    // Scores that nearly tie change places with rounding: a cluster out, another in.
    let (other, n) = (tokens.sum::<usize>(), cpu.len());
    assert!(other <= n * 2 * CLUSTER / 10, "{other} tokens in {n} positions");
}

#[test]
fn answers_with_a_certificate_are_those_of_the_exact_head() {
    let model = model(Fixture::Tiny);
    let tokenizer = model.tokenizer().expect("a tokenizer");
    let prompt = texts()[0][..12].to_vec();
    let spec = |temperature, top_k, repetition_penalty, bias: &[(u32, f32)]| SamplerSpec {
        temperature,
        top_k,
        top_p: 0.95,
        repetition_penalty,
        logit_bias: bias.to_vec(),
        seed: 5,
        ..SamplerSpec::default()
    };
    let answer = |kind, spec: &SamplerSpec| {
        let mut engine = engine(&model, Device::Cpu, kind, 1);
        let mut sampler = Sampler::new(spec.clone()).expect("sound settings");
        let request = Request {
            prompt: &prompt,
            stop: &[],
            stop_ids: &[],
            max_tokens: Some(if emulated() { 4 } else { 60 }),
            split: ReasoningSplit::off(),
        };
        let (mut session, cancel) = (Session::new(0), AtomicBool::new(false));
        let done =
            generate(&mut engine, &mut session, &tokenizer, &mut sampler, &request, &cancel, &mut |_| {});
        done.expect("answers").tokens
    };
    for spec in [
        spec(0.0, 0, 1.0, &[]),
        spec(1.5, 20, 1.0, &[]),
        spec(1.5, 5, 1.3, &[]),
        spec(1.5, 5, 0.8, &[]),
        spec(1.5, 0, 1.0, &[]),
        spec(0.0, 0, 1.1, &[(300, f32::NEG_INFINITY), (17, -3.0)]),
        spec(1.0, 3, 1.0, &[(1234, 9.0)]),
    ] {
        let (exact, certified) = (answer(HeadKind::Exact, &spec), answer(HeadKind::Certified, &spec));
        assert_eq!(exact, certified, "{spec:?}");
    }
}

/// What a sampler needs comes alone where the head can tell it, and is what it would find among all logits.
#[test]
fn the_best_alone_are_those_of_all_logits() {
    let text = &texts()[0][..if emulated() { 5 } else { 60 }];
    let step = |engine: &mut Engine, position: usize, logits: Logits| {
        let tokens = &text[position..=position];
        let sequence = Sequence { slot: 0, position, tokens, logits };
        let all = engine.forward(&Step { sequences: &[sequence] }).expect("runs").to_vec();
        (all, engine.best().to_vec())
    };
    for (kind, n_probes) in [(HeadKind::Flash, 1), (HeadKind::Flash, 14), (HeadKind::Certified, 14)] {
        for n in [1, 20, 64] {
            let [mut one, mut other] =
                [0, 1].map(|_| engine(&model(Fixture::Tiny), Device::Cpu, kind, n_probes));
            for position in 0..text.len() {
                let (all, none) = step(&mut one, position, Logits::Top(n));
                let (none_at_all, best) = step(&mut other, position, Logits::Best(n));
                assert!(none.is_empty() && none_at_all.is_empty(), "{kind} {n}");
                let mut expected: Vec<(u32, f32)> =
                    ranked(&all)[..n].iter().map(|id| (*id as u32, all[*id])).collect();
                expected.retain(|(_, logit)| *logit > f32::NEG_INFINITY);
                assert_eq!(best, expected, "{kind}, {n_probes} probes, {n}, position {position}");
            }
            assert_eq!(one.head_counts(), other.head_counts());
        }
    }
    // Others leave all logits.
    let mut engine = engine(&model(Fixture::Tiny), Device::Cpu, HeadKind::Exact, 0);
    let (all, best) = step(&mut engine, 0, Logits::Best(3));
    assert!(all.len() == N_CLUSTERS * CLUSTER && best.is_empty());
}

#[test]
fn heads_that_cannot_be_had_are_refused() {
    let check = |fixture, head, n_probes, wanted: &str| {
        let options = EngineOptions { device: Device::Cpu, head, n_probes, ..EngineOptions::default() };
        let message = match Engine::new(model(fixture), &options) {
            Ok(_) => panic!("{head} with {n_probes:?} probes was not refused"),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(wanted), "{message}");
    };
    check(Fixture::Stress, HeadKind::Flash, None, "--flash-head build");
    check(Fixture::Stress, HeadKind::Certified, None, "--flash-head build");
    check(Fixture::Tiny, HeadKind::Flash, Some(0), "from 1 to 128");
    check(Fixture::Tiny, HeadKind::Certified, Some(129), "--probes 129");
    let dir = tempfile::tempdir().expect("a temporary folder");
    let path = dir.path().join("later.samara");
    let later = |metadata: &mut Metadata| drop(metadata.insert("flash.bound", 2u64));
    rewrite(model(Fixture::Tiny).file(), &path, |metadata, _| later(metadata), |_, _| {});
    let later = Arc::new(Model::open(&path, Access::Read).expect("opens"));
    let options =
        EngineOptions { device: Device::Cpu, head: HeadKind::Certified, ..EngineOptions::default() };
    assert!(matches!(Engine::new(later, &options), Err(Error::NoCertificate)), "bounds of a later version");
    let nan = with_bounds(|i, value| *value = if i == 6 * 17 + 4 { f32::NAN } else { *value });
    let options = |head| EngineOptions { device: Device::Cpu, head, context: 64, ..EngineOptions::default() };
    let error = Engine::new(Arc::clone(&nan), &options(HeadKind::Certified)).err();
    assert!(error.is_some_and(|error| error.to_string().contains("cluster 17")));
    Engine::new(nan, &options(HeadKind::Flash)).expect("needs no bounds");
}
