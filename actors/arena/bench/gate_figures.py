"""The figures of the cost gate: policies for idle memory, run for real, side by side.

Every policy replays every workload on a driver of its own, in turns within one process,
so that what slows the machine slows all of them.  A ratio is taken within one turn; its
median over the turns, and the geometric mean of those over the workloads, are reported.

Time is that of this thread on a processor: on a shared machine, the time on the wall says
more of who else is there, and a host driver waits for nothing.

Ratios are of totals: the driver's time plus the price of the memory held.  Above 1, the
gate is the cheaper one.  Which of them are, depends on the price; none is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from actors.arena.bench.gate_replay import DriverFactory, ReplayResult, replay
from actors.arena.costs import measure
from actors.arena.driver_host import HostVmmDriver
from policies.vmm_gate import MemoryPrice, UnitCosts, release_after_s
from policies.vmm_simulate import Policy, simulate
from policies.vmm_workloads import Trace, standard_traces

EXTENT_BYTES = 256 << 10

DEAR = MemoryPrice.of_waiters(1e6, 2_500_000_000)
"""Someone waits for 2.5 GB all the time."""

CHEAP = MemoryPrice.of_waiters(5e4, 2_500_000_000)
"""Someone waits for 2.5 GB one second in twenty."""

PRICES: Mapping[str, MemoryPrice] = {"": DEAR, "cheap.": CHEAP}
"""By prefix of the figures."""

RIVALS = ("eager", "lazy", "static", "static_double")
GATES: Mapping[str, Policy] = {
    "gate": "gated",
    "learned": "gated_learned",
    "known": "gated_known",
}
"""By the word that figures begin with."""


@dataclass(frozen=True, slots=True)
class _Contender:
    """A policy as it takes part; the prefix is of the price that it decides by."""

    name: str
    policy: Policy
    prefix: str = ""
    headroom: float = 1.0


CONTENDERS: tuple[_Contender, ...] = (
    _Contender("eager", "eager"),
    _Contender("lazy", "lazy"),
    _Contender("static", "static"),
    # A pool is sized before its load is known; the one above has its size from hindsight.
    _Contender("static_double", "static", headroom=2.0),
    *(
        _Contender(f"{prefix}{policy}", policy, prefix)
        for prefix in PRICES
        for policy in GATES.values()
    ),
)

Turn = Mapping[str, ReplayResult]
"""One replay of each contender on one workload; who begins changes from turn to turn."""


def gate_figures(
    quick: bool,
    seed: int,
    *,
    driver_factory: DriverFactory = HostVmmDriver,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, float]:
    """Replay the standard workloads, and return every figure by name.

    Returns
    -------
    figures
        ``gate_vs_eager``, ``gate_vs_lazy``, ``gate_vs_static`` and
        ``gate_vs_static_double`` (a pool of twice the peak), over all workloads; the same
        for each one as ``<workload>.gate_vs_eager``, with ``<workload>.<policy>.total_ms``,
        ``driver_ms``, ``touch_ms`` and ``mean_mib``.  With ``learned_vs_`` in place of
        ``gate_vs_``: the gate that learns; with ``known_vs_``: the one that is told the
        next use.  With ``cheap.`` before it: at a price of a twentieth.  ``gated.driver_over_model``: measured time of the driver
        over that which its unit costs predict.
    """
    num_requests, num_turns = (32, 3) if quick else (240, 7)
    costs = _measure(driver_factory, clock)
    traces = standard_traces(seed, num_requests=num_requests)
    turns: dict[str, list[Turn]] = {name: [] for name in traces}
    for turn_index in range(num_turns):
        for name, trace in traces.items():
            first = turn_index % len(CONTENDERS)
            turns[name].append(
                {
                    contender.name: replay(
                        driver_factory,
                        trace,
                        contender.policy,
                        costs,
                        PRICES[contender.prefix],
                        headroom=contender.headroom,
                        clock=clock,
                    )
                    for contender in (*CONTENDERS[first:], *CONTENDERS[:first])
                }
            )
    figures = {
        "cycle_us": costs.cycle_us,
        "steal_us": costs.steal_us,
        "release_after_s": release_after_s(costs, DEAR, reuse_us=costs.steal_us),
        "price_us_per_byte_second": DEAR.us_per_byte_second,
        "gated.driver_over_model": geometric_mean(
            _driver_over_model(trace, costs, turns[name]) for name, trace in traces.items()
        ),
    }
    for prefix, price in PRICES.items():
        figures |= _ratios(turns, prefix, price)
    for name in traces:
        figures |= _rows(turns[name], name)
    return figures


def _measure(driver_factory: DriverFactory, clock: Callable[[], float]) -> UnitCosts:
    driver = driver_factory(EXTENT_BYTES, EXTENT_BYTES)
    try:
        return measure(driver, EXTENT_BYTES, clock=clock)
    finally:
        driver.close()


def _ratios(
    turns: Mapping[str, Sequence[Turn]], prefix: str, price: MemoryPrice
) -> dict[str, float]:
    """What each rival costs over what each gate does, at one price."""
    figures: dict[str, float] = {}
    for rival in RIVALS:
        for label, gate in GATES.items():
            medians = {
                name: median(
                    turn[rival].total_us(price) / turn[prefix + gate].total_us(price)
                    for turn in turns[name]
                )
                for name in turns
            }
            figures[f"{prefix}{label}_vs_{rival}"] = geometric_mean(medians.values())
            for name, ratio in medians.items():
                figures[f"{prefix}{name}.{label}_vs_{rival}"] = ratio
    return figures


def _rows(turns: Sequence[Turn], workload: str) -> dict[str, float]:
    """The medians of each contender on one workload."""
    figures: dict[str, float] = {}
    for contender in CONTENDERS:
        results = [turn[contender.name] for turn in turns]
        price = PRICES[contender.prefix]
        label = f"{contender.prefix}{workload}.{contender.policy}"
        if contender.headroom > 1:
            label = f"{workload}.{contender.name}"
        figures |= {
            f"{label}.total_ms": median(result.total_us(price) for result in results) / 1e3,
            f"{label}.driver_ms": median(result.outcome.driver_us for result in results) / 1e3,
            f"{label}.touch_ms": median(result.touch_us for result in results) / 1e3,
            f"{label}.mean_mib": results[0].outcome.mean_bytes / (1 << 20),
        }
    return figures


def _driver_over_model(trace: Trace, costs: UnitCosts, turns: Sequence[Turn]) -> float:
    predicted_us = simulate(trace, "gated", costs, DEAR).driver_us
    return median(turn["gated"].outcome.driver_us for turn in turns) / predicted_us
