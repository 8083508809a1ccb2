"""The figures of the gate: complete, consistent, and taken in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from math import isfinite, prod

import pytest

from actors.arena.bench import gate_figures as module
from actors.arena.bench.gate_figures import CHEAP, CONTENDERS, DEAR, RIVALS, gate_figures
from actors.arena.bench.gate_replay import DriverFactory, ReplayResult
from actors.arena.driver import Driver
from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from policies.vmm_gate import MemoryPrice, UnitCosts
from policies.vmm_simulate import Policy
from policies.vmm_workloads import Trace, spiteful, standard_traces

WORKLOADS = ("steady", "bursts", "diurnal")


def ticks() -> Callable[[], float]:
    """A clock that goes on by a microsecond whenever it is looked at."""
    steps = count()
    return lambda: next(steps) / 1e6


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workloads of very few requests, and of small extents."""

    def few(seed: int, *, num_requests: int) -> Mapping[str, Trace]:
        return standard_traces(seed, num_requests=4)

    monkeypatch.setattr(module, "standard_traces", few)
    monkeypatch.setattr(module, "EXTENT_BYTES", PAGE_BYTES)


def test_every_ratio_is_there_and_overall_ones_are_geometric_means(small: None) -> None:
    """Of each rival, for every gate, at both prices."""
    figures = gate_figures(quick=True, seed=3, clock=ticks())

    for price in ("", "cheap."):
        for gate in ("gate", "learned", "known"):
            for rival in RIVALS:
                parts = [figures[f"{price}{name}.{gate}_vs_{rival}"] for name in WORKLOADS]
                whole = figures[f"{price}{gate}_vs_{rival}"]
                assert whole == pytest.approx(prod(parts) ** (1 / 3))
    assert all(isfinite(value) and value > 0 for value in figures.values())


def test_ratios_are_of_the_totals_in_the_rows(small: None) -> None:
    """On this clock all turns are alike; a rival's memory is priced anew at each price."""
    figures = gate_figures(quick=True, seed=3, clock=ticks())

    differs = False
    for name in WORKLOADS:
        for rival in RIVALS:
            driver_ms, total_ms = (figures[f"{name}.{rival}.{x}_ms"] for x in ("driver", "total"))
            cheap_ms = driver_ms + (total_ms - driver_ms) / 20
            dear, cheap = (figures[f"{p}{name}.gated.total_ms"] for p in ("", "cheap."))

            assert figures[f"{name}.gate_vs_{rival}"] == pytest.approx(total_ms / dear)
            assert figures[f"cheap.{name}.gate_vs_{rival}"] == pytest.approx(cheap_ms / cheap)
        dear, cheap = (figures[f"{p}{name}.gated.mean_mib"] for p in ("", "cheap."))
        differs |= dear < cheap
    assert differs


def test_every_contender_has_its_row_for_every_workload(small: None) -> None:
    """Totals are of time and memory; the rivals have one row for both prices."""
    figures = gate_figures(quick=True, seed=3, clock=ticks())

    gates = ["gated", "gated_learned", "gated_known"]
    rows = ["eager", "lazy", "static", "static_double", *gates]
    labels = [f"{name}.{row}" for name in WORKLOADS for row in rows]
    labels += [f"cheap.{name}.{row}" for name in WORKLOADS for row in gates]
    for label in labels:
        for figure in ("total_ms", "driver_ms", "touch_ms", "mean_mib"):
            assert f"{label}.{figure}" in figures
        assert figures[f"{label}.total_ms"] > figures[f"{label}.driver_ms"]
    double, single = (figures[f"steady.{row}.mean_mib"] for row in ("static_double", "static"))
    assert double == 2 * single


def test_each_turn_runs_everyone_once_and_begins_with_another(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On drivers of their own, so that nobody finds what another left."""
    calls = []
    real_replay = module.replay

    def spy(
        factory: DriverFactory,
        sample: Trace,
        policy: Policy,
        costs: UnitCosts,
        price: MemoryPrice,
        *,
        headroom: float,
        clock: Callable[[], float],
    ) -> ReplayResult:
        calls.append((sample.name, policy, price, headroom))
        return real_replay(factory, sample, policy, costs, price, headroom=headroom, clock=clock)

    monkeypatch.setattr(module, "replay", spy)

    gate_figures(quick=True, seed=3, clock=ticks())

    size = len(CONTENDERS)
    turns = [calls[start : start + size] for start in range(0, len(calls), size)]
    assert len(turns) == 3 * len(WORKLOADS)
    for turn in turns:
        assert len(set(turn)) == size
    firsts = {turn[0][1:] for turn in turns if turn[0][0] == "steady"}
    assert len(firsts) == 3


def test_every_driver_is_closed(small: None) -> None:
    """That of the measurement too."""
    made: list[HostVmmDriver] = []

    def remember(capacity_bytes: int, granule_bytes: int) -> Driver:
        made.append(HostVmmDriver(capacity_bytes, granule_bytes))
        return made[-1]

    gate_figures(quick=True, seed=3, driver_factory=remember, clock=ticks())

    assert len(made) == 1 + 3 * len(WORKLOADS) * len(CONTENDERS)
    assert all(driver._gate.is_closed for driver in made)


def test_the_prices_are_what_their_waiters_lose() -> None:
    """Some 420 us per MiB and second, and a twentieth of it."""
    assert DEAR.us_per_byte_second == pytest.approx(4e-4)
    assert CHEAP.us_per_byte_second == pytest.approx(2e-5)


def test_a_loss_is_reported_as_a_ratio_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory comes back at once, a pool of one is cheaper than fifty steals."""

    def one_extent(seed: int, *, num_requests: int) -> Mapping[str, Trace]:
        return {"spiteful": spiteful(0.001, num_lives=50)}

    monkeypatch.setattr(module, "standard_traces", one_extent)

    figures = gate_figures(quick=True, seed=0, clock=ticks())

    assert figures["cheap.gate_vs_static"] < 1
    assert figures["cheap.gate_vs_lazy"] == pytest.approx(1)


def test_figures_are_the_same_for_the_same_seed_and_clock(small: None) -> None:
    """Nothing but the clock and the seed goes in."""
    first, again = (gate_figures(quick=True, seed=3, clock=ticks()) for _ in range(2))

    assert first == again
