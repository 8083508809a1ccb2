"""Rival ways to shrink a KV cache, from their papers: the arms that a benchmark compares."""
