//! The contracts of Thermocline: four traits, the descriptors they speak, and the schemas of plan and config.
//!
//! [`ComputeBackend`] runs operations on a device, [`StorageTier`] brings bytes of files into memory, [`CachePolicy`]
//! decides what stays there, [`Planner`] decides where each neuron cluster lives. Implementations are plug-ins: this
//! crate knows none of them, no file format and no plug-in mechanism.

#![deny(unsafe_code)]

pub mod backend;
pub mod cache;
pub mod cluster;
pub mod config;
pub mod dtype;
pub mod error;
pub mod host;
pub mod module;
pub mod operation;
pub mod options;
pub mod planner;
pub mod storage;
pub mod tensor;

pub use backend::ComputeBackend;
pub use cache::CachePolicy;
pub use cluster::{ClusterRange, ClusterSet};
pub use dtype::DType;
pub use error::{Error, HandleKind, Reached, Result};
pub use host::{HostMemory, HostSpan};
pub use planner::Planner;
pub use storage::StorageTier;
pub use tensor::TensorType;
