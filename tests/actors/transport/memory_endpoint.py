"""A pair of endpoints with the manners of ucxx, in memory: tags, eager sends, no mercy.

As in UCX, a request goes on whether or not anyone waits for it: cancelling the coroutine
is counted, and the buffer stays in use.  Only `abort` ends requests, in a later turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.transport.wire_ucx import EndpointErrors, UcxWire

EAGER_BYTES = 8192


class EndpointError(Exception):
    """What these endpoints raise."""


class TruncatedError(EndpointError):
    """A message was longer than the buffer for it."""


ERRORS = EndpointErrors(lost=(EndpointError,), truncated=(TruncatedError,))


@dataclass(eq=False)
class Request:
    """One send or receive under way."""

    buffer: bytes | bytearray | memoryview
    future: asyncio.Future[None] = field(default_factory=asyncio.Future)

    def end(self, error: Exception | None = None) -> None:
        """Complete it, once; the buffer is free then."""
        if not self.future.done():
            self.buffer = b""
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)
                self.future.exception()  # seen: nobody may be waiting any more


class MemoryEndpoint:
    """One side of a pair; see `pair`."""

    def __init__(self) -> None:
        self.peer: MemoryEndpoint = self
        self.is_closed = False
        #: Requests survive an abort until `let_go`, as behind a dead link.
        self.is_stuck = False
        #: Coroutines that somebody cancelled: always a bug of the caller.
        self.num_cancelled = 0
        #: Called with (tag, bytes) of each message before it is sent; may change them.
        self.on_send: Callable[[int, bytes], bytes] = lambda _tag, data: data
        #: Every request of ours that has not ended.
        self.requests: list[Request] = []
        self._arrived: dict[int, deque[tuple[bytes, Request]]] = defaultdict(deque)
        self._posted: dict[int, deque[Request]] = defaultdict(deque)

    async def send(self, buffer: bytes | bytearray | memoryview, tag: int) -> None:
        """Return at once for a short message, and when it is received for a long one."""
        request = self._begin(buffer)
        data = self.on_send(tag, bytes(buffer))
        self.peer._arrived[tag].append((data, request))
        self.peer._match(tag)
        if len(data) < EAGER_BYTES:
            request.end()
        await self._wait(request)

    async def recv(self, buffer: bytearray | memoryview, tag: int) -> None:
        """Fill the front of ``buffer`` with the next message of that tag."""
        request = self._begin(buffer)
        self._posted[tag].append(request)
        self._match(tag)
        await self._wait(request)

    def abort(self, *_: int) -> None:
        """End everything here soon, and at the peer a little later."""
        if self.is_closed:
            return
        self.is_closed = True
        loop = asyncio.get_running_loop()
        if not self.is_stuck:
            loop.call_soon(self.let_go)
        loop.call_soon(loop.call_soon, self.peer.lose)

    def lose(self) -> None:
        """Notice that the peer is gone: what has arrived can still be received."""
        self.is_closed = True
        self.let_go("connection reset")

    def let_go(self, why: str = "canceled") -> None:
        """End every request."""
        for request in tuple(self.requests):
            request.end(EndpointError(why))

    def _begin(self, buffer: bytes | bytearray | memoryview) -> Request:
        if self.is_closed:
            raise EndpointError("endpoint closed")
        request = Request(buffer)
        self.requests.append(request)
        request.future.add_done_callback(lambda _: self.requests.remove(request))
        return request

    async def _wait(self, request: Request) -> None:
        try:
            await asyncio.shield(request.future)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    def _match(self, tag: int) -> None:
        while self._arrived[tag] and self._posted[tag]:
            posted = self._posted[tag].popleft()
            if posted.future.done():
                continue
            data, sending = self._arrived[tag].popleft()
            if len(data) > len(posted.buffer):
                posted.end(TruncatedError("message truncated"))
            else:
                memoryview(posted.buffer)[: len(data)] = data
                posted.end()
            sending.end()


def pair() -> tuple[MemoryEndpoint, MemoryEndpoint]:
    """Two endpoints connected to each other."""
    left, right = MemoryEndpoint(), MemoryEndpoint()
    left.peer, right.peer = right, left
    return left, right


def wire(endpoint: MemoryEndpoint, peer: str = "peer") -> UcxWire:
    """The real wire over an endpoint in memory."""
    return UcxWire(endpoint, peer=peer, errors=ERRORS)
