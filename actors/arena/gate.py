"""Who may call a driver's verbs, one at a time, and how often that was done.

A driver's class holds a `Gate` as ``_gate`` and marks its verbs with `verb`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from actors.arena.driver import VerbStats
from codec.errors import VmmClosed, VmmForked


class Gate:
    """Lets in the threads of the process that made it, until it is closed."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.owner_pid = os.getpid()
        self.is_closed = False
        # Re-entrant, since a verb may be built of others.
        self._lock = threading.RLock()
        #: ``{verb: (calls, refusals, nanoseconds)}``; none of them ever falls.
        self._counts: dict[str, tuple[int, int, int]] = {}

    def check_process(self) -> None:
        """Refuse a forked child, which must not even wait for a lock held in its parent.

        Raises
        ------
        VmmForked
            In any other process than the one that made the gate.
        """
        if (pid := os.getpid()) != self.owner_pid:
            raise VmmForked(self.owner_pid, pid)

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        """Hold the gate for one call of verb ``name``, and count it.

        Raises
        ------
        VmmForked, VmmClosed
            If the caller may not come in.
        """
        self.check_process()
        with self._lock:
            if self.is_closed:
                raise VmmClosed(self.what)
            start_ns = time.perf_counter_ns()
            refused = 1
            try:
                yield
                refused = 0
            finally:
                calls, refusals, total_ns = self._counts.get(name, (0, 0, 0))
                spent_ns = time.perf_counter_ns() - start_ns
                self._counts[name] = (calls + 1, refusals + refused, total_ns + spent_ns)

    def stats(self) -> Mapping[str, VerbStats]:
        """Calls and cost so far of every verb that came in."""
        return {
            name: VerbStats(num_calls=calls, num_refusals=refusals, total_us=total_ns / 1e3)
            for name, (calls, refusals, total_ns) in self._counts.items()
        }


class Gated(Protocol):
    """What has a gate."""

    _gate: Gate


P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound=Gated)


def verb(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Make calls of ``method`` pass their object's gate."""
    name = method.__name__

    @wraps(method)
    def through_the_gate(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._gate.enter(name):
            return method(self, *args, **kwargs)

    return through_the_gate
