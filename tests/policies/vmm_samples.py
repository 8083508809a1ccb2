"""Unit costs and traces for tests: whole numbers, so that sums are exact."""

from __future__ import annotations

from hypothesis import strategies as st

from policies.vmm_gate import MemoryPrice, UnitCosts
from policies.vmm_workloads import Life, Trace

MIB = 1 << 20

COSTS = UnitCosts(
    kind="host",
    extent_bytes=MIB,
    create_us=100,
    release_us=40,
    map_us=10,
    unmap_us=20,
    access_us=5,
    sync_us=3,
    num_devices=2,
)
"""A steal costs 43, a cycle 183."""

AMOUNTS = st.integers(0, 10_000).map(float)


@st.composite
def unit_costs(draw: st.DrawFn) -> UnitCosts:
    """Any costs, free verbs among them."""
    return UnitCosts(
        kind="host",
        extent_bytes=MIB,
        create_us=draw(AMOUNTS),
        release_us=draw(AMOUNTS),
        map_us=draw(AMOUNTS),
        unmap_us=draw(AMOUNTS),
        access_us=draw(AMOUNTS),
        sync_us=draw(AMOUNTS),
        num_devices=draw(st.integers(1, 4)),
    )


def rent(us_per_s: float) -> MemoryPrice:
    """The price at which an extent of `MIB` costs ``us_per_s``."""
    return MemoryPrice(us_per_s / MIB)


def trace(*lives: tuple[float, float], horizon_s: float = 0.0) -> Trace:
    """A trace of ``(birth, death)``."""
    last_s = max(death_s for _, death_s in lives)
    return Trace("sample", tuple(Life(*life) for life in lives), max(horizon_s, last_s))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few lives on a coarse clock, so that many things happen at once."""
    spans = st.tuples(st.integers(0, 12), st.integers(1, 6)).map(lambda s: (s[0], s[0] + s[1]))
    lives = draw(st.lists(spans, min_size=1, max_size=12))
    return trace(*lives, horizon_s=draw(st.integers(0, 25)))
