"""Two real workers, from arena to arena: what the ports promise is what workers do."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.transport.deadlines import Countdown, Deadlines
from actors.transport.messages import Want
from actors.transport.pulling import Puller
from actors.transport.report import Outcome
from actors.transport.serving import ServerCounters, Serving
from actors.transport.wire_ucx import UcxWire
from actors.worker import Worker
from codec.blob import Section, pack_blob
from codec.errors import PeerLostError
from codec.identity import CodecId
from tests.actors.transport.memory_endpoint import MemoryEndpoint, pair, wire
from tests.actors.transport.samples import key
from tests.actors.transport.talk import new_client, new_server, pull_of
from tests.codec.samples import a_header

CODEC = CodecId(bytes(range(16, 32)))
EXTENT_BYTES = 64 << 10
DEADLINES = Deadlines(connect_s=30, frame_s=30, payload_s=30, total_s=60, close_s=30)


def blob(index: int, num_bytes: int) -> bytes:
    """A sound blob of component ``index``."""
    component = key(index)
    header = a_header(stage=component.stage, component=component, codec=CODEC)
    data = bytes([index]) * num_bytes
    return pack_blob(header, [Section("k0", data, num_bytes)])


def new_worker(node: str, *, num_extents: int = 16) -> Worker:
    """A worker over an arena of its own."""
    capacity_bytes = num_extents * EXTENT_BYTES
    driver = HostVmmDriver(capacity_bytes, granule_bytes=EXTENT_BYTES)
    arena = Arena(driver, capacity_bytes=capacity_bytes, extent_bytes=EXTENT_BYTES)
    return Worker(node=node, incarnation=77, arena=arena)


@pytest.fixture
def source() -> Iterator[Worker]:
    """A worker that holds components 0, 1 and 2; checked at the end."""
    worker = new_worker("right")
    for index, num_bytes in enumerate((100, 50_000, 9000)):
        worker.put(blob(index, num_bytes))
    yield worker
    worker.check()
    assert worker.stat().used_bytes == worker.stat().stored_bytes


@pytest.fixture
def sink() -> Iterator[Worker]:
    """An empty worker; what it holds at the end is all that its arena holds."""
    worker = new_worker("left")
    yield worker
    worker.check()
    assert worker.stat().used_bytes == worker.stat().stored_bytes


async def transfer(
    source: Worker, sink: Worker, indices: range, *, near: MemoryEndpoint, far: MemoryEndpoint
) -> list[Outcome]:
    """Pull components of these indices from ``source`` into ``sink``."""
    clock = asyncio.get_running_loop().time
    serving = Serving(
        wire(far),
        new_server(),
        source,
        countdown=Countdown(DEADLINES, clock=clock),
        counters=ServerCounters(),
    )
    client = new_client()
    near_wire: UcxWire = wire(near)
    puller = Puller(near_wire, client, countdown=Countdown(DEADLINES, clock=clock))
    task = asyncio.ensure_future(serving.run())
    try:
        await puller.open()
        await puller.pull(pull_of(Want(key(index), CODEC) for index in indices), sink)
    finally:
        near_wire.abort()
        await task
    return [line.outcome for line in client.outcomes()]


async def test_blobs_move_from_arena_to_arena(source: Worker, sink: Worker) -> None:
    """Byte for byte, published under their own names; what is not held is absent."""
    near, far = pair()

    found = await transfer(source, sink, range(4), near=near, far=far)

    assert found == [Outcome.DELIVERED] * 3 + [Outcome.ABSENT]
    for index in range(3):
        with source.get(key(index), CODEC) as ours, sink.get(key(index), CODEC) as theirs:
            assert bytes(ours.view) == bytes(theirs.view)
    assert len(sink.snapshot().placements) == 3


async def test_damage_on_the_way_is_not_published(source: Worker, sink: Worker) -> None:
    """The room of the damaged one is free again."""
    near, far = pair()
    far.on_send = lambda tag, data: data[:-1] + b"?" if tag == 17 else data

    found = await transfer(source, sink, range(3), near=near, far=far)

    assert found == [Outcome.DELIVERED, Outcome.CORRUPT, Outcome.DELIVERED]
    assert {p.component for p in sink.snapshot().placements} == {key(0), key(2)}


async def test_a_full_arena_is_a_miss(source: Worker) -> None:
    """The second blob needs more than is left."""
    near, far = pair()
    small = new_worker("left", num_extents=1)
    small.put(blob(9, 40_000))

    found = await transfer(source, small, range(3), near=near, far=far)

    assert found == [Outcome.DELIVERED, Outcome.NO_ROOM, Outcome.NO_ROOM]
    small.check()
    assert small.stat().used_bytes == small.stat().stored_bytes


async def test_a_lost_peer_leaves_no_room_behind(source: Worker, sink: Worker) -> None:
    """Even while the caller still holds the error."""
    near, far = pair()
    send = far.send

    async def send_until_payload(buffer: bytes, tag: int) -> None:
        if tag == 17:
            far.abort()
        await send(buffer, tag)

    far.send = send_until_payload  # type: ignore[method-assign]

    with pytest.raises(PeerLostError) as kept:
        await transfer(source, sink, range(3), near=near, far=far)

    gc.collect()
    assert kept.value.peer == "peer"
    assert sink.stat().used_bytes == sink.stat().stored_bytes
