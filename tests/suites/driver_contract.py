"""What a memory driver must answer: refusals, and a walk with its expected trace.

`CONTRACT_TRACE` holds no address and no time, so that every driver on every machine
must reproduce it exactly.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from actors.arena.driver import Access, Driver, Handle, Share, Span, Ticket
from codec.errors import (
    VmmAlreadyMapped,
    VmmBadHandle,
    VmmBusy,
    VmmError,
    VmmMisaligned,
    VmmNotMapped,
    VmmNotReserved,
    VmmNotShared,
    VmmOutOfMemory,
)

CAPACITY_GRANULES = 8
MIN_STEPS = 40
"""A shorter walk would not pass every verb and refusal."""


@dataclass
class Rig:
    """A driver in the middle of its work: two mappings side by side, and leftovers.

    From ``base``: ``pair`` (2 granules, open), ``single`` (1 granule, closed), then bare
    addresses up to 16 granules, but for ``lent`` (``single`` once more) at 14.
    """

    driver: Driver
    granule: int
    base: int
    pair: Handle
    single: Handle
    lent: Handle
    """``single`` as if another process had shared it for reading; closed."""

    loose: Handle
    """Two granules, mapped nowhere."""

    released: Handle
    outlived: Handle
    """Released while it was mapped, then unmapped."""

    freed: Span
    """A reservation that was given back."""

    @classmethod
    def build(cls, driver: Driver) -> Rig:
        """Bring ``driver``, which must be new, into that state."""
        granule = driver.caps().granule_min_bytes
        base = driver.reserve(16 * granule)
        freed = Span(driver.reserve(granule), granule)
        driver.free_va(*freed)
        pair, single, loose, released, outlived = (
            driver.create(n * granule) for n in (2, 1, 2, 1, 1)
        )
        driver.release(released)
        driver.map(base, outlived)
        driver.release(outlived)
        driver.unmap(base)
        driver.map(base, pair)
        driver.map(base + 2 * granule, single)
        driver.set_access([Span(base, 2 * granule)], Access.READ_WRITE)
        driver.copy_in(base, b"kept")
        lent = hand_over(driver, single, driver)
        driver.map(base + 14 * granule, lent)
        return cls(driver, granule, base, pair, single, lent, loose, released, outlived, freed)

    def at(self, granules: float) -> int:
        """Address that many granules behind the base."""
        return self.base + int(granules * self.granule)

    def span(self, start: float, granules: float) -> Span:
        """Span in granules behind the base."""
        return Span(self.at(start), int(granules * self.granule))

    def state(self) -> tuple[object, ...]:
        """What a refusal must not change."""
        return (self.driver.physical(), self.driver.copy_out(self.base, 4))

    def undo(self) -> None:
        """Give everything back, which fails if a refusal has changed what is mapped."""
        for va in (self.base, self.at(2), self.at(14)):
            self.driver.unmap(va)
        for handle in (self.pair, self.single, self.lent, self.loose):
            self.driver.release(handle)
        self.driver.free_va(self.base, 16 * self.granule)


def set_open(rig: Rig, *spans: Span) -> None:
    """Open ``spans`` for reading and writing."""
    rig.driver.set_access(spans, Access.READ_WRITE)


def hand_over(owner: Driver, handle: Handle, importer: Driver, *, writable: bool = False) -> Handle:
    """The importer's handle for the owner's memory."""
    share = owner.export(handle, writable=writable)
    try:
        return importer.import_(share)
    finally:
        share.close()


def import_as(rig: Rig, **changes: Any) -> Handle:
    """Import what is a share but for some of its fields."""
    share = rig.driver.export(rig.pair)
    try:
        return rig.driver.import_(replace(share, **changes))
    finally:
        share.close()


def import_pipe(rig: Rig) -> Handle:
    """Import the descriptor of something else."""
    reader, writer = os.pipe()
    try:
        return import_as(rig, fd=reader)
    finally:
        os.close(reader)
        os.close(writer)


REFUSALS: dict[str, tuple[type[Exception], Callable[[Rig], Any]]] = {
    "create part of a granule": (VmmMisaligned, lambda r: r.driver.create(r.granule + 1)),
    "create nothing": (VmmMisaligned, lambda r: r.driver.create(0)),
    "create over budget": (VmmOutOfMemory, lambda r: r.driver.create(4 * r.granule)),
    "map twice at one place": (VmmAlreadyMapped, lambda r: r.driver.map(r.base, r.loose)),
    "map over an end": (VmmAlreadyMapped, lambda r: r.driver.map(r.at(1), r.loose)),
    "map unaligned": (VmmMisaligned, lambda r: r.driver.map(r.at(4.5), r.loose)),
    "map where part of it fits": (VmmNotReserved, lambda r: r.driver.map(r.at(15), r.loose)),
    "map below a reservation": (VmmNotReserved, lambda r: r.driver.map(r.granule, r.loose)),
    "map an unknown handle": (VmmBadHandle, lambda r: r.driver.map(r.at(4), Handle(10**6))),
    "map a released handle": (VmmBadHandle, lambda r: r.driver.map(r.at(4), r.released)),
    "open a hole": (VmmNotMapped, lambda r: set_open(r, r.span(4, 1))),
    "open with a hole at the end": (VmmNotMapped, lambda r: set_open(r, r.span(2, 2))),
    "open half a mapping": (VmmNotMapped, lambda r: set_open(r, r.span(0, 1))),
    "open from half a mapping": (VmmNotMapped, lambda r: set_open(r, r.span(1, 2))),
    "open one that is fine and a hole": (
        VmmNotMapped,
        lambda r: set_open(r, r.span(2, 1), r.span(4, 1)),
    ),
    "unmap half a mapping": (VmmNotMapped, lambda r: r.driver.unmap(r.at(1))),
    "unmap a hole": (VmmNotMapped, lambda r: r.driver.unmap(r.at(4))),
    "release twice": (VmmBadHandle, lambda r: r.driver.release(r.released)),
    "release after the last unmap": (VmmBadHandle, lambda r: r.driver.release(r.outlived)),
    "free what is mapped": (VmmBusy, lambda r: r.driver.free_va(*r.span(0, 16))),
    "free a part": (VmmNotReserved, lambda r: r.driver.free_va(*r.span(0, 8))),
    "free again": (VmmNotReserved, lambda r: r.driver.free_va(*r.freed)),
    "reserve nothing": (VmmMisaligned, lambda r: r.driver.reserve(0)),
    "reserve part of a granule": (VmmMisaligned, lambda r: r.driver.reserve(r.granule - 1)),
    "align to no power of two": (
        VmmMisaligned,
        lambda r: r.driver.reserve(r.granule, align_bytes=3 * r.granule),
    ),
    "write what is closed": (VmmNotMapped, lambda r: r.driver.copy_in(r.at(2), b"x")),
    "read what is closed": (VmmNotMapped, lambda r: r.driver.copy_out(r.at(2), 1)),
    "read over the end": (VmmNotMapped, lambda r: r.driver.copy_out(r.at(1), 2 * r.granule)),
    "read nothing": (VmmMisaligned, lambda r: r.driver.copy_out(r.base, 0)),
    "write before a mapping": (VmmNotMapped, lambda r: r.driver.copy_in(r.base - 1, b"xy")),
    "tensor over the end": (
        VmmNotReserved,
        lambda r: r.driver.tensor(r.at(15), 2 * r.granule, None),
    ),
    "open for writing what is lent for reading": (
        VmmNotShared,
        lambda r: set_open(r, r.span(14, 1)),
    ),
    "open one that is fine and what is lent": (
        VmmNotShared,
        lambda r: set_open(r, r.span(2, 1), r.span(14, 1)),
    ),
    "export an unknown handle": (VmmBadHandle, lambda r: r.driver.export(Handle(10**6))),
    "export a released handle": (VmmBadHandle, lambda r: r.driver.export(r.released)),
    "export what is lent": (VmmNotShared, lambda r: r.driver.export(r.lent)),
    "import part of a granule": (VmmNotShared, lambda r: import_as(r, nbytes=r.granule // 2)),
    "import nothing": (VmmNotShared, lambda r: import_as(r, nbytes=0)),
    "import from half a granule": (
        VmmNotShared,
        lambda r: import_as(r, offset_bytes=r.granule // 2),
    ),
    "import from before the start": (
        VmmNotShared,
        lambda r: import_as(r, offset_bytes=-r.granule),
    ),
    "import more than there is": (
        VmmNotShared,
        lambda r: import_as(r, nbytes=10**6 * r.granule),
    ),
    "import what is closed": (VmmNotShared, lambda r: import_as(r, fd=-1)),
    "import what is no memory": (VmmNotShared, import_pipe),
    "import what travels otherwise": (VmmNotShared, lambda r: import_as(r, kind="pigeon")),
    "ask for a ticket of nobody": (ValueError, lambda r: r.driver.done(Ticket(10**6))),
}


class Tracer:
    """Calls a driver's verbs and notes what class of result each had."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.trace: list[str] = []

    def __call__(self, verb: str, *args: Any) -> Any:
        """Call ``verb``; a refusal is noted and gives None."""
        try:
            result = getattr(self._driver, verb)(*args)
        except VmmError as error:
            self.trace.append(f"{verb} {type(error).__name__}")
            return None
        self.trace.append(f"{verb} ok")
        return result


