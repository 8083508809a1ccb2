"""Threads that use an object take turns; finalisers never wait for theirs.

A finaliser may run in the middle of any verb of its own thread, so it cannot wait for that
verb to end.  What it wants done is left for whoever holds the turn, or takes the next.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from codec.errors import FabricError, VmmClosed, VmmForked

_log = logging.getLogger(__name__)


class Turns:
    """One turn at a time, in the process that made it, until it is closed."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._owner_pid = os.getpid()
        self.is_closed = False
        #: What finalisers asked for and nobody has done yet.
        self._chores: deque[Callable[[], None]] = deque()
        # Not re-entrant: a finaliser must find it taken.
        self._lock = threading.Lock()

    def check_process(self) -> None:
        """Refuse a forked child, which must not even wait for a lock held in its parent.

        Raises
        ------
        VmmForked
            In any other process than the one that made this.
        """
        if (pid := os.getpid()) != self._owner_pid:
            raise VmmForked(self._owner_pid, pid)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the turn, after what finalisers have left to do.

        Raises
        ------
        VmmForked, VmmClosed
            If there is no turn to be had.
        """
        self.check_process()
        with self._lock:
            if self.is_closed:
                raise VmmClosed(self._what)
            self._do_chores()
            yield

    def do_soon(self, chore: Callable[[], None]) -> None:
        """Do ``chore`` now if nobody has the turn, else leave it for the next.

        In a forked child it is forgotten.
        """
        if os.getpid() != self._owner_pid:
            return
        self._chores.append(chore)
        if self._lock.acquire(blocking=False):
            try:
                self._do_chores()
            finally:
                self._lock.release()

    def _do_chores(self) -> None:
        """Do each once; what cannot be done now is nobody else's error, and is tried again."""
        for _ in range(len(self._chores)):
            chore = self._chores.popleft()
            try:
                chore()
            except FabricError as error:
                _log.warning("%s: left for later: %s", self._what, error)
                self._chores.append(chore)
