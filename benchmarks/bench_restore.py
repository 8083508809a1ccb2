"""Restore against recompute: repeated pairs on one machine, medians and ratios.

Runs ``kvfabric demo`` several times; each run measures both arms on the same target engine, after each
other, so that a pair shares its conditions.

    .venv/bin/python benchmarks/bench_restore.py --runs 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def one_run(arguments: list[str]) -> dict[str, Any]:
    """The receipt of one demo."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        subprocess.run(
            [sys.executable, "-m", "fabric", "demo", "--json", str(path), *arguments],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        receipt: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return receipt


def summary(receipts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over runs; ratios are medians of each run's own ratio."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    steps = sorted({step for receipt in receipts for step in receipt["steps"]})
    return {
        "runs": len(receipts),
        "recompute_s": median([r["recompute_s"] for r in receipts]),
        "restore_s": median([r["actual_restore_s"] for r in receipts]),
        "speed_up": median([r["recompute_s"] / r["actual_restore_s"] for r in receipts]),
        "prediction_over_actual": median(
            [r["predicted_restore_s"] / r["actual_restore_s"] for r in receipts]
        ),
        "raw_transfer_s": median([r["raw_transfer_s"] for r in receipts]),
        "net_ratio": median([r["net_ratio"] for r in receipts]),
        "top1_agreement": median([r["top1_agreement"] for r in receipts]),
        "mean_kl": median([r["mean_kl"] for r in receipts]),
        "steps_s": {s: median([r["steps"].get(s, 0.0) for r in receipts]) for s in steps},
    }


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options, arguments = parser.parse_known_args()
    receipts = [one_run(arguments) for _ in range(options.runs)]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "arguments": arguments,
        **summary(receipts),
        "receipts": receipts,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"restore_cpu{os.cpu_count()}_{record['date'][:7].replace('-', '')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in record.items() if k != "receipts"}, indent=1))


if __name__ == "__main__":
    main()
