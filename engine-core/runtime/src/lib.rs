//! engine-runtime.
