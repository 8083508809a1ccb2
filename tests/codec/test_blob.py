"""Blobs: what was written is read, and nothing else is.

What happens to damaged ones is in test_blob_damage.

The files in tests/golden pin the format.  After a deliberate change of
``FORMAT_VERSION`` they are written anew by `write_golden`:
``python -c "from tests.codec.test_blob import write_golden; write_golden()"``.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given

from codec.blob import (
    FORMAT_VERSION,
    MAX_SECTIONS,
    Blob,
    BlobHeader,
    Buffer,
    Section,
    pack_blob,
    read_blob,
    read_header,
    verify_blob,
)
from codec.errors import CorruptBlobError
from codec.geometry import Stage
from codec.header import pack_header
from codec.identity import ChunkKey, ComponentKey
from tests.codec.samples import a_blob, a_header, headers, section_lists, some_sections

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_blobs() -> dict[str, tuple[BlobHeader, list[Section]]]:
    """What the golden files hold."""
    stage = Stage(0, 65536, 65535, 65536)
    outermost = a_header(
        stage=stage,
        component=ComponentKey(ChunkKey(b"\xff" * 16), stage, "~" * 64),
        start_position=2**31 - 2**20,
        num_tokens=2**20,
        first_token=2**32 - 1,
        last_token=0,
        dtype="float16",
        key_head_dim=65536,
        value_head_dim=1,
    )
    one_token = a_header(num_tokens=1, first_token=9, last_token=9, dtype="float32")
    return {
        "blob_three_sections": (a_header(), some_sections()),
        "blob_no_sections": (one_token, []),
        "blob_outermost_values": (outermost, [Section("!" * 64, b"\x80", 2**40)]),
    }


def as_json(blob: Blob) -> dict[str, Any]:
    """Everything that a blob says, in plain values."""
    header, component = blob.header, blob.header.component
    named = {name: getattr(header, name) for name in header.__slots__ if name != "component"}
    return {
        **{k: v.hex() if isinstance(v, bytes) else v for k, v in named.items()},
        "chunk_key": component.chunk_key.hex(),
        "stage": str(component.stage),
        "retention_class": component.retention_class,
        "sections": [
            {
                "name": section.name,
                "data": bytes(section.data).hex(),
                "decoded_bytes": section.decoded_bytes,
            }
            for section in blob.sections.values()
        ],
    }


def write_golden() -> None:
    """Write the golden files from `golden_blobs`; look at the differences before a commit."""
    blobs = {name: pack_blob(*parts) for name, parts in golden_blobs().items()}
    for name, data in blobs.items():
        (GOLDEN / f"{name}.bin").write_bytes(data)
    fields = {name: as_json(read_blob(data)) for name, data in blobs.items()}
    (GOLDEN / "blobs.json").write_text(json.dumps(fields, indent=1) + "\n")


@pytest.mark.parametrize("name", golden_blobs())
def test_a_golden_file_is_read_and_written_byte_for_byte(name: str) -> None:
    """Blobs on disks outlive this build, in both directions."""
    data = (GOLDEN / f"{name}.bin").read_bytes()
    expected = json.loads((GOLDEN / "blobs.json").read_text())[name]

    assert as_json(read_blob(data, max_decoded_bytes=2**50)) == expected
    assert pack_blob(*golden_blobs()[name]) == data


def test_the_layout_is_the_documented_one() -> None:
    """Read by hand, from the table in the module's docstring alone."""
    blob = a_blob()

    magic, version, flags, h, t = struct.unpack_from("<4sHHII", blob)
    table, checksum = blob[16 + h : 16 + h + t], blob[16 + h + t : 32 + h + t]

    assert (magic, version, flags) == (b"KVFB", FORMAT_VERSION, 0)
    assert blob[16 : 16 + h] == pack_header(a_header())
    assert checksum == xxhash.xxh3_128_digest(blob[: 16 + h + t])
    for section in some_sections():
        row = struct.pack("<QQ", len(section.data), section.decoded_bytes)
        row += xxhash.xxh3_128_digest(bytes(section.data))
        row += bytes([len(section.name)]) + section.name.encode()
        assert table.startswith(row)
        table = table[len(row) :]
    assert table == b""
    assert blob[32 + h + t :] == b"".join(bytes(s.data) for s in some_sections())


