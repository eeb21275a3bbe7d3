//! Runs `.samara` models: architecture specs, backends, KV cache, sessions, text and sampling.
//!
//! A model is data: [`Architecture`] is a file's metadata turned into a `Vec<BlockSpec>`, placement
//! gives each block to a [`Backend`], and an [`Engine`] drives the compiled segments one [`Step`] at a
//! time. Text (tokenizer, chat template, stop strings) and sampling sit beside that and never see a
//! weight.
//!
//! Nothing here prints, reads the environment or exits.
#![forbid(unsafe_code)]

mod arch;
mod backend;
mod bandwidth;
mod decoder;
mod engine;
mod error;
#[cfg(test)]
mod fake;
mod flash;
mod generate;
mod kv;
mod model;
mod placement;
mod sample;
mod score;
mod session;
mod spec;
mod text;

pub use crate::{
    arch::Architecture,
    backend::{
        Activations, Adapter, Ahead, Backend, Counters, Draw, Drawn, Footprint, KernelId, Limits, Logits,
        MAX_CANDIDATES, Phase, Placed, Segment, Sequence, Step, Threads, adapters, backends,
    },
    bandwidth::{Bandwidth, Rate},
    decoder::Decoder,
    engine::Engine,
    error::Error,
    flash::{HeadCounts, HeadKind, HeadMode},
    generate::{Finish, Outcome, Request, generate},
    kv::KvType,
    model::{GenerationDefaults, Model},
    placement::{Choices, Device, EngineOptions, MemoryPlan, Placement, Plan, Speed, format_bytes},
    sample::{SampleError, Sampler, SamplerSpec, Token},
    score::{Divergence, HeadAgreement, argmax, divergence, log_prob, score, score_head},
    session::{Prefill, Session},
    spec::{
        AttnSpec, BlockSpec, EmbedSpec, FlashSpec, HeadSpec, LayerSpec, MatrixRef, MoeSpec, NormSpec,
        QkNormSpec, RopeSpec,
    },
    text::{
        ChatTemplate, Content, Event, FunctionCall, Message, Part, Piece, ReasoningSplit, RenderOptions,
        Specials, TextError, TextStream, Tokenizer, ToolCall,
    },
};
