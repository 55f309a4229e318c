//! Integration tests of the crate: damaged files, and the traps that others fell into.

#![allow(missing_docs)] // a test binary

mod allocations;
mod malformed;
mod models;
mod mutated;
mod sample;
mod traps;
