"""Who may say what when: four tables from (state, frame type) to the next state.

What a table does not list is forbidden.  The client's table of sending and the server's
of receiving belong together, and the reverse; a test walks both machines through every
conversation to show that neither can say what the other would refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from actors.transport.kinds import FrameType


class ClientState(Enum):
    """Where the pulling side is."""

    FRESH = "fresh"
    GREETING = "greeting"
    READY = "ready"
    PINGING = "pinging"
    PROBING = "probing"
    STREAMING = "streaming"
    ANNOUNCED = "announced"
    """A COMPONENT has come; its PAYLOAD must be next."""
    SETTLING = "settling"
    """END has come; payloads may still be on their way or unsettled."""
    ABANDONED = "abandoned"
    """The sink is full: what is in flight is settled, nothing more is heard."""
    LEAVING = "leaving"
    CLOSED = "closed"
    FAILED = "failed"


class ServerState(Enum):
    """Where the serving side is."""

    FRESH = "fresh"
    GREETED = "greeted"
    READY = "ready"
    PINGED = "pinged"
    PROBED = "probed"
    STREAMING = "streaming"
    ANNOUNCED = "announced"
    AWAITING_ACK = "awaiting ack"
    LEFT = "left"
    CLOSED = "closed"
    FAILED = "failed"


ClientTable = Mapping[tuple[ClientState, FrameType], ClientState]
ServerTable = Mapping[tuple[ServerState, FrameType], ServerState]

CLIENT_SENDS: ClientTable = MappingProxyType(
    {
        (ClientState.FRESH, FrameType.HELLO): ClientState.GREETING,
        (ClientState.READY, FrameType.PING): ClientState.PINGING,
        (ClientState.READY, FrameType.PROBE): ClientState.PROBING,
        (ClientState.READY, FrameType.PULL): ClientState.STREAMING,
        (ClientState.SETTLING, FrameType.ACK): ClientState.READY,
        (ClientState.READY, FrameType.BYE): ClientState.LEAVING,
    }
)

CLIENT_RECEIVES: ClientTable = MappingProxyType(
    {
        (ClientState.GREETING, FrameType.WELCOME): ClientState.READY,
        (ClientState.PINGING, FrameType.PING): ClientState.READY,
        (ClientState.PROBING, FrameType.PAYLOAD): ClientState.READY,
        (ClientState.STREAMING, FrameType.COMPONENT): ClientState.ANNOUNCED,
        (ClientState.ANNOUNCED, FrameType.PAYLOAD): ClientState.STREAMING,
        (ClientState.STREAMING, FrameType.MISSING): ClientState.STREAMING,
        (ClientState.STREAMING, FrameType.END): ClientState.SETTLING,
        (ClientState.LEAVING, FrameType.BYE): ClientState.CLOSED,
        # A server may give up wherever it is its turn to speak, except between a
        # COMPONENT and its PAYLOAD.
        (ClientState.GREETING, FrameType.ERROR): ClientState.CLOSED,
        (ClientState.PINGING, FrameType.ERROR): ClientState.CLOSED,
        (ClientState.PROBING, FrameType.ERROR): ClientState.CLOSED,
        (ClientState.STREAMING, FrameType.ERROR): ClientState.CLOSED,
        (ClientState.LEAVING, FrameType.ERROR): ClientState.CLOSED,
    }
)

SERVER_RECEIVES: ServerTable = MappingProxyType(
    {
        (ServerState.FRESH, FrameType.HELLO): ServerState.GREETED,
        (ServerState.READY, FrameType.PING): ServerState.PINGED,
        (ServerState.READY, FrameType.PROBE): ServerState.PROBED,
        (ServerState.READY, FrameType.PULL): ServerState.STREAMING,
        (ServerState.AWAITING_ACK, FrameType.ACK): ServerState.READY,
        (ServerState.READY, FrameType.BYE): ServerState.LEFT,
    }
)

SERVER_SENDS: ServerTable = MappingProxyType(
    {
        (ServerState.GREETED, FrameType.WELCOME): ServerState.READY,
        (ServerState.PINGED, FrameType.PING): ServerState.READY,
        (ServerState.PROBED, FrameType.PAYLOAD): ServerState.READY,
        (ServerState.STREAMING, FrameType.COMPONENT): ServerState.ANNOUNCED,
        (ServerState.ANNOUNCED, FrameType.PAYLOAD): ServerState.STREAMING,
        (ServerState.STREAMING, FrameType.MISSING): ServerState.STREAMING,
        (ServerState.STREAMING, FrameType.END): ServerState.AWAITING_ACK,
        (ServerState.LEFT, FrameType.BYE): ServerState.CLOSED,
        (ServerState.FAILED, FrameType.ERROR): ServerState.CLOSED,
    }
)