def walk_contract(driver: Driver) -> list[str]:
    """The life of two handles and two reservations: every verb, many refusals."""
    granule = driver.caps().granule_min_bytes
    call = Tracer(driver)
    walk_in(call, granule)
    assert len(call.trace) >= MIN_STEPS
    return call.trace


def walk_in(call: Tracer, granule: int) -> None:
    """Take, map and open."""
    va = call("reserve", 8 * granule)
    far = call("reserve", 2 * granule, 4 * granule)
    one, two = call("create", granule), call("create", 2 * granule)
    call("create", granule - 1)
    call("create", CAPACITY_GRANULES * granule)
    call("map", va, one)
    call("map", va, two)
    call("map", va + granule, two)
    call("map", va + 3 * granule, one)
    call("map", va + 2 * granule, one)
    call("map", va + 7 * granule, two)
    call("map", far, one)
    call("copy_in", va, b"a")
    call("set_access", [Span(va, 3 * granule)], Access.READ_WRITE)
    call("set_access", [Span(va, 5 * granule)], Access.READ_WRITE)
    call("set_access", [Span(va + 3 * granule, granule), Span(far, granule)], Access.READ)
    call("copy_in", va, b"a")
    call("copy_out", va + 3 * granule, 1)
    call("copy_in", far, b"b")
    walk_across(call, granule, va + 4 * granule, one)
    walk_out(call, granule, va, far, one, two)


