"""`Puller` against `Serving`, over endpoints in memory: delivery, failure, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from actors.transport import messages as m
from actors.transport.deadlines import Countdown, Deadlines
from actors.transport.frames import pack_frame
from actors.transport.kinds import FrameType
from actors.transport.pulling import Puller
from actors.transport.report import Outcome
from actors.transport.serving import ServerCounters, Serving
from actors.transport.session import PullClient
from actors.transport.session.tables import ClientState
from actors.transport.wire_ucx import num_zombies
from codec.errors import (
    PeerLostError,
    ProtocolError,
    StaleIncarnationError,
    TransferError,
    TransferTimeoutError,
)
from tests.actors.transport.memory_endpoint import MemoryEndpoint, pair, wire
from tests.actors.transport.samples import (
    SampleIncoming,
    SampleSink,
    SampleSource,
    samples,
    want,
)
from tests.actors.transport.talk import new_client, new_server, pull_of

SIZES = (1, 8191, 8192, 8193, 100_001, 1, 50_000)
PATIENT = Deadlines(connect_s=30, frame_s=30, payload_s=30, total_s=60, close_s=30)
HASTY = Deadlines(connect_s=30, frame_s=0.05, payload_s=0.05, total_s=60, close_s=0.05)


@dataclass
class Scene:
    """A client and a server in one loop."""

    client: PullClient
    puller: Puller
    near: MemoryEndpoint
    far: MemoryEndpoint
    serving: asyncio.Task[None]
    source: SampleSource
    counters: ServerCounters


@asynccontextmanager
async def scene(
    source: SampleSource,
    *,
    incarnation: int = 77,
    near_deadlines: Deadlines = PATIENT,
    far_deadlines: Deadlines = PATIENT,
    far_error: type[BaseException] | None = None,
) -> AsyncIterator[Scene]:
    """Serve ``source``; afterwards the server must have ended and let everything go."""
    clock = asyncio.get_running_loop().time
    near, far = pair()
    counters = ServerCounters()
    serving = Serving(
        wire(far, "left"),
        new_server(),
        source,
        countdown=Countdown(far_deadlines, clock=clock),
        counters=counters,
    )
    client = new_client(incarnation=incarnation)
    near_wire = wire(near, "right")
    puller = Puller(near_wire, client, countdown=Countdown(near_deadlines, clock=clock))
    task = asyncio.ensure_future(serving.run())
    try:
        yield Scene(client, puller, near, far, task, source, counters)
    finally:
        near_wire.abort()
        await asyncio.wait({task})
    error = task.exception()
    assert error is None if far_error is None else isinstance(error, far_error)
    assert source.num_pinned == 0
    assert near.num_cancelled == far.num_cancelled == 0
    assert num_zombies() == 0


def outcomes(stage: Scene) -> list[Outcome]:
    """How each want ended."""
    return [line.outcome for line in stage.client.outcomes()]


async def test_everything_is_delivered_and_pins_last_until_the_ack() -> None:
    """The server lets go when the client has everything, not before."""
    held = samples(SIZES)
    pinned_at_ack: list[int] = []
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        stage.near.on_send = _watch(
            FrameType.ACK, lambda: pinned_at_ack.append(stage.source.num_pinned)
        )

        await stage.puller.pull(pull_of(held), sink)
        await stage.puller.leave()
        stage.near.abort()
        await stage.serving

        assert pinned_at_ack == [len(SIZES)]
        assert sink.committed == held
        assert sink.ended == {"committed": len(SIZES)}
        assert outcomes(stage) == [Outcome.DELIVERED] * len(SIZES)
        assert (stage.counters.sessions, stage.counters.parted) == (1, 1)
        assert stage.counters.components_sent == len(SIZES)
        assert stage.counters.payload_bytes == sum(SIZES)


def _watch(kind: FrameType, action: Callable[[], object]) -> Callable[[int, bytes], bytes]:
    """Do ``action`` when a frame of that kind is sent."""

    def on_send(tag: int, data: bytes) -> bytes:
        if tag == 1 and data[5] == kind:
            action()
        return data

    return on_send


async def test_misses_of_every_kind_are_told_apart() -> None:
    """Not held, unreadable twice over, over the limit; the rest is delivered."""
    held = samples(SIZES)
    source = SampleSource(held | {})
    del source.held[want(0)]
    source.errors[want(1)] = OSError(5, "disk")
    source.errors[want(2)] = ProtocolError("any", "fabric error")
    sink = SampleSink(held)
    async with scene(source) as stage:
        await stage.puller.open()

        await stage.puller.pull(pull_of(held, max_bytes=8193 + 2 + 50_000), sink)

        assert outcomes(stage) == [
            Outcome.ABSENT,
            Outcome.UNREADABLE,
            Outcome.UNREADABLE,
            Outcome.DELIVERED,
            Outcome.OVER_LIMIT,
            Outcome.DELIVERED,
            Outcome.DELIVERED,
        ]
        assert stage.counters.components_missing == 4


async def test_a_payload_changed_on_its_way_is_not_committed() -> None:
    """The checksum was made of what was held; the room is given back."""
    held = samples(SIZES)
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        stage.far.on_send = lambda tag, data: data[:-1] + b"?" if tag == 16 + 4 else data

        await stage.puller.pull(pull_of(held), sink)
        await stage.puller.leave()

        assert outcomes(stage)[4] is Outcome.CORRUPT
        assert want(4) not in sink.committed
        assert sink.ended == {"committed": len(SIZES) - 1, "aborted": 1}
        assert stage.counters.components_rejected == 1


async def test_a_sound_payload_that_is_no_blob_is_corrupt() -> None:
    """The sink's own verification has the last word, and the server hears of it."""
    held = samples(SIZES)
    sink = SampleSink({named: data for named, data in held.items() if named != want(3)})
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()

        await stage.puller.pull(pull_of(held), sink)
        await stage.puller.leave()

        assert outcomes(stage)[3] is Outcome.CORRUPT
        assert not sink.open
        assert stage.counters.components_rejected == 1


