"""`UcxWire`: no request outlives its buffer, whatever happens to whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from actors.transport import messages as m
from actors.transport import wire_ucx
from actors.transport.frames import HEADER_BYTES, MAX_CONTROL_BYTES, pack_frame
from actors.transport.wire_ucx import SLOT_BYTES, num_zombies
from codec.errors import PeerLostError, ProtocolError, TransferTimeoutError
from tests.actors.transport.memory_endpoint import (
    EAGER_BYTES,
    EndpointError,
    MemoryEndpoint,
    pair,
    wire,
)
from tests.actors.transport.samples import want

LONG_S = 30.0
SHORT_S = 0.01
PING = pack_frame(m.Ping(bytes(16)), request_id=1)
BIG = bytes(range(256)) * (EAGER_BYTES // 128)


@pytest.fixture(autouse=True)
def no_zombies_left() -> Iterator[None]:
    """Every test lets its requests end."""
    yield
    assert num_zombies() == 0


async def turns(count: int = 5) -> None:
    """Let the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_frame_arrives_as_it_was_sent() -> None:
    """The slot's padding is not part of it; both sides count its bytes."""
    left, right = (wire(endpoint) for endpoint in pair())

    await left.send_frame(PING, step="test", timeout_s=LONG_S)

    assert await right.receive_frame(step="test", timeout_s=LONG_S) == PING
    assert (left.sent_bytes, right.received_bytes) == (len(PING), len(PING))


@pytest.mark.parametrize("num_wants", [1, 40, 80, 1024])
async def test_a_frame_longer_than_a_slot_takes_two_messages(num_wants: int) -> None:
    """Frames on either side of the limit, and one right behind another."""
    left, right = (wire(endpoint) for endpoint in pair())
    frame = pack_frame(m.Pull(tuple(want(index) for index in range(num_wants)), 1))

    receiving = asyncio.ensure_future(right.receive_frame(step="test", timeout_s=LONG_S))
    await left.send_frame(frame, step="test", timeout_s=LONG_S)
    await left.send_frame(PING, step="test", timeout_s=LONG_S)

    assert await receiving == frame
    assert await right.receive_frame(step="test", timeout_s=LONG_S) == PING


def test_a_slot_is_eager_and_the_longest_frame_fits_two_messages() -> None:
    """Sends of frames return at once, so the order of frames never waits for the peer."""
    assert HEADER_BYTES < SLOT_BYTES < EAGER_BYTES
    assert MAX_CONTROL_BYTES < 1 << 18


async def test_an_unreadable_header_is_handed_on() -> None:
    """It is for the session to refuse; not a byte more than a header is believed."""
    sender, receiver = pair()
    await sender.send(b"GET / HTTP/1.1\r\n\r\n" * 20, 1)

    heard = await wire(receiver).receive_frame(step="test", timeout_s=LONG_S)

    assert len(heard) == HEADER_BYTES


async def test_payloads_are_told_apart_by_ordinal() -> None:
    """Received in another order than sent."""
    left, right = (wire(endpoint) for endpoint in pair())
    views = [memoryview(bytearray(len(BIG))) for _ in range(3)]
    payloads = [bytes([index]) * len(BIG) for index in range(3)]

    async with asyncio.TaskGroup() as group:
        for ordinal in (0, 1, 2):
            data = memoryview(payloads[ordinal])
            group.create_task(left.send_payload(data, ordinal=ordinal, timeout_s=LONG_S))
        for ordinal in (2, 0, 1):
            view = views[ordinal]
            group.create_task(right.receive_payload(view, ordinal=ordinal, timeout_s=LONG_S))

    assert [bytes(view) for view in views] == payloads
    assert left.sent_bytes == right.received_bytes == 3 * len(BIG)


