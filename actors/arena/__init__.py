"""The memory of a worker: one reserved range, extents committed on demand."""
