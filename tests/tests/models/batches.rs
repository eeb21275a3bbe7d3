//! The same tokens give the same logits however they are cut into steps, threads and sessions.

use std::sync::atomic::AtomicBool;

use samara_runtime::{Device, Engine, EngineOptions, KvType, Logits, Sequence, Session, Step};
use samara_tests::{Fixture, emulated, engine, ids};

fn options(device: Device, threads: usize, max_batch: usize, n_slots: usize) -> EngineOptions {
    EngineOptions {
        device,
        isa: None,
        threads,
        context: 1400,
        n_slots,
        max_batch,
        max_logit_rows: 4,
        kv: KvType::default(),
        ..EngineOptions::default()
    }
}

/// Without the reference on an emulated machine, where it takes the most time and computes what the goldens show.
fn devices() -> impl Iterator<Item = Device> {
    [Device::Cpu, Device::Reference].into_iter().take(if emulated() { 1 } else { 2 })
}

/// Logits after the whole of `ids`, prefilled in the given pieces.
fn after(engine: &mut Engine, ids: &[u32], pieces: &[usize]) -> Vec<f32> {
    let (mut session, mut logits) = (Session::new(0), Vec::new());
    session.clear(engine);
    let mut end = 0;
    for piece in pieces {
        end += piece;
        session.prefill(engine, &ids[..end], &mut logits, &AtomicBool::new(false)).expect("runs");
    }
    for id in &ids[end..] {
        session.decode(engine, *id, None, &mut logits).expect("runs");
    }
    logits
}

#[test]
fn ring_is_right_around_the_window_and_after() {
    // The stress model's window is 16, the tiny one's 64; prompts around multiples of them and around
    // the sizes that broke others, then 3 appended, then many decoded one by one.
    let engines = [
        (Fixture::Stress, Device::Cpu, 24),
        (Fixture::Tiny, Device::Cpu, 128),
        (Fixture::Stress, Device::Reference, 24),
    ];
    for &(fixture, device, batch) in if emulated() { &engines[..2] } else { &engines[..] } {
        let mut engine = engine(fixture, &options(device, 2, batch, 1));
        let prompts = [65, 16, 15, 17, 63, 64, 511, 512, 513, 700];
        for &prompt in if emulated() { &prompts[..1] } else { &prompts[..] } {
            let decoded = match device {
                Device::Cpu if prompt >= 511 => 600,
                _ if emulated() => 5,
                _ => 40,
            };
            let ids = ids(prompt + 3 + decoded);
            let in_one = after(&mut engine, &ids, &[ids.len()]);
            let in_steps = after(&mut engine, &ids, &[prompt, 3]);
            assert_eq!(in_one, in_steps, "{fixture:?} on {device:?}, a prompt of {prompt}");
        }
    }
}

#[test]
fn more_threads_than_there_is_work_for_change_nothing() {
    let ids = ids(6);
    let logits =
        |threads| after(&mut engine(Fixture::Tiny, &options(Device::Cpu, threads, 4, 1)), &ids, &[5]);
    let expected = logits(1);
    for threads in if emulated() { vec![127] } else { vec![64, 127, 256] } {
        assert_eq!(logits(threads), expected, "{threads} threads");
    }
}

#[test]
fn threads_and_batches_do_not_change_a_bit() {
    let n = if emulated() { 24 } else { 300 };
    let ids = ids(n);
    let of = |ids: &[u32], threads, batch, kv| {
        let options = EngineOptions { kv, ..options(Device::Cpu, threads, batch, 1) };
        after(&mut engine(Fixture::Tiny, &options), ids, &[ids.len() - 10])
    };
    let mut seen = Vec::new();
    for kv in KvType::ALL {
        let expected = of(&ids, 1, 128, kv);
        let cuts = [(3, 128), (2, 7), (2, 1), (2, 128), (7, 128), (1, 300)];
        for &(threads, batch) in if emulated() { &cuts[..2] } else { &cuts[..] } {
            assert_eq!(of(&ids, threads, batch, kv), expected, "{threads} threads, steps of {batch}, {kv}");
        }
        assert_ne!(of(&ids[1..], 1, 128, kv), expected, "{kv}");
        assert!(!seen.contains(&expected), "{kv} changes something");
        seen.push(expected);
    }
}

