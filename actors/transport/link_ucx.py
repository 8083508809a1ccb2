"""Pulling components over UCX.

* `UcxListener` serves a `Source` on a port that UCX picks; publish ``port``.
* `UcxLink` pulls into a `Sink`, and measures what a link costs.
* `shutdown` ends UCX in this process.  Without it the process would never exit, because
  ucxx keeps a thread that nothing else stops.

ucxx is one per process and bound to the event loop that started it; both classes start it
when first used.  Requests in flight are bounded over the whole process: sessions and pulls
queue for a place, each has a window of payloads and one frame on its way, and together
that stays below the 64 or so futures that ucxx keeps ready.

Host memory only.  UCX listens on every address and knows neither authentication nor
encryption: whoever reaches the port may pull.  Keep it on a private network.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from actors.transport.deadlines import DEFAULT_DEADLINES, Countdown, Deadlines
from actors.transport.kinds import ANY_INCARNATION, NONCE_BYTES
from actors.transport.messages import Pull, Want
from actors.transport.ports import Sink, Source
from actors.transport.pulling import Puller
from actors.transport.report import LinkProbe, PullReport, fit_link
from actors.transport.runtime_ucx import (
    LAST_RESORT_S,
    Runtime,
    active_transports,
    connect,
    shutdown,
    start,
)
from actors.transport.serving import ServerCounters, Serving
from actors.transport.session import PullClient, PullServer
from actors.transport.session.tables import ClientState
from actors.transport.wire_ucx import UcxWire
from codec.errors import TransferError, TransferTimeoutError
from codec.identity import CodecId, ComponentKey

__all__ = ["UcxLink", "UcxListener", "active_transports", "shutdown"]

MAX_WAITING = 256
"""Endpoints that may queue for a session; more are cut off at once."""

DEFAULT_PULL_BYTES = 1 << 30
SMALL_PROBE_BYTES = 64 << 10
LARGE_PROBE_BYTES = 8 << 20
"""Both are above UCX's eager limit, so that they take the same path."""


