"""How long each kind of wait may take.  UCX itself notices neither a cut link nor a hung peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Longest waits, in seconds; every wait of a transfer has one of these."""

    connect_s: float = 5.0
    """Until an endpoint is there, name resolution included."""

    frame_s: float = 5.0
    """For one frame, while no payload is on its way."""

    payload_s: float = 30.0
    """For one payload, and for a frame that payloads may hold up."""

    total_s: float = 120.0
    """For a whole pull, or a whole session on the serving side."""

    close_s: float = 1.0
    """For the last word to be heard."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{field.name} must be above 0, got {getattr(self, field.name)}")


DEFAULT_DEADLINES = Deadlines()


class Countdown:
    """What is left of ``total_s``, on a clock that is passed in.

    Examples
    --------
    >>> now = 100.0
    >>> countdown = Countdown(Deadlines(total_s=10.0), clock=lambda: now)
    >>> now = 107.0
    >>> countdown.left(5.0), countdown.left(1.0)
    (3.0, 1.0)
    """

    def __init__(self, deadlines: Deadlines, *, clock: Callable[[], float]) -> None:
        self.deadlines = deadlines
        self.clock = clock
        self._end_s = clock() + deadlines.total_s

    def left(self, step_s: float) -> float:
        """Seconds that a step of at most ``step_s`` may still take; never below 0."""
        return max(0.0, min(step_s, self._end_s - self.clock()))