async def test_a_time_out_ends_the_request_and_cancels_nothing() -> None:
    """By the time the caller hears of it, nothing can write into the buffer any more."""
    endpoint, _ = pair()
    quiet: list[str] = []
    ours = wire(endpoint, "node-7")

    with pytest.raises(TransferTimeoutError) as caught:
        await ours.receive_payload(memoryview(bytearray(9)), ordinal=0, timeout_s=SHORT_S)
    ours.when_quiet(lambda: quiet.append("released"))

    assert (caught.value.peer, caught.value.deadline_s) == ("node-7", SHORT_S)
    assert endpoint.is_closed
    assert endpoint.requests == []
    assert endpoint.num_cancelled == 0
    assert quiet == ["released"]
    ours.check()


async def test_a_closed_wire_repeats_why() -> None:
    """Each call afterwards raises the first failure, in an exception of its own."""
    ours = wire(pair()[0])
    with pytest.raises(TransferTimeoutError) as first:
        await ours.receive_frame(step="greeting", timeout_s=SHORT_S)

    later = []
    for _ in range(2):
        with pytest.raises(TransferTimeoutError) as raised:
            await ours.send_frame(PING, step="other", timeout_s=LONG_S)
        later.append(raised.value)

    assert len({id(error) for error in (first.value, *later)}) == 3
    assert {error.args for error in later} == {first.value.args}


async def test_a_cancelled_caller_waits_until_the_request_has_ended() -> None:
    """Ray cancels async actor calls; the buffer must outlive the request all the same."""
    endpoint, _ = pair()
    ours = wire(endpoint)
    buffer = memoryview(bytearray(9))
    task = asyncio.ensure_future(ours.receive_payload(buffer, ordinal=0, timeout_s=LONG_S))
    await turns()
    assert len(endpoint.requests) == 1

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert endpoint.requests == []
    assert endpoint.num_cancelled == 0
    assert endpoint.is_closed


async def test_cancelling_again_does_not_cut_the_wait_short() -> None:
    """Someone impatient cancels while the aborted request is still ending."""
    endpoint, _ = pair()
    endpoint.is_stuck = True
    ours = wire(endpoint)
    buffer = memoryview(bytearray(9))
    task = asyncio.ensure_future(ours.receive_payload(buffer, ordinal=0, timeout_s=LONG_S))
    await turns()

    for _ in range(3):
        task.cancel()
        await turns()
    assert not task.done()
    endpoint.let_go()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert endpoint.num_cancelled == 0


async def test_a_cancellation_during_a_time_out_is_not_lost() -> None:
    """The caller asked to stop: that counts more than the time-out."""
    endpoint, _ = pair()
    endpoint.is_stuck = True
    task = asyncio.ensure_future(
        wire(endpoint).receive_payload(memoryview(bytearray(9)), ordinal=0, timeout_s=0)
    )
    await turns()
    assert endpoint.is_closed

    task.cancel()
    await turns()
    endpoint.let_go()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_request_that_does_not_end_keeps_its_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Released when it ends after all; until then it is counted."""
    monkeypatch.setattr(wire_ucx, "SETTLE_S", SHORT_S)
    endpoint, _ = pair()
    endpoint.is_stuck = True
    ours = wire(endpoint)
    released: list[str] = []

    with pytest.raises(TransferTimeoutError):
        await ours.receive_payload(memoryview(bytearray(9)), ordinal=0, timeout_s=SHORT_S)
    ours.when_quiet(lambda: released.append("room"))

    assert released == []
    assert num_zombies() == 1
    ours.check()
    endpoint.let_go()
    await turns()
    assert released == ["room"]
    ours.check()


async def test_a_request_that_somebody_else_cancels_is_never_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closing event loop cancels every task: then nobody knows, so nothing is released."""
    monkeypatch.setattr(wire_ucx, "_zombies", zombies := set())
    endpoint, _ = pair()
    ours = wire(endpoint)
    released: list[str] = []
    before = asyncio.all_tasks()
    task = asyncio.ensure_future(
        ours.receive_payload(memoryview(bytearray(9)), ordinal=0, timeout_s=LONG_S)
    )
    await turns()
    (request,) = asyncio.all_tasks() - before - {task}

    request.cancel()
    with pytest.raises(PeerLostError):
        await task
    ours.when_quiet(lambda: released.append("room"))
    await turns()

    assert released == []
    assert zombies == {ours}