class UcxListener:
    """Serves one source to every worker that connects."""

    def __init__(
        self,
        source: Source,
        *,
        node: str,
        incarnation: int,
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> None:
        if incarnation == ANY_INCARNATION:
            raise ValueError(f"incarnation must not be {ANY_INCARNATION}")
        self._source = source
        self._node = node
        self._incarnation = incarnation
        self._deadlines = deadlines
        self._counters = ServerCounters()
        self._listener: Any = None
        self._runtime: Runtime | None = None
        #: Handlers under way, waiting ones included; at most ``MAX_WAITING``.
        self._handlers: dict[asyncio.Task[Any], UcxWire] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def port(self) -> int:
        """The port to publish; any address of the host will do."""
        if self._listener is None:
            raise RuntimeError("the listener is not running")
        return int(self._listener.port)

    async def start(self) -> int:
        """Begin to serve; return the port."""
        if self._listener is not None:
            raise RuntimeError("the listener is running already")
        self._runtime = start()
        self._listener = self._runtime.ucxx.create_listener(
            self._on_endpoint, 0, connect_timeout=LAST_RESORT_S
        )
        return self.port

    async def close(self) -> None:
        """Cut off every session and stop listening."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        for wire in self._handlers.values():
            wire.abort()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self._deadlines.close_s)
        listener.close()

    @property
    def num_sessions(self) -> int:
        """Endpoints being served or waiting to be."""
        return len(self._handlers)

    def counters(self) -> ServerCounters:
        """A copy of what was counted so far."""
        return replace(self._counters)

    async def _on_endpoint(self, endpoint: Any) -> None:  # noqa: ANN401 - ucxx has no types
        """Serve one endpoint; ucxx runs this as a task and logs what it raises."""
        runtime, task = self._runtime, asyncio.current_task()
        is_open = self._listener is not None and len(self._handlers) < MAX_WAITING
        if runtime is None or task is None or not is_open:
            self._counters.refused += 1
            endpoint.abort()
            return
        wire = UcxWire(endpoint, peer="a client", errors=runtime.errors)
        self._handlers[task] = wire
        runtime.wires.add(wire)
        try:
            async with runtime.sessions:
                await self._serve(wire)
        finally:
            wire.abort()
            runtime.wires.discard(wire)
            del self._handlers[task]

    async def _serve(self, wire: UcxWire) -> None:
        server = PullServer(
            node=self._node,
            incarnation=self._incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        countdown = Countdown(self._deadlines, clock=asyncio.get_running_loop().time)
        serving = Serving(wire, server, self._source, countdown=countdown, counters=self._counters)
        await serving.run()


@dataclass(frozen=True, slots=True)
class _Session:
    """An open session, seen from the pulling side."""

    wire: UcxWire
    client: PullClient
    puller: Puller


class UcxLink:
    """Pulls on behalf of one node."""

    def __init__(self, *, node: str) -> None:
        self._node = node

    async def pull(
        self,
        host: str,
        port: int,
        wants: Sequence[tuple[ComponentKey, CodecId]],
        sink: Sink,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        *,
        node: str,
        incarnation: int,
        max_bytes: int = DEFAULT_PULL_BYTES,
    ) -> PullReport:
        """Bring components of worker ``node`` into ``sink``.

        Parameters
        ----------
        wants
            1 to 1,024 of them, each once.  They are sent in this order.
        incarnation
            Which start of the worker is meant; `ANY_INCARNATION` if that is all the same.
        max_bytes
            Most payload bytes in all; a component that would take it further is a miss.

        Returns
        -------
        report
            One outcome per want.  Whatever could not be had is a miss in it, not an error.

        Raises
        ------
        ValueError
            If ``wants`` or ``max_bytes`` break the protocol's limits; nothing was sent.
        StaleIncarnationError
            If the worker has restarted.
        PeerLostError, TransferTimeoutError, ProtocolError
            If the transfer broke off.  Components committed before that stay; all other
            reservations are aborted as soon as UCX cannot write to them any more.
        """
        request = Pull(tuple(Want(component, codec) for component, codec in wants), max_bytes)
        clock = asyncio.get_running_loop().time
        countdown = Countdown(deadlines, clock=clock)
        start_s = clock()
        async with self._session(host, port, node, incarnation, countdown) as session:
            open_s = clock()
            await session.puller.pull(request, sink)
            end_s = clock()
        return PullReport(
            outcomes=session.client.outcomes(),
            wire_bytes=session.wire.sent_bytes + session.wire.received_bytes,
            connect_s=open_s - start_s,
            transfer_s=end_s - open_s,
        )

    async def measure_link(
        self,
        host: str,
        port: int,
        *,
        node: str,
        incarnation: int = ANY_INCARNATION,
        deadlines: Deadlines = DEFAULT_DEADLINES,
        num_rounds: int = 3,
    ) -> LinkProbe:
        """Time a small and a large transfer, the best of ``num_rounds`` each.

        Raises what `pull` raises, and ``ValueError`` for no rounds.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, got {num_rounds}")
        clock = asyncio.get_running_loop().time
        countdown = Countdown(deadlines, clock=clock)
        async with self._session(host, port, node, incarnation, countdown) as session:
            # The first round trip pays for connections that UCX makes when first used.
            await session.puller.ping(secrets.token_bytes(NONCE_BYTES))
            best_s: dict[int, float] = {}
            for num_bytes in (SMALL_PROBE_BYTES, LARGE_PROBE_BYTES) * num_rounds:
                start_s = clock()
                await session.puller.probe(num_bytes)
                took_s = max(clock() - start_s, 1e-9)
                best_s[num_bytes] = min(took_s, best_s.get(num_bytes, took_s))
        return fit_link(
            small_bytes=SMALL_PROBE_BYTES,
            small_s=best_s[SMALL_PROBE_BYTES],
            large_bytes=LARGE_PROBE_BYTES,
            large_s=best_s[LARGE_PROBE_BYTES],
        )

    @asynccontextmanager
    async def _session(
        self, host: str, port: int, node: str, incarnation: int, countdown: Countdown
    ) -> AsyncIterator[_Session]:
        """Connect and greet; part politely unless the block has failed or given up."""
        runtime = start()
        client = PullClient(
            node=self._node,
            server_node=node,
            incarnation=incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        peer = f"{node} at {host}:{port}"
        async with _place(runtime.pulls, peer, countdown):
            endpoint = await connect(runtime, host, port, peer=peer, countdown=countdown)
            wire = UcxWire(endpoint, peer=peer, errors=runtime.errors)
            runtime.wires.add(wire)
            try:
                puller = Puller(wire, client, countdown=countdown)
                await puller.open()
                yield _Session(wire, client, puller)
                if client.state is ClientState.READY:
                    # All is acknowledged; that a last word got lost changes nothing.
                    with suppress(TransferError):
                        await puller.leave()
            finally:
                wire.abort()
                runtime.wires.discard(wire)


@asynccontextmanager
async def _place(places: asyncio.Semaphore, peer: str, countdown: Countdown) -> AsyncIterator[None]:
    """Hold one of a bounded number of places."""
    timeout_s = countdown.left(countdown.deadlines.total_s)
    try:
        async with asyncio.timeout(timeout_s):
            await places.acquire()
    except TimeoutError:
        raise TransferTimeoutError(peer, "waiting for a place", timeout_s) from None
    try:
        yield
    finally:
        places.release()
