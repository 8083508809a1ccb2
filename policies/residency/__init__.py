"""Where every prefix lives: chunk keys, events, the index and its answers."""
