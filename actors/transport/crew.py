"""Tasks that share a wire, and so stand or fall together.

Not ``asyncio.TaskGroup``: that cancels its parent when a child fails and, before Python
3.13, does not take the cancellation back where the parent is already waiting at the end.
Nothing needs to be cancelled here.  Who fails closes the wire, and that ends every
request on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self

from actors.transport.wire import Wire
from codec.errors import FabricError


class Crew:
    """Starts tasks, waits for all of them, and raises what failed first.

    A cancellation of the block itself goes before everything else.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        #: Tasks that have not ended; none of them ever raises.
        self._tasks: set[asyncio.Task[None]] = set()
        #: What the first task to fail has raised.
        self._failure: BaseException | None = None

    @property
    def has_failed(self) -> bool:
        """Whether a task has failed, so that the wire is closed."""
        return self._failure is not None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside the block."""
        task = asyncio.ensure_future(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as error:  # noqa: BLE001 - raised again when the block ends
            self._failure = self._failure or error
            self._wire.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled:
            self._wire.abort()
        # What fails while we wait here fails because of what failed before.
        is_ours = error is not None and self._failure is None
        while self._tasks:
            try:
                # No deadline here: every request of a task has one of its own.
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError:
                is_cancelled = True
                self._wire.abort()
        failure, self._failure = self._failure, None
        if is_cancelled:
            raise asyncio.CancelledError
        if failure is not None and not is_ours:
            self._raise(failure)

    def _raise(self, failure: BaseException) -> None:
        """Raise ``failure``; without its traceback if it is one that callers handle.

        Tracebacks hold views of the memory that was being transferred, and whoever kept
        the error would keep that memory from being given back.
        """
        try:
            if isinstance(failure, FabricError):
                raise failure.with_traceback(None)
            raise failure
        finally:
            del failure  # its new traceback leads back to this frame
