"""`Serving`: what it does with clients that misbehave, vanish, or say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from actors.transport import messages as m
from actors.transport.deadlines import Countdown, Deadlines
from actors.transport.frames import HEADER_BYTES, pack_frame, parse_header, parse_message
from actors.transport.kinds import ErrorCode, FrameType
from actors.transport.serving import ServerCounters, Serving
from actors.transport.wire_ucx import UcxWire, num_zombies
from tests.actors.transport.memory_endpoint import MemoryEndpoint, pair, wire
from tests.actors.transport.samples import SampleSource, samples, want
from tests.actors.transport.talk import CLIENT_NONCE, INCARNATION, new_server, pull_of

LONG_S = 30.0
PATIENT = Deadlines(connect_s=30, frame_s=30, payload_s=30, total_s=60, close_s=0.05)
HASTY = Deadlines(connect_s=30, frame_s=0.05, payload_s=0.05, total_s=60, close_s=0.05)
HELLO = m.Hello("left", INCARNATION, CLIENT_NONCE)


@dataclass
class Stage:
    """A server, and the bare wire of its client."""

    client: UcxWire
    near: MemoryEndpoint
    far: MemoryEndpoint
    source: SampleSource
    counters: ServerCounters
    task: asyncio.Task[None]

    async def say(self, message: m.Message, request_id: int = 0) -> None:
        """Send one frame."""
        frame = pack_frame(message, request_id=request_id)
        await self.client.send_frame(frame, step="test", timeout_s=LONG_S)

    async def hear(self) -> m.Message:
        """Receive one frame."""
        frame = await self.client.receive_frame(step="test", timeout_s=LONG_S)
        header = parse_header(frame[:HEADER_BYTES], peer="server")
        return parse_message(header, frame[HEADER_BYTES:], peer="server")

    async def greet(self) -> None:
        """Get past WELCOME."""
        await self.say(HELLO)
        assert (await self.hear()).type is FrameType.WELCOME

    async def end(self) -> None:
        """Wait for the server, which must have let everything go."""
        await self.task
        assert self.source.num_pinned == 0
        assert self.far.is_closed
        assert self.far.num_cancelled == 0
        assert self.far.requests == []
        assert num_zombies() == 0


@asynccontextmanager
async def serving(source: SampleSource, deadlines: Deadlines = PATIENT) -> AsyncIterator[Stage]:
    """Serve ``source`` to a client that the test plays."""
    near, far = pair()
    counters = ServerCounters()
    countdown = Countdown(deadlines, clock=asyncio.get_running_loop().time)
    session = Serving(wire(far), new_server(), source, countdown=countdown, counters=counters)
    task = asyncio.ensure_future(session.run())
    stage = Stage(wire(near), near, far, source, counters, task)
    yield stage
    near.abort()
    await asyncio.wait({task})


async def test_a_client_that_parts_is_answered() -> None:
    """BYE both ways; then the server waits for the client to close."""
    async with serving(SampleSource({})) as stage:
        await stage.greet()
        await stage.say(m.Bye())

        assert await stage.hear() == m.Bye()
        assert not stage.far.is_closed
        stage.near.abort()
        await stage.end()
        assert (stage.counters.parted, stage.counters.lost) == (1, 0)


async def test_a_client_that_does_not_close_is_cut_off() -> None:
    """After a while the server closes by itself."""
    async with serving(SampleSource({})) as stage:
        await stage.greet()
        await stage.say(m.Bye())
        await stage.hear()

        await stage.end()

        assert stage.counters.parted == 1


@pytest.mark.parametrize("greeted", [False, True])
async def test_a_silent_client_is_cut_off(greeted: bool) -> None:
    """Whoever connects and says nothing holds no place for ever."""
    async with serving(SampleSource({}), HASTY) as stage:
        if greeted:
            await stage.greet()

        await stage.end()

        assert stage.counters.timeouts == 1


async def test_garbage_is_answered_with_an_error() -> None:
    """The client, if it is one, learns what was wrong."""
    async with serving(SampleSource({})) as stage:
        await stage.near.send(b"GET / HTTP/1.1\r\n\r\n" * 10, 1)

        error = await stage.hear()
        await stage.end()

        assert isinstance(error, m.Error)
        assert error.code is ErrorCode.PROTOCOL
        assert "magic" in error.text
        assert stage.counters.protocol_errors == 1


async def test_a_frame_out_of_turn_is_answered_with_an_error() -> None:
    """PULL before HELLO."""
    async with serving(SampleSource({})) as stage:
        await stage.say(pull_of([want(0)]), 1)

        error = await stage.hear()
        await stage.end()

        assert isinstance(error, m.Error)
        assert "PULL when fresh" in error.text


async def test_another_incarnation_is_told_which_this_is() -> None:
    """And counted apart from broken protocol."""
    async with serving(SampleSource({})) as stage:
        await stage.say(m.Hello("left", 5, CLIENT_NONCE))

        assert await stage.hear() == m.Error(ErrorCode.STALE_INCARNATION, INCARNATION, "")
        await stage.end()
        assert stage.counters.stale_incarnations == 1
        assert stage.counters.protocol_errors == 0


async def test_a_client_that_never_acknowledges_holds_no_pins() -> None:
    """Its payloads have arrived, it says nothing: the server lets go after the deadline."""
    held = samples((10, 20))
    async with serving(SampleSource(held), HASTY) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)
        while (await stage.hear()).type is not FrameType.END:
            pass
        assert stage.source.num_pinned == 2

        await stage.end()

        assert stage.counters.timeouts == 1


async def test_a_client_that_takes_no_payload_holds_no_pins() -> None:
    """A rendezvous waits for the receiver, who does not come."""
    held = samples((50_000,) * 8)
    async with serving(SampleSource(held), HASTY) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)

        await stage.end()

        assert stage.counters.timeouts == 1


async def test_a_client_that_vanishes_holds_no_pins() -> None:
    """In the middle of eight payloads."""
    held = samples((50_000,) * 8)
    async with serving(SampleSource(held)) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)
        for _ in range(4):
            await stage.hear()
        assert stage.source.num_pinned > 0

        stage.near.abort()
        await stage.end()

        assert stage.counters.lost == 1


async def test_the_window_bounds_payloads_in_flight() -> None:
    """Four unreceived payloads are as many as the server sends; one more is pinned."""
    held = samples((50_000,) * 12)
    async with serving(SampleSource(held)) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)
        for _ in range(8):
            await stage.hear()
        for _ in range(50):
            await asyncio.sleep(0)

        sends = [r for r in stage.far.requests if len(r.buffer) == 50_000]
        assert len(sends) == 4
        assert stage.source.num_pinned == 5


async def test_pins_that_may_still_be_read_are_kept() -> None:
    """An aborted send that UCX does not end: its memory stays pinned until it does."""
    held = samples((50_000,))
    async with serving(SampleSource(held), HASTY) as stage:
        await stage.greet()
        stage.far.is_stuck = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("actors.transport.wire_ucx.SETTLE_S", 0.01)
            await stage.say(pull_of(held), 1)
            await stage.task

        assert stage.source.num_pinned == 1
        assert num_zombies() == 1
        stage.far.let_go()
        for _ in range(5):
            await asyncio.sleep(0)
        await stage.end()


async def test_an_ack_lets_go_at_once() -> None:
    """Not only when the session ends."""
    held = samples((10, 20))
    async with serving(SampleSource(held)) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)
        while (await stage.hear()).type is not FrameType.END:
            pass

        await stage.say(m.Ack((1,)), 1)
        await stage.say(m.Ping(bytes(16)), 2)
        assert (await stage.hear()).type is FrameType.PING

        assert stage.source.num_pinned == 0
        assert stage.counters.components_rejected == 1


async def test_a_wrong_ack_is_refused_and_everything_let_go() -> None:
    """It rejects what it never got."""
    held = samples((10,))
    async with serving(SampleSource(held)) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)
        while (await stage.hear()).type is not FrameType.END:
            pass

        await stage.say(m.Ack((3,)), 1)

        assert isinstance(await stage.hear(), m.Error)
        await stage.end()


async def test_a_strided_view_is_an_error_of_ours() -> None:
    """UCX would send other bytes."""
    held = samples((10,))
    source = SampleSource(held)
    source.held[want(0)] = memoryview(bytes(20))[::2]  # type: ignore[assignment]
    async with serving(source) as stage:
        await stage.greet()
        await stage.say(pull_of(held), 1)

        assert await stage.hear() == m.Error(ErrorCode.INTERNAL, 0, "ValueError")
        with pytest.raises(ValueError, match="contiguous"):
            await stage.end()
        assert stage.counters.failed == 1
        assert source.num_pinned == 0
