"""What a session machine tells its link to do.  The link obeys in the order given."""

from __future__ import annotations

from dataclasses import dataclass

from actors.transport.messages import Want


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes, which are one whole frame."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OpenComponent:
    """Find the component, then call ``opened`` or ``missing``."""

    index: int
    want: Want


@dataclass(frozen=True, slots=True)
class SendPayload:
    """Send the raw bytes that the frame before has announced."""

    ordinal: int
    """Counts the session's payloads, alike on both sides."""

    view: memoryview


@dataclass(frozen=True, slots=True)
class ReleasePins:
    """The client has everything: let go of what was opened.  ``rejected`` failed there."""

    rejected: tuple[Want, ...]


@dataclass(frozen=True, slots=True)
class ReceivePayload:
    """Receive ``num_bytes`` into a reservation, then call ``payload_received``.

    Call ``no_room`` if nothing can be reserved.
    """

    index: int
    ordinal: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReceiveProbe:
    """Receive ``num_bytes`` and forget them."""

    ordinal: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The payload is what was sent: commit the reservation, then call ``settled``."""

    index: int


@dataclass(frozen=True, slots=True)
class Discard:
    """The payload is damaged: abort the reservation.  The machine has settled it."""

    index: int


@dataclass(frozen=True, slots=True)
class Close:
    """Nothing more will be said; close once the peer had a chance to hear the last word."""


Instruction = (
    Send
    | OpenComponent
    | SendPayload
    | ReleasePins
    | ReceivePayload
    | ReceiveProbe
    | Commit
    | Discard
    | Close
)
