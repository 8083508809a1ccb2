"""The sections of the entropy profile's blobs that are not symbol streams.

Every reader raises `CorruptBlobError` if a section is missing, of another size, or holds
what no writer writes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from codec.blob import Blob, Section
from codec.errors import CorruptBlobError
from codec.step_quantizer import Ints
from codec.symbol_classes import MAX_SHIFT


def stored(name: str, data: bytes) -> Section:
    """A section of bytes that are stored as they are."""
    return Section(name, data, len(data))


def check_bytes(found: int, wanted: int, name: str) -> None:
    """Refuse a section of another size."""
    if found != wanted:
        raise CorruptBlobError(f"section {name}", f"need {wanted} bytes, got {found}")


def read_shifts(blob: Blob, num_rows: int) -> Ints:
    """The shift of each coded token, shape ``(T',)``."""
    if not num_rows:
        return np.zeros(0, np.int32)
    section = blob.section("shift")
    check_bytes(len(section.data), num_rows, "shift")
    shift_T = np.frombuffer(section.data, np.int8).astype(np.int32)
    if np.abs(shift_T).max() > MAX_SHIFT:
        raise CorruptBlobError("section shift", f"a shift is over {MAX_SHIFT}")
    return shift_T


def read_planes(blob: Blob, name: str, num_planes: int, num_rows: int) -> NDArray[np.uint8]:
    """Bit planes of a band: shape ``(P, T')``, 0 or 1."""
    if not num_planes:
        return np.zeros((0, num_rows), np.uint8)
    data = blob.section(name).data
    check_bytes(len(data), num_planes * -(-num_rows // 8), name)
    packed = np.frombuffer(data, np.uint8).reshape(num_planes, -1)
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    if bits[:, num_rows:].any():
        raise CorruptBlobError(f"section {name}", "padding bits are set")
    return np.ascontiguousarray(bits[:, :num_rows])


def read_escapes(blob: Blob, name: str) -> Ints:
    """Numbers of a band that no symbol stands for."""
    section = blob.sections.get(name)
    if section is None:
        return np.zeros(0, np.int32)
    if not section.data or len(section.data) % 4:
        raise CorruptBlobError(f"section {name}", f"has {len(section.data)} bytes")
    return np.frombuffer(section.data, "<i4").astype(np.int32)
