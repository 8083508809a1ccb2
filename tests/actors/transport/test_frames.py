"""Frames: what is packed is read back; what is damaged is a `ProtocolError`, nothing else."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transport import frames, kinds
from actors.transport import messages as m
from actors.transport.frames import HEADER_BYTES, Header
from codec.errors import ProtocolError
from tests.actors.transport import strategies
from tests.actors.transport.samples import want

PEER = "node-7"


def parse(data: bytes) -> tuple[Header, m.Message]:
    """Read one whole frame."""
    header = frames.parse_header(data[:HEADER_BYTES], peer=PEER)
    return header, frames.parse_message(header, data[HEADER_BYTES:], peer=PEER)


def forge(
    kind: int,
    body: bytes = b"",
    *,
    magic: bytes = b"KVFX",
    version: int = 1,
    flags: int = 0,
    length: int | None = None,
    body_check: int | None = None,
) -> bytes:
    """Build a frame by hand, with correct checks, from the table in the documentation."""
    length = len(body) if length is None else length
    if body_check is None:
        body_check = xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF
    fields = struct.pack("<4sBBHQQI", magic, version, kind, flags, 9, length, body_check)
    return fields + struct.pack("<I", xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF) + body


@given(strategies.messages, strategies.uint(8))
def test_every_message_comes_back(message: m.Message, request_id: int) -> None:
    """Type, request id and every field."""
    header, found = parse(frames.pack_frame(message, request_id=request_id))

    assert found == message
    assert (header.type, header.request_id) == (message.type, request_id)


@given(strategies.messages)
def test_no_message_is_longer_than_its_header_may_say(message: m.Message) -> None:
    """The limits of bodies follow from the limits of fields."""
    header, _ = parse(frames.pack_frame(message))

    assert header.body_bytes <= frames.BODY_LIMITS[message.type]
    assert header.control_bytes + HEADER_BYTES <= frames.MAX_CONTROL_BYTES


def test_the_longest_messages_just_fit() -> None:
    """A pull of as many wants as allowed, each as long as allowed."""
    long_class = "c" * kinds.MAX_CLASS_BYTES
    component = want(0).component
    wants = tuple(
        m.Want(
            type(component)(want(index).component.chunk_key, component.stage, long_class),
            want(index).codec,
        )
        for index in range(kinds.MAX_WANTS)
    )
    features = tuple(
        m.Feature(f"{index}" * kinds.MAX_FEATURE_NAME_BYTES, bytes(kinds.MAX_FEATURE_BYTES))
        for index in range(kinds.MAX_FEATURES)
    )
    nonce = bytes(kinds.NONCE_BYTES)
    longest: list[m.Message] = [
        m.Pull(wants, 1),
        m.Welcome("n" * kinds.MAX_NODE_BYTES, 1, nonce, nonce, features),
        m.Ack(tuple(range(kinds.MAX_WANTS))),
        m.Error(kinds.ErrorCode.PROTOCOL, 0, "x" * kinds.MAX_ERROR_BYTES),
        m.Component(0, wants[0], 1, bytes(kinds.CHECKSUM_BYTES)),
    ]

    for message in longest:
        header, found = parse(frames.pack_frame(message))
        assert found == message
        assert header.body_bytes == frames.BODY_LIMITS[message.type]


def test_the_layout_is_the_documented_one() -> None:
    """A frame written by hand from the table is read, and the reverse, byte for byte."""
    nonce = bytes(range(16))

    assert frames.pack_frame(m.Ping(nonce, is_reply=True), request_id=9) == forge(
        11, nonce + b"\x01"
    )
    assert frames.pack_frame(m.Payload(5000), request_id=9) == forge(5, length=5000, body_check=0)
    assert parse(forge(10)) == (Header(kinds.FrameType.BYE, 9, 0, _check(b"")), m.Bye())


def _check(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data) & 0xFFFFFFFF


BAD_FRAMES = {
    "magic": forge(10, magic=b"HTTP"),
    "version 0": forge(10, version=0),
    "version 2": forge(10, version=2),
    "flags": forge(10, flags=1),
    "type 0": forge(0),
    "type 13": forge(13),
    "type 255": forge(255),
    "length over limit": forge(10, length=1),
    "huge pull": forge(3, length=1 << 40),
    "huge payload": forge(5, length=kinds.MAX_PAYLOAD_BYTES + 1, body_check=0),
    "empty payload": forge(5, body_check=0),
    "payload with a check": forge(5, length=10, body_check=1),
    "trailing byte": forge(8, b"\x00\x00!"),
    "unknown reason": forge(6, b"\x00\x00\x09"),
    "unknown error code": forge(9, b"\x00" * 11),
    "flag of 2": forge(11, bytes(16) + b"\x02"),
    "short ping": forge(11, bytes(16)),
    "body too long for its fields": forge(4, bytes(100)),
    "reversed stage": forge(
        3,
        struct.pack("<QH", 1, 1) + bytes(32) + struct.pack("<4I", 2, 1, 0, 1) + b"\x01\x00c",
    ),
    "no wants": forge(3, struct.pack("<QH", 1, 0)),
    "too many wants": forge(3, struct.pack("<QH", 1, 65535) + bytes(1000)),
    "odd rejects": forge(8, b"\x01\x00\x05"),
    "text that is not utf-8": forge(9, b"\x01" + bytes(8) + b"\x01\x00\xff"),
    "trailing bytes in a hello": forge(1, b"\x01\x00n" + bytes(8) + bytes(16) + b"\x00" + b"!"),
    "too many features": forge(1, b"\x01\x00n" + bytes(8) + bytes(16) + b"\xff"),
    "nothing": b"",
    "half a header": forge(10)[: HEADER_BYTES // 2],
}


@pytest.mark.parametrize("data", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_a_frame_that_breaks_a_rule_is_refused(data: bytes) -> None:
    """Every check sum is right, so each rule stands by itself."""
    with pytest.raises(ProtocolError) as caught:
        parse(data)

    assert caught.value.peer == PEER


def test_a_length_is_refused_before_anything_is_allocated() -> None:
    """A header that speaks of a terabyte costs no more than any other."""
    data = forge(3, length=1 << 40)
    with pytest.raises(ProtocolError):
        frames.parse_header(data, peer=PEER)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="limit"):
            frames.parse_header(data, peer=PEER)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 100_000


@given(strategies.control_messages, st.data())
def test_a_flipped_bit_is_always_found(message: m.Message, data: st.DataObject) -> None:
    """In the header or in the body."""
    frame = bytearray(frames.pack_frame(message, request_id=3))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8

    with pytest.raises(ProtocolError):
        parse(bytes(frame))


@given(strategies.control_messages, st.data())
def test_a_cut_or_longer_frame_is_always_found(message: m.Message, data: st.DataObject) -> None:
    """Header and body are exactly as long as they must be."""
    frame = frames.pack_frame(message)
    cut = data.draw(st.integers(0, len(frame)))
    extension = data.draw(st.binary(min_size=0 if cut < len(frame) else 1, max_size=40))
    changed = frame[:cut] + extension
    if changed == frame:
        return

    with pytest.raises(ProtocolError):
        parse(changed)


@settings(max_examples=300)
@given(st.sampled_from(kinds.FrameType), st.binary(max_size=400))
def test_a_random_body_with_right_checks_is_a_message_or_refused(
    kind: kinds.FrameType, body: bytes
) -> None:
    """The parser's own rules, with the check sums out of the way; what it accepts is canonical."""
    data = forge(kind, body, body_check=0 if kind is kinds.FrameType.PAYLOAD else None)
    try:
        _, message = parse(data)
    except ProtocolError:
        return

    whole = data[:HEADER_BYTES] if kind is kinds.FrameType.PAYLOAD else data
    assert frames.pack_frame(message, request_id=9) == whole


@settings(max_examples=300)
@given(strategies.control_messages, st.data())
def test_a_mutated_body_with_right_checks_is_a_message_or_refused(
    message: m.Message, data: st.DataObject
) -> None:
    """Nearly right bodies reach the deeper rules that random ones do not."""
    body = bytearray(frames.pack_frame(message)[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            place = data.draw(st.integers(0, len(body) - 1))
            body[place] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)))
    forged = forge(message.type, bytes(body))
    try:
        _, found = parse(forged)
    except ProtocolError:
        return

    assert frames.pack_frame(found, request_id=9) == forged


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_headers_are_refused(data: bytes) -> None:
    """Whatever reaches the port that is not ours."""
    with pytest.raises(ProtocolError):
        frames.parse_header(data, peer=PEER)


def test_the_payload_checksum_is_xxh3_128() -> None:
    """A published value: both ends may be different builds."""
    assert frames.payload_checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert frames.payload_checksum(memoryview(b"ab")) == xxhash.xxh3_128_digest(b"ab")
