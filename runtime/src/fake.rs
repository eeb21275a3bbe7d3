//! Stand-ins for tests: a model whose blocks nobody computes, and a device that is wrong or lost when a test wants it.
//!
//! The next token's logits are a hash of every token that the slot holds, so a step that is missing, repeated or of
//! another position shows in what is generated.

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use samara_converter::{Options, Quiet, convert, plan};
use samara_format::Access;

use crate::{
    backend::{
        Activations, Adapter, Ahead, Backend, Draw, Drawn, Footprint, KernelId, Limits, Placed, Segment, Step,
    },
    engine::{Compiled, Engine},
    error::Error,
    flash::HeadMode,
    kv::KvType,
    model::Model,
    sample::{Sampler, SamplerSpec},
    spec::BlockSpec,
};

/// A checkpoint of `tests/fixtures`, converted once: `tiny-maple-2bit` has 8 layers and 4096 tokens.
pub(crate) fn model(name: &'static str) -> Arc<Model> {
    static MODELS: Mutex<Vec<(&str, Arc<Model>)>> = Mutex::new(Vec::new());
    let mut models = MODELS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, model)) = models.iter().find(|(known, _)| *known == name) {
        return Arc::clone(model);
    }
    let checkpoint = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name);
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (path, options) = (dir.path().join("model.samara"), Options::default());
    let plan = plan(&checkpoint, &options).expect("a sound checkpoint");
    convert(&plan, &path, &options, &Quiet, &AtomicBool::new(false)).expect("converts");
    // Read, not mapped: the folder goes away here.
    let model = Arc::new(Model::open(&path, Access::Read).expect("opens"));
    models.push((name, Arc::clone(&model)));
    model
}

/// What a fake does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Faults {
    /// Every so many steps it goes on from another token than it should; 0 never.
    pub(crate) wrong_every: usize,
    /// The second of its candidates comes with the logit of the first.
    pub(crate) lies: bool,
    /// After so many steps, of prefill or ahead, it is lost.
    pub(crate) lost_after: Option<usize>,
    /// Positions that it can go back; `None` is all.
    pub(crate) forgets: Option<usize>,
}

/// A segment of every block.
pub(crate) struct Fake {
    vocab_size: usize,
    slots: Vec<Vec<u32>>,
    /// Whether it runs ahead.
    ahead: bool,
    faults: Faults,
    steps: usize,
    /// Slot, draw and next token of what runs ahead.
    run: Option<(usize, Draw, u32)>,
    queued: VecDeque<Result<Drawn, Error>>,
    /// Steps ever queued.
    pub(crate) total: Arc<AtomicUsize>,
}

impl Fake {
    pub(crate) fn new(vocab_size: usize, n_slots: usize, ahead: bool, faults: Faults) -> Self {
        Fake {
            vocab_size,
            slots: vec![Vec::new(); n_slots],
            ahead,
            faults,
            steps: 0,
            run: None,
            queued: VecDeque::new(),
            total: Arc::default(),
        }
    }

    fn step(&mut self) -> Result<(), Error> {
        self.steps += 1;
        if self.faults.lost_after.is_some_and(|after| self.steps > after) {
            return Err(Error::DeviceLost { device: "fake".into(), reason: "unplugged".into() });
        }
        Ok(())
    }
}

/// Logits from -8 to 8 in steps that let some tie; tokens after other tokens are others.
fn logits(tokens: &[u32], vocab_size: usize) -> Vec<f32> {
    let mix = |hash: u64, x: u64| (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let seed = tokens.iter().fold(1, |hash, token| mix(hash, u64::from(*token)));
    (0..vocab_size as u64).map(|id| (mix(mix(seed, id), 7) >> 44) as f32 / 65536.0 - 8.0).collect()
}

impl Segment for Fake {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        self.step()?;
        let wanted: Vec<usize> = step.logit_rows().collect();
        for (row, (slot, position, token)) in step.tokens().enumerate() {
            let cache = &mut self.slots[slot];
            assert_eq!(cache.len(), position, "the position of slot {slot}");
            cache.push(token);
            if let Some(at) = wanted.iter().position(|wanted| *wanted == row) {
                let out = &mut io.logits[at * self.vocab_size..(at + 1) * self.vocab_size];
                out.copy_from_slice(&logits(cache, self.vocab_size));
            }
        }
        Ok(())
    }

    fn head_again(&mut self, _top: Option<usize>, _io: &mut Activations) -> Result<(), Error> {
        Ok(())
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        let cache = &mut self.slots[slot];
        let back = cache.len().saturating_sub(len);
        if len > 0 && self.faults.forgets.is_some_and(|most| back > most) {
            return false;
        }
        cache.truncate(len);
        true
    }

    fn ahead(&mut self) -> Option<&mut dyn Ahead> {
        if self.ahead { Some(self) } else { None }
    }
}

