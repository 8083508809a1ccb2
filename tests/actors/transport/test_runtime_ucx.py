"""`connect`: late attempts are left to end by themselves, and nobody's endpoint is aborted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.transport import runtime_ucx
from actors.transport.deadlines import Countdown, Deadlines
from actors.transport.runtime_ucx import connect
from codec.errors import PeerLostError, TransferTimeoutError
from tests.actors.transport.memory_endpoint import ERRORS, EndpointError, MemoryEndpoint


class Attempts:
    """Stands in for ucxx: each attempt waits for the test to decide it."""

    def __init__(self) -> None:
        self.made: list[asyncio.Future[MemoryEndpoint]] = []
        self.errors = ERRORS

    async def create(self, *_: object) -> MemoryEndpoint:
        """Begin an attempt."""
        self.made.append(asyncio.Future())
        return await self.made[-1]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Attempts under control of the test; none is in limbo afterwards."""
    stand_in = Attempts()
    monkeypatch.setattr(runtime_ucx, "_create_endpoint", stand_in.create)
    yield stand_in
    assert runtime_ucx._limbo == {}


async def attempt(attempts: Any, *, port: int = 7, connect_s: float = 30.0) -> Any:
    """Connect to ``host`` at ``port``."""
    countdown = Countdown(Deadlines(connect_s=connect_s), clock=asyncio.get_running_loop().time)
    return await connect(attempts, "host", port, peer="node-7", countdown=countdown)


async def turns() -> None:
    """Let the loop run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_endpoint_is_returned(attempts: Any) -> None:
    """The plain case."""
    task = asyncio.ensure_future(attempt(attempts))
    await turns()
    endpoint = MemoryEndpoint()
    attempts.made[0].set_result(endpoint)

    assert await task is endpoint
    assert not endpoint.is_closed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EndpointError("not connected"), PeerLostError),
        (ConnectionRefusedError(), PeerLostError),
        (RuntimeError("checksum invalid"), PeerLostError),
        (TimeoutError(), TransferTimeoutError),
        (KeyError("bug"), KeyError),
    ],
)
async def test_a_failed_attempt_is_named(
    attempts: Any, error: Exception, kind: type[Exception]
) -> None:
    """Whatever ucxx or the network say; only a bug stays what it is."""
    task = asyncio.ensure_future(attempt(attempts))
    await turns()
    attempts.made[0].set_exception(error)

    with pytest.raises(kind):
        await task


async def test_a_late_endpoint_is_aborted(attempts: Any) -> None:
    """Nobody waits for it any more."""
    with pytest.raises(TransferTimeoutError) as caught:
        await attempt(attempts, connect_s=0.01)
    assert caught.value.step == "connecting"
    assert not attempts.made[0].cancelled()
    assert len(runtime_ucx._limbo) == 1

    endpoint = MemoryEndpoint()
    attempts.made[0].set_result(endpoint)
    await turns()

    assert endpoint.is_closed


async def test_a_late_failure_is_forgotten(attempts: Any) -> None:
    """It would be logged by asyncio as never retrieved, were it not looked at."""
    with pytest.raises(TransferTimeoutError):
        await attempt(attempts, connect_s=0.01)

    attempts.made[0].set_exception(EndpointError("reset"))
    await turns()


async def test_a_cancelled_caller_leaves_the_attempt_alone(attempts: Any) -> None:
    """Cancelling it would corrupt memory."""
    task = asyncio.ensure_future(attempt(attempts))
    await turns()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not attempts.made[0].cancelled()
    attempts.made[0].set_exception(EndpointError("reset"))
    await turns()


async def test_a_cancellation_that_meets_an_endpoint_aborts_it(attempts: Any) -> None:
    """Both happen in one turn of the loop: the caller will never see the endpoint."""
    task = asyncio.ensure_future(attempt(attempts))
    await turns()
    endpoint = MemoryEndpoint()

    attempts.made[0].set_result(endpoint)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()

    assert endpoint.is_closed


async def test_a_late_attempt_does_not_stand_in_for_the_next(attempts: Any) -> None:
    """It may never end, and the next one may succeed at once."""
    with pytest.raises(TransferTimeoutError):
        await attempt(attempts, connect_s=0.01)

    again = asyncio.ensure_future(attempt(attempts))
    await turns()
    endpoint = MemoryEndpoint()
    attempts.made[1].set_result(endpoint)

    assert await again is endpoint
    attempts.made[0].set_exception(EndpointError("reset"))
    await turns()


async def test_a_hung_peer_collects_only_so_many_attempts(attempts: Any) -> None:
    """Then the last one is waited for again; another address begins its own."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    for _ in range(7):
        with pytest.raises(TransferTimeoutError):
            await attempt(attempts, connect_s=0.01)
    assert len(attempts.made) == 4

    again = asyncio.ensure_future(attempt(attempts))
    other = asyncio.ensure_future(attempt(attempts, port=8))
    await turns()
    endpoints = [MemoryEndpoint() for _ in attempts.made]
    for future, endpoint in zip(attempts.made, endpoints, strict=True):
        future.set_result(endpoint)

    assert await again is endpoints[3]
    assert await other is endpoints[4]
    await turns()
    assert [endpoint.is_closed for endpoint in endpoints] == [True] * 3 + [False] * 2
    assert problems == []


class Ucxx:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, float | None]] = []

    async def create_endpoint(
        self, address: str, port: int, connect_timeout: float | None
    ) -> MemoryEndpoint:
        """Connect at once."""
        self.asked.append((address, port, connect_timeout))
        return MemoryEndpoint()


async def test_ucxx_is_never_told_the_deadline() -> None:
    """Its own time-out would cancel an exchange and corrupt memory; see `LAST_RESORT_S`."""
    ucxx, loop = Ucxx(), asyncio.get_running_loop()
    runtime: Any = SimpleNamespace(ucxx=ucxx, errors=ERRORS, loop=loop)
    countdown = Countdown(Deadlines(connect_s=20.0), clock=loop.time)
    with socket.create_server(("127.0.0.1", 0)) as knocked:
        port = knocked.getsockname()[1]

        await connect(runtime, "localhost", port, peer="node-7", countdown=countdown)

    assert ucxx.asked == [("127.0.0.1", port, runtime_ucx.LAST_RESORT_S)]
    assert runtime_ucx.LAST_RESORT_S >= 60


async def test_a_refused_knock_is_final() -> None:
    """UCX is not even asked: it would mostly never answer."""
    ucxx, loop = Ucxx(), asyncio.get_running_loop()
    runtime: Any = SimpleNamespace(ucxx=ucxx, errors=ERRORS, loop=loop)
    countdown = Countdown(Deadlines(connect_s=20.0), clock=loop.time)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(PeerLostError, match="Refused"):
        await connect(runtime, "127.0.0.1", port, peer="node-7", countdown=countdown)

    assert ucxx.asked == []
