//! The operations, each a straight loop over the formula in `engine_core::operation::OperationKind`.

pub(crate) mod attention;
pub(crate) mod experts;
pub(crate) mod ffn;
pub(crate) mod functions;
pub(crate) mod linear;
pub(crate) mod norm;
mod planes;
pub(crate) mod pointwise;
pub(crate) mod rope;
