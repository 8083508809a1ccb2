"""Messages as bytes: a checked header and a bounded body.  No I/O, no pickle.

Little-endian throughout; `HEADER_BYTES` of header, then the body:

====== ===== ==========================================================
offset bytes field
====== ===== ==========================================================
0      4     magic ``KVFX``
4      1     protocol version
5      1     frame type
6      2     flags, all zero in this version
8      8     request id; zero for frames that speak of the session itself
16     8     body length
24     4     body check: low half of xxh3-64 of the body; zero for PAYLOAD
28     4     header check: low half of xxh3-64 of the 28 bytes before it
====== ===== ==========================================================

1. The header's own check comes first, so that no damaged length is believed.
2. The length is compared with the type's limit before a byte of body is asked for.
3. The body is parsed field by field; what is left over is an error.

The body of a PAYLOAD is a component's raw bytes.  They never pass through this module:
the link receives them straight into their place, and the COMPONENT frame's checksum
covers them.  The checks find damage and bugs, not malice.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import xxhash

from actors.transport import kinds
from actors.transport import messages as m
from actors.transport.fields import FieldReader
from actors.transport.kinds import FrameType
from codec.errors import ProtocolError

PROTOCOL_VERSION = 1
MAGIC = b"KVFX"
_FIELDS = struct.Struct("<4sBBHQQI")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size

_MAX_WANT_BYTES = 2 * 16 + 4 * 4 + 2 + kinds.MAX_CLASS_BYTES
_MAX_FEATURES_BYTES = 1 + kinds.MAX_FEATURES * (
    2 + kinds.MAX_FEATURE_NAME_BYTES + 2 + kinds.MAX_FEATURE_BYTES
)
_MAX_GREETING_BYTES = 2 + kinds.MAX_NODE_BYTES + 8 + 2 * kinds.NONCE_BYTES + _MAX_FEATURES_BYTES

BODY_LIMITS: Mapping[FrameType, int] = MappingProxyType(
    {
        FrameType.HELLO: _MAX_GREETING_BYTES,
        FrameType.WELCOME: _MAX_GREETING_BYTES,
        FrameType.PULL: 10 + kinds.MAX_WANTS * _MAX_WANT_BYTES,
        FrameType.COMPONENT: 26 + _MAX_WANT_BYTES,
        FrameType.PAYLOAD: kinds.MAX_PAYLOAD_BYTES,
        FrameType.MISSING: 3,
        FrameType.END: 10,
        FrameType.ACK: 2 + 2 * kinds.MAX_WANTS,
        FrameType.ERROR: 11 + kinds.MAX_ERROR_BYTES,
        FrameType.BYE: 0,
        FrameType.PING: kinds.NONCE_BYTES + 1,
        FrameType.PROBE: 8,
    }
)
"""The longest body of each type; a header that says more is refused."""

MAX_CONTROL_BYTES = HEADER_BYTES + max(
    limit for kind, limit in BODY_LIMITS.items() if kind is not FrameType.PAYLOAD
)
"""The longest frame, payload bytes apart."""

_READERS = {
    kind.type: kind
    for kind in (
        m.Hello,
        m.Welcome,
        m.Pull,
        m.Component,
        m.Missing,
        m.End,
        m.Ack,
        m.Error,
        m.Bye,
        m.Ping,
        m.Probe,
    )
}


@dataclass(frozen=True, slots=True)
class Header:
    """A header that has passed its checks."""

    type: FrameType
    request_id: int
    body_bytes: int
    body_check: int

    @property
    def control_bytes(self) -> int:
        """Body bytes that belong to the frame itself: none for a PAYLOAD."""
        return 0 if self.type is FrameType.PAYLOAD else self.body_bytes


def payload_checksum(payload: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of a payload, as COMPONENT carries it."""
    return xxhash.xxh3_128_digest(payload)


def pack_frame(message: m.Message, *, request_id: int = 0) -> bytes:
    """Header and body of ``message``; the header alone for a `Payload`."""
    if isinstance(message, m.Payload):
        body, body_bytes, body_check = b"", message.num_bytes, 0
    else:
        body = message.pack()
        body_bytes, body_check = len(body), _check(body)
    fields = _FIELDS.pack(
        MAGIC, PROTOCOL_VERSION, message.type, 0, request_id, body_bytes, body_check
    )
    return fields + _CHECK.pack(_check(fields)) + body


def parse_header(data: bytes | bytearray | memoryview, *, peer: str) -> Header:
    """Read and check a header of `HEADER_BYTES`.

    Raises
    ------
    ProtocolError
        If a field is not one that this version allows.  Nothing after the header has been
        read or allocated by then.
    """
    if len(data) != HEADER_BYTES:
        raise ProtocolError(peer, f"a header of {len(data)} bytes, not {HEADER_BYTES}")
    magic, version, kind, flags, request_id, body_bytes, body_check = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(peer, f"magic is {magic!r}, not {MAGIC!r}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != _check(data[: _FIELDS.size]):
        raise ProtocolError(peer, "the header fails its check")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(peer, f"version {version}, this build speaks {PROTOCOL_VERSION}")
    if flags:
        raise ProtocolError(peer, f"flags {flags:#06x} mean nothing in version {version}")
    try:
        frame_type = FrameType(kind)
    except ValueError:
        raise ProtocolError(peer, f"unknown frame type {kind}") from None
    if body_bytes > BODY_LIMITS[frame_type]:
        limit = BODY_LIMITS[frame_type]
        raise ProtocolError(peer, f"{frame_type.name} of {body_bytes} bytes, limit {limit}")
    return Header(frame_type, request_id, body_bytes, body_check)


def parse_message(header: Header, body: bytes | bytearray | memoryview, *, peer: str) -> m.Message:
    """Read the body that belongs to ``header``.

    Raises
    ------
    ProtocolError
        If the body fails its check, or is not exactly what its type prescribes.
    """
    if header.type is FrameType.PAYLOAD:
        return _payload(header, peer=peer)
    if len(body) != header.body_bytes or _check(body) != header.body_check:
        raise ProtocolError(peer, f"the body of {header.type.name} fails its check")
    reader = FieldReader(body)
    try:
        message = _READERS[header.type].read(reader)
        reader.finish()
    except ValueError as error:
        raise ProtocolError(peer, f"{header.type.name}: {error}") from error
    return message


def _payload(header: Header, *, peer: str) -> m.Payload:
    if header.body_check or not header.body_bytes:
        raise ProtocolError(peer, "PAYLOAD must announce bytes, and no check of its own")
    return m.Payload(header.body_bytes)


def _check(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF
