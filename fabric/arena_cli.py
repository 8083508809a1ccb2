"""The command ``kvfabric bench arena``."""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress

from actors.arena.bench.gate_figures import gate_figures
from actors.arena.bench.soak import soak
from actors.arena.bench.window_race import RING, ROLL, hot_window_us, race
from actors.arena.costs import measure
from actors.arena.driver_host import HostVmmDriver
from codec.errors import BackendUnavailable
from fabric.output import writable, write_json
from policies.vmm_gate import MemoryPrice
from policies.vmm_simulate import compare, describe

WINDOWS = (512, 1024, 4096)
GATE_EXTENT_BYTES = 256 << 10
SOAK_GRANULE_BYTES = 64 << 10
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Of the GNU C library's mallopt."""

SOAK_OPS, QUICK_SOAK_OPS = 200_000, 5_000
ROUNDS, QUICK_ROUNDS = (31, 200), (9, 50)
"""Rounds of a race, and appends of each contender in each."""

DYNAMIC, STATIC = "dynamic", "static"


@click.command()
@click.option("--quick", is_flag=True, help="About a minute; figures vary more.")
@click.option("--seed", default=0, show_default=True, help="Of the workloads and the soak.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=writable, help="Write the figures."
)
def arena(*, quick: bool, seed: int, path: Path | None) -> None:
    """Race window appends, run idle-memory policies, and use an arena for a long time."""
    torch.set_num_threads(1)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        figures = unit_costs() | windows(bar, "", quick=quick)
        keep_freed_blocks()
        figures |= windows(bar, "kept_", quick=quick)
        figures["hot_window_us_w1024"] = hot_window_us(1024, num_windows=200)
        task = bar.add_task("policies for idle memory", total=None)
        figures |= gate_figures(quick, seed)
        simulated = simulated_policies(seed)
        bar.remove_task(task)
        figures |= soaked(bar, num_ops=QUICK_SOAK_OPS if quick else SOAK_OPS, seed=seed)
    click.echo(simulated, err=True)
    click.echo(write_json(path, {"figures": figures}))


def unit_costs() -> dict[str, float]:
    """What each verb of the host driver costs, for extents of 2 MiB."""
    driver = HostVmmDriver(2 << 20)
    costs = measure(driver, 2 << 20, clock=time.perf_counter)
    driver.close()
    return {
        "host_create_us": costs.create_us,
        "host_map_us": costs.map_us,
        "host_access_us": costs.access_us,
        "host_unmap_us": costs.unmap_us,
        "host_release_us": costs.release_us,
    }


def keep_freed_blocks() -> None:
    """Have the C library keep large blocks that are freed, as it comes to do by itself.

    In a process that has just started, each tensor of a megabyte or more is a fresh mapping,
    and most of what a copy costs is page faults.  Other C libraries do not know the options.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def windows(bar: Progress, prefix: str, *, quick: bool) -> dict[str, float]:
    """Appends to windows of several sizes; speed-ups are over Transformers' sliding layer.

    Parameters
    ----------
    prefix
        Of the figures: empty for a process that has just started, ``kept_`` for one whose
        freed blocks are kept.

    Raises
    ------
    BackendUnavailable
        If Transformers, whose layers take part, is missing.
    """
    try:
        from fabric.engines.sliding import dynamic_layer, static_layer  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendUnavailable("transformers", "install kvfabric[hf]") from error
    figures: dict[str, float] = {}
    num_rounds, steps_per_round = QUICK_ROUNDS if quick else ROUNDS
    for window in bar.track(WINDOWS, description="window appends"):
        found = race(
            window,
            {DYNAMIC: dynamic_layer, STATIC: static_layer},
            num_rounds=num_rounds,
            steps_per_round=steps_per_round,
        )
        figures |= {
            f"{prefix}window_append_speedup_w{window}": found[f"{DYNAMIC}.over_ring"],
            f"{prefix}window_append_vs_static_w{window}": found[f"{STATIC}.over_ring"],
            f"{prefix}window_append_vs_roll_w{window}": found[f"{ROLL}.over_ring"],
            f"{prefix}window_append_ring_us_w{window}": found[f"{RING}.us"],
        }
    return figures


def simulated_policies(seed: int) -> str:
    """Which policy for idle memory would win by unit costs alone, at four prices.

    The last workload is made against the gate: memory is wanted again just when it was given
    back.
    """
    driver = HostVmmDriver(GATE_EXTENT_BYTES, GATE_EXTENT_BYTES)
    costs = measure(driver, GATE_EXTENT_BYTES)
    driver.close()
    prices = map(MemoryPrice, (0.0, 2e-5, 4e-4, 4e-3))
    return costs.describe() + "\n" + describe(compare(costs, prices, seed=seed))


def soaked(bar: Progress, *, num_ops: int, seed: int) -> dict[str, float]:
    """Random operations on an arena; measured and booked bytes compared after each."""
    task = bar.add_task("soak", total=num_ops)
    driver = HostVmmDriver(512 * SOAK_GRANULE_BYTES, SOAK_GRANULE_BYTES)
    found = soak(
        driver,
        num_ops=num_ops,
        seed=seed,
        progress=lambda done: bar.update(task, completed=done),
    )
    driver.close()
    return {
        "ops_per_s": found.ops_per_s,
        "soak_ops": found.num_ops,
        "soak_mismatches": found.num_mismatches,
        "soak_refused": found.num_refused,
        "soak_certified": found.num_certified,
        "soak_peak_bytes": found.peak_bytes,
        "soak_final_bytes": found.final_bytes,
    }
