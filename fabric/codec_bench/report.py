"""What a run found, as plain data for a file and as tables for a terminal."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from codec.quality_receipt import Interval
from fabric.codec_bench.codecs import ENTROPY, PAPER
from fabric.codec_bench.measure import NUM_RESAMPLES, Measured
from fabric.codec_bench.run import BenchResult
from fabric.codec_bench.speed import Race
from fabric.evaluate.bootstrap import CONFIDENCE

FORMAT: Final = "kvfabric.bench.codec.1"
MAIN_TARGET: Final = 16.0
"""The target whose figures carry no other number in their names."""

_PACKAGES: Final = ("kvfabric", "torch", "numpy", "numba", "transformers")


def record(found: BenchResult, *, is_quick: bool) -> dict[str, Any]:
    """Everything, with the machine and the settings that it was found with."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "model": found.model,
        "machine": machine(),
        "versions": versions(),
        "quick": is_quick,
        "confidence": CONFIDENCE,
        "num_resamples": NUM_RESAMPLES,
        "config": asdict(found.config),
        "figures": figures(found),
        "gains": [
            {**asdict(gain), "gain": gain.gain, "interval": _ends(interval)}
            for gain, interval in zip(
                found.comparison.gains, found.comparison.intervals, strict=True
            )
        ],
        "speed": {
            "prefix_tokens": found.prefix_tokens,
            "rates": asdict(found.rates),
            "races": {f"{target:g}": asdict(one) for target, one in found.races.items()},
        },
    }


def figures(found: BenchResult) -> dict[str, Any]:
    """The named figures; ``None`` where the run could not find one."""
    comparison = found.comparison
    values: dict[str, Any] = {
        "entropy_gain_at_equal_kl": comparison.smallest,
        "entropy_gain_interval": _ends(comparison.smallest_interval),
    }
    for gain in comparison.gains:
        values[f"entropy_gain_at_paper{gain.target:g}"] = gain.gain
    for one in found.arms:
        if one.arm.startswith(f"{ENTROPY}@") and one.target in found.races:
            values |= _quality(f"entropy{one.target:g}", one, found)
    for target, one_race in found.races.items():
        suffix = "" if target == MAIN_TARGET else f"{target:g}"
        values |= _speed(suffix, one_race)
    values["prefill_s"] = next(iter(found.races.values())).prefill_s if found.races else None
    values["arms"] = [_arm(one, found) for one in found.arms]
    return values


def machine() -> dict[str, Any]:
    """The processor and how many threads were at work outside the race."""
    return {
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions() -> dict[str, str]:
    """Of what takes part, as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def tables(found: BenchResult) -> Iterator[Table]:
    """Arms, gains at equal KL, and steps of the race."""
    yield _arm_table(found)
    yield _gain_table(found)
    for target, one in found.races.items():
        yield _race_table(target, one, found)


def _quality(prefix: str, one: Measured, found: BenchResult) -> dict[str, Any]:
    result = one.result
    keys, values = found.ranks[one.arm]
    return {
        f"{prefix}_ratio": result.net_ratio,
        f"{prefix}_kl": result.pooled.mean_kl.value,
        f"{prefix}_top1": result.pooled.top1.value,
        f"{prefix}_dppl_pct": result.pooled.dppl_pct.value,
        f"{prefix}_rank": keys + values,
        f"{prefix}_rank_keys": keys,
        f"{prefix}_rank_values": values,
    }


def _speed(suffix: str, one: Race) -> dict[str, Any]:
    return {
        f"decode{suffix}_vs_prefill_speedup": one.decode_speedup,
        f"encode{suffix}_vs_prefill_speedup": one.encode_speedup,
        f"coded_rank{suffix}": one.coded.mean_rank,
        f"decode{suffix}_s": one.decode_s,
        f"encode{suffix}_s": one.encode_s,
        f"decode{suffix}_peak_over_raw": one.decode_peak_over_raw,
        f"encode{suffix}_peak_over_raw": one.encode_peak_over_raw,
    }


def _arm(one: Measured, found: BenchResult) -> dict[str, Any]:
    result = one.result
    rank = found.ranks.get(one.arm)
    pooled = result.pooled
    return {
        "arm": one.arm,
        "profile": one.arm.partition("@")[0],
        "target": one.target,
        "net_ratio": result.net_ratio,
        "kl": pooled.mean_kl.value,
        "kl_interval": _ends(pooled.mean_kl),
        "top1": pooled.top1.value,
        "top1_interval": _ends(pooled.top1),
        "dppl_pct": pooled.dppl_pct.value,
        "dppl_pct_interval": _ends(pooled.dppl_pct),
        "rank": None if rank is None else sum(rank),
        "num_samples": pooled.num_samples,
        "num_tokens": pooled.num_tokens,
        "sets": {part.name: part.mean_kl.value for part in result.sets},
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _processor() -> str:
    """Its name where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        justify = "right" if number else "left"
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]  # a literal
    return table


