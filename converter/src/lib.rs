//! converter
