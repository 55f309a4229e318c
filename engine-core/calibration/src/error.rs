//! The crate's error.

/// Why a layer was not calibrated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// Weights that do not encode or decode.
    #[error(transparent)]
    Format(#[from] formats::FormatError),
    /// Numbers that do not belong together.
    #[error("calibrating: {0}")]
    Shape(String),
    /// A tensor of the model that is not there or not as it must be.
    #[error("layer {layer}: tensor `{tensor}` {problem}")]
    Tensor {
        /// The layer.
        layer: usize,
        /// The tensor's name.
        tensor: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// Asked to stop.
    #[error("calibrating was stopped")]
    Cancelled,
}

impl From<ndarray::ShapeError> for CalibrationError {
    fn from(error: ndarray::ShapeError) -> Self {
        CalibrationError::Shape(format!("matrices of other sizes than said ({error})"))
    }
}
