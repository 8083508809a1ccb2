"""Damaged blobs, and blobs that lie under a right checksum: none is believed.

The first half flips, cuts, extends and splices what a writer wrote.  The second half
seals what no writer writes with a checksum of its own, so that each rule of the format
has to hold by itself.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from codec.blob import (
    MAX_SECTIONS,
    BlobHeader,
    Section,
    pack_blob,
    read_blob,
    read_header,
    verify_blob,
)
from codec.errors import CorruptBlobError, UnsupportedVersionError
from codec.header import MAX_HEADER_BYTES, pack_header
from tests.codec.samples import a_blob, a_header, headers, peak_bytes, section_lists, some_sections

DETECTED = (CorruptBlobError, UnsupportedVersionError)
#: A row of the section table as documented: stored, decoded, checksum, name length.
ROW = struct.Struct("<QQ16sB")
#: What reading a blob of a few hundred bytes may allocate, whatever it claims to hold;
#: msgpack's packer, by which the written form is compared, takes half of it at once.
SMALL_BYTES = 1 << 19


def prelude(magic: bytes = b"KVFB", flags: int = 0, h: int | None = None, t: int = 0) -> bytes:
    """The first 16 bytes of a blob."""
    header_bytes = len(pack_header(a_header())) if h is None else h
    return struct.pack("<4sHHII", magic, 1, flags, header_bytes, t)


def sealed(table: bytes, data: bytes = b"", *, prelude: bytes | None = None) -> bytes:
    """A blob whose header checksum is right, whatever the rest may be."""
    header = pack_header(a_header())
    if prelude is None:
        prelude = struct.pack("<4sHHII", b"KVFB", 1, 0, len(header), len(table))
    front = prelude + header + table
    return front + xxhash.xxh3_128_digest(front) + data


def row(name: bytes, data: bytes = b"", *, stored: int | None = None, decoded: int = 0) -> bytes:
    """One row of the section table."""
    stored = len(data) if stored is None else stored
    return ROW.pack(stored, decoded, xxhash.xxh3_128_digest(data), len(name)) + name


def assert_detected(mutants: Iterable[bytes], *written: bytes) -> int:
    """Every mutant that is not one of the blobs written is refused; how many there were."""
    count = 0
    for mutant in mutants:
        if mutant in written:
            continue
        count += 1
        with pytest.raises(DETECTED):
            read_blob(mutant)
    return count


def test_every_flipped_bit_is_detected() -> None:
    """All of them, one at a time."""
    data = a_blob()

    def flipped() -> Iterable[bytes]:
        for bit in range(len(data) * 8):
            mutant = bytearray(data)
            mutant[bit // 8] ^= 1 << bit % 8
            yield bytes(mutant)

    assert assert_detected(flipped(), data) == len(data) * 8 > 2000


def test_every_cut_and_extension_is_detected() -> None:
    """A blob is exactly as long as it says, from either end."""
    data = a_blob()
    cuts = [data[:n] for n in range(len(data))] + [data[n:] for n in range(1, len(data))]
    longer = [data + bytes(n) for n in range(1, 40)] + [data + data, b"\x00" + data]

    assert assert_detected([*cuts, *longer], data) == len(cuts) + len(longer)


def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """``data`` with one run of bytes overwritten, cut out, doubled or taken from ``other``."""
    start, stop = sorted(rng.choices(range(len(data) + 1), k=2))
    run = data[start:stop]
    replacement = rng.choice(
        [
            rng.randbytes(len(run)),
            bytes(len(run)),
            b"",
            run + run,
            rng.randbytes(rng.randrange(20)) + run,
            other[start:stop],
            bytes(reversed(run)),
        ]
    )
    return data[:start] + replacement + data[stop:]


def test_random_damage_is_detected() -> None:
    """3,000 mutants: runs overwritten, cut, doubled, reversed, or out of another blob."""
    rng = random.Random(20)
    data = a_blob()
    other = pack_blob(a_header(first_token=8), some_sections()[::-1])

    count = assert_detected((mutate(rng, data, other) for _ in range(3000)), data, other)

    assert count > 2700


@given(headers(), section_lists, headers(), section_lists, st.data())
def test_the_front_of_one_blob_and_the_rest_of_another_do_not_join(
    header_a: BlobHeader,
    sections_a: list[Section],
    header_b: BlobHeader,
    sections_b: list[Section],
    choices: st.DataObject,
) -> None:
    """Spliced anywhere, two blobs make a third only if they make one of themselves."""
    a, b = pack_blob(header_a, sections_a), pack_blob(header_b, sections_b)
    cut_a = choices.draw(st.integers(0, len(a)))
    cut_b = choices.draw(st.integers(0, len(b)))
    spliced = a[:cut_a] + b[cut_b:]

    # Blobs whose sections are the same bytes may trade them.
    if spliced in {a, b}:
        assert verify_blob(spliced) in {header_a, header_b}
    else:
        with pytest.raises(DETECTED):
            read_blob(spliced)


def test_sections_cannot_trade_places() -> None:
    """Sections of one length, exchanged under the same header."""
    data = pack_blob(a_header(), [Section("a", b"first", 5), Section("b", b"other", 5)])

    with pytest.raises(CorruptBlobError, match="section a: checksum"):
        read_blob(data[:-10] + b"otherfirst")


#: Blobs whose header checksum is right and that must be refused all the same, with why.
HOSTILE = {
    "another magic": (sealed(b"", prelude=prelude(magic=b"KVFC")), "magic: need b'KVFB'"),
    "flags": (sealed(b"", prelude=prelude(flags=0x100)), "flags: need 0, got 0x0100"),
    "long header": (sealed(b"", prelude=prelude(h=MAX_HEADER_BYTES + 1)), "header: has 65537"),
    "huge header": (sealed(b"", prelude=prelude(h=2**32 - 1)), "header: has 4294967295"),
    "huge table": (sealed(b"", prelude=prelude(t=2**32 - 1)), "section table: has 4294967295"),
    "table past the end": (sealed(b"", prelude=prelude(t=1000)), "length: need at least"),
    "half a row": (sealed(row(b"abc")[:20]), "section table: ends within row 0"),
    "half a name": (sealed(row(b"a") + row(b"abc")[:-1]), "section table: ends within row 1"),
    "no name": (sealed(row(b"")), "section table: name of row 0 must be"),
    "long name": (sealed(row(b"x" * 65)), "section table: name of row 0 must be"),
    "bad name": (sealed(row(b"a\x00")), "section table: name of row 0 must be"),
    "name not ASCII": (sealed(row("\u00fc".encode())), "section table: name of row 0 must be"),
    "two of a name": (sealed(row(b"a") + row(b"a")), "section table: has two rows named 'a'"),
    "a row too many": (
        sealed(b"".join(row(b"%d" % i) for i in range(MAX_SECTIONS + 1))),
        "section table: has more than 4096 rows",
    ),
    "huge section": (sealed(row(b"a", stored=2**64 - 1)), "length: need 1844674"),
    "sizes that wrap": (
        sealed(row(b"a", stored=2**64 - 1) + row(b"b", b"12"), b"1"),
        "length: need 1844674",
    ),
    "decompression bomb": (
        sealed(row(b"a", decoded=2**64 - 1)),
        "section table: decodes to 184467",
    ),
    "many small bombs": (
        sealed(b"".join(row(b"%d" % i, decoded=2**20) for i in range(10))),
        "section table: decodes to 10485760",
    ),
    "wrong section checksum": (
        sealed(row(b"a", b"12"), b"13"),
        "section a: checksum does not match",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_sealed_lie_is_refused_without_allocating(name: str) -> None:
    """Each rule of the format holds on its own, even where the checksum agrees."""
    data, why = HOSTILE[name]

    with peak_bytes() as peak, pytest.raises(CorruptBlobError) as caught:
        read_blob(data)

    assert str(caught.value).startswith(f"corrupt blob, {why}")
    assert peak.num_bytes < SMALL_BYTES + 20 * len(data)


def test_another_version_is_named() -> None:
    """A reader that is too old says so, even where it cannot know the layout."""
    newer = bytearray(a_blob())
    newer[4:6] = struct.pack("<H", 2)

    with pytest.raises(UnsupportedVersionError) as caught:
        read_header(newer)

    assert (caught.value.found, caught.value.supported) == (2, 1)


def test_sealed_random_damage_is_refused_or_within_bounds() -> None:
    """3,000 mutants with a right header checksum: no surprise, and no large allocation."""
    rng = random.Random(21)
    data = a_blob()
    front_bytes = len(data) - sum(len(s.data) for s in some_sections()) - 16
    front, sections = data[:front_bytes], data[front_bytes + 16 :]
    passed = 0

    with peak_bytes() as peak:
        for _ in range(3000):
            mutant = bytearray(front)
            for _ in range(rng.randrange(1, 4)):
                mutant[rng.randrange(16, front_bytes)] = rng.randrange(256)
            try:
                blob = read_blob(mutant + xxhash.xxh3_128_digest(mutant) + sections)
            except CorruptBlobError:
                continue
            passed += 1
            total = sum(s.decoded_bytes for s in blob.sections.values())
            assert total <= blob.header.decoded_bytes_bound

    # Some lies are legal: another token, another namespace.  Codecs compare those.
    assert 100 < passed < 2000
    assert peak.num_bytes < SMALL_BYTES
