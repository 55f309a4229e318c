//! engine-plugin.
