"""`Driver` over ordinary memory: the same verbs and refusals as CUDA's, on any Linux.

``reserve`` is an inaccessible ``mmap``; ``create`` commits a run of one sealed memory
file; ``map`` maps that run over reserved addresses; ``set_access`` is ``mprotect``;
``export`` opens the file once more.  Committed bytes are exact, from the file's block
count.

A child made by ``fork`` shares the memory file, so that a verb (or a finaliser) of its
copy of the driver would change its parent's memory: each compares process numbers first.

It does not bind memory to a NUMA node.
"""

from __future__ import annotations

from actors.arena.driver_booked import BookedDriver
from actors.arena.ledger import need_aligned
from actors.arena.syscalls import PAGE_BYTES
from actors.arena.system_host import HostSystem

DEFAULT_GRANULE_BYTES = 2 << 20
"""What CUDA devices have."""


class HostVmmDriver(BookedDriver):
    """Commits memory of a sealed file under reserved addresses of this process.

    Parameters
    ----------
    capacity_bytes
        Budget: most bytes committed at once.  A multiple of the granule.
    granule_bytes
        A power of two, at least the page size.  Each mapping costs the kernel one or
        two entries of a bounded table: prefer 256 KiB or more for large arenas.
    """

    def __init__(self, capacity_bytes: int, granule_bytes: int = DEFAULT_GRANULE_BYTES) -> None:
        if granule_bytes < PAGE_BYTES or granule_bytes & (granule_bytes - 1):
            raise ValueError(
                f"granule_bytes must be a power of two >= {PAGE_BYTES}, got {granule_bytes}"
            )
        need_aligned("capacity_bytes", capacity_bytes, granule_bytes)
        super().__init__(HostSystem(capacity_bytes=capacity_bytes, granule_bytes=granule_bytes))
