"""Requests and snapshots by number, and what may be asked of each now."""

from __future__ import annotations

from dataclasses import dataclass

from actors.arena.table.heads import Heads
from actors.arena.table.steps import Receipt, Step, StepItem
from codec.errors import QuarantinedError, StaleNameError, VmmBusy


@dataclass(slots=True, eq=False)
class Request:
    """A request that has not been released."""

    number: int
    #: Only ever rises.
    boundary: int
    #: Held.
    heads: Heads
    #: Neither committed nor aborted yet.
    prepared: Step | None = None
    #: Why it stands still; empty if it does not.
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A head that is kept, and held."""

    boundary: int
    heads: Heads


class Requests:
    """Who there is.  Numbers are never used again."""

    def __init__(self) -> None:
        self.open: dict[int, Request] = {}
        self.kept: dict[int, Snapshot] = {}
        #: Prepared steps by number: each is its request's ``prepared``.
        self.steps: dict[int, Step] = {}
        self._last = 0

    def next_number(self) -> int:
        """A number that nothing has had."""
        self._last += 1
        return self._last

    def request(self, number: int) -> Request:
        """A request that has not been released.

        Raises
        ------
        StaleNameError
            If there is none of that number.
        """
        found = self.open.get(number)
        if found is None:
            raise StaleNameError("request", str(number), "is not open")
        return found

    def running(self, number: int) -> Request:
        """A request that may go on.

        Raises
        ------
        StaleNameError, QuarantinedError
            If there is none, or it stands still.
        """
        found = self.request(number)
        if found.fault:
            raise QuarantinedError(number, found.fault)
        return found

    def idle(self, number: int) -> Request:
        """A request without a prepared step.

        Raises
        ------
        StaleNameError, VmmBusy
            If there is none, or a step of it is prepared.
        """
        found = self.request(number)
        if found.prepared is not None:
            raise VmmBusy(f"request {number}", f"step {found.prepared.number} is prepared")
        return found

    def shareable(self, number: int) -> Request:
        """A request that may go on, without a prepared step.

        Raises
        ------
        StaleNameError, QuarantinedError, VmmBusy
            If there is none, or it stands still, or a step of it is prepared.
        """
        self.running(number)
        return self.idle(number)

    def at(self, item: StepItem) -> Request:
        """The request of ``item``, if it is where the caller believes it to be.

        Raises
        ------
        StaleNameError, QuarantinedError, VmmBusy
            If it is not, or cannot make a step.
        """
        found = self.shareable(item.request)
        if found.boundary != item.before:
            why = f"is at boundary {found.boundary}, not {item.before}"
            raise StaleNameError("request", str(item.request), why)
        return found

    def snapshot(self, number: int) -> Snapshot:
        """A snapshot that has not been dropped.

        Raises
        ------
        StaleNameError
            If there is none of that number.
        """
        found = self.kept.get(number)
        if found is None:
            raise StaleNameError("snapshot", str(number), "is not kept")
        return found

    def step(self, number: int) -> Step:
        """A prepared step.

        Raises
        ------
        StaleNameError
            If there is none of that number.
        """
        found = self.steps.get(number)
        if found is None:
            raise StaleNameError("step", str(number), "is not prepared")
        return found

    def step_of(self, receipt: Receipt) -> Step:
        """The prepared step that a receipt is for.

        Raises
        ------
        StaleNameError
            If there is none, or the receipt is of another epoch.
        """
        found = self.step(receipt.step)
        if receipt.epoch != found.epoch:
            why = f"is of epoch {found.epoch}, its receipt of {receipt.epoch}"
            raise StaleNameError("step", str(receipt.step), why)
        return found

    def need_prepared(self, step: Step) -> None:
        """Refuse what is not a prepared step, as it was given out.

        Raises
        ------
        StaleNameError
            If it has ended, or says something else.
        """
        if self.steps.get(step.number) != step:
            raise StaleNameError("step", str(step.number), "is not prepared")

    def prepare(self, step: Step) -> None:
        """Begin a step."""
        self.steps[step.number] = self.open[step.request].prepared = step

    def settle(self, step: Step) -> Request:
        """End a prepared step, for better or worse; its request."""
        del self.steps[step.number]
        found = self.open[step.request]
        found.prepared = None
        return found
