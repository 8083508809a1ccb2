"""Tensors over an arena's memory, and typed views of them.

A row holds one token of one or more layers; a layer's keys come first, its values follow.
Views share memory with the rows and keep alive whatever these keep alive.
"""

from __future__ import annotations

import weakref

import torch

from actors.arena.driver import Driver
from policies.retention.program import KvShape


class _Hold:
    """Dies with the last tensor made from one that a `Viewer` gave out."""

    __slots__ = ("__weakref__", "keeps")

    def __init__(self, keeps: object) -> None:
        self.keeps = keeps


class Viewer:
    """Makes tensors over a driver's memory, and knows how many of them live."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        #: One for each tensor that was given out and of which anything is left.
        self._holds: weakref.WeakSet[_Hold] = weakref.WeakSet()

    @property
    def num_views(self) -> int:
        """Tensors given out of which anything is left."""
        return len(self._holds)

    def rows(self, va: int, num_rows: int, row_bytes: int, owner: object) -> torch.Tensor:
        """Shape ``(num_rows, row_bytes)``, uint8, without a copy; keeps ``owner`` alive."""
        hold = _Hold(owner)
        flat = self._driver.tensor(va, num_rows * row_bytes, hold)
        self._holds.add(hold)
        return flat.view(num_rows, row_bytes)


def keys_values(
    rows: torch.Tensor, shape: KvShape, at: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the layer that begins at byte ``at`` of each row, without a copy.

    Parameters
    ----------
    rows
        Shape ``(tokens, row_bytes)``, uint8, each row in one piece and whole elements.

    Returns
    -------
    keys, values
        Shapes ``(tokens, num_kv_heads, key_dim)`` and ``(tokens, num_kv_heads, value_dim)``.

    Raises
    ------
    ValueError
        If the layer does not lie within a row, or not on an element.
    """
    element: torch.dtype = getattr(torch, shape.dtype)
    stop = at + shape.bytes_per_token_layer
    if not 0 <= at < stop <= rows.shape[1] or at % element.itemsize:
        raise ValueError(f"bytes [{at}, {stop}) are not a layer's in rows of {rows.shape[1]}")
    tokens = rows.view(element)
    count, stride = len(rows), tokens.stride(0)
    start = tokens.storage_offset() + at // element.itemsize
    heads, key_dim, value_dim = shape.num_kv_heads, shape.key_dim, shape.value_dim
    # One call each, where slicing and splitting would be three: this runs once per layer.
    keys = tokens.as_strided((count, heads, key_dim), (stride, key_dim, 1), start)
    start += heads * key_dim
    values = tokens.as_strided((count, heads, value_dim), (stride, value_dim, 1), start)
    return keys, values
