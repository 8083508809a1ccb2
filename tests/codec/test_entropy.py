"""Byte coders: what went in comes out, within the size declared, or a typed error does."""

from __future__ import annotations

import importlib.util
import mmap
import random
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.entropy.coder import ByteCoder
from codec.entropy.deflate import MAX_BYTES, MAX_EXPANSION, DeflateCoder
from codec.entropy.registry import CODERS, DEVICE_CODERS, coder_named, device_coder_named
from codec.entropy.stored import StoredCoder
from codec.entropy.zstd import MAX_BLOCK_BYTES, ZstdCoder, check_frame
from codec.errors import BackendUnavailable, CorruptBlobError
from tests.codec.samples import peak_bytes

#: Some bytes that compress and some that do not.
TEXT = b"a chunk of 256 tokens, " * 40
NOISE = random.Random(5).randbytes(500)

needs_zstandard = pytest.mark.skipif(
    importlib.util.find_spec("zstandard") is None, reason="zstandard is not installed"
)
every_coder = [
    pytest.param(name, marks=needs_zstandard if name == "zstd" else ()) for name in sorted(CODERS)
]
compressing_coders = [p for p in every_coder if p.values != ("stored",)]


@pytest.fixture(params=every_coder)
def coder(request: pytest.FixtureRequest) -> ByteCoder:
    """Every coder that a blob may name."""
    return coder_named(request.param)


@pytest.mark.parametrize("name", every_coder)
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


@pytest.mark.parametrize("name", compressing_coders)
def test_random_bytes_never_decode_into_another_size(name: str) -> None:
    """2,000 mutants of a stream: a typed error, or exactly as many bytes as declared."""
    rng = random.Random(6)
    coder = coder_named(name)
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


@needs_zstandard
def test_coders_are_found_by_the_names_they_have() -> None:
    """A blob's name for a coder leads back to it."""
    assert {name: coder_named(name).name for name in CODERS} == {
        "deflate": "deflate",
        "stored": "stored",
        "zstd": "zstd",
    }


@pytest.mark.parametrize("name", ["", "Deflate", "zstd9", "deflate ", "ans"])
def test_an_unknown_coder_is_a_typed_error(name: str) -> None:
    """A blob of a later build is a miss here."""
    with pytest.raises(
        CorruptBlobError, match="entropy stage: need one of deflate, stored, zstd, got"
    ):
        coder_named(name)


def test_a_device_writes_formats_that_a_cpu_reads() -> None:
    """Its names are a part of ours, and nothing but those is asked for."""
    assert set(DEVICE_CODERS) <= set(CODERS)
    with pytest.raises(ValueError, match="need one of deflate, zstd, got 'stored'"):
        device_coder_named("stored")


