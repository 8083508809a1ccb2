"""What became of a pull, and what a link costs: the results that callers see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from actors.transport.kinds import MissingReason
from codec.identity import CodecId, ComponentKey


class Outcome(Enum):
    """What became of one wanted component; everything but the first is a miss."""

    DELIVERED = "delivered"
    """Verified and committed to the sink."""
    ABSENT = "absent"
    """The server does not hold it."""
    OVER_LIMIT = "over limit"
    """It would have taken the pull over its byte limit."""
    UNREADABLE = "unreadable"
    """The server holds it but could not read it."""
    CORRUPT = "corrupt"
    """Its bytes arrived and failed a check; nothing was committed."""
    MISMATCH = "mismatch"
    """Its bytes are sound but name another component or codec."""
    NO_ROOM = "no room"
    """The sink had no room, for this one or for one before it."""


OUTCOME_OF_REASON = {
    MissingReason.UNKNOWN: Outcome.ABSENT,
    MissingReason.OVER_LIMIT: Outcome.OVER_LIMIT,
    MissingReason.UNREADABLE: Outcome.UNREADABLE,
}

_ARRIVED = (Outcome.DELIVERED, Outcome.CORRUPT, Outcome.MISMATCH)


@dataclass(frozen=True, slots=True)
class ComponentOutcome:
    """One line of a `PullReport`."""

    component: ComponentKey
    codec: CodecId
    outcome: Outcome
    stored_bytes: int = 0
    """Size of its payload, where one was announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """A finished pull: outcomes in the order of the wants, bytes and times."""

    outcomes: tuple[ComponentOutcome, ...]
    wire_bytes: int
    """Payloads and frames both ways; what UCX and TCP add is not seen here."""

    connect_s: float
    """From the call until the session was open: queueing, connecting, greeting."""

    transfer_s: float
    """From sending PULL until the last component was settled."""

    @property
    def bytes_moved(self) -> int:
        """Payload bytes that arrived, whether or not they were good."""
        return sum(o.stored_bytes for o in self.outcomes if o.outcome in _ARRIVED)

    @property
    def delivered_bytes(self) -> int:
        """Payload bytes that were committed."""
        return sum(o.stored_bytes for o in self.outcomes if o.outcome is Outcome.DELIVERED)

    @property
    def is_complete(self) -> bool:
        """Whether every wanted component was delivered."""
        return all(o.outcome is Outcome.DELIVERED for o in self.outcomes)


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """The measured cost of a link: ``n`` bytes take about ``t0_s + n / bytes_per_s``."""

    t0_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.t0_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"need t0_s >= 0 and bytes_per_s > 0, got {self}")


def fit_link(*, small_bytes: int, small_s: float, large_bytes: int, large_s: float) -> LinkProbe:
    """Draw the line through two timed transfers.

    Where noise made the large one no slower than the small one, no line fits: then all of
    the large one's time counts as bandwidth, which errs towards a slow link.

    Examples
    --------
    >>> fit_link(small_bytes=1_000, small_s=0.5, large_bytes=3_000, large_s=1.0)
    LinkProbe(t0_s=0.25, bytes_per_s=4000.0)
    """
    if not 0 < small_bytes < large_bytes or small_s <= 0 or large_s <= 0:
        raise ValueError("need 0 < small_bytes < large_bytes, and times above 0")
    if large_s <= small_s:
        return LinkProbe(0.0, large_bytes / large_s)
    bytes_per_s = (large_bytes - small_bytes) / (large_s - small_s)
    return LinkProbe(max(0.0, small_s - small_bytes / bytes_per_s), bytes_per_s)
