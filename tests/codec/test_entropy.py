"""Byte coders: what went in comes out, within the size declared, or a typed error does."""

from __future__ import annotations

import mmap
import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.entropy.coder import ByteCoder
from codec.entropy.deflate import MAX_BYTES, MAX_EXPANSION, DeflateCoder
from codec.entropy.registry import CODERS, coder_named
from codec.entropy.stored import StoredCoder
from codec.errors import CorruptBlobError
from tests.codec.samples import peak_bytes

#: Some bytes that compress and some that do not.
TEXT = b"a chunk of 256 tokens, " * 40
NOISE = random.Random(5).randbytes(500)


@pytest.fixture(params=sorted(CODERS))
def coder(request: pytest.FixtureRequest) -> ByteCoder:
    """Every coder that a blob may name."""
    return coder_named(request.param)


@pytest.mark.parametrize("name", sorted(CODERS))
@given(data=st.one_of(st.binary(max_size=300), st.text("ab", max_size=300).map(str.encode)))
def test_any_bytes_come_back(name: str, data: bytes) -> None:
    """Compressible or not, and none at all."""
    coder = coder_named(name)

    assert coder.decode(coder.encode(data), len(data)) == data


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 200_001])
def test_sizes_around_block_bounds_come_back(coder: ByteCoder, size: int) -> None:
    """Runs longer than any block or window of a format."""
    data = (TEXT + NOISE) * (size // 1000 + 1)

    assert coder.decode(coder.encode(data[:size]), size) == data[:size]


def test_any_buffer_is_taken_as_its_bytes(coder: ByteCoder) -> None:
    """Views of an arena, and arrays of wider elements, are not copied first."""
    array = np.arange(300, dtype=np.uint16)
    coded = coder.encode(array.data)

    assert coded == coder.encode(array.tobytes())
    assert coder.decode(memoryview(b"." + coded + b".")[1:-1], 600) == array.tobytes()
    assert coder.decode(bytearray(coded), 600) == array.tobytes()


@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE])
def test_another_size_is_refused(coder: ByteCoder, data: bytes) -> None:
    """Neither shorter nor longer by one, nor nothing, nor less than nothing."""
    coded = coder.encode(data)

    for wrong in {-1, 0, len(data) - 1, len(data) + 1, 2 * len(data) + 2} - {len(data)}:
        with pytest.raises(CorruptBlobError):
            coder.decode(coded, wrong)


def test_a_cut_stream_is_refused(coder: ByteCoder) -> None:
    """At every length."""
    coded = coder.encode(TEXT)

    for length in range(len(coded)):
        with pytest.raises(CorruptBlobError):
            coder.decode(coded[:length], len(TEXT))


@pytest.mark.parametrize("decoded_bytes", [2**28, 2**31, 2**32 + 1, 2**40, 2**64 + 1])
def test_a_size_that_cannot_be_is_refused_without_allocating(
    coder: ByteCoder, decoded_bytes: int
) -> None:
    """A terabyte declared for a handful of bytes costs nothing, nor does it wrap to few."""
    coded = coder.encode(b"x")

    with peak_bytes() as peak, pytest.raises(CorruptBlobError):
        coder.decode(coded, decoded_bytes)

    assert peak.num_bytes < 1 << 16


def test_a_bomb_decodes_into_no_more_than_was_declared() -> None:
    """Ten megabytes of zeros behind a declared kilobyte."""
    coder = DeflateCoder(12)
    bomb = coder.encode(bytes(10_000_000))

    with peak_bytes() as peak, pytest.raises(CorruptBlobError, match="to 1000 bytes"):
        coder.decode(bomb, 1000)

    assert peak.num_bytes < 1 << 16
    assert len(bomb) * MAX_EXPANSION >= 10_000_000


def test_more_than_the_library_counts_is_refused() -> None:
    """Two gigabytes that no page was ever touched of, so the test costs nothing."""
    with mmap.mmap(-1, MAX_BYTES + 1) as memory:
        with pytest.raises(ValueError, match="at most 2147483647 bytes, got 2147483648"):
            DeflateCoder().encode(memory)
        with pytest.raises(CorruptBlobError, match="cannot decode to 2147483648"):
            DeflateCoder().decode(memory, MAX_BYTES + 1)


def test_random_bytes_never_decode_into_another_size() -> None:
    """2,000 mutants of a stream: a typed error, or exactly as many bytes as declared."""
    rng = random.Random(6)
    coder = DeflateCoder()
    coded = coder.encode(TEXT + NOISE)
    refused = 0

    for _ in range(2000):
        mutant = bytearray(coded)
        for _ in range(rng.randrange(1, 4)):
            mutant[rng.randrange(len(mutant))] = rng.randrange(256)
        try:
            decoded = coder.decode(mutant, len(TEXT + NOISE))
        except CorruptBlobError:
            refused += 1
        else:
            assert len(decoded) == len(TEXT + NOISE)

    assert refused > 100


@pytest.mark.parametrize("level", range(13))
def test_every_level_writes_what_another_inflater_reads(level: int) -> None:
    """Bare RFC 1951: zlib, told to expect no frame, agrees; levels decode each other."""
    coded = DeflateCoder(level).encode(TEXT)

    assert zlib.decompress(coded, wbits=-15) == TEXT
    assert DeflateCoder().decode(coded, len(TEXT)) == TEXT


def test_what_another_deflater_writes_is_read() -> None:
    """The other way round, and with a stream of several blocks."""
    deflater = zlib.compressobj(wbits=-15)
    coded = deflater.compress(TEXT) + deflater.flush(zlib.Z_FULL_FLUSH)
    coded += deflater.compress(NOISE) + deflater.flush()

    assert DeflateCoder().decode(coded, len(TEXT + NOISE)) == TEXT + NOISE


def test_more_effort_makes_fewer_bytes() -> None:
    """The level reaches the library: 0 only frames, 12 finds the most."""
    data = b"".join(b"%d, " % (n * n) for n in range(2000))
    none, fast, small = (len(DeflateCoder(level).encode(data)) for level in (0, 1, 12))

    assert none > len(data) > fast > small


@pytest.mark.parametrize("level", [-1, 13])
def test_a_level_that_does_not_exist_is_refused(level: int) -> None:
    """Also the -1 that other libraries read as their default."""
    with pytest.raises(ValueError, match=rf"level must be in 0\.\.12, got {level}"):
        DeflateCoder(level)


def test_stored_bytes_are_the_bytes() -> None:
    """Nothing is added, so that a control arm's sizes are those of the data."""
    assert StoredCoder().encode(NOISE) == NOISE


def test_coders_are_found_by_the_names_they_have() -> None:
    """A blob's name for a coder leads back to it."""
    assert {name: coder_named(name).name for name in CODERS} == {
        "deflate": "deflate",
        "stored": "stored",
    }


@pytest.mark.parametrize("name", ["", "Deflate", "zstd9", "deflate "])
def test_an_unknown_coder_is_a_typed_error(name: str) -> None:
    """A blob of a later build is a miss here."""
    with pytest.raises(CorruptBlobError, match="entropy stage: need one of deflate, stored"):
        coder_named(name)
