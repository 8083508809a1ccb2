"""Rows that a lossy codec stores as they are: sinks, and tokens it would spoil.

Sections, left out where there is no such row: ``exact.rows`` (u32 little-endian row numbers
within the chunk, rising), ``k.exact`` and ``v.exact`` (the rows, ``(T', L, H, D)`` in the
blob's dtype).  Keys are kept rotated, as the engine holds them, so that they come back bit
for bit.  Nothing here is compressed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from codec.blob import Blob, BlobHeader, Section
from codec.codec import TORCH_DTYPES
from codec.errors import CorruptBlobError

SECTIONS = ("exact.rows", "k.exact", "v.exact")
"""Names of the sections, in their order."""


def exact_sections(is_exact_T: Tensor, keys: Tensor, values: Tensor) -> Iterator[Section]:
    """Sections of the rows that are set in ``is_exact_T``."""
    if not is_exact_T.any():
        return
    rows = is_exact_T.nonzero().flatten().numpy().astype("<u4").tobytes()
    yield Section("exact.rows", rows, len(rows))
    for name, array in (("k.exact", keys), ("v.exact", values)):
        data = array[is_exact_T].contiguous().view(torch.uint8).numpy().tobytes()
        yield Section(name, data, len(data))


def read_exact_rows(blob: Blob) -> Tensor:
    """Which rows are exact: shape ``(T,)``, bool.

    Raises
    ------
    CorruptBlobError
        If the numbers do not rise strictly or lie outside the chunk.
    """
    is_exact = torch.zeros(blob.header.num_tokens, dtype=torch.bool)
    section = blob.sections.get("exact.rows")
    if section is None:
        return is_exact
    if not section.data or len(section.data) % 4:
        raise CorruptBlobError("section exact.rows", f"has {len(section.data)} bytes")
    rows = np.frombuffer(section.data, dtype="<u4").astype(np.int64)
    if rows[-1] >= blob.header.num_tokens or (np.diff(rows) < 1).any():
        raise CorruptBlobError("section exact.rows", "rows must rise and lie within the chunk")
    is_exact[torch.from_numpy(rows)] = True
    return is_exact


def exact_values(blob: Blob, kind: str, num_rows: int, layers: range) -> Tensor:
    """The exact rows' elements for ``layers`` (numbered within the stage).

    Raises
    ------
    CorruptBlobError
        If the section is missing or not of that many rows.
    """
    header = blob.header
    head_dim = header.key_head_dim if kind == "k" else header.value_head_dim
    shape = (num_rows, header.num_layers, header.num_heads, head_dim)
    dtype = TORCH_DTYPES[header.dtype]
    if not num_rows:
        return torch.zeros((0, len(layers), *shape[2:]), dtype=dtype)
    section = blob.section(f"{kind}.exact")
    wanted_bytes = int(np.prod(shape)) * dtype.itemsize
    if len(section.data) != wanted_bytes:
        raise CorruptBlobError(
            f"section {section.name}", f"need {wanted_bytes} bytes, got {len(section.data)}"
        )
    elements = torch.frombuffer(bytearray(section.data), dtype=dtype).view(shape)
    if not all_finite(elements):
        raise CorruptBlobError(f"section {section.name}", "an element is not finite")
    return elements[:, layers.start : layers.stop]


def checked_rows(kind: str, array: Tensor, header: BlobHeader, head_dim: int) -> Tensor:
    """Keys or values that may be stored, on the CPU.

    Raises
    ------
    ValueError
        If they are not as the header says, or an element is not finite: such a cache must
        not be kept.
    """
    shape = (header.num_tokens, header.num_layers, header.num_heads, head_dim)
    if tuple(array.shape) != shape:
        raise ValueError(f"{kind} must have shape {shape}, got {tuple(array.shape)}")
    if array.dtype != TORCH_DTYPES[header.dtype]:
        raise ValueError(f"{kind} must be {header.dtype}, got {array.dtype}")
    if not all_finite(array):
        raise ValueError(f"{kind} must be finite to be stored")
    return array.detach().cpu()


def all_finite(array: Tensor) -> bool:
    """Whether every element is a finite number.

    One pass: the extremes are not finite if one element is infinite, or is not a number.
    """
    if not array.numel():
        return True
    low, high = torch.aminmax(array)
    return bool(torch.isfinite(low) and torch.isfinite(high))


def to_dtype(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Coded rows in the blob's dtype: what was stored was within its range, and stays there."""
    limit = torch.finfo(dtype).max
    return rows.clamp(-limit, limit).to(dtype)
