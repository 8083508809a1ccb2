"""Which pages a step needs: fresh ones, and copies of those that it must not write to.

The partly filled last page of a class may be written in place by one request, as long as
nobody else was given it and nobody has it pinned.  Where that fails for one class, the
tails of all classes of the request are copied, so that they go on from one boundary.
Memory that belongs to one tenant at a time (a ring) may force a move: then every live page
of its class is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from actors.arena.table.pages import Page
from actors.arena.table.slots import SlotSource
from policies.retention.plan import PlannedClass
from policies.retention.steps import StepShape, step_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDemand:
    """What a step needs of one class."""

    ordinals: tuple[int, ...]
    """Pages to reserve, rising."""

    sources: Mapping[int, Page]
    """Of those, the ones that start as a copy."""

    tail: Page | None
    """The page that is written in place."""

    is_move: bool
    live_from: int


def demands(
    classes: Sequence[PlannedClass],
    slots: Sequence[SlotSource],
    heads: Sequence[Mapping[int, Page]],
    *,
    request: int,
    before: int,
    after: int,
) -> list[ClassDemand]:
    """What a step from ``before`` to ``after`` needs of each class.

    Parameters
    ----------
    heads
        For each class, a view of the request's pages by ordinal.
    """
    shapes = [step_shape(found, before, after) for found in classes]
    tails = [
        None if shape.tail is None else head[shape.tail]
        for shape, head in zip(shapes, heads, strict=True)
    ]
    must_copy = any(page and not _is_private(page, request) for page in tails)
    return [
        _demand(shape, source, head, tail, request, must_copy=must_copy)
        for shape, source, head, tail in zip(shapes, slots, heads, tails, strict=True)
    ]


def _is_private(page: Page, request: int) -> bool:
    return page.writer == request and not page.num_pins


def _demand(
    shape: StepShape,
    slots: SlotSource,
    head: Mapping[int, Page],
    tail: Page | None,
    request: int,
    *,
    must_copy: bool,
) -> ClassDemand:
    sources = {tail.ordinal: tail} if tail is not None and must_copy else {}
    wanted = (*sources, *shape.fresh)
    is_move = bool(wanted) and slots.needs_move(request, wanted)
    if is_move:
        sources = dict(head)
        wanted = (*sorted(sources), *shape.fresh)
    return ClassDemand(
        ordinals=wanted,
        sources=sources,
        tail=None if tail is None or tail.ordinal in sources else tail,
        is_move=is_move,
        live_from=shape.live_from,
    )


def reserve_all(
    slots: Sequence[SlotSource], demanded: Sequence[ClassDemand], request: int, undo: ExitStack
) -> list[list[int]]:
    """Slots for every demand, class by class; ``undo`` gets what would give them back.

    Raises
    ------
    ArenaFullError
        If there is no room.
    """
    found = []
    for source, demand in zip(slots, demanded, strict=True):
        taken: list[int] = []
        if demand.ordinals:
            taken = source.reserve(request, demand.ordinals, move=demand.is_move)
            undo.callback(source.free, taken)
        found.append(taken)
    return found
