"""Tensors to bytes and back: geometry, rotary positions, calibration, quantizer, blobs."""
