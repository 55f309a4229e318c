//! placement-greedy.