@given(headers(), section_lists)
def test_a_blob_is_read_back(header: BlobHeader, sections: list[Section]) -> None:
    """Header, names, order, bytes and sizes; and the short ways agree."""
    data = pack_blob(header, sections)

    blob = read_blob(data)

    assert blob.header == header == read_header(data) == verify_blob(data)
    assert list(blob.sections.values()) == sections
    assert list(blob.sections) == [section.name for section in sections]


def mapped(data: bytes) -> mmap.mmap:
    """Anonymous shared memory that holds ``data``."""
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memory


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, mapped])
def test_sections_are_read_only_views_into_the_buffer(kind: Callable[[bytes], Buffer]) -> None:
    """No section is copied, and none can be written through."""
    buf = kind(a_blob())

    views = [section.data for section in read_blob(buf).sections.values() if section.data]

    assert [bytes(v) for v in views] == [bytes(s.data) for s in some_sections() if s.data]
    for view in views:
        assert isinstance(view, memoryview)
        assert view.readonly
        assert view.obj is (buf.obj if isinstance(buf, memoryview) else buf)


def test_a_view_of_wider_elements_is_read_as_bytes() -> None:
    """Sizes are bytes, not elements, for writer and reader alike."""
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    empty = np.empty((0, 3), dtype=np.uint16)
    sections = [Section("a", array.data, 12), Section("b", empty.data, 0)]

    blob = read_blob(pack_blob(a_header(), sections))

    assert bytes(blob.section("a").data) == array.tobytes()
    assert bytes(blob.section("b").data) == b""


def test_a_view_with_gaps_is_refused() -> None:
    """A checksum over memory that is not contiguous would be over something else."""
    with pytest.raises(TypeError, match="contiguous"):
        read_blob(memoryview(a_blob())[::2])


def test_a_blob_within_a_buffer_is_read_at_its_place() -> None:
    """An arena's blob is a slice at any offset, which need not be aligned."""
    arena = b"\xaa" * 3 + a_blob() + b"\xaa" * 5

    assert verify_blob(memoryview(arena)[3:-5]) == a_header()


def test_the_header_is_readable_before_the_sections_have_come() -> None:
    """A receiver can refuse early; until the front is complete there is no header."""
    data = a_blob()
    front_bytes = len(data) - sum(len(s.data) for s in some_sections())

    assert read_header(data[:front_bytes]) == a_header()
    with pytest.raises(CorruptBlobError, match="length: need at least"):
        read_header(data[: front_bytes - 1])


def test_a_missing_section_is_corruption() -> None:
    """A codec that asks for what it always writes gets a typed error."""
    blob = read_blob(a_blob())

    assert blob.section("k0") == some_sections()[0]
    with pytest.raises(CorruptBlobError, match="section k1: is missing"):
        blob.section("k1")


def test_only_the_sections_wanted_are_verified_and_returned() -> None:
    """A slice costs its own bytes; damage elsewhere does not spoil it."""
    data = bytearray(a_blob())
    data[-1] ^= 1

    blob = read_blob(data, only={"k0", "no such"})

    assert list(blob.sections) == ["k0"]
    with pytest.raises(CorruptBlobError, match="section v0: checksum"):
        read_blob(data, only={"v0"})


def test_sections_may_decode_to_the_bound_and_no_more() -> None:
    """The sum counts, not the largest."""
    assert read_blob(a_blob(), max_decoded_bytes=95).header == a_header()
    with pytest.raises(CorruptBlobError, match="decodes to 95 bytes, over 94"):
        read_blob(a_blob(), max_decoded_bytes=94)


