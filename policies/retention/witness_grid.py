"""Choose the grid of a witness: keys where claims meet or turn, queries past every end."""

from __future__ import annotations

from math import lcm
from typing import Final, TypeAlias

from policies.retention.claims import Claim, Until
from policies.retention.clauses import Bounds
from policies.retention.forms import at, common_period
from policies.retention.ir import MAX_POSITION
from policies.retention.witness import Witness

Ranges: TypeAlias = tuple[tuple[int, int], ...]

WIDE: Final = 64
NARROW: Final = 2
"""Most keys tried from a place where a claim starts, ends or turns."""

WHOLE: Final = 256
"""An axis whose structure ends below this is covered from 0 without gaps."""

MAX_KEYS: Final = 512
MAX_GRID: Final = 2**22
"""Most pairs of a grid that is chosen here."""

MAX_RECURRENCE: Final = 4096


def build_witness(
    claims: tuple[Claim, ...], alternatives: list[Bounds], *, is_exact: bool
) -> Witness:
    """Witness for ``claims`` on a grid that shows the structure, if one of that size can."""
    period = lcm(*(common_period(atom.form) for b in alternatives for atom in b.strides))
    recurrence = period if period <= MAX_RECURRENCE else 0
    for width in (WIDE, NARROW):  # fewer keys where the queries would not reach
        key_ranges = _key_ranges(claims, width)
        num_keys = sum(stop - start for start, stop in key_ranges)
        last = max(key_ranges[-1][1], _last_event(claims, alternatives, key_ranges))
        wanted = last + 2 * max(1, recurrence) + 8
        if wanted * num_keys <= MAX_GRID:
            break
    num_queries = min(wanted, MAX_GRID // num_keys)
    if num_queries < wanted:
        recurrence = 0  # late readers may lie outside the grid
    return Witness(claims, key_ranges, num_queries, recurrence, is_exact)


def _last_event(claims: tuple[Claim, ...], alternatives: list[Bounds], key_ranges: Ranges) -> int:
    """Last query at which a key of the ranges is claimed to be read, or begins to be."""
    last = max(_last_within(claim, *pair) for claim in claims for pair in key_ranges)
    edges = [key for start, stop in key_ranges for key in (start, stop - 1)]
    lows = [low for bounds in alternatives if not bounds.highs for low in bounds.lows]
    return min(MAX_POSITION, max([last, *(at(low, 0, key) for low in lows for key in edges)]))


def _last_within(claim: Claim, start: int, stop: int) -> int:
    """Greatest last reader, of those there are, among the claim's keys in a range."""
    part = claim.keys.clip(start, stop)
    if part is None or not isinstance(claim.rule, Until):
        return 0
    ends = (part.first_from(start), part.last_before(stop))  # it rises, or falls
    return max(claim.rule.last_read(key) for key in ends if key is not None)


def _key_ranges(claims: tuple[Claim, ...], widest: int) -> Ranges:
    """Ranges around the keys where a claim starts, ends or turns."""
    points = {0}
    width = 8
    for claim in claims:
        keys, turns = claim.keys, [claim.keys.modulus]
        if isinstance(claim.rule, Until):
            turns.append(claim.rule.step)
        points |= {keys.start, keys.start if keys.stop is None else keys.stop}
        points |= {keys.start + 2 * turn for turn in turns}
        points |= {turn for turn in turns if turn > 1}
        width = max(width, *(2 * turn + 8 for turn in turns))
    width = min(width, widest)
    if max(points) + width <= WHOLE and widest > NARROW:
        return ((0, max(points) + width),)
    ranges: list[tuple[int, int]] = []
    for point in sorted(points)[: MAX_KEYS // widest]:
        start = max(point - 4, ranges[-1][1] if ranges else 0)
        stop = min(point + width, MAX_POSITION)
        if start < stop:
            ranges.append((start, stop))
    return tuple(ranges)