impl Ahead for Fake {
    fn begin(&mut self, slot: usize, position: usize, token: u32, draw: &Draw) -> Result<(), Error> {
        assert!(self.queued.is_empty(), "begun while something is queued");
        assert_eq!(self.slots[slot].len(), position, "the position of slot {slot}");
        self.run = Some((slot, *draw, token));
        Ok(())
    }

    fn queue(&mut self, uniforms: &[f32]) -> Result<(), Error> {
        for uniform in uniforms {
            assert!((0.0..1.0).contains(uniform), "{uniform}");
            let (slot, draw, token) = self.run.expect("begun");
            self.total.fetch_add(1, Ordering::Relaxed);
            let lost = self.step();
            self.slots[slot].push(token);
            let logits = logits(&self.slots[slot], self.vocab_size);
            let mut drawn = drawn(&logits, &draw, *uniform);
            if self.faults.wrong_every > 0 && self.steps.is_multiple_of(self.faults.wrong_every) {
                drawn.token = (drawn.token + 1) % self.vocab_size as u32;
            }
            if self.faults.lies
                && let [first, second, ..] = drawn.candidates.as_mut_slice()
            {
                second.1 = first.1;
            }
            self.run = Some((slot, draw, drawn.token));
            self.queued.push_back(lost.map(|()| drawn));
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Drawn, Error> {
        self.queued.pop_front().expect("something queued")
    }

    fn stop(&mut self) {
        self.queued.clear();
    }
}

/// As a device draws: in f32.
fn drawn(logits: &[f32], draw: &Draw, uniform: f32) -> Drawn {
    let mut candidates: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
    let best_first = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if draw.top_k < candidates.len() {
        candidates.select_nth_unstable_by(draw.top_k, best_first);
        candidates.truncate(draw.top_k);
    }
    candidates.sort_unstable_by(best_first);
    let best = candidates[0];
    if draw.temperature == 0.0 {
        return Drawn { token: best.0, candidates };
    }
    let weight = |logit: f32| ((logit - best.1) / draw.temperature).exp();
    let all: f32 = candidates.iter().map(|(_, logit)| weight(*logit)).sum();
    let mut mass = 0.0;
    let kept = candidates.iter().take_while(|(_, logit)| {
        let before = mass;
        mass += weight(*logit);
        before < draw.top_p * all && weight(*logit) >= draw.min_p
    });
    let kept: Vec<_> = kept.collect();
    let mut left = uniform * kept.iter().map(|(_, logit)| weight(*logit)).sum::<f32>();
    let chosen = kept.iter().find(|(_, logit)| {
        left -= weight(*logit);
        left < 0.0
    });
    let token = chosen.or(kept.last()).map_or(best.0, |(id, _)| *id);
    Drawn { token, candidates }
}

pub(crate) fn limits(n_slots: usize, context: usize) -> Limits {
    Limits {
        threads: 1,
        fewer_threads: false,
        n_slots,
        context,
        max_batch: 16.min(context),
        max_logit_rows: 1,
        kv: KvType::F32,
        head: HeadMode::EXACT,
    }
}

/// An engine of one fake; what is lost goes on in another, which does all right.
pub(crate) fn engine(context: usize, ahead: bool, faults: Faults) -> (Engine, Arc<AtomicUsize>) {
    let (model, limits) = (model("tiny-maple-2bit"), limits(2, context));
    let vocab_size = model.architecture().vocab_size;
    let compiled = move |ahead, faults| {
        let fake = Fake::new(vocab_size, limits.n_slots, ahead, faults);
        let total = Arc::clone(&fake.total);
        (Compiled { placements: Vec::new(), segments: vec![Box::new(fake)] }, total)
    };
    let (first, total) = compiled(ahead, faults);
    let mut engine = Engine::assemble(model, limits, first);
    engine.fall_back_to(Box::new(move || Ok(compiled(false, Faults::default()).0)));
    (engine, total)
}

pub(crate) fn sampler(spec: &SamplerSpec) -> Sampler {
    Sampler::new(spec.clone()).expect("sound settings")
}

/// A backend that computes nothing, in a given time; a GPU if it has an adapter.
pub(crate) struct FakeBackend {
    pub(crate) name: &'static str,
    pub(crate) adapter: Option<Adapter>,
    /// Bytes of device memory: of a layer, of the head, of the embedding.
    pub(crate) bytes: [u64; 3],
    /// Microseconds of a layer.
    pub(crate) layer_us: u64,
    /// Index of a layer that it refuses, and those before it.
    pub(crate) refuses: Option<usize>,
    /// What compiling more than so many bytes ends in, as long as there are errors.
    pub(crate) fails: Mutex<Vec<Error>>,
    pub(crate) compiled: AtomicUsize,
}

impl FakeBackend {
    pub(crate) fn gpu() -> Self {
        FakeBackend {
            name: "gpu",
            adapter: Some(Adapter {
                id: "vulkan:1:2".into(),
                name: "Fake 9000".into(),
                api: "Vulkan".into(),
                kind: "DiscreteGpu".into(),
                driver: "fake 1".into(),
                max_binding: 1 << 30,
                max_buffer: 1 << 30,
                software: false,
            }),
            bytes: [100, 50, 30],
            layer_us: 0,
            refuses: None,
            fails: Mutex::default(),
            compiled: AtomicUsize::new(0),
        }
    }

    pub(crate) fn cpu(layer_us: u64) -> Self {
        FakeBackend { name: "cpu", adapter: None, bytes: [0; 3], layer_us, ..FakeBackend::gpu() }
    }
}

impl Backend for FakeBackend {
    fn name(&self) -> &str {
        self.name
    }

    fn supports(&self, spec: &BlockSpec) -> Result<Vec<KernelId>, String> {
        match (spec, self.refuses) {
            (BlockSpec::Layer(layer), Some(last)) if layer.index <= last => Err("too odd".to_owned()),
            _ => Ok(vec![KernelId::new("all", self.name)]),
        }
    }

    fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    fn batch(&self) -> usize {
        if self.adapter.is_some() { 2048 } else { 512 }
    }

    fn stores(&self, kv: KvType) -> bool {
        self.adapter.is_none() || kv != KvType::Q8
    }

    /// A byte of a layer's cache for each 16 positions.
    fn footprint(&self, _model: &Model, blocks: &[BlockSpec], limits: &Limits) -> Footprint {
        let [layer, head, embed] = self.bytes;
        let of = |block: &BlockSpec| match block {
            BlockSpec::Embed(_) => embed,
            BlockSpec::Layer(_) => layer + if layer > 0 { limits.context as u64 / 16 } else { 0 },
            BlockSpec::Head(_) => head,
        };
        let kv = if self.adapter.is_none() { blocks.len() as u64 * limits.context as u64 } else { 0 };
        Footprint { kv, scratch: 0, device: blocks.iter().map(of).sum() }
    }

    fn compile(
        &self,
        model: &Arc<Model>,
        blocks: &[Placed<'_>],
        limits: &Limits,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Segment>, Error> {
        self.compiled.fetch_add(1, Ordering::Relaxed);
        if let Some(error) = self.fails.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Err(error);
        }
        progress(1, 1);
        let vocab_size = model.architecture().vocab_size;
        let n_layers = blocks.iter().filter(|(block, _)| matches!(block, BlockSpec::Layer(_))).count();
        Ok(Box::new(Slow {
            inner: Fake::new(vocab_size, limits.n_slots, false, Faults::default()),
            time: std::time::Duration::from_micros(100 + self.layer_us * n_layers as u64),
        }))
    }
}

/// Takes its time.
struct Slow {
    inner: Fake,
    time: std::time::Duration,
}

impl Segment for Slow {
    fn forward(&mut self, step: &Step<'_>, io: &mut Activations) -> Result<(), Error> {
        std::thread::sleep(self.time);
        self.inner.forward(step, io)
    }

    fn head_again(&mut self, _top: Option<usize>, _io: &mut Activations) -> Result<(), Error> {
        Ok(())
    }

    fn rewind(&mut self, slot: usize, len: usize) -> bool {
        self.inner.rewind(slot, len)
    }
}
