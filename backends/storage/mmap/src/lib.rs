//! storage-mmap.
