//! cache-lru.