def test_the_default_bound_is_the_headers() -> None:
    """Writer and reader agree on it, so whatever is written can be read."""
    bound = a_header().decoded_bytes_bound
    data = pack_blob(a_header(), [Section("a", b"", bound - 1), Section("b", b"", 1)])

    assert verify_blob(data) == a_header()
    with pytest.raises(ValueError, match=f"may decode to {bound} bytes, got {bound + 1}"):
        pack_blob(a_header(), [Section("a", b"", bound), Section("b", b"", 1)])


def test_a_blob_has_at_most_so_many_sections() -> None:
    """The last number allowed is written and read, the next is not."""
    sections = [Section(str(i), b"", 0) for i in range(MAX_SECTIONS + 1)]

    assert len(read_blob(pack_blob(a_header(), sections[:-1])).sections) == MAX_SECTIONS
    with pytest.raises(ValueError, match="at most 4096 sections, got 4097"):
        pack_blob(a_header(), sections)


def test_a_name_occurs_once() -> None:
    """Two sections of one name could not be told apart."""
    with pytest.raises(ValueError, match="names must differ"):
        pack_blob(a_header(), [Section("a", b"1", 1), Section("a", b"2", 1)])


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\u00fc", "x" * 65, b"a", None])
def test_a_bad_section_name_is_refused(name: Any) -> None:
    """Names are printed in messages and metrics, and take one byte per character."""
    with pytest.raises(ValueError, match="section name must be"):
        Section(name, b"", 0)


@pytest.mark.parametrize("decoded_bytes", [-1, 2**64, 1.0, True, None])
def test_a_bad_decoded_size_is_refused(decoded_bytes: Any) -> None:
    """A size that the table could not hold fails before anything is packed."""
    with pytest.raises(ValueError, match="decoded_bytes of a must be"):
        Section("a", b"", decoded_bytes)


def test_a_cut_blob_has_the_sections_that_are_whole() -> None:
    """If asked for, at every length that still has the header; those there are verified."""
    data = a_blob()
    sections = some_sections()
    front = len(data) - sum(len(section.data) for section in sections)

    for length in range(front, len(data) + 1):
        blob = read_blob(data[:length], allow_truncated=True)

        whole, end = [], front
        for section in sections:
            end += len(section.data)
            whole += [section.name] if end <= length else []
        assert list(blob.sections) == whole
        assert all(bytes(blob.section(s.name).data) == s.data for s in sections if s.name in whole)
        assert blob.header == a_header()


def test_a_cut_through_the_front_is_refused_in_any_case() -> None:
    """Without header and table nothing can be known."""
    data = a_blob()
    front = len(data) - sum(len(section.data) for section in some_sections())

    for length in range(front):
        with pytest.raises(CorruptBlobError):
            read_blob(data[:length], allow_truncated=True)


def test_truncation_must_be_asked_for() -> None:
    """By default a blob is exactly as long as it says; and too long it never may be."""
    data = a_blob()

    for cut in (1, 40, 55):
        with pytest.raises(CorruptBlobError, match="length: need"):
            read_blob(data[:-cut])
    for longer in (data + b"\0", data + data):
        with pytest.raises(CorruptBlobError, match="length: need"):
            read_blob(longer, allow_truncated=True)


def test_a_cut_does_not_excuse_damage() -> None:
    """Neither in a section that is there, nor in the front."""
    data = a_blob()
    front = len(data) - sum(len(section.data) for section in some_sections())
    for at, why in ((front + 3, "section k0: checksum"), (20, "header: checksum")):
        spoiled = bytearray(data)
        spoiled[at] ^= 1

        with pytest.raises(CorruptBlobError, match=why):
            read_blob(bytes(spoiled[:-4]), allow_truncated=True)


def test_a_cut_blob_may_decode_to_no_more_than_a_whole_one() -> None:
    """The bound is on what the table says, whatever is there."""
    with pytest.raises(CorruptBlobError, match="decodes to 95 bytes, over 94"):
        read_blob(a_blob()[:-4], max_decoded_bytes=94, allow_truncated=True)


def test_sections_wanted_of_a_cut_blob() -> None:
    """Both options together."""
    data = a_blob()

    assert list(read_blob(data[:-4], only={"k0", "v0"}, allow_truncated=True).sections) == ["k0"]
