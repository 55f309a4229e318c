//! The CPU as a compute plug-in: kernels chosen at run time, a pinned pool, and the contract of `engine-core` over them.

pub(crate) mod kernels;
