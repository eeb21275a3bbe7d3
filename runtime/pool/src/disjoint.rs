//! What a run can be cut into: slices in pieces, and numbers alone.

use std::{marker::PhantomData, ops::Range, slice};

mod sealed {
    pub trait Sealed {}
}

/// Something that can be cut into pieces that do not overlap. Only this crate implements it.
///
/// # Safety
///
/// Runs taken from disjoint ranges of pieces must not overlap in memory, whichever threads hold them, and must stay
/// valid for as long as the value's own borrow.
pub unsafe trait Disjoint: Sync + sealed::Sealed {
    /// Consecutive pieces.
    type Run;

    /// Number of pieces. Always the same for one value.
    ///
    /// # Panics
    ///
    /// If the members of a tuple have different numbers of pieces.
    fn pieces(&self) -> usize;

    /// Takes a range of pieces.
    ///
    /// # Safety
    ///
    /// `pieces` is ascending and within `0..self.pieces()`, and overlaps no other range that is taken from this value.
    unsafe fn take(&self, pieces: Range<usize>) -> Self::Run;
}

/// A `&mut [T]` that several threads cut up.
struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: through a shared reference only `cut` reaches the elements. It hands every element to at most one thread,
// which then has it as `&mut T`: that is sending it.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: it is a `&mut [T]`.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    ///
    /// `range` is ascending, ends at `len` at most, and overlaps no other range that is cut from this slice.
    unsafe fn cut(&self, range: Range<usize>) -> &'a mut [T] {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice, which is borrowed for 'a, and no other reference has these elements: the caller
        // said both.
        unsafe { slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}

/// A slice in pieces of the same number of elements; the last may be shorter. A run is one slice.
pub struct Chunks<'a, T> {
    slice: Shared<'a, T>,
    piece: usize,
}

impl<'a, T> Chunks<'a, T> {
    /// Pieces of `piece` elements.
    ///
    /// # Panics
    ///
    /// If `piece` is 0.
    pub fn new(slice: &'a mut [T], piece: usize) -> Self {
        assert!(piece > 0, "a piece has at least one element");
        Self { slice: Shared::new(slice), piece }
    }
}

impl<T> sealed::Sealed for Chunks<'_, T> {}

// SAFETY: ascending disjoint ranges of pieces times `piece`, cut at the end, are such ranges of elements.
unsafe impl<'a, T: Send> Disjoint for Chunks<'a, T> {
    type Run = &'a mut [T];

    fn pieces(&self) -> usize {
        self.slice.len.div_ceil(self.piece)
    }

    unsafe fn take(&self, pieces: Range<usize>) -> &'a mut [T] {
        let end = pieces.end.saturating_mul(self.piece).min(self.slice.len);
        // SAFETY: a piece before `pieces()` starts inside the slice, so start <= end <= len; disjoint as above.
        unsafe { self.slice.cut(pieces.start * self.piece..end) }
    }
}

/// A slice in pieces of any size: piece `i` is `slice[bounds[i] * unit..bounds[i + 1] * unit]`. A run is one slice, the
/// elements of all its pieces.
pub struct At<'a, T> {
    slice: Shared<'a, T>,
    bounds: &'a [u32],
    unit: usize,
}

impl<'a, T> At<'a, T> {
    /// `bounds.len() - 1` pieces; `unit` is in elements. What is before the first bound or after the last is in none.
    ///
    /// # Panics
    ///
    /// If `bounds` is empty or not ascending (equal neighbours are an empty piece), or ends beyond the slice.
    pub fn new(slice: &'a mut [T], bounds: &'a [u32], unit: usize) -> Self {
        let last = *bounds.last().expect("bounds of n pieces are n + 1 numbers");
        assert!(bounds.is_sorted(), "bounds must ascend");
        let end = (last as usize).checked_mul(unit);
        assert!(
            end.is_some_and(|end| end <= slice.len()),
            "bounds end at {last} units of {unit}, the slice at {} elements",
            slice.len()
        );
        Self { slice: Shared::new(slice), bounds, unit }
    }
}

impl<T> sealed::Sealed for At<'_, T> {}

// SAFETY: `new` has seen that bounds ascend, so ascending disjoint ranges of pieces are such ranges of elements.
unsafe impl<'a, T: Send> Disjoint for At<'a, T> {
    type Run = &'a mut [T];

    fn pieces(&self) -> usize {
        self.bounds.len() - 1
    }

    unsafe fn take(&self, pieces: Range<usize>) -> &'a mut [T] {
        let at = |piece: usize| self.bounds[piece] as usize * self.unit;
        // SAFETY: `new` has seen that the largest bound is within the slice; disjoint as above.
        unsafe { self.slice.cut(at(pieces.start)..at(pieces.end)) }
    }
}

/// So many pieces of nothing, for work that writes only to its scratch. A run is their numbers.
pub struct Tasks(pub usize);

impl sealed::Sealed for Tasks {}

// SAFETY: numbers are no memory.
unsafe impl Disjoint for Tasks {
    type Run = Range<usize>;

    fn pieces(&self) -> usize {
        self.0
    }

    unsafe fn take(&self, pieces: Range<usize>) -> Range<usize> {
        pieces
    }
}

macro_rules! tuple {
    ($($member:ident $at:tt)+) => {
        impl<$($member: Disjoint),+> sealed::Sealed for ($($member,)+) {}

        // SAFETY: every member is disjoint, and members do not overlap: each has its own borrow.
        unsafe impl<$($member: Disjoint),+> Disjoint for ($($member,)+) {
            type Run = ($($member::Run,)+);

            fn pieces(&self) -> usize {
                let pieces = self.0.pieces();
                $(assert_eq!(pieces, self.$at.pieces(), "member {} has other pieces than member 0", $at);)+
                pieces
            }

            unsafe fn take(&self, pieces: Range<usize>) -> Self::Run {
                // SAFETY: `pieces` has seen that all members have the same number; the rest is the caller's promise.
                unsafe { ($(self.$at.take(pieces.clone()),)+) }
            }
        }
    };
}

tuple!(A 0 B 1);
tuple!(A 0 B 1 C 2);
tuple!(A 0 B 1 C 2 D 3);
tuple!(A 0 B 1 C 2 D 3 E 4);
