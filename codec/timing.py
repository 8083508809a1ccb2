"""Seconds spent per named step of a piece of work, for receipts and latency models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimes:
    """Adds up seconds under step names; not shared between threads.

    Examples
    --------
    >>> times = StepTimes()
    >>> with times.step("project"):
    ...     pass
    >>> list(times.seconds)
    ['project']
    """

    def __init__(self) -> None:
        #: Only ever grows; insertion order is the order of first use.
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the time inside the ``with`` block under ``name``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count ``seconds`` under ``name``."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
