"""A connected pair of endpoints, seen from one side: what a link gives the two pumps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from actors.transport.session.instructions import Instruction


class Wire(Protocol):
    """Carries frames in order, and payloads beside them, told apart by their ordinal.

    Every call has a deadline.  After the first failure the wire is closed for good and each
    further call raises that same failure.  Cancelling a call is a failure too.
    """

    sent_bytes: int
    received_bytes: int

    async def send_frame(self, frame: bytes, *, step: str, timeout_s: float) -> None:
        """Hand over one frame; that is no proof that it was heard."""
        ...

    async def receive_frame(self, *, step: str, timeout_s: float) -> bytes:
        """Return exactly one frame, or the bytes of a header that nobody can read."""
        ...

    async def send_payload(self, view: memoryview, *, ordinal: int, timeout_s: float) -> None:
        """Send from ``view``; it may be touched until `when_quiet` says otherwise."""
        ...

    async def receive_payload(self, view: memoryview, *, ordinal: int, timeout_s: float) -> None:
        """Fill ``view``; it may be touched until `when_quiet` says otherwise."""
        ...

    def when_quiet(self, release: Callable[[], None]) -> None:
        """Call ``release`` once nothing can touch any buffer of this wire any more.

        At once, if nothing is in flight.  Never, if nobody can tell: a leak is better than
        memory written to by a stranger.
        """
        ...

    def abort(self) -> None:
        """Close without ceremony; what is in flight ends soon."""
        ...


class Machine(Protocol):
    """The face of `PullClient` and `PullServer` that `hear` needs."""

    @property
    def bytes_wanted(self) -> int:
        """How many bytes to read next."""
        ...

    def receive(self, data: memoryview, /) -> list[Instruction]:
        """Take them."""
        ...


async def hear(wire: Wire, machine: Machine, *, step: str, timeout_s: float) -> list[Instruction]:
    """Pass one frame from ``wire`` to ``machine``; return what it wants done."""
    rest = memoryview(await wire.receive_frame(step=step, timeout_s=timeout_s))
    instructions: list[Instruction] = []
    while rest:
        taken = machine.bytes_wanted
        instructions += machine.receive(rest[:taken])
        rest = rest[taken:]
    return instructions
