"""What one worker may say to another: one frozen class per frame type.

A message that exists is within every limit of the protocol, so packing cannot fail and
parsing checks by constructing.  `frames` puts the header in front; `session` says which
message may come when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from actors.transport.fields import (
    FieldReader,
    need_exact,
    need_text,
    need_uint,
    pack_bytes,
    pack_text,
    pack_uint,
)
from actors.transport.kinds import (
    CHECKSUM_BYTES,
    MAX_CLASS_BYTES,
    MAX_ERROR_BYTES,
    MAX_FEATURE_BYTES,
    MAX_FEATURE_NAME_BYTES,
    MAX_FEATURES,
    MAX_NODE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PROBE_BYTES,
    MAX_WANTS,
    NONCE_BYTES,
    ErrorCode,
    FrameType,
    MissingReason,
)
from codec.geometry import Stage
from codec.identity import DIGEST_BYTES, ChunkKey, CodecId, ComponentKey


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a peer offers beyond this version: a name, and bytes only it understands.

    Tickets and sealed payloads will come in here; a peer passes over names it does not know.
    """

    name: str
    value: bytes = b""

    def __post_init__(self) -> None:
        need_text("feature name", self.name, most=MAX_FEATURE_NAME_BYTES)
        if len(self.value) > MAX_FEATURE_BYTES:
            raise ValueError(
                f"a feature takes at most {MAX_FEATURE_BYTES} bytes, got {len(self.value)}"
            )


def _need_features(features: tuple[Feature, ...]) -> None:
    names = [feature.name for feature in features]
    if len(names) > MAX_FEATURES or names != sorted(set(names)):
        raise ValueError(f"need at most {MAX_FEATURES} features in order of name, got {names}")


def _pack_features(features: tuple[Feature, ...]) -> bytes:
    packed = (pack_text(feature.name) + pack_bytes(feature.value) for feature in features)
    return pack_uint(len(features), 1) + b"".join(packed)


def _read_features(reader: FieldReader) -> tuple[Feature, ...]:
    count = reader.uint(1)
    if count > MAX_FEATURES:
        raise ValueError(f"need at most {MAX_FEATURES} features, got {count}")
    return tuple(
        Feature(reader.text(most=MAX_FEATURE_NAME_BYTES), reader.bytes(most=MAX_FEATURE_BYTES))
        for _ in range(count)
    )


