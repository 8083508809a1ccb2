"""A ring that is mapped twice in a row, so that every window of it is one piece.

1. Token ``t`` lies in row ``t % R``, and again in row ``t % R + R``: the same memory.  A
   window that runs over the end of the first half goes on into the second.
2. Each half is whole extents, since those are what can be mapped twice, and whole pages.
   For rows of ``b`` bytes, pages of P tokens and extents of G bytes that makes R a multiple
   of ``lcm(P, G / gcd(G, b))``: an odd row width can cost many times the memory.
3. `choose_ring_layout` lessens that.  A row holds both keys and values of a token; it may be
   padded to a power of two, or hold several layers, where that takes less memory.

A token is stored before it is read; nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeed:
    """What a ring must have room for."""

    page_tokens: int
    cells: int
    """Pages that the class needs at once: the period of its address program."""

    num_layers: int
    width_bytes: int
    """Bytes of one token in one layer, keys and values together."""

    window_tokens: int | None = None
    """Tokens that a query reads, its own included; nothing if only the cells bound it."""

    step_tokens: int = 1
    """Most tokens that are stored before the first of them is queried."""

    late_pages: int = 0
    """Pages that nothing will read, but whose cells are not free yet."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value, least = getattr(self, name), 0 if name == "late_pages" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @property
    def seen_tokens(self) -> int:
        """Tokens that the queries of one step read together."""
        if self.window_tokens is None:
            return self.cells * self.page_tokens
        return self.window_tokens + self.step_tokens - 1

    @property
    def least_tokens(self) -> int:
        """Rows without which it does not work.

        A window that begins within a page keeps the whole of it, hence one page more.
        """
        pages = self.cells + self.late_pages
        if self.window_tokens is not None:
            pages = max(pages, 1 + _ceil(self.seen_tokens, self.page_tokens))
        return pages * self.page_tokens

    @property
    def seen_bytes(self) -> int:
        """Bytes of `seen_tokens` in all layers."""
        return self.seen_tokens * self.width_bytes * self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """How a ring lies in memory: in planes, each mapped twice."""

    need: RingNeed
    extent_bytes: int
    rows: int
    """Tokens of the ring."""

    row_bytes: int
    """Bytes from one token to the next."""

    pad_bytes: int
    """Bytes of a row that nothing uses."""

    layers_per_row: int

    @property
    def num_planes(self) -> int:
        """Runs of rows, each with some of the layers."""
        return _ceil(self.need.num_layers, self.layers_per_row)

    @property
    def cells(self) -> int:
        """Pages of the ring."""
        return self.rows // self.need.page_tokens

    @property
    def plane_bytes(self) -> int:
        """Memory of one plane; its addresses are twice as many."""
        return self.rows * self.row_bytes

    @property
    def plane_extents(self) -> int:
        """Extents of one plane's memory."""
        return self.plane_bytes // self.extent_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring."""
        return self.num_planes * self.plane_bytes

    @property
    def over_allocation(self) -> float:
        """Memory of the ring over the bytes that one step's queries read; at least 1."""
        return self.ring_bytes / self.need.seen_bytes

    def locate(self, layer_index: int) -> tuple[int, int]:
        """Plane of the class's ``layer_index``-th layer, and where in its rows it begins."""
        plane, nth = divmod(layer_index, self.layers_per_row)
        return plane, nth * self.need.width_bytes


