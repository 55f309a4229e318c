//! Integration tests of the crate: damaged files, and the traps that others fell into.

#![allow(missing_docs)] // a test binary

mod allocations;
mod architectures;
mod blocks;
mod convert;
mod library;
mod malformed;
mod models;
mod mutated;
mod overrides;
mod pickle;
mod pieces;
mod prepared;
mod safetensors;
mod sample;
mod split;
mod traps;
