"""UCX in this process: started once, on one event loop, and stopped for good.

The only module that imports ucxx, and only when it is first used: importing ucxx sets
environment variables and probes devices.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from actors.transport.deadlines import Countdown
from actors.transport.wire_ucx import SETTLE_S, EndpointErrors, UcxWire, forget_frames
from codec.errors import BackendUnavailable, PeerLostError, TransferTimeoutError

MAX_SESSIONS = 6
MAX_PULLS = 6

_MAX_LIMBO = 4
"""Attempts in limbo at one address."""

LAST_RESORT_S = 600.0
"""When ucxx itself may give up an exchange of addresses.

It then cancels a request of its own, and where an answer is just arriving that corrupts
memory: with ucxx 0.52 a few hundred connections with time-outs of some milliseconds are
enough for a segmentation fault.  After ten minutes nothing is arriving any more; without
any end, exchanges that broke off at a bad moment would stay for ever.
"""

_UCX_OPTIONS = {"TCP_KEEPIDLE": "2s", "TCP_KEEPINTVL": "1s", "TCP_KEEPCNT": "3"}
"""By these a connecting side that only receives notices a cut link, in seconds."""


@dataclass(slots=True)
class Runtime:
    """UCX in this process."""

    ucxx: ModuleType
    errors: EndpointErrors
    loop: asyncio.AbstractEventLoop
    pulls: asyncio.Semaphore
    sessions: asyncio.Semaphore
    wires: set[UcxWire]
    """Endpoints in use; `shutdown` aborts what is left."""


_log = logging.getLogger(__name__)
_runtime: Runtime | None = None
_is_spent = False
"""A shutdown has failed to release ucxx."""


def _import_ucxx() -> ModuleType:
    try:
        import ucxx  # noqa: PLC0415 - importing it probes devices and sets variables
        import ucxx.exceptions  # noqa: PLC0415
    except ImportError as error:
        raise BackendUnavailable("ucxx", "install the package ucxx-cu12") from error
    return ucxx  # type: ignore[no-any-return]


def start() -> Runtime:
    """Return this process's UCX, started on the running loop.

    Raises
    ------
    BackendUnavailable
        If ucxx is not installed, or was shut down while something still held on to it.
    RuntimeError
        If another loop has started it: its futures would never be set here.
    """
    global _runtime  # noqa: PLW0603 - ucxx itself is one per process
    loop = asyncio.get_running_loop()
    if _runtime is None:
        if _is_spent:
            raise BackendUnavailable("ucxx", "it was shut down in use; begin a new process")
        ucxx = _import_ucxx()
        ucxx.init(
            options=_UCX_OPTIONS,
            env_takes_precedence=True,
            progress_mode="thread",
            enable_python_future=True,
        )
        names = ("UCXMessageTruncatedError", "UCXMsgTruncated")
        truncated = tuple(getattr(ucxx.exceptions, name) for name in names)
        errors = EndpointErrors(lost=(ucxx.exceptions.UCXError,), truncated=truncated)
        pulls, sessions = asyncio.Semaphore(MAX_PULLS), asyncio.Semaphore(MAX_SESSIONS)
        _runtime = Runtime(ucxx, errors, loop, pulls, sessions, set())
    if _runtime.loop is not loop:
        raise RuntimeError("UCX belongs to the event loop that started it; shut it down there")
    return _runtime


async def shutdown() -> None:
    """Abort every endpoint and end UCX, so that the process can exit; may be called twice.

    Close listeners first.  UCX may be started again afterwards, on any loop.
    """
    global _runtime, _is_spent  # noqa: PLW0603 - see start
    if _runtime is None:
        return
    runtime, _runtime = _runtime, None
    if asyncio.get_running_loop() is runtime.loop:
        await _quiesce(runtime.wires)
    # Stopping takes up to a second of joining a thread, which needs this loop meanwhile.
    await asyncio.to_thread(runtime.ucxx.stop_notifier_thread)
    try:
        runtime.ucxx.reset()
    except runtime.errors.lost as error:
        # Someone still holds an endpoint or a listener.  The thread is gone all the same,
        # so the process can exit; but ucxx would start without progress the next time.
        _is_spent = True
        _log.warning("UCX was not released and cannot be started again here: %s", error)


async def _quiesce(wires: set[UcxWire]) -> None:
    """Abort every wire, and wait for their requests to end while there is still someone to say so."""
    quiet = []
    for wire in tuple(wires):
        wire.abort()
        ended = asyncio.Event()
        wire.when_quiet(ended.set)
        quiet.append(asyncio.ensure_future(ended.wait()))
    if quiet:
        _, late = await asyncio.wait(quiet, timeout=SETTLE_S)
        for waiter in late:
            waiter.cancel()


def active_transports() -> frozenset[str]:
    """Transports that UCX may use here, such as ``tcp``; without RDMA among them, it is TCP.

    Call it where `UcxListener.start` or a pull has started UCX, on the same loop.
    """
    return frozenset(start().ucxx.get_active_transports())


async def connect(
    runtime: Runtime, host: str, port: int, *, peer: str, countdown: Countdown
) -> Any:  # noqa: ANN401 - ucxx has no types
    """Return an endpoint.

    ucxx may not be told of the deadline (see `LAST_RESORT_S`).  So an attempt that comes too
    late is left in limbo until it ends by itself.  A hung peer does not collect any number
    of them: from some number on, the last one is waited for again.

    Raises
    ------
    PeerLostError, TransferTimeoutError
        If nobody answers there, or not in time.
    """
    timeout_s = countdown.left(countdown.deadlines.connect_s)
    attempt = _out_of_limbo(host, port)
    if attempt is None:
        attempt = asyncio.ensure_future(_create_endpoint(runtime, host, port, timeout_s))
    try:
        await asyncio.wait({attempt}, timeout=timeout_s)
    except asyncio.CancelledError:
        _into_limbo(host, port, attempt)
        raise
    if not attempt.done():
        _into_limbo(host, port, attempt)
        raise TransferTimeoutError(peer, "connecting", timeout_s)
    failure = attempt.exception()
    if failure is None:
        return attempt.result()
    forget_frames(failure)
    if isinstance(failure, TimeoutError):
        raise TransferTimeoutError(peer, "connecting", timeout_s)
    if isinstance(failure, (*runtime.errors.lost, OSError, RuntimeError)):
        raise PeerLostError(peer, f"connecting: {type(failure).__name__}: {failure}")
    raise failure


async def _create_endpoint(runtime: Runtime, host: str, port: int, timeout_s: float) -> Any:  # noqa: ANN401 - ucxx has no types
    """Connect, after a plain knock on the port that costs a round trip.

    The knock resolves ``host`` without blocking the loop, and hears a refusal of which UCX
    mostly never tells.  UCX listens over TCP on the same port whatever else it listens on,
    so a refusal is final.
    """
    async with asyncio.timeout(timeout_s):
        found = await runtime.loop.getaddrinfo(
            host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
        address = str(found[0][4][0])
        _, writer = await asyncio.open_connection(address, port)
        writer.close()
    return await runtime.ucxx.create_endpoint(address, port, connect_timeout=LAST_RESORT_S)


_limbo: dict[asyncio.Task[Any], tuple[str, int]] = {}
"""Attempts that nobody waits for; an endpoint that comes of one is aborted."""


def _into_limbo(host: str, port: int, attempt: asyncio.Task[Any]) -> None:
    _limbo[attempt] = (host, port)
    attempt.add_done_callback(_on_abandoned)


def _out_of_limbo(host: str, port: int) -> asyncio.Task[Any] | None:
    attempts = [attempt for attempt, address in _limbo.items() if address == (host, port)]
    if len(attempts) < _MAX_LIMBO:
        return None
    latest = attempts[-1]
    del _limbo[latest]
    latest.remove_done_callback(_on_abandoned)
    return latest


def _on_abandoned(attempt: asyncio.Task[Any]) -> None:
    del _limbo[attempt]
    if attempt.cancelled():
        return
    if (error := attempt.exception()) is None:
        attempt.result().abort()
    else:
        forget_frames(error)
