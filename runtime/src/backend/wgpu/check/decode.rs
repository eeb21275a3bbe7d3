//! The kernels of a step of one token, against the CPU in f64.
//!
//! Each function runs one kernel on inputs that the CPU has too, so that a difference is that kernel's own. Sizes come from the
//! caller: those of a model when it is loaded, whatever is awkward in the tests.

mod attention;
mod experts;
mod gemv;
mod head;
mod quantized;
mod select;
#[cfg(test)]
mod tests;

#[cfg(test)]
use self::head::{maxima_of, order_key};
pub(super) use self::{
    attention::{Attention, attention, attention_merge},
    experts::{ExpertBlocks, experts_in, experts_out},
    gemv::{Row, gemv_add, length, norm_gemv, norm_router},
    head::{Affine, embed, head, key_bits},
    select::{Drawing, select_token},
};
