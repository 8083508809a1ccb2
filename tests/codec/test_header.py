"""`BlobHeader`: whatever exists is within bounds, and has one written form."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.blob import BlobHeader
from codec.errors import CorruptBlobError
from codec.geometry import Stage
from codec.header import (
    MAX_EXTENT,
    MAX_POSITION,
    MAX_TOKENS,
    SLACK_BYTES,
    pack_header,
    unpack_header,
)
from codec.identity import ChunkKey, ComponentKey
from tests.codec.samples import STAGE, a_header, headers

KEY = ChunkKey(bytes(16))
#: What the header's array holds, in order.
FIELDS = (
    "namespace",
    "codec",
    "chunk_key",
    *("layer_start", "layer_stop", "head_start", "head_stop"),
    "retention_class",
    *("start_position", "num_tokens", "first_token", "last_token"),
    "dtype",
    *("num_layers", "num_heads", "key_head_dim", "value_head_dim"),
)
#: For each, values that are out of bounds or of another type.
NOT_BYTES: tuple[object, ...] = (None, "0123456789abcdef", b"", bytes(15), 1, [1])
NOT_TEXT: tuple[object, ...] = (None, b"unbounded", "", "a b", "\u00fc", "x" * 65, 1, [])
NOT_INT: tuple[object, ...] = (None, "1", b"1", 1.0, True, -1, 2**63, 2**64 - 1, [], [1])
BAD_FIELDS = [
    *((name, bad) for name in FIELDS[:3] for bad in NOT_BYTES),
    *(("retention_class", bad) for bad in NOT_TEXT),
    *(("dtype", bad) for bad in (*NOT_TEXT, "int8", "Float32")),
    *((name, bad) for name in (*FIELDS[3:7], *FIELDS[8:12], *FIELDS[13:]) for bad in NOT_INT),
    *((name, 0) for name in ("num_tokens", "num_layers", "key_head_dim", "value_head_dim")),
    *((name, 4) for name in ("layer_start", "head_start", "num_heads", "num_layers")),
    *((name, MAX_EXTENT + 1) for name in ("layer_stop", "head_stop", "key_head_dim")),
    ("num_tokens", MAX_TOKENS + 1),
    ("num_tokens", 1),
    ("start_position", MAX_POSITION - 4),
    ("first_token", 2**32),
]


def packed_fields(header: BlobHeader) -> list[Any]:
    """What is in the written header."""
    fields = msgpack.unpackb(pack_header(header))
    assert isinstance(fields, list)
    return fields


def read(data: bytes) -> BlobHeader:
    """Header written as ``data``."""
    return unpack_header(memoryview(data))


@given(headers())
def test_a_header_is_read_back(header: BlobHeader) -> None:
    """Every legal header survives, in every field."""
    assert read(pack_header(header)) == header


def test_the_written_fields_are_in_the_documented_order() -> None:
    """Each value of the sample is told apart from its neighbors."""
    header = a_header(stage=STAGE, component=ComponentKey(KEY, STAGE, "window(8)"))

    assert dict(zip(FIELDS, packed_fields(header), strict=True)) == {
        "namespace": bytes(range(16)),
        "codec": bytes(range(16, 32)),
        "chunk_key": bytes(16),
        "layer_start": 2,
        "layer_stop": 4,
        "head_start": 0,
        "head_stop": 3,
        "retention_class": "window(8)",
        "start_position": 256,
        "num_tokens": 5,
        "first_token": 7,
        "last_token": 2**32 - 1,
        "dtype": "bfloat16",
        "num_layers": 2,
        "num_heads": 3,
        "key_head_dim": 8,
        "value_head_dim": 6,
    }


@pytest.mark.parametrize(("name", "bad"), BAD_FIELDS)
def test_a_bad_field_is_refused(name: str, bad: object) -> None:
    """A header that parses but says something impossible is no header."""
    fields = packed_fields(a_header(stage=STAGE))
    assert read(msgpack.packb(fields)) == a_header(stage=STAGE)
    fields[FIELDS.index(name)] = bad

    with pytest.raises(CorruptBlobError, match="corrupt blob, header: "):
        read(msgpack.packb(fields))


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": bytearray(16)},
        {"codec": bytes(15)},
        {"component": ComponentKey(ChunkKey(bytes(17)), STAGE)},
        {"component": ComponentKey(KEY, STAGE, "a\n")},
        {"component": ComponentKey(KEY, Stage(0, 3, 0, 3))},
        {"component": ComponentKey(KEY, Stage(2, 4, 0, 2))},
        {"dtype": "float64"},
        {"num_tokens": 0},
        {"num_tokens": 1},
        {"start_position": -1},
        {"last_token": 2**32},
        {"num_layers": 3},
        {"num_heads": True},
        {"key_head_dim": 0},
        {"value_head_dim": MAX_EXTENT + 1},
    ],
)
def test_a_bad_header_cannot_be_made(changes: dict[str, Any]) -> None:
    """A writer learns of its mistake before anything is written."""
    with pytest.raises(ValueError, match=r"must be|the first of 1 token"):
        a_header(stage=STAGE, **changes)


def test_the_outermost_legal_values_are_legal() -> None:
    """Bounds are the last values allowed, not the first refused."""
    stage = Stage(MAX_EXTENT - 1, MAX_EXTENT, MAX_EXTENT - 2, MAX_EXTENT)
    header = a_header(
        stage=stage,
        component=ComponentKey(KEY, stage, "~" * 64),
        num_tokens=MAX_TOKENS,
        start_position=MAX_POSITION - MAX_TOKENS,
        first_token=0,
        key_head_dim=MAX_EXTENT,
        value_head_dim=1,
    )

    assert read(pack_header(header)) == header


def other_forms() -> dict[str, bytes]:
    """Bytes that hold a legal header's fields but are not how it is written."""
    written = pack_header(a_header(stage=STAGE))
    array, body = written[:3], written[3:]
    assert array == b"\xdc\x00\x11"
    tokens_at = written.index(b"\xcd\x01\x00\x05") + 3
    fields = packed_fields(a_header(stage=STAGE))
    return {
        "longer array": b"\xdd\x00\x00\x00\x11" + body,
        "longer integer": written[:tokens_at] + b"\xcc\x05" + written[tokens_at + 1 :],
        "longer string": written.replace(b"\xa8bfloat16", b"\xd9\x08bfloat16"),
        "longer bytes": written.replace(b"\xc4\x10", b"\xc5\x00\x10", 1),
        "one more byte": written + b"\xc0",
        "one byte less": written[:-1],
        "two headers": written + written,
        "one more field": msgpack.packb([*fields, 0]),
        "one field less": msgpack.packb(fields[:-1]),
        "a map": msgpack.packb(dict(zip(FIELDS, fields, strict=True))),
        "one field": b"\x01",
        "nothing": b"",
        "an extension": b"\xc7\x04\x01abcd",
        "an unused mark": b"\xc1",
        "no text": written.replace(b"bfloat16", b"bfloat1\xff"),
        "nested arrays": b"\x91" * 5000 + b"\x01",
        "a huge array": b"\xdd\xff\xff\xff\xff",
        "a huge string": b"\xdb\xff\xff\xff\xff",
        "a huge map": b"\xdf\xff\xff\xff\xff",
    }


@pytest.mark.parametrize("form", other_forms())
def test_another_form_is_refused(form: str) -> None:
    """One header, one spelling: equal headers have equal bytes and checksums."""
    with pytest.raises(CorruptBlobError, match="corrupt blob, header: "):
        read(other_forms()[form])


@given(st.binary(max_size=200))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    """Nothing but a typed error comes out of bytes that nobody wrote."""
    with pytest.raises(CorruptBlobError):
        read(data)


def test_sections_may_decode_to_raw_float32_and_some_slack() -> None:
    """The default bound follows from what the component holds: 5 x 2 x 3 x (8 + 6)."""
    header = a_header(stage=STAGE)

    assert header.num_elements == 420
    assert header.decoded_bytes_bound == 420 * 4 + SLACK_BYTES