async def test_a_blob_that_names_another_component_is_a_miss() -> None:
    """The server sent sound bytes under a wrong name."""
    held = samples((5, 6))
    swapped = {want(0): held[want(1)], want(1): held[want(0)]}
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()

        await stage.puller.pull(pull_of(held), SampleSink(swapped))

        assert outcomes(stage) == [Outcome.MISMATCH] * 2


async def test_a_full_sink_is_a_miss_for_the_rest() -> None:
    """What fits before it is delivered; the session cannot go on."""
    held = samples((100, 200, 9000, 10, 20))
    sink = SampleSink(held, capacity_bytes=5000)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()

        await stage.puller.pull(pull_of(held), sink)

        assert outcomes(stage) == [Outcome.DELIVERED] * 2 + [Outcome.NO_ROOM] * 3
        assert stage.client.state is ClientState.ABANDONED
        assert not sink.open


@pytest.mark.parametrize("num_sizes", [1, 3, 20])
async def test_a_peer_lost_in_mid_transfer_aborts_every_reservation(num_sizes: int) -> None:
    """With one payload in flight, with several, and with the window full."""
    held = samples((50_000,) * num_sizes)
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        lose_payloads(stage.far)
        sink.on_reserve = stage.far.abort

        with pytest.raises(PeerLostError):
            await stage.puller.pull(pull_of(held), sink)

        assert set(sink.ended) == {"aborted"}
        assert not sink.open


def lose_payloads(endpoint: MemoryEndpoint) -> None:
    """Let frames through and swallow payloads, as a server does that stops half-way."""
    send = endpoint.send

    async def send_frames(buffer: bytes, tag: int) -> None:
        if tag == 1:
            await send(buffer, tag)

    endpoint.send = send_frames  # type: ignore[method-assign]


@pytest.mark.parametrize("num_sizes", [1, 3, 20])
async def test_a_payload_that_never_comes_times_out(num_sizes: int) -> None:
    """The server has announced it and stopped; every reservation is aborted."""
    held = samples((50_000,) * num_sizes)
    sink = SampleSink(held)
    async with scene(SampleSource(held), near_deadlines=HASTY) as stage:
        await stage.puller.open()
        lose_payloads(stage.far)

        with pytest.raises(TransferTimeoutError):
            await stage.puller.pull(pull_of(held), sink)

        assert set(sink.ended) == {"aborted"}
        assert not sink.open


