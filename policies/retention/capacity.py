"""How many bytes a plan needs at a boundary, and how many requests a budget admits.

Two different savings, never to be mixed: keeping *fewer tokens* (what lifetimes allow; the
kept ones are bit for bit what they were) and storing them in *fewer bytes* (what a codec
does; a stored form cannot be read by attention until it is decoded).  Only the second is
compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from codec.errors import RetentionError
from policies.retention.plan import Plan, PlannedClass
from policies.retention.program import MAX_COUNT, check_count
from policies.retention.synthesis import Append, LastRead


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassUsage:
    """One class at one boundary, for one request."""

    name: str
    kind: str
    num_layers: int
    address: str
    dies: str
    live_tokens: int
    held_tokens: int
    live_bytes: int
    held_bytes: int
    reserved_bytes: int
    """Bytes of the cells that must be set aside to get there: `held_bytes` at its peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One request at one boundary."""

    boundary: int
    classes: tuple[ClassUsage, ...]
    all_full_bytes: int

    @property
    def live_bytes(self) -> int:
        """Bytes that can still be read."""
        return sum(found.live_bytes for found in self.classes)

    @property
    def held_bytes(self) -> int:
        """Bytes of all cells in use."""
        return sum(found.held_bytes for found in self.classes)

    @property
    def reserved_bytes(self) -> int:
        """Bytes to set aside for a request of this length."""
        return sum(found.reserved_bytes for found in self.classes)

    @property
    def kept_ratio(self) -> float:
        """All-full bytes over held bytes: fewer tokens kept, not compression."""
        return self.all_full_bytes / self.held_bytes if self.held_bytes else 1.0


def usage_at(plan: Plan, boundary: int) -> Usage:
    """What one request uses at ``boundary``."""
    if not 0 <= boundary <= MAX_COUNT:
        raise RetentionError("bad-boundary", f"boundary={boundary}", f"need 0..{MAX_COUNT}")
    return Usage(
        boundary=boundary,
        classes=tuple(_usage(found, boundary) for found in plan.classes),
        all_full_bytes=plan.all_full_bytes(boundary),
    )


def _usage(found: PlannedClass, boundary: int) -> ClassUsage:
    return ClassUsage(
        name=found.name,
        kind=found.kind,
        num_layers=len(found.layers),
        address=str(found.address),
        dies=str(found.retirement),
        live_tokens=found.live_tokens(boundary),
        held_tokens=found.held_tokens(boundary),
        live_bytes=found.live_bytes(boundary),
        held_bytes=found.held_bytes(boundary),
        reserved_bytes=reserved_pages(found, boundary) * found.page_bytes,
    )


def reserved_pages(found: PlannedClass, boundary: int) -> int:
    """Cells of one class that a request needs on its way to ``boundary``."""
    start, stop = found.pages_at(boundary)
    cells = found.address.cells
    if cells is not None:
        return min(stop - start, cells)
    grows_only = isinstance(found.address, Append) and isinstance(found.retirement, LastRead)
    return found.held_pages(boundary) if grows_only else stop - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How many requests of one length a budget carries at a time."""

    per_request_bytes: int
    admitted: int
    """Requests that run together; 0 if not even one fits."""

    waves: int | None
    """Rounds until all have run; nothing if none fits."""

    used_bytes: int


def admit(per_request_bytes: int, *, budget_bytes: int, requests: int) -> Admission:
    """Fill ``budget_bytes`` with up to ``requests`` requests of equal size."""
    check_count("per_request_bytes", per_request_bytes, "bad-budget")
    check_count("requests", requests, "bad-budget")
    if type(budget_bytes) is not int or not 0 <= budget_bytes <= 2**60:
        raise RetentionError("bad-budget", f"budget_bytes={budget_bytes!r}", "need 0..2**60")
    admitted = min(budget_bytes // per_request_bytes, requests)
    return Admission(
        per_request_bytes=per_request_bytes,
        admitted=admitted,
        waves=-(-requests // admitted) if admitted else None,
        used_bytes=admitted * per_request_bytes,
    )


class ClassPool(NamedTuple):
    """The share of a budget that one class takes."""

    name: str
    pages_per_request: int
    pool_tokens: int
    pool_bytes: int


def pools(plan: Plan, boundary: int, admitted: int) -> tuple[ClassPool, ...]:
    """One pool per class that carries ``admitted`` requests up to ``boundary``."""
    found = []
    for planned in plan.classes:
        pages = reserved_pages(planned, boundary)
        tokens = admitted * pages * planned.page_tokens
        found.append(ClassPool(planned.name, pages, tokens, admitted * pages * planned.page_bytes))
    return tuple(found)


def stored_bytes(usage: Usage, codec_target: float) -> int:
    """Bytes of the live state in a codec's stored form.

    Keys and values shrink by ``codec_target``; recurrent state is stored as it is.

    Raises
    ------
    RetentionError
        If ``codec_target`` is below 1.
    """
    if not 1 <= codec_target < float("inf"):
        raise RetentionError("bad-target", f"codec_target={codec_target}", "need at least 1")
    target = Fraction(codec_target)
    return sum(
        found.live_bytes if found.kind == "recurrent" else ceil(found.live_bytes / target)
        for found in usage.classes
    )


class StripeSaving(NamedTuple):
    """What a range of heads with a period of its own saves over the layer's largest."""

    normalised_bytes: int
    widest_bytes: int
    saved_bytes: int
    saved_milli_percent: int
    amplification_milli: int


def stripe_saving(plan: Plan, boundary: int) -> StripeSaving:
    """Compare head ranges of their own periods with giving every head the layer's largest.

    Raises
    ------
    RetentionError
        ``not-striped`` unless every class has heads and a bound, the ranges of each layer
        run from head 0 without gaps, and a layer's heads are of one size.
    """
    by_layer: dict[int, list[PlannedClass]] = {}
    for found in plan.classes:
        if found.heads is None or found.address.cells is None:
            raise RetentionError("not-striped", found.name, "need heads and a bound")
        for layer in found.layers:
            by_layer.setdefault(layer, []).append(found)
    normal = widest = 0
    for layer, stripes in by_layer.items():
        end = 0
        ranges = [(found.heads, found) for found in stripes if found.heads is not None]
        first_heads, first = ranges[0]
        most = max(reserved_pages(found, boundary) for found in stripes)
        for heads, found in sorted(ranges, key=lambda pair: pair[0].start):
            if heads.start != end:
                raise RetentionError("not-striped", f"layer {layer}, head {end}", "heads missing")
            if found.width_bytes * first_heads.num_heads != first.width_bytes * heads.num_heads:
                raise RetentionError("not-striped", f"layer {layer}", "heads of two sizes")
            end = heads.stop
            page_bytes = found.page_tokens * found.width_bytes
            normal += reserved_pages(found, boundary) * page_bytes
            widest += most * page_bytes
    saved = widest - normal
    if not normal:
        raise RetentionError("not-striped", f"boundary {boundary}", "nothing is held yet")
    return StripeSaving(normal, widest, saved, saved * 100_000 // widest, widest * 1000 // normal)
