"""Adapters between inference engines and the fabric."""