async def test_a_stream_that_breaks_the_rules_ends_at_once() -> None:
    """Payloads in flight are not waited for, long as their deadline may be."""
    held = samples((50_000,) * 3)
    sink = SampleSink(held)
    never = replace(PATIENT, payload_s=3600, total_s=3600)
    async with scene(SampleSource(held), near_deadlines=never) as stage, asyncio.timeout(20):
        await stage.puller.open()
        lose_payloads(stage.far)
        send = stage.far.send
        wrong = pack_frame(m.End(3, 1), request_id=1)

        async def send_wrong_end(buffer: bytes, tag: int) -> None:
            await send(wrong if buffer[5] == FrameType.END else buffer, tag)

        stage.far.send = send_wrong_end  # type: ignore[method-assign]

        with pytest.raises(ProtocolError, match="END speaks of"):
            await stage.puller.pull(pull_of(held), sink)

        assert sink.ended == {"aborted": 3}


async def test_a_silent_server_times_out() -> None:
    """It accepts and never says a word."""
    near, _far = pair()
    clock = asyncio.get_running_loop().time
    client = new_client()
    puller = Puller(wire(near, "right"), client, countdown=Countdown(HASTY, clock=clock))

    with pytest.raises(TransferTimeoutError) as caught:
        await puller.open()

    assert caught.value.step == "greeting"
    assert near.is_closed


@pytest.mark.parametrize("num_sizes", [1, 3])
async def test_a_cancelled_pull_is_cancelled_and_leaves_nothing_behind(num_sizes: int) -> None:
    """Even though closing the wire makes its other payloads fail at the same time."""
    held = samples((50_000,) * num_sizes)
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        lose_payloads(stage.far)
        pulling = asyncio.ensure_future(stage.puller.pull(pull_of(held), sink))
        while len(sink.open) < num_sizes:
            await asyncio.sleep(0)

        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling

        assert sink.ended == {"aborted": num_sizes}
        assert not sink.open


async def test_a_kept_error_keeps_no_memory() -> None:
    """A bytearray with a view of it cannot grow: this shows that no view is left."""
    held = samples((50_000,) * 3)
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        lose_payloads(stage.far)
        sink.on_reserve = stage.far.abort
        kept: list[TransferError] = []

        try:
            await stage.puller.pull(pull_of(held), sink)
        except TransferError as error:
            kept.append(error)

        assert len(kept) == 1
        assert len(sink.reserved) >= 1
        for incoming in sink.reserved:
            incoming.view.release()
            incoming.buffer.append(0)


class ReadOnlySink(SampleSink):
    """Hands out views that cannot be written to."""

    def reserve_incoming(self, num_bytes: int) -> SampleIncoming:
        """Reserve, and spoil it."""
        incoming = super().reserve_incoming(num_bytes)
        incoming.view = incoming.view.toreadonly()
        return incoming


async def test_a_sink_that_breaks_its_promise_is_an_error_of_ours() -> None:
    """UCX would have written into read-only memory."""
    held = samples(SIZES)
    sink = ReadOnlySink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()

        with pytest.raises(ValueError, match="read-only"):
            await stage.puller.pull(pull_of(held), sink)

        assert not sink.open
        assert sink.ended["aborted"] >= 1


async def test_a_stale_incarnation_is_refused_by_the_server_and_counted() -> None:
    """The client's error has the incarnation that it found."""
    async with scene(SampleSource({}), incarnation=5) as stage:
        with pytest.raises(StaleIncarnationError) as caught:
            await stage.puller.open()
        stage.near.abort()
        await stage.serving

        assert caught.value.found == 77
        assert stage.counters.stale_incarnations == 1
        assert stage.counters.parted == 0


async def test_pings_and_probes_go_through() -> None:
    """The payload of a probe is drained; the session goes on."""
    held = samples(SIZES)
    sink = SampleSink(held)
    async with scene(SampleSource(held)) as stage:
        await stage.puller.open()
        await stage.puller.ping(b"n" * 16)
        await stage.puller.probe(100_000)
        await stage.puller.pull(pull_of(held), sink)

        assert sink.committed == held
        assert stage.counters.payload_bytes == sum(SIZES) + 100_000
        assert stage.counters.components_sent == len(SIZES)


async def test_a_bug_in_the_source_reaches_its_owner_and_the_client() -> None:
    """The server's task raises it; the client hears that the server gave up, not why."""
    held = samples(SIZES)
    source = SampleSource(held)
    source.errors[want(2)] = KeyError("secret")
    sink = SampleSink(held)
    async with scene(source, far_error=KeyError) as stage:
        await stage.puller.open()

        with pytest.raises(PeerLostError, match="gave up: KeyError"):
            await stage.puller.pull(pull_of(held), sink)

        assert not sink.open
        assert stage.counters.failed == 1
