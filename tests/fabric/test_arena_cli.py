"""``kvfabric bench arena``: the figures it promises, on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fabric import arena_cli
from fabric.cli import main

PROMISED = {
    "window_append_speedup_w1024",
    "window_append_speedup_w4096",
    "kept_window_append_speedup_w1024",
    "hot_window_us_w1024",
    "gate_vs_eager",
    "gate_vs_lazy",
    "ops_per_s",
    "soak_ops",
    "soak_mismatches",
}


def some_figures(quick: bool, seed: int) -> dict[str, float]:
    """In place of the replay of workloads."""
    return {"gate_vs_eager": 1.5, "gate_vs_lazy": 0.9, "gate_was_quick": quick, "seed": seed}


def test_the_figures_are_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the promised ones, each a number."""
    threads: list[int] = []
    monkeypatch.setattr(arena_cli.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(arena_cli, "QUICK_SOAK_OPS", 50)
    monkeypatch.setattr(arena_cli, "QUICK_ROUNDS", (1, 1))
    monkeypatch.setattr(arena_cli, "gate_figures", some_figures)
    monkeypatch.setattr(arena_cli, "keep_freed_blocks", lambda: threads.append(0))
    path = tmp_path / "figures.json"

    result = CliRunner().invoke(
        main, ["bench", "arena", "--quick", "--seed", "3", "--json", str(path)]
    )

    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())["figures"]
    assert set(figures) >= PROMISED
    assert (figures["soak_ops"], figures["soak_mismatches"]) == (50, 0)
    assert (figures["gate_was_quick"], figures["seed"]) == (True, 3)
    assert all(figures[f"host_{verb}_us"] > 0 for verb in ("create", "map", "unmap", "release"))
    assert json.loads(result.stdout)["figures"] == figures
    assert threads == [1, 0]
    assert "spiteful" in result.stderr
    assert "winner" in result.stderr
