"""Ratios at equal quality, read off measured curves; nothing is read beyond their ends.

Between two neighbouring points the logarithm of the ratio is taken as linear in the
logarithm of the KL.  Where a curve has no two points around a KL, there is no answer: ``None``
and a sentence that says what to measure in addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """What one arm at one setting stored and lost."""

    ratio: float
    kl: float
    """Mean over tokens, nats; positive, as it is read in logarithms."""

    def __post_init__(self) -> None:
        if not (0 < self.ratio < math.inf and 0 < self.kl < math.inf):
            raise ValueError(f"need a finite ratio and KL over 0, got {self.ratio} and {self.kl}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much further one arm's curve compresses at the KL of a point of another's."""

    target: float
    """Of the point that is compared with."""

    kl: float
    ratio: float
    """Of that point."""

    ratio_at_kl: float | None
    """On the curve; ``None`` where it does not reach that KL."""

    why: str
    """What is missing; empty if nothing is."""

    @property
    def gain(self) -> float | None:
        """Ratio over ratio, above 1 where the curve is better."""
        return None if self.ratio_at_kl is None else self.ratio_at_kl / self.ratio


def ratio_at(curve: Iterable[Point], kl: float) -> float | None:
    """Ratio of a curve at ``kl``, between its neighbouring points.

    A curve that measures unevenly may pass one KL several times; the least of the ratios
    counts, so that no luck of one point makes an arm look better than it is everywhere.

    Returns
    -------
    ratio
        ``None`` if no two points that are neighbours in ratio have ``kl`` between them.

    Examples
    --------
    >>> round(ratio_at([Point(8, 0.001), Point(32, 0.1)], 0.01), 9)
    16.0
    >>> ratio_at([Point(8, 0.001), Point(32, 0.1)], 0.2)
    """
    points = sorted(curve)
    found = [point.ratio for point in points if point.kl == kl]
    for one, other in pairwise(points):
        low, high = sorted((one.kl, other.kl))
        if low < kl < high:
            part = math.log(kl / one.kl) / math.log(other.kl / one.kl)
            found.append(one.ratio * (other.ratio / one.ratio) ** part)
    return min(found, default=None)


def gain_at(target: float, point: Point, curve: Sequence[Point]) -> Gain:
    """How ``curve`` compares with a point at that point's own KL."""
    ratio = ratio_at(curve, point.kl)
    return Gain(
        target=target,
        kl=point.kl,
        ratio=point.ratio,
        ratio_at_kl=ratio,
        why="" if ratio is not None else _missing(point.kl, curve),
    )


def smallest(gains: Sequence[Gain]) -> float | None:
    """The least gain; ``None`` unless every one of them was found."""
    found = [one.gain for one in gains]
    known = [gain for gain in found if gain is not None]
    return min(known) if known and len(known) == len(found) else None


def _missing(kl: float, curve: Sequence[Point]) -> str:
    if not curve:
        return "the curve has no point with a KL over 0"
    low, high = min(one.kl for one in curve), max(one.kl for one in curve)
    side, target = ("under", "lower") if kl < low else ("over", "higher")
    end = low if kl < low else high
    return (
        f"a KL of {kl:.3g} is {side} all that was measured ({end:.3g}): measure a {target} target"
    )
