"""Kinds, reasons and limits of the transport protocol: numbers that both ends must share."""

from __future__ import annotations

from enum import IntEnum

NONCE_BYTES = 16
CHECKSUM_BYTES = 16
ANY_INCARNATION = 0
"""In a HELLO: the caller does not know, or care, which start of the worker it meets."""

MAX_NODE_BYTES = 128
MAX_CLASS_BYTES = 64
MAX_ERROR_BYTES = 256
MAX_FEATURES = 8
MAX_FEATURE_NAME_BYTES = 32
MAX_FEATURE_BYTES = 256
MAX_WANTS = 1024
MAX_PAYLOAD_BYTES = 256 << 20
MAX_PROBE_BYTES = 16 << 20


class FrameType(IntEnum):
    """Every kind of frame."""

    HELLO = 1
    WELCOME = 2
    PULL = 3
    COMPONENT = 4
    PAYLOAD = 5
    MISSING = 6
    END = 7
    ACK = 8
    ERROR = 9
    BYE = 10
    PING = 11
    PROBE = 12


class MissingReason(IntEnum):
    """Why a wanted component does not come."""

    UNKNOWN = 1
    """The worker does not hold it (any more)."""
    OVER_LIMIT = 2
    """It would take the pull over its byte limit, or a payload over the protocol's."""
    UNREADABLE = 3
    """The worker holds it but cannot read it."""


class ErrorCode(IntEnum):
    """Why a server ends the session."""

    PROTOCOL = 1
    STALE_INCARNATION = 2
    INTERNAL = 3
