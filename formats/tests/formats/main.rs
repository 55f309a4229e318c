//! Integration tests of the crate: damaged files, and the traps that others fell into.

#![allow(missing_docs)] // a test binary

mod allocations;
mod architectures;
mod blocks;
mod malformed;
mod models;
mod mutated;
mod pieces;
mod safetensors;
mod sample;
mod split;
mod traps;
