"""A wire over one ucxx endpoint, on which no request outlives its buffer.

UCX goes on writing into a buffer after the coroutine that waited for it was cancelled, so
here nothing is ever cancelled.  A request runs as a task of its own:

1. Wait for the task with a deadline, which does not cancel it.
2. On a time-out, or when the caller is cancelled: abort the endpoint, which ends every
   request on it, and wait until this one has ended.
3. Only then let the caller go on to release the buffer.
4. A request that does not end even so keeps its buffer, its wire and whatever was to be
   released alive; `num_zombies` counts such wires.

Frames travel under one tag, short enough to be sent eagerly: the receiver posts a slot of
`SLOT_BYTES` and reads the true length from the header.  Each payload has a tag of its own.
This module does not import ucxx; the link passes in endpoints and the classes they raise.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from actors.transport.frames import HEADER_BYTES, parse_header
from codec.errors import PeerLostError, ProtocolError, TransferError, TransferTimeoutError

SLOT_BYTES = 4096
"""First message of every frame, at most; below UCX's eager limit of 8 KiB over TCP."""

SETTLE_S = 2.0
"""How long to wait for an aborted request before it is left to itself."""

Bytes = bytes | bytearray | memoryview
_ABORT_NS = 10**9
_FRAME_TAG = 1
_FIRST_PAYLOAD_TAG = 16


