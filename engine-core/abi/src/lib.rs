//! engine-abi.
