"""The benchmark's figures: their names, their sums, and no clock of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from types import FrameType

import pytest

from policies.retention import figures as figures_module
from policies.retention.digest import plan_digest
from policies.retention.figures import (
    compile_distinct_ms,
    compile_model_ms,
    distinct_program,
    figures,
    fuzz_for,
    hybrid_config,
)
from policies.retention.hf_config import read_config
from policies.retention.plan import compile_program
from policies.retention.program import Program


def hybrid_program(num_layers: int) -> Program:
    """The program of the hybrid model."""
    return read_config(hybrid_config(num_layers)).program


def test_figures_have_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once each time it is read."""
    monkeypatch.setattr(figures_module, "FUZZ_RELATIONS", 20)
    monkeypatch.setattr(figures_module, "QUICK_SECONDS", 10_000.0)
    ticks = count()

    found = figures(quick=True, clock=lambda: float(next(ticks)))

    assert {"compile_100_layers_ms", "fuzz_relations", "fuzz_unsound", "fuzz_exact_share"} <= set(
        found
    )
    assert (found["fuzz_relations"], found["fuzz_unsound"]) == (20, 0)
    assert 0 < found["fuzz_exact_share"] <= 1
    assert found["compile_100_layers_ms"] == 1000


def test_a_quick_run_stops_in_time() -> None:
    """By the clock it is given, and it says how many it tried."""
    ticks = count()

    report = fuzz_for(10**6, seconds=5.0, clock=lambda: float(next(ticks)))

    assert 0 < report.num_relations < 6
    assert report.num_relations == report.num_exact + report.num_loose


def test_the_models_are_what_they_are_called() -> None:
    """A hundred layers of two kinds, and a hundred kinds."""
    hybrid = compile_program(hybrid_program(100))
    distinct = compile_program(distinct_program(100))

    assert sum(len(found.layers) for found in hybrid.classes) == 100
    assert len(hybrid.classes) == 2
    assert len(distinct.classes) == 100


def test_times_are_read_from_the_clock_that_is_given() -> None:
    """Two readings for each repeat."""
    ticks = count()

    def clock() -> float:
        return float(next(ticks))

    assert compile_model_ms(10, repeats=3, clock=clock) == 1000
    assert compile_distinct_ms(5, repeats=3, clock=clock) == 1000
    assert next(ticks) == 12


def calls_of(work: Callable[[], object]) -> int:
    """How many Python functions ``work`` calls: a measure that no load disturbs."""
    calls = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("program_for", [hybrid_program, distinct_program])
def test_compiling_is_linear_in_layers(program_for: Callable[[int], Program]) -> None:
    """Four times the layers, at most four times the calls and a constant."""
    small, large = program_for(50), program_for(200)

    few = calls_of(lambda: plan_digest(compile_program(small)))
    many = calls_of(lambda: plan_digest(compile_program(large)))

    assert many <= 4 * few + 500
