//! engine-loader.
