//! `samara bench`: prefill and decode speed, with everything a figure needs to be believed later.
//!
//! Every repetition runs the same tokens from an empty cache, prefill and decode in turn, so slow drifts of the
//! machine hit both. The logits at the end must be the same bits each time; their hash says what was computed. The
//! bound, how fast the model's weights can be read at all, is measured in the same run, before and after.

mod count;
mod profile;
mod record;

use std::{sync::atomic::AtomicBool, time::Instant};

use anyhow::Result;
use samara_runtime::{Bandwidth, Counters, Decoder, Engine, Phase, Sampler, SamplerSpec, Session, argmax};
use xxhash_rust::xxh3::xxh3_128;

use self::{
    profile::{Profile, Timed},
    record::Record,
};
use crate::{
    cli::{Bench, Format},
    failure::Failure,
    head::{HeadReads, HeadReport},
    load::{self, Wants},
    machine::Machine,
    output::{json as print_json, line},
};

/// Tokens that the warm-up prefills at most: one step of a long prompt.
const WARM_UP_PREFILL: usize = 512;
/// Tokens that the warm-up decodes at most: enough for the number of threads to be settled.
const WARM_UP_DECODE: usize = 16;

pub(crate) fn run(args: &Bench) -> Result<()> {
    let (n_prompt, n_decode) = (args.prompt as usize, args.decode as usize);
    if n_prompt == 0 && n_decode == 0 {
        return Err(Failure::Usage("-p 0 -n 0 leaves nothing to measure".to_owned()).into());
    }
    let format = if args.json { Format::Json } else { args.format };
    let model = load::open(&args.model, &args.engine)?;
    // Decode starts after the prompt, or after one token where there is none.
    let context = args.depth as usize + n_prompt.max(1) + n_decode;
    let asked = match args.depth {
        0 => format!("-p {n_prompt} -n {n_decode}"),
        depth => format!("--depth {depth} -p {n_prompt} -n {n_decode}"),
    };
    if args.engine.ctx.is_some_and(|ctx| (ctx as usize) < context) {
        return Err(Failure::Usage(format!("{asked} needs --ctx {context} or more")).into());
    }
    let max = model.architecture().max_context;
    if context > max {
        return Err(Failure::Usage(format!("{asked} is {context} tokens; the model holds {max}")).into());
    }
    let mut engine =
        load::engine(&model, &args.engine, Wants { context, ..Wants::answers(format == Format::Text) })?;
    if engine.limits().context < context {
        return Err(Failure::Space(format!(
            "a context of {context} tokens does not fit; use a smaller --depth, -p or -n"
        ))
        .into());
    }
    let runs = measure(&mut engine, args)?;
    let record = Record { args, engine: &engine, runs: &runs, machine: Machine::detect() };
    match format {
        Format::Json => print_json(&record.to_json())?,
        Format::Text => record.to_text().iter().try_for_each(|text| line(text))?,
        Format::Markdown => record.to_markdown().iter().try_for_each(|text| line(text))?,
    }
    Ok(())
}

/// What was measured.
#[derive(Debug)]
struct Runs {
    /// Tokens a second, one for each repetition; empty when left out.
    prefill: Vec<f64>,
    decode: Vec<f64>,
    /// Weight bytes that a whole prefill reads; `None` where the backend does not count them.
    prefill_bytes: Option<u64>,
    /// Before and after the repetitions; empty when left out.
    bandwidth: Vec<Bandwidth>,
    /// Of a GPU, GB/s, as often.
    device_bandwidth: Vec<f64>,
    /// What a decoded token asks of a GPU.
    submissions: Option<f64>,
    dispatches: Option<f64>,
    /// Bytes of the head that a decoded token reads; `None` of the exact head.
    head_bytes: Option<f64>,
    /// How the head compares with the exact one.
    head: Option<HeadReport>,
    /// With --profile.
    profile: Option<Profile>,
    /// xxh3-128 of the last logits, f32 little endian.
    logits_hash: u128,
    warm_up_seconds: f64,
}

