"""The contract's trace as a device once answered it; no file until one was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRACE_PATH = Path(__file__).parents[1] / "data" / "gpu_trace.json"


def read_trace() -> dict[str, Any] | None:
    """What was recorded: ``device``, ``driver``, ``date`` and ``trace``."""
    if not TRACE_PATH.exists():
        return None
    found: dict[str, Any] = json.loads(TRACE_PATH.read_text(encoding="utf-8"))
    return found
