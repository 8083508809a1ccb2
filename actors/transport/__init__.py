"""Moving components between workers: a protocol without I/O, and UCX under it."""
