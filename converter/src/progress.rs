//! How a long operation tells its caller where it is. The library itself prints nothing.

/// Receives the progress of [`crate::convert()`] and [`crate::synthesise`]. Calls come from several threads.
pub trait Progress: Sync {
    /// A phase begins: "hash", "cluster", "convert", "verify" or "generate". `total` is in bytes.
    fn phase(&self, name: &'static str, total: u64);
    /// `bytes` more of the current phase are done.
    fn advance(&self, bytes: u64);
    /// Something worth a line of its own, without line end.
    fn message(&self, text: &str);
}

/// Progress that goes nowhere.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiet;

impl Progress for Quiet {
    fn phase(&self, _name: &'static str, _total: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn message(&self, _text: &str) {}
}
