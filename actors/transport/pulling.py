"""The pulling pump: does on a wire what a `PullClient` says.  No UCX in here."""

from __future__ import annotations

import asyncio

from actors.transport.crew import Crew
from actors.transport.deadlines import Countdown
from actors.transport.messages import Pull
from actors.transport.ports import Incoming, Sink, flat_target
from actors.transport.report import Outcome
from actors.transport.session import PullClient
from actors.transport.session.instructions import (
    Commit,
    Discard,
    Instruction,
    ReceivePayload,
    ReceiveProbe,
    Send,
)
from actors.transport.session.tables import ClientState
from actors.transport.wire import Wire, hear
from codec.errors import CapacityError, CodecError

_STREAMING = (ClientState.STREAMING, ClientState.ANNOUNCED)


class Puller:
    """One session with one server, from greeting to parting."""

    def __init__(self, wire: Wire, client: PullClient, *, countdown: Countdown) -> None:
        self._wire = wire
        self._client = client
        self._countdown = countdown
        self._deadlines = countdown.deadlines
        #: Reservations by index: each ends by commit or abort and then leaves the dict.
        self._reserved: dict[int, Incoming] = {}
        #: Set when a payload is no longer in flight, for better or worse.
        self._landed = asyncio.Event()

    async def open(self) -> None:
        """Greet, and be welcomed by the worker that is meant."""
        await self._say(self._client.greet())
        await self._hear("greeting")

    async def pull(self, request: Pull, sink: Sink) -> None:
        """Transfer every wanted component that the server has and the sink has room for.

        If it raises, what was committed before stays committed, each component being sound
        on its own, and every other reservation is aborted as soon as that is safe.
        """
        await self._say(self._client.pull(request))
        try:
            async with Crew(self._wire) as crew:
                await self._stream(sink, crew)
        finally:
            for incoming in self._reserved.values():
                self._wire.when_quiet(incoming.abort)
            self._reserved.clear()

    async def ping(self, nonce: bytes) -> None:
        """Make one round trip."""
        await self._say(self._client.ping(nonce))
        await self._hear("PING")

    async def probe(self, num_bytes: int) -> None:
        """Receive ``num_bytes`` of nothing."""
        await self._say(self._client.probe(num_bytes))
        for instruction in await self._hear("PROBE"):
            if isinstance(instruction, ReceiveProbe):
                await self._wire.receive_payload(
                    memoryview(bytearray(instruction.num_bytes)),
                    ordinal=instruction.ordinal,
                    timeout_s=self._countdown.left(self._deadlines.payload_s),
                )

    async def leave(self) -> None:
        """Part; the server's BYE shows that it has heard our ACK."""
        await self._say(self._client.leave())
        await self._hear("BYE")

    async def _stream(self, sink: Sink, crew: Crew) -> None:
        try:
            while self._client.state in _STREAMING and not crew.has_failed:
                if self._client.bytes_wanted:
                    for instruction in await self._hear("the next component"):
                        await self._obey(instruction, sink, crew)
                else:
                    # The window is full.  Each payload in it has a deadline, so this ends.
                    self._landed.clear()
                    await self._landed.wait()
        except BaseException:
            self._wire.abort()  # or the payloads in flight would be waited for
            raise

    async def _obey(self, instruction: Instruction, sink: Sink, crew: Crew) -> None:
        if isinstance(instruction, Send):
            await self._say(instruction)
        elif isinstance(instruction, ReceivePayload):
            try:
                incoming = sink.reserve_incoming(instruction.num_bytes)
            except CapacityError:
                self._client.no_room(instruction.index)
                return
            self._reserved[instruction.index] = incoming
            crew.start(self._fetch(instruction))

    async def _fetch(self, order: ReceivePayload) -> None:
        """Receive one payload, check it, commit or abort it."""
        try:
            for instruction in await self._receive(order):
                if isinstance(instruction, Send):
                    await self._say(instruction)
        finally:
            self._landed.set()

    async def _receive(self, order: ReceivePayload) -> list[Instruction]:
        view = flat_target(self._reserved[order.index].view, order.num_bytes)
        await self._wire.receive_payload(
            view,
            ordinal=order.ordinal,
            timeout_s=self._countdown.left(self._deadlines.payload_s),
        )
        todo = self._client.payload_received(order.index, view)
        del view  # or the sink could not give the room back at once
        if todo[0] == Commit(order.index):
            return self._client.settled(order.index, self._commit(order.index))
        if todo[0] == Discard(order.index):
            self._reserved.pop(order.index).abort()
        return todo[1:]

    def _commit(self, index: int) -> Outcome:
        want = self._client.want(index)
        incoming = self._reserved[index]
        try:
            placement = incoming.commit()
        except CodecError:
            self._reserved.pop(index).abort()
            return Outcome.CORRUPT
        del self._reserved[index]
        found = (placement.component, placement.codec)
        return Outcome.DELIVERED if found == (want.component, want.codec) else Outcome.MISMATCH

    async def _say(self, send: Send) -> None:
        await self._wire.send_frame(
            send.data,
            step="sending a frame",
            timeout_s=self._countdown.left(self._deadlines.frame_s),
        )

    async def _hear(self, step: str) -> list[Instruction]:
        may_lag = bool(self._reserved)
        longest_s = self._deadlines.payload_s if may_lag else self._deadlines.frame_s
        return await hear(
            self._wire, self._client, step=step, timeout_s=self._countdown.left(longest_s)
        )