@dataclass(frozen=True, slots=True)
class Want:
    """One component in one codec: what a pull asks for."""

    component: ComponentKey
    codec: CodecId

    def __post_init__(self) -> None:
        need_exact("chunk key", self.component.chunk_key, DIGEST_BYTES)
        need_exact("codec id", self.codec, DIGEST_BYTES)
        need_text("retention class", self.component.retention_class, most=MAX_CLASS_BYTES)
        need_uint("layer stop", self.component.stage.layer_stop, 4)
        need_uint("head stop", self.component.stage.head_stop, 4)

    def pack(self) -> bytes:
        """Return the form that `read` takes back."""
        stage = self.component.stage
        ends = (stage.layer_start, stage.layer_stop, stage.head_start, stage.head_stop)
        packed_stage = b"".join(pack_uint(end, 4) for end in ends)
        packed_class = pack_text(self.component.retention_class)
        return self.component.chunk_key + self.codec + packed_stage + packed_class

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Take one want off ``reader``."""
        chunk_key = ChunkKey(reader.exact(DIGEST_BYTES))
        codec = CodecId(reader.exact(DIGEST_BYTES))
        stage = Stage(reader.uint(4), reader.uint(4), reader.uint(4), reader.uint(4))
        retention_class = reader.text(most=MAX_CLASS_BYTES)
        return cls(ComponentKey(chunk_key, stage, retention_class), codec)


@dataclass(frozen=True, slots=True)
class Hello:
    """The client's first word: who it is, and which start of the server it means."""

    type: ClassVar[FrameType] = FrameType.HELLO
    node: str
    incarnation: int
    nonce: bytes
    features: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        need_text("node", self.node, most=MAX_NODE_BYTES)
        need_uint("incarnation", self.incarnation, 8)
        need_exact("nonce", self.nonce, NONCE_BYTES)
        _need_features(self.features)

    def pack(self) -> bytes:
        """Return the body."""
        head = pack_text(self.node) + pack_uint(self.incarnation, 8) + self.nonce
        return head + _pack_features(self.features)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        node = reader.text(most=MAX_NODE_BYTES)
        return cls(node, reader.uint(8), reader.exact(NONCE_BYTES), _read_features(reader))


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server's first word: who it is; the client's nonce shows that it answers *this* HELLO."""

    type: ClassVar[FrameType] = FrameType.WELCOME
    node: str
    incarnation: int
    client_nonce: bytes
    nonce: bytes
    features: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        need_text("node", self.node, most=MAX_NODE_BYTES)
        need_uint("incarnation", self.incarnation, 8)
        need_exact("client nonce", self.client_nonce, NONCE_BYTES)
        need_exact("nonce", self.nonce, NONCE_BYTES)
        _need_features(self.features)

    def pack(self) -> bytes:
        """Return the body."""
        head = pack_text(self.node) + pack_uint(self.incarnation, 8)
        return head + self.client_nonce + self.nonce + _pack_features(self.features)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        node, incarnation = reader.text(most=MAX_NODE_BYTES), reader.uint(8)
        nonces = reader.exact(NONCE_BYTES), reader.exact(NONCE_BYTES)
        return cls(node, incarnation, *nonces, _read_features(reader))


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask for components, in this order, of at most ``max_bytes`` together."""

    type: ClassVar[FrameType] = FrameType.PULL
    wants: tuple[Want, ...]
    max_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.wants) <= MAX_WANTS:
            raise ValueError(f"need 1 to {MAX_WANTS} wants, got {len(self.wants)}")
        if len(set(self.wants)) != len(self.wants):
            raise ValueError("a pull names each component once")
        need_uint("max_bytes", self.max_bytes, 8)

    def pack(self) -> bytes:
        """Return the body."""
        head = pack_uint(self.max_bytes, 8) + pack_uint(len(self.wants), 2)
        return head + b"".join(want.pack() for want in self.wants)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        max_bytes, count = reader.uint(8), reader.uint(2)
        if count > MAX_WANTS:
            raise ValueError(f"need 1 to {MAX_WANTS} wants, got {count}")
        return cls(tuple(Want.read(reader) for _ in range(count)), max_bytes)


@dataclass(frozen=True, slots=True)
class Component:
    """Describes the payload that comes next."""

    type: ClassVar[FrameType] = FrameType.COMPONENT
    index: int
    """Its place in the pull."""

    want: Want
    stored_bytes: int
    checksum: bytes
    """xxh3-128 of the payload."""

    def __post_init__(self) -> None:
        need_uint("index", self.index, 2)
        need_exact("checksum", self.checksum, CHECKSUM_BYTES)
        if not 1 <= self.stored_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(
                f"need 1 <= stored_bytes <= {MAX_PAYLOAD_BYTES}, got {self.stored_bytes}"
            )

    def pack(self) -> bytes:
        """Return the body."""
        head = pack_uint(self.index, 2) + pack_uint(self.stored_bytes, 8) + self.checksum
        return head + self.want.pack()

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        index, stored_bytes = reader.uint(2), reader.uint(8)
        checksum = reader.exact(CHECKSUM_BYTES)
        return cls(index, Want.read(reader), stored_bytes, checksum)


@dataclass(frozen=True, slots=True)
class Payload:
    """Announces ``num_bytes`` raw bytes, which follow outside any frame."""

    type: ClassVar[FrameType] = FrameType.PAYLOAD
    num_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"need 1 <= num_bytes <= {MAX_PAYLOAD_BYTES}, got {self.num_bytes}")