fn measure(engine: &mut Engine, args: &Bench) -> Result<Runs> {
    let (n_prompt, n_decode) = (args.prompt as usize, args.decode as usize);
    let depth = args.depth as usize;
    let prompt = tokens(n_prompt.max(1), engine.model().architecture().vocab_size);
    let started = Instant::now();
    let first = &prompt[..prompt.len().min(WARM_UP_PREFILL)];
    let room = engine.limits().context - depth - first.len();
    pass(engine, depth, first, if n_decode > 0 { room.min(WARM_UP_DECODE) } else { 0 }, false)?;
    let warm_up_seconds = started.elapsed().as_secs_f64();
    let (mut bandwidth, mut device_bandwidth) = (Vec::new(), Vec::new());
    measure_bandwidth(engine, args, &mut bandwidth, &mut device_bandwidth)?;
    let (mut prefill, mut decode, mut hashes) = (Vec::new(), Vec::new(), Vec::new());
    let (mut prefill_bytes, mut asked) = (None, None);
    let head_before = HeadReads::of(engine);
    for _ in 0..args.repetitions {
        let pass = pass(engine, depth, &prompt, n_decode, false)?;
        if n_prompt > 0 {
            prefill.push(n_prompt as f64 / pass.prefill.seconds);
            prefill_bytes = pass.prefill.bytes();
        }
        if n_decode > 0 {
            decode.push(n_decode as f64 / pass.decode.seconds);
        }
        hashes.push(pass.logits_hash);
        asked = pass.asked;
    }
    let head_bytes = head_before
        .zip(HeadReads::of(engine))
        .filter(|_| n_decode > 0)
        .map(|(before, after)| after.since(before).bytes());
    measure_bandwidth(engine, args, &mut bandwidth, &mut device_bandwidth)?;
    let head = if n_decode > 0 { compare_head(engine, depth, &prompt, n_decode)? } else { None };
    let profile = if args.profile {
        let Pass { prefill, decode, asked: _, logits_hash } = pass(engine, depth, &prompt, n_decode, true)?;
        hashes.push(logits_hash);
        Some(Profile { prefill: (n_prompt > 0).then_some(prefill), decode: (n_decode > 0).then_some(decode) })
    } else {
        None
    };
    let logits_hash = hashes[0];
    if hashes.iter().any(|hash| *hash != logits_hash) {
        return Err(Failure::Failed(
            "two repetitions computed different logits: do not trust this machine or build".to_owned(),
        )
        .into());
    }
    let per_token = |count: fn(Counters) -> u64| {
        asked.filter(|_| n_decode > 0).map(|asked| count(asked) as f64 / n_decode as f64)
    };
    Ok(Runs {
        prefill,
        decode,
        prefill_bytes,
        bandwidth,
        device_bandwidth,
        submissions: per_token(|asked| asked.submissions),
        dispatches: per_token(|asked| asked.dispatches),
        head_bytes,
        head,
        profile,
        logits_hash,
        warm_up_seconds,
    })
}

/// Decodes `n` tokens greedily after `depth` made-up ones and `prompt`, with the exact head and the engine's own.
fn compare_head(engine: &mut Engine, depth: usize, prompt: &[u32], n: usize) -> Result<Option<HeadReport>> {
    HeadReport::of(engine, 1, |engine, agreement| {
        let (mut session, mut logits) = (Session::new(0), Vec::new());
        session.clear(engine);
        if depth > 0 {
            session.pretend(engine, depth);
        }
        let whole = [session.tokens(), prompt].concat();
        session.prefill(engine, &whole, &mut logits, &AtomicBool::new(false))?;
        for _ in 0..n {
            session.decode(engine, argmax(&logits) as u32, None, &mut logits)?;
            agreement.add(&logits, engine.logits_again(Some(1))?);
        }
        Ok(())
    })
}

