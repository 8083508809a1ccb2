"""nvCOMP's streams on a device, against CPU coders of the same formats, both ways.

Sizes are those of a chunk's planes: from one byte to some MiB in one stream.
"""

from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest

from codec.entropy.nvcomp import NvcompCoder
from codec.entropy.registry import coder_named
from codec.errors import BackendUnavailable, CorruptBlobError
from tests.gpu.devices import has_library

pytestmark = pytest.mark.gpu
if not has_library():
    pytest.skip("no NVIDIA driver here: nothing was tested on a device", allow_module_level=True)

SIZES = [1, 2, 7, 4096, 65535, 65536, 65537, 262_144, 3_000_001]
EFFORTS = [None, 0, 1, 2, 4, 5]


def coder_on_device(name: str, effort: int | None = None) -> NvcompCoder:
    """A coder that also decodes there, or a reason to skip."""
    if name == "zstd":
        pytest.importorskip("zstandard")
    try:
        return NvcompCoder(name, effort=effort, may_decode_on_device=True)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def planes(size: int) -> dict[str, bytes]:
    """What the codec's planes look like, and the extremes."""
    draw = np.random.default_rng(size)
    codes = np.clip(draw.normal(7.5, 2, 2 * size).round(), 0, 15).astype(np.uint8)
    return {
        "codes": (codes[::2] | codes[1::2] << 4).tobytes(),
        "noise": draw.bytes(size),
        "zeros": bytes(size),
        "text": (b"a chunk of 256 tokens, " * (size // 23 + 1))[:size],
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_a_cpu_reads_what_the_device_writes(name: str, size: int) -> None:
    """Byte for byte; for DEFLATE by two libraries that know nothing of nvCOMP."""
    coder = coder_on_device(name)

    for data in planes(size).values():
        coded = coder.encode(data)
        assert coder_named(name).decode(coded, size) == data
        if name == "deflate":
            assert zlib.decompress(coded, wbits=-15) == data


@pytest.mark.parametrize("effort", EFFORTS)
def test_a_cpu_reads_every_effort(effort: int | None) -> None:
    """Each is another compressor on the device."""
    coder = coder_on_device("deflate", effort)

    for data in planes(200_000).values():
        assert coder_named("deflate").decode(coder.encode(data), 200_000) == data


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_the_device_reads_what_a_cpu_writes(name: str, size: int) -> None:
    """Streams longer than 64 KiB, which nvCOMP itself would cut into chunks, too."""
    coder = coder_on_device(name)

    for data in planes(size).values():
        assert coder.decode(coder_named(name).encode(data), size) == data


@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_the_device_reads_what_it_writes(name: str) -> None:
    """With nothing on the CPU in between."""
    coder = coder_on_device(name)

    for data in planes(300_000).values():
        assert coder.decode(coder.encode(data), 300_000) == data


@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_codes_are_made_fewer_bytes(name: str) -> None:
    """Close to what a CPU makes of them: symbols of 3.1 bits in 4."""
    data = planes(262_144)["codes"]

    on_device = len(coder_on_device(name).encode(data))

    assert on_device < 0.9 * len(data)
    assert on_device < 1.1 * len(coder_named(name).encode(data))


@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_another_size_is_refused(name: str) -> None:
    """The device's own count of the stream is what finds it, for DEFLATE."""
    coder = coder_on_device(name)
    coded = coder.encode(planes(5000)["text"])

    for wrong in (0, 4999, 5001):
        with pytest.raises(CorruptBlobError):
            coder.decode(coded, wrong)


@pytest.mark.parametrize("name", ["deflate", "zstd"])
def test_encoding_is_deterministic(name: str) -> None:
    """Equal planes, equal bytes: blobs of one machine can be compared by digest."""
    coder = coder_on_device(name)
    data = planes(100_000)["codes"]

    assert coder.encode(data) == coder.encode(bytearray(data)) == coder_on_device(name).encode(data)


def test_threads_share_a_coder() -> None:
    """Each has a codec of nvCOMP's own, on a stream of its own."""
    coder = coder_on_device("deflate")
    data = list(planes(150_000).values())
    coded: dict[int, bytes] = {}

    def work(number: int) -> None:
        coded[number] = coder.encode(data[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    host = coder_named("deflate")
    assert [host.decode(coded[n], 150_000) for n in range(len(data))] == data
