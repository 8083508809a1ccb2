"""Ways for tests to look at memory, and to make the system refuse."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from actors.arena import syscalls

if TYPE_CHECKING:
    import pytest


def is_readable(va: int) -> bool:
    """Whether the byte at ``va`` can be read, found out without a crash."""
    libc = ctypes.CDLL(None, use_errno=True)
    reader, writer = os.pipe()
    try:
        done = libc.write(writer, ctypes.c_void_p(va), ctypes.c_size_t(1))
        assert done == 1 or ctypes.get_errno() == errno.EFAULT
        return bool(done == 1)
    finally:
        os.close(reader)
        os.close(writer)


def fail_call(
    patch: pytest.MonkeyPatch, name: str, code: int, number: int = 0
) -> Callable[[], int]:
    """Make call ``number`` of a system call and all after it fail; returns the calls so far."""
    calls: list[int] = []
    real = getattr(syscalls, name)

    def failing(*args: int) -> object:
        calls.append(0)
        if len(calls) > number:
            raise OSError(code, os.strerror(code), name)
        return real(*args)

    patch.setattr(syscalls, name, failing)
    return lambda: len(calls)


def run_in_threads(work: Callable[[int], None], num_threads: int) -> None:
    """Call ``work`` with 0, 1, ... at once, threads changing as often as they can.

    What one of them raises is raised here.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(work, range(num_threads)))
    finally:
        sys.setswitchinterval(interval_s)
