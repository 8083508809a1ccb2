"""The refusals of memory drivers; `codec.errors` has the whole tree."""

from __future__ import annotations

from codec.errors.fabric import CapacityError, FabricError


class VmmError(FabricError):
    """A memory driver refused a verb, and nothing changed."""


class VmmMisaligned(VmmError, ValueError):  # noqa: N818 - named as CUDA's refusals are
    """A size or an address is not a positive multiple of what it has to be."""

    def __init__(self, what: str, found: int, granule_bytes: int) -> None:
        super().__init__(what, found, granule_bytes)
        self.what = what
        self.found = found
        self.granule_bytes = granule_bytes

    def __str__(self) -> str:
        return f"{self.what} must be a positive multiple of {self.granule_bytes}, got {self.found}"


class VmmOutOfMemory(VmmError, CapacityError, MemoryError):  # noqa: N818 - as above
    """A limit is reached; ``limit`` says which, since each has another remedy."""

    def __init__(self, limit: str, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(limit, wanted_bytes, free_bytes)
        self.limit = limit
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return (
            f"{self.limit} reached: wanted {self.wanted_bytes} bytes, "
            f"{self.free_bytes} of the driver's budget are free"
        )


class VmmNotReserved(VmmError):  # noqa: N818 - as above
    """Not wholly inside one reservation, or not exactly one."""

    def __init__(self, va: int, nbytes: int) -> None:
        super().__init__(va, nbytes)
        self.va = va
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.va:#x} are not of one reservation"


class VmmAlreadyMapped(VmmError):  # noqa: N818 - as above
    """A mapping is there already."""

    def __init__(self, va: int, nbytes: int) -> None:
        super().__init__(va, nbytes)
        self.va = va
        self.nbytes = nbytes

    def __str__(self) -> str:
        return f"something is mapped within {self.nbytes} bytes at {self.va:#x}"


class VmmNotMapped(VmmError):  # noqa: N818 - as above
    """Not exactly whole mappings, or not mapped with that access."""

    def __init__(self, va: int, nbytes: int, why: str) -> None:
        super().__init__(va, nbytes, why)
        self.va = va
        self.nbytes = nbytes
        self.why = why

    def __str__(self) -> str:
        return f"{self.nbytes} bytes at {self.va:#x}: {self.why}"


class VmmBadHandle(VmmError):  # noqa: N818 - as above
    """The handle was never created here, or is released."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self.handle = handle

    def __str__(self) -> str:
        return f"handle {self.handle} is not live"


class VmmBusy(VmmError):  # noqa: N818 - as above
    """What would go away is still in use."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what} is in use: {self.why}"


class VmmForked(VmmError):  # noqa: N818 - as above
    """A forked child called; the memory belongs to its parent."""

    def __init__(self, owner_pid: int, pid: int) -> None:
        super().__init__(owner_pid, pid)
        self.owner_pid = owner_pid
        self.pid = pid

    def __str__(self) -> str:
        return f"process {self.pid} was forked from {self.owner_pid}, which owns the memory"


class VmmClosed(VmmError):  # noqa: N818 - as above
    """The driver or arena was closed."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"the {self.what} is closed"


class VmmDriverError(VmmError):
    """The system refused a call that should have worked."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.call = call
        self.code = code

    def __str__(self) -> str:
        return f"{self.call} failed with code {self.code}"


class VmmNotShared(VmmError):  # noqa: N818 - as above
    """Memory cannot be handed over like this, or what was handed over is not what it says."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"{self.what} cannot be shared: {self.why}"
