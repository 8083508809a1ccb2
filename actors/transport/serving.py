"""The serving pump: does on a wire what a `PullServer` says.  No UCX in here."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from actors.transport.crew import Crew
from actors.transport.deadlines import Countdown
from actors.transport.kinds import MissingReason
from actors.transport.ports import Source, flat
from actors.transport.session import PullServer
from actors.transport.session.client import DEFAULT_WINDOW
from actors.transport.session.instructions import (
    Close,
    Instruction,
    OpenComponent,
    ReleasePins,
    Send,
    SendPayload,
)
from actors.transport.session.tables import ServerState
from actors.transport.wire import Wire, hear
from codec.errors import (
    FabricError,
    ProtocolError,
    StaleError,
    StaleIncarnationError,
    TransferError,
    TransferTimeoutError,
)


@dataclass(slots=True)
class ServerCounters:
    """What a listener has seen since it started; each number only rises."""

    sessions: int = 0
    """Conversations begun."""
    refused: int = 0
    """Endpoints cut off before a word, because too many were waiting."""
    parted: int = 0
    """Sessions that ended with BYE."""
    stale_incarnations: int = 0
    protocol_errors: int = 0
    timeouts: int = 0
    lost: int = 0
    """Clients that went away in mid-sentence."""
    failed: int = 0
    """Sessions that an error of our own ended."""
    components_sent: int = 0
    components_missing: int = 0
    components_rejected: int = 0
    """Sent, and found damaged by the client."""
    payload_bytes: int = 0
    """Handed over, probes included."""


class Serving:
    """One session with one client, from its first word to its last."""

    def __init__(
        self,
        wire: Wire,
        server: PullServer,
        source: Source,
        *,
        countdown: Countdown,
        counters: ServerCounters,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self._wire = wire
        self._server = server
        self._source = source
        self._countdown = countdown
        self._deadlines = countdown.deadlines
        self._counters = counters
        #: Everything opened since the last ACK.
        self._pins = ExitStack()
        #: Payloads that may still be put in flight.
        self._window = asyncio.Semaphore(window)

    async def run(self) -> None:
        """Serve until the client parts or the session fails; count how it ended.

        Errors that a client can cause end here.  Ours go on, after the client was told.
        """
        self._counters.sessions += 1
        try:
            await self._converse()
            self._counters.parted += 1
        except StaleIncarnationError as error:
            self._counters.stale_incarnations += 1
            await self._part(self._server.farewell(error))
        except ProtocolError as error:
            self._counters.protocol_errors += 1
            await self._part(self._server.farewell(error))
        except TransferTimeoutError:
            self._counters.timeouts += 1
        except TransferError:
            self._counters.lost += 1
        except Exception as error:
            self._counters.failed += 1
            await self._part(self._server.farewell(error))
            raise
        finally:
            self._wire.abort()
            self._wire.when_quiet(self._pins.close)

    async def _converse(self) -> None:
        longest_s = self._deadlines.frame_s
        while self._server.bytes_wanted:
            instructions = await hear(
                self._wire,
                self._server,
                step=f"a frame when {self._server.state.value}",
                timeout_s=self._countdown.left(longest_s),
            )
            await self._obey(instructions)
            # The client may still be receiving and committing: its ACK takes longer.
            is_waiting = self._server.state is ServerState.AWAITING_ACK
            longest_s = self._deadlines.payload_s if is_waiting else self._deadlines.frame_s

    async def _obey(self, instructions: list[Instruction]) -> None:
        """Do it all; returns when every payload is out of our hands."""
        async with Crew(self._wire) as crew:
            todo = deque(instructions)
            while todo:
                todo.extend(await self._do(todo.popleft(), crew))

    async def _do(self, instruction: Instruction, crew: Crew) -> list[Instruction]:
        match instruction:
            case Send(data):
                await self._say(data)
            case OpenComponent():
                return self._open(instruction)
            case SendPayload(ordinal, view):
                # Each payload ahead of this one has a deadline, so this ends.
                await self._window.acquire()
                crew.start(self._send(ordinal, view))
            case ReleasePins(rejected):
                self._counters.components_rejected += len(rejected)
                self._pins.close()
            case Close():
                await self._linger()
        return []

    def _open(self, order: OpenComponent) -> list[Instruction]:
        """Pin the component until the client's ACK, or declare it missing."""
        answer = self._answer(order)
        is_sent = any(isinstance(instruction, SendPayload) for instruction in answer)
        self._counters.components_sent += is_sent
        self._counters.components_missing += not is_sent
        return answer

    def _answer(self, order: OpenComponent) -> list[Instruction]:
        try:
            pin = self._source.get(order.want.component, order.want.codec)
            self._pins.enter_context(pin)
            return self._server.opened(flat(pin.view))
        except StaleError:
            return self._server.missing(MissingReason.UNKNOWN)
        except (FabricError, OSError):
            return self._server.missing(MissingReason.UNREADABLE)

    async def _send(self, ordinal: int, view: memoryview) -> None:
        try:
            await self._wire.send_payload(
                view,
                ordinal=ordinal,
                timeout_s=self._countdown.left(self._deadlines.payload_s),
            )
        finally:
            self._window.release()
        self._counters.payload_bytes += view.nbytes

    async def _say(self, frame: bytes) -> None:
        await self._wire.send_frame(
            frame,
            step="sending a frame",
            timeout_s=self._countdown.left(self._deadlines.frame_s),
        )

    async def _part(self, farewell: list[Instruction]) -> None:
        """Say a last word, if the client still listens."""
        with suppress(TransferError):
            await self._obey(farewell)

    async def _linger(self) -> None:
        """Wait for the client to close: closing first can lose our last word."""
        with suppress(TransferError):
            await self._wire.receive_frame(
                step="closing", timeout_s=self._countdown.left(self._deadlines.close_s)
            )