/// Of the memory that the weights are read from: the host's, the GPU's, or both.
fn measure_bandwidth(
    engine: &mut Engine,
    args: &Bench,
    host: &mut Vec<Bandwidth>,
    device: &mut Vec<f64>,
) -> Result<()> {
    if args.no_bandwidth {
        return Ok(());
    }
    if engine.placements().iter().any(|placement| placement.backend != "gpu") {
        host.push(Bandwidth::measure(engine.model(), engine.limits().threads)?);
    }
    device.extend(engine.device_bandwidth().map(|rate| rate / 1e9));
    Ok(())
}

struct Pass {
    prefill: Timed,
    decode: Timed,
    /// Of a GPU, while decoding.
    asked: Option<Counters>,
    logits_hash: u128,
}

/// One prefill and one greedy decode after `depth` made-up tokens; with `timers`, where the time of decode goes. On the
/// host the timers of the prefill always run: they count the bytes, and look at the clock a few times in each layer, for
/// all tokens at once. Those of a GPU take time from it.
fn pass(engine: &mut Engine, depth: usize, prompt: &[u32], n_decode: usize, timers: bool) -> Result<Pass> {
    let (mut session, mut logits) = (Session::new(0), Vec::new());
    session.clear(engine);
    if depth > 0 && !session.pretend(engine, depth) {
        return Err(Failure::Usage("--depth: this device cannot make up a context".to_owned()).into());
    }
    let whole = [session.tokens(), prompt].concat();
    engine.profile(timers || engine.counters().is_none());
    let started = Instant::now();
    session.prefill(engine, &whole, &mut logits, &AtomicBool::new(false))?;
    let prefill_seconds = started.elapsed().as_secs_f64();
    let prefill_phases = engine.profile(timers);
    let asked = engine.counters();
    let started = Instant::now();
    if n_decode > 0 {
        decode(engine, &mut session, whole, &mut logits, n_decode)?;
    }
    let decode_seconds = started.elapsed().as_secs_f64();
    let asked = asked.zip(engine.counters()).map(|(before, after)| Counters {
        submissions: after.submissions - before.submissions,
        dispatches: after.dispatches - before.dispatches,
    });
    let decode_phases = engine.profile(false);
    let timed = |tokens, seconds, phases: Vec<Phase>| Timed { tokens, seconds, phases };
    Ok(Pass {
        prefill: timed(prompt.len(), prefill_seconds, prefill_phases),
        decode: timed(n_decode, decode_seconds, decode_phases),
        asked,
        logits_hash: xxh3_128(bytemuck::cast_slice(&logits)),
    })
}

/// Appends the likeliest token `n` times, as an answer does, and leaves the logits of the last: the device runs ahead
/// up to there if it can.
fn decode(
    engine: &mut Engine,
    session: &mut Session,
    mut history: Vec<u32>,
    logits: &mut Vec<f32>,
    n: usize,
) -> Result<()> {
    let mut likeliest = Sampler::new(SamplerSpec { temperature: 0.0, ..SamplerSpec::default() })?;
    let mut decoder = Decoder::new(engine, session, &mut likeliest, std::mem::take(logits));
    let mut last = 0;
    for more in (0..n).rev() {
        last = decoder.next(&history, more)?;
        history.push(last);
    }
    drop(decoder);
    Ok(session.decode(engine, last, Some(1), logits)?)
}

/// Ids spread over the vocabulary, the same on every machine (Knuth's multiplicative hash).
fn tokens(n: usize, vocab_size: usize) -> Vec<u32> {
    (0..n as u64).map(|i| (i.wrapping_mul(2_654_435_761) % vocab_size as u64) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompt_tokens_are_in_the_vocabulary_and_differ() {
        let ids = tokens(1000, 4096);
        assert!(ids.iter().all(|id| *id < 4096));
        assert!(ids[..100].iter().collect::<std::collections::HashSet<_>>().len() > 90);
        assert!(tokens(0, 4096).is_empty());
    }
}
