//! storage-ram.