#[test]
fn several_sequences_in_one_step_equal_each_alone() {
    for device in devices() {
        let n = if emulated() { 60 } else { 120 };
        let ids = ids(n);
        let mut engine = engine(Fixture::Tiny, &options(device, 2, 128, 3));
        let alone: Vec<Vec<f32>> = [(0, 20), (20, 21), (21, n)]
            .iter()
            .map(|&(from, to)| after(&mut engine, &ids[from..to], &[to - from]))
            .collect();
        engine.rewind(0, 0);
        let sequence = |slot, from: usize, to: usize| Sequence {
            slot,
            position: 0,
            tokens: &ids[from..to],
            logits: Logits::Last,
        };
        let together = engine
            .forward(&Step { sequences: &[sequence(2, 0, 20), sequence(0, 20, 21), sequence(1, 21, n)] })
            .expect("runs");
        assert_eq!(together, alone.concat(), "{device:?}");
    }
}

#[test]
fn a_step_may_mix_decoding_prefilling_and_scoring() {
    for device in devices() {
        let ids = ids(230);
        let mut engine = engine(Fixture::Stress, &options(device, 2, 64, 3));
        let expected: Vec<Vec<f32>> =
            [100, 101, 30].iter().map(|&n| after(&mut engine, &ids[..n], &[n])).collect();
        engine.rewind(0, 0);
        // Slot 2 is far past its ring and decodes one token at a time; slot 0 prefills beside it; slot 1 starts
        // in between and wants the logits of all its tokens.
        let mut position = 0;
        let run = |engine: &mut Engine, sequences: &[Sequence<'_>]| {
            engine.forward(&Step { sequences }).expect("runs").to_vec()
        };
        let sequence = |slot, from: usize, to: usize, logits| Sequence {
            slot,
            position: from,
            tokens: &ids[from..to],
            logits,
        };
        while position < 99 {
            let end = (position + 40).min(99);
            run(&mut engine, &[sequence(2, position, end, Logits::None)]);
            position = end;
        }
        let mixed = run(
            &mut engine,
            &[
                sequence(0, 0, 27, Logits::None),
                sequence(2, 99, 100, Logits::Last),
                sequence(1, 0, 3, Logits::All),
            ],
        );
        let vocab_size = expected[0].len();
        assert_eq!(mixed.len(), 4 * vocab_size, "{device:?}");
        assert_eq!(mixed[..vocab_size], expected[0], "{device:?}: decoding beside others");
        let mixed =
            run(&mut engine, &[sequence(2, 100, 101, Logits::Last), sequence(0, 27, 30, Logits::Last)]);
        assert_eq!(mixed[..vocab_size], expected[1], "{device:?}: decoding on");
        assert_eq!(mixed[vocab_size..], expected[2], "{device:?}: prefilled in two steps beside others");
    }
}

#[test]
#[should_panic(expected = "the next position of slot 0")]
fn a_step_that_leaves_a_hole_is_a_bug() {
    let mut engine = engine(Fixture::Stress, &options(Device::Cpu, 1, 8, 1));
    let sequence = Sequence { slot: 0, position: 5, tokens: &[1], logits: Logits::Last };
    let _ = engine.forward(&Step { sequences: &[sequence] });
}

#[test]
fn a_session_rewinds_to_the_common_prefix() {
    let mut engine = engine(Fixture::Tiny, &options(Device::Cpu, 2, 128, 1));
    let (mut session, mut logits) = (Session::new(0), Vec::new());
    let ids = ids(300);
    let mut edited = ids.clone();
    edited[280] += 1;
    let go = AtomicBool::new(false);
    let mut run = |session: &mut Session, engine: &mut Engine, ids: &[u32]| {
        let prefill = session.prefill(engine, ids, &mut logits, &go).expect("runs");
        (prefill.cached, logits.clone())
    };
    assert_eq!(run(&mut session, &mut engine, &ids).0, 0);
    // A late edit reuses what the ring still holds.
    let (cached, late) = run(&mut session, &mut engine, &edited);
    assert_eq!(cached, 280);
    // The same prompt again runs its last token only.
    assert_eq!(run(&mut session, &mut engine, &edited), (299, late.clone()));
    // An early edit is beyond the ring: all is run again.
    let mut early = edited.clone();
    early[10] += 1;
    assert_eq!(run(&mut session, &mut engine, &early).0, 0);
    assert_eq!(run(&mut session, &mut engine, &edited), (0, late));
}