def _arm_table(found: BenchResult) -> Table:
    pooled = found.arms[0].result.pooled
    table = _table(
        f"{found.model}: {pooled.name}, {pooled.num_samples} windows, {pooled.num_tokens} tokens",
        *("arm", "ratio", "KL", "top-1 %", "perplexity %", "rank"),
        caption=f"intervals of {CONFIDENCE:.0%}; rank is of keys + values",
    )
    for one in found.arms:
        result = one.result
        rank = found.ranks.get(one.arm)
        table.add_row(
            one.arm,
            f"{result.net_ratio:.2f}",
            _cell(result.pooled.mean_kl, 1, 5),
            _cell(result.pooled.top1, 100, 1),
            _cell(result.pooled.dppl_pct, 1, 2),
            "" if rank is None else f"{rank[0]} + {rank[1]}",
        )
    return table


def _gain_table(found: BenchResult) -> Table:
    comparison = found.comparison
    table = _table(
        "entropy profile at the KL of the paper profile",
        *("point", "KL", "its ratio", "ratio there", "gain"),
    )
    for gain, interval in zip(comparison.gains, comparison.intervals, strict=True):
        table.add_row(
            f"{PAPER}@{gain.target:g}",
            f"{gain.kl:.5f}",
            f"{gain.ratio:.2f}",
            gain.why if gain.ratio_at_kl is None else f"{gain.ratio_at_kl:.2f}",
            "" if gain.gain is None else _gain_cell(gain.gain, interval),
        )
    if comparison.smallest is not None:
        cell = _gain_cell(comparison.smallest, comparison.smallest_interval)
        table.add_row("smallest", "", "", "", cell)
    return table


def _race_table(target: float, one: Race, found: BenchResult) -> Table:
    raw = f"{one.raw_bytes / 1e6:.0f} MB held"
    table = _table(
        f"{ENTROPY}@{target:g}, {found.prefix_tokens} tokens, {raw}, prefill {one.prefill_s:.2f} s",
        *("step", "seconds", "floor", "over floor"),
        caption=f"{found.rates.flops_per_s / 1e9:.0f} GFLOP/s, "
        f"{found.rates.bytes_per_s / 1e9:.1f} GB/s, {found.config.speed.num_threads} thread(s)",
    )
    for what, seconds, speedup, peak, steps in (
        ("encode", one.encode_s, one.encode_speedup, one.encode_peak_over_raw, one.encode_steps),
        ("decode", one.decode_s, one.decode_speedup, one.decode_peak_over_raw, one.decode_steps),
    ):
        memory = "" if peak is None else f", peak {peak:.2f} x raw"
        table.add_row(f"{what}: {speedup:.1f} x prefill{memory}", f"{seconds:.3f}", "", "")
        for name, step in steps.items():
            over = f"{step.seconds / step.floor_s:.1f}" if step.floor_s else ""
            table.add_row(f"  {name}", f"{step.seconds:.4f}", f"{step.floor_s:.4f}", over)
    return table


def _cell(interval: Interval, scale: float, digits: int) -> str:
    value, low, high = (
        f"{scale * end:.{digits}f}" for end in (interval.value, interval.low, interval.high)
    )
    return f"{value}\n{low}..{high}"


def _gain_cell(gain: float, interval: Interval | None) -> str:
    ends = "" if interval is None else f"\n{interval.low:.2f}..{interval.high:.2f}"
    return f"{gain:.2f}{ends}"
