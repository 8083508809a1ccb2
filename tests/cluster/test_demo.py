"""The main job on the real packaged model, in processes of their own, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.model]

CONSTITUTION = Path(__file__).parents[1] / "data" / "constitution.txt"


def demo(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The receipt of one ``kvfabric demo``."""
    receipt = tmp_path / "receipt.json"
    finished = subprocess.run(
        [sys.executable, "-m", "fabric", "demo", "--json", str(receipt), *arguments],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found: dict[str, Any] = json.loads(receipt.read_text(encoding="utf-8"))
    return found


def test_a_prompt_prefilled_here_is_continued_there(tmp_path: Path) -> None:
    """At a target of 8: a net ratio of 6 with everything counted, and 95 % of top tokens."""
    receipt = demo(tmp_path)

    assert receipt["outcome"] == "restored"
    assert receipt["qualified"] is True
    assert receipt["quality_receipt"]
    assert receipt["tokens_prompt"] >= 2000
    assert receipt["tokens_restored"] >= receipt["tokens_prompt"] - 256 - 128
    assert receipt["bytes_raw"] == 2304 * 2 * 5760 * 2
    assert receipt["net_ratio"] >= 6
    assert receipt["net_ratio"] == pytest.approx(receipt["bytes_raw"] / receipt["bytes_stored"])
    assert receipt["bytes_moved"] == receipt["bytes_stored"]
    assert receipt["transport"].startswith("ucx:")
    assert receipt["tokens_compared"] == 64
    assert receipt["top1_agreement"] >= 0.95
    assert 0 < receipt["mean_kl"] < 0.05
    assert receipt["text_restored"]


def test_another_prompt_works_and_a_flipped_byte_costs_a_recompute(tmp_path: Path) -> None:
    """The text is then that of the reference, to the letter, and the receipt says why."""
    receipt = demo(
        tmp_path,
        *("--prompt", str(CONSTITUTION), "--max-prompt-tokens", "700", "--fault", "flip-byte"),
        "--allow-unqualified",
    )

    assert receipt["outcome"] == "recomputed"
    assert receipt["reason"] == "IncompletePullError"
    assert "corrupt" in receipt["explanation"]
    assert receipt["counters"]["rejected_corrupt"] == 1
    assert receipt["counters"]["quarantined"] == 1
    assert receipt["tokens_prompt"] == 700
    assert receipt["tokens_restored"] == 0
    assert receipt["text_restored"] == receipt["text_reference"]


def test_a_killed_source_costs_a_recompute(tmp_path: Path) -> None:
    """The same, with kill -9 between storing and restoring."""
    arguments = ("--max-prompt-tokens", "700", "--fault", "kill-source", "--allow-unqualified")
    receipt = demo(tmp_path, *arguments)

    assert receipt["outcome"] == "recomputed"
    assert receipt["reason"] in {"PeerLostError", "TransferTimeoutError", "StaleIncarnationError"}
    assert receipt["top1_agreement"] == 1.0
    assert receipt["text_restored"] == receipt["text_reference"]
