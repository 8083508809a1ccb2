"""State and I/O of one process: plain classes, and the Ray actors that wrap them."""
