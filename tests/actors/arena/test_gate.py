"""`Gate`: who comes in, and what is counted."""

from __future__ import annotations

import os
import threading

import pytest

from actors.arena.gate import Gate, verb
from codec.errors import VmmClosed, VmmForked, VmmNotReserved
from tests.suites.probes import run_in_threads


class Doors:
    """Something with verbs."""

    def __init__(self) -> None:
        self._gate = Gate("doors")
        self.inside = 0
        self.most_inside = 0

    @verb
    def open(self, error: Exception | None = None) -> str:
        """Answer, or raise ``error``."""
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            if error is not None:
                raise error
            # Long enough for threads to change.
            return max("open" for _ in range(300))
        finally:
            self.inside -= 1

    @verb
    def open_twice(self) -> str:
        """A verb made of verbs."""
        return self.open() + self.open()

    @property
    def gate(self) -> Gate:
        """The gate itself."""
        return self._gate


def test_calls_and_refusals_are_counted_apart() -> None:
    """A verb that raises has been called too."""
    doors = Doors()
    assert doors.open() == "open"
    with pytest.raises(VmmNotReserved):
        doors.open(VmmNotReserved(0, 1))

    stats = doors.gate.stats()["open"]

    assert (stats.num_calls, stats.num_refusals) == (2, 1)
    assert stats.total_us > 0


def test_a_verb_may_call_verbs() -> None:
    """The gate is re-entrant for the thread inside."""
    doors = Doors()

    assert doors.open_twice() == "openopen"
    assert doors.gate.stats()["open"].num_calls == 2


def test_a_closed_gate_lets_nobody_in_and_counts_nothing() -> None:
    """The call has not happened."""
    doors = Doors()
    doors.gate.is_closed = True

    with pytest.raises(VmmClosed, match="doors"):
        doors.open()

    assert doors.gate.stats() == {}


def test_another_process_is_refused_before_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked child may have inherited the lock held, by a thread that it does not have."""
    doors = Doors()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with doors.gate.enter("hold"):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)

    with pytest.raises(VmmForked) as caught:
        doors.open()

    done.set()
    thread.join()
    assert (caught.value.owner_pid, caught.value.pid) == (here, here + 1)


def test_one_thread_at_a_time() -> None:
    """Calls from many threads do not meet inside."""
    doors = Doors()

    def work(_: int) -> None:
        for _ in range(200):
            doors.open()

    run_in_threads(work, 4)

    assert doors.most_inside == 1
    assert doors.gate.stats()["open"].num_calls == 800
