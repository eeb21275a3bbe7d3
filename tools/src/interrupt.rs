//! Ctrl-C as a flag that the libraries look at between steps.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};

use crate::failure::INTERRUPTED;

/// Set by Ctrl-C. A request to terminate ends the program as it does any other.
pub(crate) static CANCEL: AtomicBool = AtomicBool::new(false);

/// From here on Ctrl-C sets [`CANCEL`]; pressed again before anyone has looked, it ends the program.
pub(crate) fn listen() -> Result<()> {
    static LISTENING: OnceLock<Result<(), String>> = OnceLock::new();
    LISTENING
        .get_or_init(|| {
            ctrlc::set_handler(|| {
                if CANCEL.swap(true, Ordering::SeqCst) {
                    std::process::exit(INTERRUPTED.into());
                }
            })
            .map_err(|error| error.to_string())
        })
        .clone()
        .map_err(anyhow::Error::msg)
        .context("cannot listen for Ctrl-C")
}

/// Forgets an earlier Ctrl-C.
pub(crate) fn reset() {
    CANCEL.store(false, Ordering::SeqCst);
}