class Endpoint(Protocol):
    """What we use of ``ucxx._lib_async.Endpoint``."""

    def send(self, buffer: Bytes, tag: int) -> Coroutine[Any, Any, None]:
        """Send the whole buffer under ``tag``."""
        ...

    def recv(self, buffer: Bytes, tag: int) -> Coroutine[Any, Any, None]:
        """Receive a message of at most the buffer's size; its size is not told."""
        ...

    def abort(self, period: int, max_attempts: int) -> None:
        """Close at once; a second call does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointErrors:
    """What an endpoint raises."""

    lost: tuple[type[Exception], ...]
    """Anything at all."""
    truncated: tuple[type[Exception], ...] = ()
    """Among these: the peer sent a longer message than was announced."""


_zombies: set[UcxWire] = set()


def num_zombies() -> int:
    """Wires with a request that did not end when its endpoint was aborted."""
    return len(_zombies)


def forget_frames(error: BaseException) -> None:
    """Clear the locals of the finished frames that ``error`` came through.

    ucxx keeps the future of a failed request, and so its error, for as long as it likes;
    the traceback would keep the buffer and the whole of ucxx alive.
    """
    traceback.clear_frames(error.__traceback__)


class UcxWire:
    """Frames and payloads over one endpoint."""

    def __init__(self, endpoint: Endpoint, *, peer: str, errors: EndpointErrors) -> None:
        self._endpoint = endpoint
        self._errors = errors
        self.peer = peer
        self.sent_bytes = 0
        self.received_bytes = 0
        #: Why the wire is closed; set once, before the endpoint is aborted.
        self._failure: TransferError | None = None
        #: Requests that UCX may still be working on.
        self._live: set[asyncio.Task[None]] = set()
        #: Somebody else cancelled a request, so that nobody can tell when it has ended.
        self._is_tainted = False
        #: Called, in order, when ``_live`` becomes empty; never while it is tainted.
        self._releases: list[Callable[[], None]] = []

    async def send_frame(self, frame: bytes, *, step: str, timeout_s: float) -> None:
        """See `Wire.send_frame`; a frame longer than a slot takes a second message."""
        for part in (frame[:SLOT_BYTES], frame[SLOT_BYTES:]):
            if part:
                await self._request(self._endpoint.send, part, _FRAME_TAG, step, timeout_s)
        self.sent_bytes += len(frame)

    async def receive_frame(self, *, step: str, timeout_s: float) -> bytes:
        """See `Wire.receive_frame`."""
        slot = bytearray(SLOT_BYTES)
        await self._request(self._endpoint.recv, slot, _FRAME_TAG, step, timeout_s)
        head = bytes(slot[:HEADER_BYTES])
        try:
            num_bytes = HEADER_BYTES + parse_header(head, peer=self.peer).control_bytes
        except ProtocolError:
            self.received_bytes += len(head)
            return head  # for the session to refuse, and to say why
        frame = bytes(slot[:num_bytes])
        if num_bytes > SLOT_BYTES:
            rest = bytearray(num_bytes - SLOT_BYTES)
            await self._request(self._endpoint.recv, rest, _FRAME_TAG, step, timeout_s)
            frame += rest
        self.received_bytes += num_bytes
        return frame

    async def send_payload(self, view: memoryview, *, ordinal: int, timeout_s: float) -> None:
        """See `Wire.send_payload`."""
        tag = _FIRST_PAYLOAD_TAG + ordinal
        await self._request(self._endpoint.send, view, tag, "sending a payload", timeout_s)
        self.sent_bytes += view.nbytes

    async def receive_payload(self, view: memoryview, *, ordinal: int, timeout_s: float) -> None:
        """See `Wire.receive_payload`."""
        tag = _FIRST_PAYLOAD_TAG + ordinal
        await self._request(self._endpoint.recv, view, tag, "receiving a payload", timeout_s)
        self.received_bytes += view.nbytes

    def when_quiet(self, release: Callable[[], None]) -> None:
        """See `Wire.when_quiet`."""
        self._releases.append(release)
        self._release_if_quiet()
        if self._releases:
            _zombies.add(self)

    def abort(self) -> None:
        """See `Wire.abort`."""
        self._fail(PeerLostError(self.peer, "the connection was closed on this side"))

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        assert not self._releases or self._live or self._is_tainted
        assert (self in _zombies) == bool(self._releases)

    async def _request(
        self,
        operation: Callable[[Bytes, int], Coroutine[Any, Any, None]],
        buffer: Bytes,
        tag: int,
        step: str,
        timeout_s: float,
    ) -> None:
        """Run one request to its end, whatever happens to whoever waits for it."""
        if self._failure is not None:
            raise copy(self._failure)
        task = asyncio.ensure_future(operation(buffer, tag))
        self._live.add(task)
        task.add_done_callback(self._on_done)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._fail(PeerLostError(self.peer, f"{step} was cancelled on this side"))
            await self._settle(task)
            raise
        if not task.done():
            self._fail(TransferTimeoutError(self.peer, step, timeout_s))
            await self._settle(task)
        elif task.cancelled():
            self._fail(PeerLostError(self.peer, f"the request for {step} was cancelled"))
        elif (error := task.exception()) is not None:
            self._note(error, step)
        if self._failure is not None:
            # A copy, since several requests may end of one failure and each adds its trace.
            raise copy(self._failure)

    def _note(self, error: BaseException, step: str) -> None:
        """Close for the reason that a request gives, unless there was one before."""
        has_failed = self._failure is not None
        if isinstance(error, self._errors.truncated):
            self._fail(ProtocolError(self.peer, f"{step}: more came than was announced"))
        else:
            self._fail(PeerLostError(self.peer, f"{step}: {type(error).__name__}: {error}"))
        # An endpoint aborted before a request began trips over itself in ways of its own.
        if not has_failed and not isinstance(error, self._errors.lost):
            raise error

    def _fail(self, why: TransferError) -> None:
        """Close for good; the first reason stays."""
        if self._failure is None:
            self._failure = why
            with suppress(*self._errors.lost):
                self._endpoint.abort(_ABORT_NS, 1)

    async def _settle(self, task: asyncio.Task[None]) -> None:
        """Wait for an aborted request to end, through any number of cancellations."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SETTLE_S
        is_cancelled = False
        while not task.done() and loop.time() < end_s:
            try:
                await asyncio.wait({task}, timeout=end_s - loop.time())
            except asyncio.CancelledError:
                is_cancelled = True
        if is_cancelled:
            raise asyncio.CancelledError

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._is_tainted = True
        elif (error := task.exception()) is not None:
            forget_frames(error)
        self._live.discard(task)
        self._release_if_quiet()

    def _release_if_quiet(self) -> None:
        # A task leaves ``_live`` a turn of the loop after it is done.
        if self._is_tainted or any(not t.done() or t.cancelled() for t in self._live):
            return
        releases, self._releases = self._releases, []
        _zombies.discard(self)
        for release in releases:
            release()
