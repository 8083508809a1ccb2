"""Examples run as they are, and the README shows what they run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart" / "quickstart.py"
MARK = "# --8<--"


def test_the_readme_shows_the_quickstart_as_it_is() -> None:
    """Its middle part, line by line: code in a README that nobody runs goes stale."""
    shown = QUICKSTART.read_text(encoding="utf-8").split(MARK)[1].split("\n", 1)[1].strip()

    assert shown in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len([line for line in shown.splitlines() if line]) == 10


@pytest.mark.cluster
@pytest.mark.model
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*/*.py")), ids=lambda p: p.stem)
def test_the_example_runs(script: Path) -> None:
    """In a process of its own, with the packaged model; it asserts its own claims."""
    finished = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert finished.returncode == 0, finished.stdout + finished.stderr
