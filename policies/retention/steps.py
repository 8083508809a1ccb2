"""What one step of a request does to the pages of a class: which it writes, adds and ends.

A step takes a request from boundary ``before`` to ``after``: it stores the tokens
``before .. after-1`` and runs their queries.  Pages that it starts are *fresh*; the partly
filled page that it goes on with is its *tail*.  Recurrent state is one page, ordinal 0,
that every step writes; an encoder's output is written whole by the first step.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.retention.plan import PlannedClass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Ordinals of one class that a step concerns."""

    tail: int | None
    """The page with room left that the step writes into; nothing if there is none."""

    fresh: range
    """Pages that the step begins."""

    live_from: int
    """After the step, pages before this one are dead."""


def step_shape(found: PlannedClass, before: int, after: int) -> StepShape:
    """What a step from ``before`` to ``after`` does to the pages of ``found``.

    Raises
    ------
    ValueError
        Unless ``0 <= before < after``.
    """
    if not 0 <= before < after:
        raise ValueError(f"need 0 <= before < after, got {before} and {after}")
    if found.kind != "attention":
        return _fixed_shape(found, is_first=before == 0)
    start, stop = found.pages_at(before)
    _, stop_after = found.pages_at(after)
    has_tail = start < stop and _writes(found, stop - 1, before, after)
    return StepShape(
        tail=stop - 1 if has_tail else None,
        fresh=range(stop, max(stop, stop_after)),
        live_from=found.continuation(after)[0],
    )


def stop_ordinal(found: PlannedClass, boundary: int) -> int:
    """One past the last page of a head at ``boundary``."""
    return min(boundary, 1) if found.kind == "recurrent" else found.pages_at(boundary)[1]


def _writes(found: PlannedClass, ordinal: int, before: int, after: int) -> bool:
    """Whether a token in ``[before, after)`` goes to the page."""
    _, stop = found.tokens_of(ordinal)
    if not found.region.is_ranked:
        return before < stop
    keys = found.region.claims[0].keys
    return keys.between(before, min(after, stop)) > 0


def _fixed_shape(found: PlannedClass, *, is_first: bool) -> StepShape:
    pages = 1 if found.kind == "recurrent" else found.region.stop_page or 0
    is_kept = found.kind == "recurrent" and not is_first
    return StepShape(
        tail=0 if is_kept else None,
        fresh=range(pages) if is_first else range(pages, pages),
        live_from=0,
    )