async def test_releases_wait_for_every_request_of_the_wire() -> None:
    """One is done, another is not: which of them uses the buffer is not known here."""
    endpoint, other = pair()
    endpoint.is_stuck = True
    ours = wire(endpoint)
    released: list[str] = []
    tasks = [
        asyncio.ensure_future(
            ours.receive_payload(memoryview(bytearray(9)), ordinal=ordinal, timeout_s=LONG_S)
        )
        for ordinal in range(2)
    ]
    await turns()
    await other.send(b"123456789", 16)
    await turns()

    ours.when_quiet(lambda: released.append("room"))
    assert released == []
    assert tasks[0].done()
    endpoint.let_go()
    await asyncio.wait(tasks)

    assert released == ["room"]
    with pytest.raises(PeerLostError):
        tasks[1].result()


async def test_the_first_failure_is_everyones() -> None:
    """A time-out closes the wire; its siblings report the time-out, not the closing."""
    ours = wire(pair()[0])
    patient = asyncio.ensure_future(ours.receive_frame(step="patient", timeout_s=LONG_S))
    hasty = asyncio.ensure_future(
        ours.receive_payload(memoryview(bytearray(9)), ordinal=0, timeout_s=SHORT_S)
    )

    await asyncio.wait({patient, hasty})

    assert isinstance(patient.exception(), TransferTimeoutError)
    assert isinstance(hasty.exception(), TransferTimeoutError)


async def test_an_error_that_ucx_keeps_does_not_keep_the_buffer() -> None:
    """A bytearray with a view of it cannot grow: this shows that no view is left."""
    endpoint, _ = pair()
    buffer = bytearray(9)
    ours = wire(endpoint)
    task = asyncio.ensure_future(
        ours.receive_payload(memoryview(buffer), ordinal=0, timeout_s=LONG_S)
    )
    await turns()
    kept = EndpointError("lost")
    endpoint.requests[0].end(kept)

    await asyncio.wait({task})
    await turns()
    assert isinstance(task.exception(), PeerLostError)
    del task

    assert kept.__traceback__ is not None
    buffer.append(0)


async def test_a_lost_peer_is_named() -> None:
    """Sending and receiving alike."""
    for call in ("send_payload", "receive_payload"):
        endpoint, other = pair()
        ours = wire(endpoint, "node-7")
        operation = getattr(ours, call)
        task = asyncio.ensure_future(
            operation(memoryview(bytearray(BIG)), ordinal=0, timeout_s=LONG_S)
        )
        await turns()
        other.abort()
        with pytest.raises(PeerLostError, match="node-7"):
            await task


async def test_more_than_was_announced_breaks_the_protocol() -> None:
    """A frame over the slot, or a payload over its announced size."""
    sender, receiver = pair()
    await sender.send(bytes(SLOT_BYTES + 1), 1)

    with pytest.raises(ProtocolError, match="more came"):
        await wire(receiver).receive_frame(step="test", timeout_s=LONG_S)

    assert receiver.is_closed


async def test_an_error_of_our_own_is_not_a_lost_peer() -> None:
    """It surfaces as it is, and the wire is closed."""

    class Broken(MemoryEndpoint):
        async def send(self, *_: object) -> None:
            """Refuse."""
            raise TypeError("not a buffer")

    ours = wire(Broken())

    with pytest.raises(TypeError, match="not a buffer"):
        await ours.send_frame(PING, step="test", timeout_s=LONG_S)
    with pytest.raises(PeerLostError):
        await ours.send_frame(PING, step="test", timeout_s=LONG_S)


async def test_aborting_twice_is_aborting_once() -> None:
    """And the reason stays the first."""
    endpoint, _ = pair()
    ours = wire(endpoint)

    ours.abort()
    ours.abort()

    with pytest.raises(PeerLostError, match="closed on this side"):
        await ours.receive_frame(step="test", timeout_s=LONG_S)
