//! What every KV cache has in common: which positions it holds, and which of them a query sees.
//!
//! A growing list for full attention and a ring for a sliding window are the same buffer with
//! `position % capacity`: a full layer's capacity is the whole context and never wraps. A ring holds at least
//! `window - 1 + max_batch` positions, so that a step may write all its keys before its first query reads: the
//! oldest key that query needs is still there. Getting this wrong is easy to miss; a prompt of 511, 512, 513 tokens,
//! then 3, then 600 shows it.

use std::{fmt, str::FromStr};

/// How a backend stores keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub enum KvType {
    /// As computed: 4 bytes an element.
    F32,
    /// Rounded to the upper half of an f32: 2 bytes.
    #[default]
    Bf16,
    /// int8 with an f32 scale for each head and position: 1 byte and a little.
    Q8,
}

impl KvType {
    /// Every type.
    pub const ALL: [KvType; 3] = [KvType::F32, KvType::Bf16, KvType::Q8];

    /// Bytes of one key or value of `head_dim` elements.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            KvType::F32 => size_of::<f32>() * head_dim,
            KvType::Bf16 => size_of::<u16>() * head_dim,
            KvType::Q8 => samara_simd::q8_dims(head_dim) + size_of::<f32>(),
        }
    }

    /// The name `--kv` takes.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::Bf16 => "bf16",
            KvType::Q8 => "q8",
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        KvType::ALL.into_iter().find(|kv| kv.name() == name).ok_or_else(|| {
            format!("unknown type {name:?}; known are {}", KvType::ALL.map(KvType::name).join(", "))
        })
    }
}

/// Positions held by one layer's cache, for all slots.
#[derive(Debug)]
pub(crate) struct Ring {
    capacity: usize,
    window: Option<usize>,
    /// Per slot, one past the highest position written since it was last emptied.
    written: Vec<usize>,
}

impl Ring {
    /// Fewest positions that a layer must hold.
    pub(crate) fn positions(window: Option<usize>, context: usize, max_batch: usize) -> usize {
        window.map_or(context, |window| context.min(window - 1 + max_batch))
    }

    /// `capacity` is at least [`positions`](Self::positions).
    pub(crate) fn new(n_slots: usize, window: Option<usize>, capacity: usize) -> Self {
        Ring { capacity, window, written: vec![0; n_slots] }
    }

    /// Positions held.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Slots.
    pub(crate) fn n_slots(&self) -> usize {
        self.written.len()
    }

    /// Where a position is.
    pub(crate) fn index(&self, position: usize) -> usize {
        position % self.capacity
    }

    /// Notes that a position was stored.
    pub(crate) fn wrote(&mut self, slot: usize, position: usize) {
        self.written[slot] = self.written[slot].max(position + 1);
    }

    /// First key that the query at `position` sees.
    pub(crate) fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Forgets positions from `len` on; `false` when older keys that position `len` needs are gone.
    pub(crate) fn rewind(&mut self, slot: usize, len: usize) -> bool {
        if len == 0 {
            self.written[slot] = 0;
            return true;
        }
        let oldest_held = self.written[slot].saturating_sub(self.capacity);
        self.first_visible(len) >= oldest_held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewind_refuses_what_the_ring_lost() {
        let mut ring = Ring::new(1, Some(4), Ring::positions(Some(4), 100, 3));
        (0..20).for_each(|position| ring.wrote(0, position));
        // Capacity 6: positions 14..20 are held. Position p needs p-3..p.
        for (len, expected) in [(20, true), (17, true), (16, false), (1, false), (0, true)] {
            assert_eq!(ring.rewind(0, len), expected, "len {len}");
            (len.max(14)..20).for_each(|position| ring.wrote(0, position));
            if len == 0 {
                assert!(ring.rewind(0, 0));
            }
        }
    }

    #[test]
    fn types_have_names() {
        for kv in KvType::ALL {
            assert_eq!(kv.to_string().parse(), Ok(kv));
        }
        assert!("f16".parse::<KvType>().is_err_and(|error| error.contains("f32, bf16, q8")));
    }
}
