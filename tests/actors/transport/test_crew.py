"""`Crew`: the first failure is raised, a cancellation never lost, no task left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from actors.transport.crew import Crew
from codec.errors import PeerLostError, TransferTimeoutError


class OpenWire:
    """Just what a crew needs of a wire: an end that every task waits for."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def abort(self) -> None:
        """End every wait."""
        self.closed.set()

    async def request(self) -> None:
        """Wait for something that never comes."""
        await self.closed.wait()
        raise PeerLostError("peer", "closed on this side")


async def fail(error: Exception) -> None:
    """Fail at once."""
    raise error


async def run(
    wire: OpenWire, *works: Coroutine[Any, Any, None], block: Awaitable[None] | None = None
) -> Crew:
    """Start ``works`` beside ``block``."""
    async with Crew(wire) as crew:
        for work in works:
            crew.start(work)
        if block is not None:
            await block
    return crew


async def test_a_crew_waits_for_all() -> None:
    """The block ends when the last task does."""
    done: list[int] = []

    async def work(index: int) -> None:
        for _ in range(index):
            await asyncio.sleep(0)
        done.append(index)

    crew = await run(OpenWire(), work(3), work(1), work(2))

    assert done == [1, 2, 3]
    assert not crew.has_failed


async def test_the_first_failure_closes_the_wire_and_is_raised() -> None:
    """The others end of the closing, and so does the block; neither hides the cause."""
    wire = OpenWire()
    late = fail(TransferTimeoutError("peer", "step", 1.0))

    with pytest.raises(TransferTimeoutError):
        await run(wire, wire.request(), late, wire.request(), block=wire.request())

    assert wire.closed.is_set()


async def test_a_failure_of_the_block_is_raised_when_it_came_first() -> None:
    """It closes the wire itself; what that does to the tasks is a consequence."""
    wire = OpenWire()

    async def block() -> None:
        wire.abort()
        raise KeyError

    with pytest.raises(KeyError):
        await run(wire, wire.request(), block=block())


async def test_a_failing_block_lets_tasks_finish() -> None:
    """A server tells its client of the failure afterwards, so the wire stays open."""
    wire = OpenWire()
    finished: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0)
        finished.append(True)

    with pytest.raises(KeyError):
        await run(wire, work(), block=fail(KeyError()))

    assert finished == [True]
    assert not wire.closed.is_set()


@pytest.mark.parametrize("where", ["in the block", "at the end"])
async def test_a_cancellation_goes_before_the_failures_it_causes(where: str) -> None:
    """And it leaves no trace in the task's count of cancellations."""
    wire = OpenWire()
    counts: list[int] = []

    async def counted() -> None:
        try:
            await run(
                wire, wire.request(), block=wire.request() if where == "in the block" else None
            )
        finally:
            task = asyncio.current_task()
            counts.append(task.cancelling() if task else -1)

    task = asyncio.ensure_future(counted())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert counts == [1]


async def test_a_failure_does_not_count_as_a_cancellation() -> None:
    """A time-out around a failed transfer must still be able to tell its own from others."""
    task = asyncio.current_task()
    assert task is not None
    for _ in range(2):
        with pytest.raises(PeerLostError):
            await run(OpenWire(), fail(PeerLostError("peer", "why")))

    assert task.cancelling() == 0


async def test_an_error_of_ours_keeps_its_trace_and_another_does_not() -> None:
    """Traces of transfers hold views of memory; a bug needs to be found."""
    with pytest.raises(PeerLostError) as lost:
        await run(OpenWire(), fail(PeerLostError("peer", "why")))
    with pytest.raises(KeyError) as bug:
        await run(OpenWire(), fail(KeyError("bug")))

    assert "fail" not in [entry.name for entry in lost.traceback]
    assert "fail" in [entry.name for entry in bug.traceback]
