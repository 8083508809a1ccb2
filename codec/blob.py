"""The container of one coded component: header, section table, checksums, sections.

Layout, all integers little-endian:

==================  ==================  ==============================================
offset              bytes               content
==================  ==================  ==============================================
0                   4                   magic, ``KVFB``
4                   2                   format version, 1
6                   2                   flags, 0
8                   4                   ``h``: bytes of the header, at most 65536
12                  4                   ``t``: bytes of the section table
16                  ``h``               header: one msgpack array, see `codec.header`
16 + h              ``t``               section table, one row per section
16 + h + t          16                  XXH3-128 of everything before it
32 + h + t          sum of stored       the sections, back to back, in the table's order
==================  ==================  ==============================================

A row of the table is stored bytes (u64), decoded bytes (u64), XXH3-128 of the stored
bytes (16), length of the name (u8), the name in ASCII.

A reader works outwards from what it has proved: the prelude's lengths are bounded,
then the header checksum is verified, and only then are header and table parsed; the
table's sizes must add up to exactly the buffer; then each section's checksum is
verified.  The table's checksums are under the header's, so that no part of one blob
can stand in for a part of another.

The checksums find accidents, not forgers: whoever may write blobs can write a sound
one that lies.  Hence a codec compares identity and shapes with its own before it
trusts a header's sizes, and bounds what it allocates by ``decoded_bytes``.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from mmap import mmap
from typing import NamedTuple, TypeAlias

import xxhash

from codec.errors import CorruptBlobError, UnsupportedVersionError
from codec.header import (
    DTYPE_BYTES,
    MAX_HEADER_BYTES,
    MAX_NAME_CHARS,
    BlobHeader,
    check_int,
    check_name,
    pack_header,
    unpack_header,
)
from codec.identity import DIGEST_BYTES

__all__ = [
    "DTYPE_BYTES",
    "FORMAT_VERSION",
    "MAX_SECTIONS",
    "Blob",
    "BlobHeader",
    "Buffer",
    "Section",
    "byte_view",
    "pack_blob",
    "read_blob",
    "read_header",
    "verify_blob",
]

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap
"""What can be read from in place."""

MAGIC = b"KVFB"
FORMAT_VERSION = 1
MAX_SECTIONS = 4096

_PRELUDE = struct.Struct("<4sHHII")
_ROW = struct.Struct(f"<QQ{DIGEST_BYTES}sB")
_MAX_TABLE_BYTES = MAX_SECTIONS * (_ROW.size + MAX_NAME_CHARS)
_MAX_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Section:
    """One named run of bytes in a blob."""

    name: str
    """Printable ASCII without spaces, at most 64 characters; unique in its blob."""

    data: Buffer
    """As stored: after the entropy stage."""

    decoded_bytes: int
    """Size once the entropy stage is undone: nothing larger is ever allocated for it."""

    def __post_init__(self) -> None:
        check_name("section name", self.name)
        check_int(f"decoded_bytes of {self.name}", self.decoded_bytes, 0, _MAX_U64)


@dataclass(frozen=True, slots=True)
class Blob:
    """A verified header and sections, which are read-only views into the buffer read."""

    header: BlobHeader
    sections: Mapping[str, Section]
    """In the order written."""

    def section(self, name: str) -> Section:
        """The section of that name.

        Raises
        ------
        CorruptBlobError
            If the blob has none.
        """
        found = self.sections.get(name)
        if found is None:
            raise CorruptBlobError(f"section {name}", "is missing")
        return found


class _Row(NamedTuple):
    """A row of the section table."""

    stored_bytes: int
    decoded_bytes: int
    checksum: bytes
    name: str


def pack_blob(header: BlobHeader, sections: Sequence[Section]) -> bytes:
    """Write a blob that `read_blob` reads back.

    Raises
    ------
    ValueError
        If there are more than `MAX_SECTIONS`, a name occurs twice, or together they
        decode to more than ``header.decoded_bytes_bound``.
    """
    if len(sections) > MAX_SECTIONS:
        raise ValueError(f"a blob has at most {MAX_SECTIONS} sections, got {len(sections)}")
    names = [section.name for section in sections]
    if len(set(names)) < len(names):
        raise ValueError(f"section names must differ, got {names}")
    decoded_bytes = sum(section.decoded_bytes for section in sections)
    if decoded_bytes > header.decoded_bytes_bound:
        raise ValueError(
            f"sections may decode to {header.decoded_bytes_bound} bytes, got {decoded_bytes}"
        )
    data = [byte_view(section.data) for section in sections]
    table = b"".join(
        _ROW.pack(
            len(view),
            section.decoded_bytes,
            xxhash.xxh3_128_digest(view),
            len(section.name),
        )
        + section.name.encode("ascii")
        for section, view in zip(sections, data, strict=True)
    )
    packed = pack_header(header)
    prelude = _PRELUDE.pack(MAGIC, FORMAT_VERSION, 0, len(packed), len(table))
    front = prelude + packed + table
    return b"".join([front, xxhash.xxh3_128_digest(front), *data])


def read_header(buf: Buffer) -> BlobHeader:
    """Header of a blob, or of its beginning; its own checksum is verified, sections not.

    Raises
    ------
    CorruptBlobError, UnsupportedVersionError
        As `read_blob`, as far as the header and the section table go.
    """
    header, _, _ = _read_front(byte_view(buf))
    return header


def verify_blob(buf: Buffer) -> BlobHeader:
    """Header of a blob all of whose bytes were verified, as by `read_blob`."""
    return read_blob(buf).header


def read_blob(
    buf: Buffer,
    *,
    max_decoded_bytes: int | None = None,
    only: Collection[str] | None = None,
    allow_truncated: bool = False,
) -> Blob:
    """Verify a blob and find its sections, without copying them.

    Parameters
    ----------
    buf
        Exactly one blob.  It must not change while the result is in use.
    max_decoded_bytes
        Most bytes that all sections together may declare to decode to;
        ``header.decoded_bytes_bound`` by default.
    only
        Names of the sections wanted; the bytes of others are neither read nor
        verified, and they are left out.  Header, table and length always are verified.
    allow_truncated
        Take a blob whose end is missing: sections that are not there whole are left out.
        One that is too long is refused all the same.

    Raises
    ------
    CorruptBlobError
        If any byte read is not as written, the length is not exact, a field is out of
        bounds, or the sections decode to too much.
    UnsupportedVersionError
        If another format version wrote it.
    """
    view = byte_view(buf)
    header, rows, start = _read_front(view)
    decoded_bytes = sum(row.decoded_bytes for row in rows)
    bound = header.decoded_bytes_bound if max_decoded_bytes is None else max_decoded_bytes
    if decoded_bytes > bound:
        raise CorruptBlobError("section table", f"decodes to {decoded_bytes} bytes, over {bound}")
    *starts, end = accumulate((row.stored_bytes for row in rows), initial=start)
    if end != len(view) and not (allow_truncated and len(view) < end):
        raise CorruptBlobError("length", f"need {end} bytes, got {len(view)}")
    sections = {}
    for row, at in zip(rows, starts, strict=True):
        if (only is not None and row.name not in only) or at + row.stored_bytes > len(view):
            continue
        data = view[at : at + row.stored_bytes]
        if xxhash.xxh3_128_digest(data) != row.checksum:
            raise CorruptBlobError(f"section {row.name}", "checksum does not match")
        sections[row.name] = Section(row.name, data, row.decoded_bytes)
    return Blob(header, sections)


def byte_view(buf: Buffer) -> memoryview:
    """A read-only view of the single bytes of ``buf``, which must be contiguous."""
    view = memoryview(buf).toreadonly()
    # An empty array of several dimensions cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _read_front(view: memoryview) -> tuple[BlobHeader, list[_Row], int]:
    """Header, section table, and where the sections start."""
    if len(view) < _PRELUDE.size:
        raise CorruptBlobError("prelude", f"need {_PRELUDE.size} bytes, got {len(view)}")
    magic, version, flags, header_bytes, table_bytes = _PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise CorruptBlobError("magic", f"need {MAGIC!r}, got {magic!r}")
    if version != FORMAT_VERSION:
        raise UnsupportedVersionError(version, FORMAT_VERSION)
    if flags != 0:
        raise CorruptBlobError("flags", f"need 0, got {flags:#06x}")
    if header_bytes > MAX_HEADER_BYTES:
        raise CorruptBlobError("header", f"has {header_bytes} bytes, over {MAX_HEADER_BYTES}")
    if table_bytes > _MAX_TABLE_BYTES:
        raise CorruptBlobError("section table", f"has {table_bytes} bytes, over {_MAX_TABLE_BYTES}")
    table_start = _PRELUDE.size + header_bytes
    table_stop = table_start + table_bytes
    start = table_stop + DIGEST_BYTES
    if len(view) < start:
        raise CorruptBlobError("length", f"need at least {start} bytes, got {len(view)}")
    if xxhash.xxh3_128_digest(view[:table_stop]) != view[table_stop:start]:
        raise CorruptBlobError("header", "checksum does not match")
    header = unpack_header(view[_PRELUDE.size : table_start])
    return header, _unpack_table(view[table_start:table_stop]), start


def _unpack_table(view: memoryview) -> list[_Row]:
    rows: dict[str, _Row] = {}
    at = 0
    while at < len(view):
        if len(rows) == MAX_SECTIONS:
            raise CorruptBlobError("section table", f"has more than {MAX_SECTIONS} rows")
        if len(view) - at < _ROW.size:
            raise CorruptBlobError("section table", f"ends within row {len(rows)}")
        stored_bytes, decoded_bytes, checksum, name_bytes = _ROW.unpack_from(view, at)
        at += _ROW.size
        name = bytes(view[at : at + name_bytes]).decode("latin-1")
        at += name_bytes
        if at > len(view):
            raise CorruptBlobError("section table", f"ends within row {len(rows)}")
        if name in rows:
            raise CorruptBlobError("section table", f"has two rows named {name!r}")
        try:
            check_name(f"name of row {len(rows)}", name)
        except ValueError as error:
            raise CorruptBlobError("section table", str(error)) from None
        rows[name] = _Row(stored_bytes, decoded_bytes, checksum, name)
    return list(rows.values())
