"""Lossless byte coders behind one protocol."""
