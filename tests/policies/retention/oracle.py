"""Brute force on whole plans: which keys are read late, and whether cells are shared.

Evaluates the relation on a grid of positions and replays the plan's addresses against it.
Nothing here knows how lifetimes are inferred or addresses chosen.
"""

from __future__ import annotations

import numpy as np

from policies.retention.evaluate import Bools, may_read_grid
from policies.retention.ir import Relation
from policies.retention.plan import Plan, PlannedClass
from policies.retention.program import AttentionState, Program

#: Keys and queries of the grid.
NUM_KEYS = 96
NUM_QUERIES = 400


def program_for(relation: Relation, page_tokens: int) -> Program:
    """One state of one layer, one byte a token."""
    state = AttentionState(name="s", layers=(0,), reads=relation, bytes_per_token_layer=1)
    return Program(page_tokens=page_tokens, states=(state,))


def reads_grid(relation: Relation) -> Bools:
    """Whether query (row) may read key (column)."""
    queries_Q = np.arange(NUM_QUERIES, dtype=np.int64)
    return may_read_grid(relation, queries_Q, np.arange(NUM_KEYS, dtype=np.int64))


def homes(plan: Plan, key: int) -> list[tuple[PlannedClass, int]]:
    """The classes that hold ``key``, each with the page."""
    found = [(planned, planned.page_of(key)) for planned in plan.classes]
    return [(planned, page) for planned, page in found if page is not None]


def live_keys(reads_QK: Bools, boundary: int) -> set[int]:
    """Keys before ``boundary`` that a query of the grid at or after it reads."""
    return set(np.flatnonzero(reads_QK[boundary:, :boundary].any(axis=0)).tolist())


def complaints(plan: Plan, relation: Relation) -> list[str]:
    """What the plan does wrong on the grid, as far as one can see."""
    reads_QK = reads_grid(relation)
    found = [*_homeless(plan, reads_QK), *_dead_reads(plan, reads_QK)]
    for boundary in range(0, NUM_KEYS - plan.step_tokens, max(1, plan.step_tokens // 2)):
        found += _shared_cells(plan, reads_QK, boundary)
    return found


def _homeless(plan: Plan, reads_QK: Bools) -> list[str]:
    """Keys that are read but have not exactly one page."""
    read = np.flatnonzero(reads_QK.any(axis=0)).tolist()
    counts = {key: len(homes(plan, key)) for key in read}
    return [f"key {key} has {count} pages" for key, count in counts.items() if count != 1]


def _dead_reads(plan: Plan, reads_QK: Bools) -> list[str]:
    """Keys that are read at or after the boundary at which their page died."""
    last_K = NUM_QUERIES - 1 - reads_QK[::-1].argmax(axis=0)
    found = []
    for key in np.flatnonzero(reads_QK.any(axis=0)).tolist():
        for planned, page in homes(plan, key):
            death = planned.death(page)
            if death is not None and last_K[key] >= death:
                found.append(f"key {key} is read by {last_K[key]}, its page died at {death}")
    return found


def _shared_cells(plan: Plan, reads_QK: Bools, boundary: int) -> list[str]:
    """Pages needed in the step that starts at ``boundary`` and share a cell.

    All of the step's keys are stored before any of its queries runs.
    """
    stop = boundary + plan.step_tokens
    needed = live_keys(reads_QK, boundary) | set(range(boundary, stop))
    cells: dict[tuple[str, int], int] = {}
    found = []
    for key in sorted(needed):
        for planned, page in homes(plan, key):
            cell, _ = planned.locate(page)
            bound = planned.address.cells
            if bound is not None and not 0 <= cell < bound:
                found.append(f"page {page} of {planned.name} is in cell {cell} of {bound}")
            other = cells.setdefault((planned.name, cell), page)
            if other != page:
                found.append(f"pages {other} and {page} share cell {cell} at {boundary}")
    return found
