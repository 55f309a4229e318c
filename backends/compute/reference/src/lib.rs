//! compute-reference.