def ring_rows(*, least_tokens: int, page_tokens: int, row_bytes: int, extent_bytes: int) -> int:
    """Fewest rows that are whole pages and whole extents."""
    step = lcm(page_tokens, extent_bytes // gcd(extent_bytes, row_bytes))
    return _ceil(least_tokens, step) * step


def ring_candidates(
    need: RingNeed, *, extent_bytes: int, max_layers_per_row: int | None = None
) -> Iterator[RingLayout]:
    """Every layout that `choose_ring_layout` considers."""
    most = need.num_layers if max_layers_per_row is None else max_layers_per_row
    for layers in range(1, min(most, need.num_layers) + 1):
        filled = layers * need.width_bytes
        for row_bytes in sorted({filled, 1 << (filled - 1).bit_length()}):
            rows = ring_rows(
                least_tokens=need.least_tokens,
                page_tokens=need.page_tokens,
                row_bytes=row_bytes,
                extent_bytes=extent_bytes,
            )
            yield RingLayout(
                need=need,
                extent_bytes=extent_bytes,
                rows=rows,
                row_bytes=row_bytes,
                pad_bytes=row_bytes - filled,
                layers_per_row=layers,
            )


def choose_ring_layout(
    need: RingNeed, *, extent_bytes: int, max_layers_per_row: int | None = None
) -> RingLayout:
    """The layout of least memory; among equals, fewest layers in a row, then least padding.

    Layers in one row are read with a stride, which costs attention kernels bandwidth:
    ``max_layers_per_row`` of 1 keeps them apart, whatever the memory.
    """
    found = ring_candidates(need, extent_bytes=extent_bytes, max_layers_per_row=max_layers_per_row)
    return min(found, key=lambda it: (it.ring_bytes, it.layers_per_row, it.pad_bytes))


class MirrorRing:
    """The last tokens of a sequence, over ``2 R`` rows of which the halves are one memory.

    Parameters
    ----------
    rows
        Of any type; ``2 R`` of them along ``axis``, one token each.
    axis
        0 for rows of shape ``(2 R, ...)``.
    num_tokens
        Tokens that were appended before, to the same memory.
    """

    __slots__ = ("_axis", "_dtype", "_half", "_one", "_rows", "num_tokens")

    def __init__(self, rows: torch.Tensor, *, axis: int = 0, num_tokens: int = 0) -> None:
        count = rows.shape[axis]
        if count < 2 or count % 2:
            raise ValueError(f"need two halves of rows, got {count} rows")
        self._rows = rows
        self._axis = axis
        self._half = count // 2
        #: Shape and type of one token, for the check that every step makes.
        self._one = rows.narrow(axis, 0, 1).shape
        self._dtype = rows.dtype
        #: Tokens ever appended: the boundary.  Only rises; the last R of them are there.
        self.num_tokens = num_tokens

    @property
    def capacity_tokens(self) -> int:
        """R: the most tokens that can be had back."""
        return self._half

    def heads_first(self) -> MirrorRing:
        """The same ring with tokens on axis 2 of ``(1, heads, tokens, dim)``; go on with that one.

        For rows of shape ``(2 R, heads, dim)``.  The memory is the same, but each of the two
        counts what is appended through it.
        """
        rows = self._rows.transpose(0, 1)[None]
        return MirrorRing(rows, axis=2, num_tokens=self.num_tokens)

    def append(self, new: torch.Tensor) -> None:
        """Store tokens behind the last.

        Parameters
        ----------
        new
            Of the ring's type and shape, with at most R tokens along its axis.
        """
        is_one = new.shape == self._one and new.dtype == self._dtype
        count = 1 if is_one else self._fitting(new)
        self._rows.narrow(self._axis, self.num_tokens % self._half, count).copy_(new)
        self.num_tokens += count

    def _fitting(self, new: torch.Tensor) -> int:
        """How many tokens these are, if they fit."""
        axis, shape = self._axis, new.shape
        count = shape[axis] if len(shape) == len(self._one) else -1
        wanted = (*self._one[:axis], count, *self._one[axis + 1 :])
        if shape != wanted or new.dtype != self._dtype or count > self._half:
            one = tuple(self._one)
            raise ValueError(
                f"need {one} {self._dtype} with 1 to {self._half} along axis {axis}, "
                f"got {tuple(shape)} {new.dtype}"
            )
        return count

    def last(self, count: int) -> torch.Tensor:
        """The last ``count`` tokens, in order, in one piece and without a copy."""
        return self.window(self.num_tokens, count)

    def window(self, boundary: int, count: int) -> torch.Tensor:
        """Tokens ``[boundary - count, boundary)``, in one piece and without a copy.

        It is the ring's memory: later tokens will appear in it.

        Raises
        ------
        ValueError
            If they are not all there.
        """
        start = boundary - count
        oldest = max(0, self.num_tokens - self._half)
        if not oldest <= start <= boundary <= self.num_tokens:
            raise ValueError(
                f"tokens [{start}, {boundary}) are not among [{oldest}, {self.num_tokens})"
            )
        return self._rows.narrow(self._axis, start % self._half, count)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)