def walk_across(call: Tracer, granule: int, va: int, handle: Handle) -> None:
    """Lend a handle for reading and for writing, and have both back."""
    shares: list[Share] = [call("export", handle)]
    lent = call("import_", shares[0])
    call("import_", replace(shares[0], nbytes=10**6 * granule))
    call("export", lent)
    call("export", Handle(10**6))
    call("map", va, lent)
    call("set_access", [Span(va, granule)], Access.READ_WRITE)
    call("set_access", [Span(va, granule)], Access.READ)
    call("copy_out", va, 1)
    call("copy_in", va, b"c")
    call("release", lent)
    call("unmap", va)
    call("map", va, lent)
    share = replace(shares[0], is_writable=True)
    lent = call("import_", share)
    call("release", lent)
    call("import_", replace(share, kind="pigeon"))
    for share in shares:
        share.close()
    call("import_", shares[0])


def walk_out(call: Tracer, granule: int, va: int, far: int, *handles: Handle) -> None:
    """Give back, in an order in which much can go wrong."""
    one, two = handles
    call("release", one)
    call("release", one)
    call("map", far + granule, one)
    call("unmap", va + granule // 2)
    call("unmap", va)
    call("unmap", va)
    call("copy_out", va, 1)
    call("copy_out", far, 1)
    call("unmap", va + 3 * granule)
    call("free_va", far, 2 * granule)
    call("unmap", far)
    call("free_va", far, granule)
    call("free_va", far, 2 * granule)
    call("free_va", far, 2 * granule)
    call("unmap", va + 2 * granule)
    call("unmap", va + granule)
    call("map", va, two)
    call("set_access", [Span(va, 2 * granule)], Access.NONE)
    call("copy_out", va, 1)
    call("unmap", va)
    call("release", two)
    call("free_va", va, 8 * granule)
    call("close")
    call("close")
    call("create", granule)


CONTRACT_TRACE = """
reserve ok / reserve ok / create ok / create ok / create VmmMisaligned /
create VmmOutOfMemory / map ok / map VmmAlreadyMapped / map ok / map ok /
map VmmAlreadyMapped / map VmmNotReserved / map ok / copy_in VmmNotMapped /
set_access ok / set_access VmmNotMapped / set_access ok / copy_in ok / copy_out ok /
copy_in VmmNotMapped /
export ok / import_ ok / import_ VmmNotShared / export VmmNotShared / export VmmBadHandle /
map ok / set_access VmmNotShared / set_access ok / copy_out ok / copy_in VmmNotMapped /
release ok / unmap ok / map VmmBadHandle / import_ ok / release ok / import_ VmmNotShared /
import_ VmmNotShared /
release ok / release VmmBadHandle / map VmmBadHandle /
unmap VmmNotMapped / unmap ok / unmap VmmNotMapped / copy_out VmmNotMapped / copy_out ok /
unmap ok / free_va VmmBusy / unmap ok / free_va VmmNotReserved / free_va ok /
free_va VmmNotReserved / unmap VmmNotMapped / unmap ok / map ok / set_access ok /
copy_out VmmNotMapped / unmap ok / release ok / free_va ok / close ok / close ok /
create VmmClosed
"""
