"""How much memory a piece of work takes at its peak, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"
"""Of proc(5): sets the peak to what is resident now."""

_M_MMAP_THRESHOLD: Final = -3
"""Of the GNU C library's mallopt."""

_MAPPED_BYTES: Final = 1 << 17
_USUAL_BYTES: Final = 32 << 20


def peak_bytes(action: Callable[[], object]) -> int | None:
    """Resident bytes that ``action`` adds at its peak, its result included.

    Nothing else may run in the process meanwhile, and the action should have run once
    before: what libraries set up at first use is not its own.

    Returns
    -------
    num_bytes
        ``None`` where the kernel does not tell.
    """
    gc.collect()
    with _large_blocks_mapped():
        try:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
            before = _resident_bytes("VmRSS")
        except OSError:
            return None
        kept = action()
        after = _resident_bytes("VmHWM")
        del kept
    return None if before is None or after is None else max(0, after - before)


@contextmanager
def _large_blocks_mapped() -> Iterator[None]:
    """Give freed memory back to the kernel, and have large blocks go back at once.

    Else what was freed before would be at hand, so that the action seemed to need less, and
    holes between its own blocks would seem to be needed.  Other C libraries than GNU's do
    not know these calls.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            # What the library itself comes to in a process that uses large blocks.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _USUAL_BYTES)


def _resident_bytes(field: str) -> int | None:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    return None