def test_without_its_package_zstd_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error that names the extra, and only where the coder is asked for."""
    monkeypatch.setitem(sys.modules, "zstandard", None)

    with pytest.raises(BackendUnavailable, match=r"run `pip install kvfabric\[zstd\]`"):
        coder_named("zstd")
    assert coder_named("deflate").name == "deflate"


# Zstandard frames.


def frame(*blocks: bytes, content_bytes: int, descriptor: int = 0xA0, extra: bytes = b"") -> bytes:
    """A frame of one segment that states ``content_bytes`` in four bytes."""
    return (
        bytes.fromhex("28b52ffd")
        + bytes([descriptor])
        + extra
        + (content_bytes.to_bytes(4, "little") + b"".join(blocks))
    )


def block(kind: int, size: int, body: bytes, *, is_last: bool = True) -> bytes:
    """A block: 0 plain, 1 one byte repeated, 2 compressed, 3 no kind at all."""
    return (size << 3 | kind << 1 | int(is_last)).to_bytes(3, "little") + body


@needs_zstandard
def test_frames_put_together_by_hand_are_read() -> None:
    """Several blocks, plain and repeated, and the empty last one that some writers end with."""
    data = frame(
        block(0, 3, b"abc", is_last=False),
        block(1, 1000, b"x", is_last=False),
        block(0, 0, b""),
        content_bytes=1003,
    )

    assert ZstdCoder().decode(data, 1003) == b"abc" + b"x" * 1000


@needs_zstandard
@pytest.mark.parametrize("window", [b"\x00", b"\xa8"])
def test_a_window_need_not_fit_the_content(window: bytes) -> None:
    """1 KiB or 2 GiB: a frame decoded in one go needs none."""
    data = frame(block(0, 3, b"abc"), content_bytes=3, descriptor=0x80, extra=window)

    assert ZstdCoder().decode(data, 3) == b"abc"


@needs_zstandard
def test_a_window_of_a_terabyte_is_a_typed_error() -> None:
    """The library refuses the header, with words of its own."""
    data = frame(block(0, 3, b"abc"), content_bytes=3, descriptor=0x80, extra=b"\xf0")

    with pytest.raises(CorruptBlobError, match="does not decode to 3 bytes"):
        ZstdCoder().decode(data, 3)


@needs_zstandard
def test_a_frame_that_understates_its_size_is_refused() -> None:
    """The stated size is what is allocated, and the blocks do not fit in it."""
    content = TEXT * 200
    coded = ZstdCoder().encode(content)
    assert coded[4] == 0xA0
    lying = coded[:5] + (1000).to_bytes(4, "little") + coded[9:]
    check_frame(memoryview(lying), 1000)

    with pytest.raises(CorruptBlobError, match="does not decode to 1000 bytes"):
        ZstdCoder().decode(lying, 1000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no frame starts with nothing"),
        (b"\x50\x2a\x4d\x18\x03\0\0\0abc", "no frame starts with 502a4d18"),
        (frame(block(0, 3, b"abc"), content_bytes=3, descriptor=0xA8), "a reserved bit"),
        (frame(block(0, 3, b"abc"), content_bytes=3, descriptor=0xA1), "has a dictionary"),
        (bytes.fromhex("28b52ffd") + b"\0\x50" + block(0, 3, b"abc"), "does not state the size"),
        (frame(content_bytes=3)[:7], "within its header"),
        (frame(content_bytes=3), "before its last block"),
        (frame(block(0, 3, b"abc", is_last=False), content_bytes=3), "before its last block"),
        (frame(block(0, 3, b"ab"), content_bytes=3), "ends after 15 bytes of 14"),
        (frame(block(0, 3, b"abc"), b"d", content_bytes=3), "ends after 15 bytes of 16"),
        (frame(block(0, 3, b"abc"), content_bytes=3) * 2, "ends after 15 bytes of 30"),
        (frame(block(0, 3, b"abc"), content_bytes=3, descriptor=0xA4), "ends after 19 bytes of 15"),
        (frame(block(3, 3, b"abc"), content_bytes=3), "a block of type 3"),
        (frame(block(1, MAX_BLOCK_BYTES + 1, b"a"), content_bytes=3), "and 131073 bytes"),
        (frame(block(0, 4, b"abcd"), content_bytes=3), "cannot decode to 3 bytes"),
        (frame(block(1, 2, b"a"), content_bytes=3), "cannot decode to 3 bytes"),
        (frame(block(0, 3, b"abc"), content_bytes=4), "states 4 bytes, need 3"),
    ],
)
def test_a_frame_that_is_not_one_whole_frame_of_its_size_is_refused(data: bytes, why: str) -> None:
    """By its outer form, before anything is decoded and without the package."""
    with pytest.raises(CorruptBlobError, match=why):
        check_frame(memoryview(data), 3)


@needs_zstandard
def test_an_empty_frame_with_something_in_it_is_refused() -> None:
    """The library returns nothing for a stated size of 0, without a look at the blocks."""
    for body in (block(0, 1, b"a"), block(1, 1, b"a"), block(2, 3, b"abc")):
        with pytest.raises(CorruptBlobError, match="cannot decode to 0 bytes"):
            ZstdCoder().decode(frame(body, content_bytes=0), 0)


@pytest.mark.parametrize("size", [MAX_BLOCK_BYTES + 1, 2**28, 2**31 - 1])
def test_a_size_past_what_the_blocks_can_hold_is_refused(size: int) -> None:
    """A frame states it honestly, but one block never is more than 128 KiB."""
    data = frame(block(2, 3, b"abc"), content_bytes=size)

    with pytest.raises(CorruptBlobError, match="cannot decode"):
        check_frame(memoryview(data), size)


@needs_zstandard
@pytest.mark.parametrize("level", [1, 3, 19, 22])
def test_levels_of_zstd_decode_each_other(level: int) -> None:
    """And state their size, without a checksum: that is the blob's."""
    coded = ZstdCoder(level).encode(TEXT + NOISE)

    assert not coded[4] & 0b100
    assert ZstdCoder().decode(coded, len(TEXT + NOISE)) == TEXT + NOISE


@needs_zstandard
def test_more_effort_of_zstd_makes_fewer_bytes() -> None:
    """The level reaches the library."""
    data = b"".join(b"%d, " % (n * n) for n in range(2000))

    assert len(ZstdCoder(1).encode(data)) > len(ZstdCoder(19).encode(data))


@needs_zstandard
def test_frames_that_another_zstd_streams_are_read_if_they_state_their_size() -> None:
    """With a checksum, too; one that does not know its size is refused."""
    zstandard = pytest.importorskip("zstandard")
    sized = zstandard.ZstdCompressor(write_checksum=True).compressobj(size=len(TEXT))
    unsized = zstandard.ZstdCompressor().compressobj()

    assert ZstdCoder().decode(sized.compress(TEXT) + sized.flush(), len(TEXT)) == TEXT
    with pytest.raises(CorruptBlobError, match="does not state the size"):
        ZstdCoder().decode(unsized.compress(TEXT) + unsized.flush(), len(TEXT))


@needs_zstandard
def test_a_wrong_checksum_of_a_frame_is_noticed() -> None:
    """Ours have none, but one that is there counts."""
    zstandard = pytest.importorskip("zstandard")
    coded = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(TEXT))
    coded[-1] ^= 1

    with pytest.raises(CorruptBlobError, match="does not decode to"):
        ZstdCoder().decode(coded, len(TEXT))


@needs_zstandard
@pytest.mark.parametrize("level", [-1, 0, 23])
def test_a_level_of_zstd_that_does_not_exist_is_refused(level: int) -> None:
    """Also the ones below 1, which are other formats of effort in the library."""
    with pytest.raises(ValueError, match=rf"level must be in 1\.\.22, got {level}"):
        ZstdCoder(level)


@needs_zstandard
def test_zstd_refuses_more_than_a_device_takes() -> None:
    """Two gigabytes that no page was ever touched of."""
    with (
        mmap.mmap(-1, 2**31) as memory,
        pytest.raises(ValueError, match="at most 2147483647 bytes, got 2147483648"),
    ):
        ZstdCoder().encode(memory)
