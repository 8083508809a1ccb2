"""What `kvfabric bench arena` and the benchmarks run."""
