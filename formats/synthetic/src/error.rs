//! What can be wrong with a shape, and what can fail while a model is written.

use formats::FormatError;

/// Why a model was not made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SyntheticError {
    /// A shape that no model can have.
    #[error("{what} {problem}")]
    Shape {
        /// The number, by its flag's name.
        what: &'static str,
        /// What is wrong with it, and what would do.
        problem: String,
    },
    /// Quantising or writing failed.
    #[error(transparent)]
    Format(#[from] FormatError),
}