@dataclass(frozen=True, slots=True)
class Missing:
    """One wanted component does not come; the next one follows."""

    type: ClassVar[FrameType] = FrameType.MISSING
    index: int
    reason: MissingReason

    def __post_init__(self) -> None:
        need_uint("index", self.index, 2)

    def pack(self) -> bytes:
        """Return the body."""
        return pack_uint(self.index, 2) + pack_uint(self.reason, 1)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        return cls(reader.uint(2), MissingReason(reader.uint(1)))


@dataclass(frozen=True, slots=True)
class End:
    """Every wanted component was sent or declared missing; these were sent."""

    type: ClassVar[FrameType] = FrameType.END
    num_components: int
    payload_bytes: int

    def __post_init__(self) -> None:
        need_uint("num_components", self.num_components, 2)
        need_uint("payload_bytes", self.payload_bytes, 8)

    def pack(self) -> bytes:
        """Return the body."""
        return pack_uint(self.num_components, 2) + pack_uint(self.payload_bytes, 8)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        return cls(reader.uint(2), reader.uint(8))


@dataclass(frozen=True, slots=True)
class Ack:
    """Every payload has arrived; the server may let go.  ``rejected`` failed a check here."""

    type: ClassVar[FrameType] = FrameType.ACK
    rejected: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rejected) > MAX_WANTS or list(self.rejected) != sorted(set(self.rejected)):
            raise ValueError(f"need rising indices, at most {MAX_WANTS}, got {self.rejected}")
        for index in self.rejected:
            need_uint("index", index, 2)

    def pack(self) -> bytes:
        """Return the body."""
        return pack_bytes(b"".join(pack_uint(index, 2) for index in self.rejected))

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        packed = FieldReader(indices := reader.bytes(most=2 * MAX_WANTS))
        rejected = tuple(packed.uint(2) for _ in range(len(indices) // 2))
        packed.finish()
        return cls(rejected)


@dataclass(frozen=True, slots=True)
class Error:
    """The server ends the session; ``value`` is its incarnation where that is the reason."""

    type: ClassVar[FrameType] = FrameType.ERROR
    code: ErrorCode
    value: int
    text: str

    def __post_init__(self) -> None:
        need_uint("value", self.value, 8)
        need_text("text", self.text, most=MAX_ERROR_BYTES, least=0)

    def pack(self) -> bytes:
        """Return the body."""
        return pack_uint(self.code, 1) + pack_uint(self.value, 8) + pack_text(self.text)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        code = ErrorCode(reader.uint(1))
        return cls(code, reader.uint(8), reader.text(most=MAX_ERROR_BYTES))


@dataclass(frozen=True, slots=True)
class Bye:
    """Nothing more will be asked; the server answers in kind, then either may close."""

    type: ClassVar[FrameType] = FrameType.BYE

    def pack(self) -> bytes:
        """Return the body, which is empty."""
        return b""

    @classmethod
    def read(cls, reader: FieldReader) -> Self:  # noqa: ARG003 - every message has this form
        """Parse the body."""
        return cls()


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?  The server sends it back with ``is_reply``."""

    type: ClassVar[FrameType] = FrameType.PING
    nonce: bytes
    is_reply: bool = False

    def __post_init__(self) -> None:
        need_exact("nonce", self.nonce, NONCE_BYTES)

    def pack(self) -> bytes:
        """Return the body."""
        return self.nonce + pack_uint(self.is_reply, 1)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        return cls(reader.exact(NONCE_BYTES), reader.flag())


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask for a payload of ``num_bytes`` zeros, to time the link."""

    type: ClassVar[FrameType] = FrameType.PROBE
    num_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_bytes <= MAX_PROBE_BYTES:
            raise ValueError(f"need 1 <= num_bytes <= {MAX_PROBE_BYTES}, got {self.num_bytes}")

    def pack(self) -> bytes:
        """Return the body."""
        return pack_uint(self.num_bytes, 8)

    @classmethod
    def read(cls, reader: FieldReader) -> Self:
        """Parse the body."""
        return cls(reader.uint(8))


Message = (
    Hello | Welcome | Pull | Component | Payload | Missing | End | Ack | Error | Bye | Ping | Probe
)
