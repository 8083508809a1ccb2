"""`NvcompCoder` where there is no device: what it asks of nvCOMP, and what it makes of answers.

The stand-in takes what nvCOMP 6.0.0 takes and codes with CPU libraries.  It shows nothing
about nvCOMP's streams: tests/gpu/test_nvcomp.py does, on a device.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import zlib
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from codec.entropy.coder import ByteCoder
from codec.entropy.nvcomp import NvcompCoder
from codec.entropy.registry import coder_named, device_coder_named
from codec.errors import BackendUnavailable, CorruptBlobError

TEXT = b"a chunk of 256 tokens, " * 40
#: Keywords that the constructor of nvCOMP 6.0.0's codec takes for these two algorithms.
KEYWORDS = {
    "algorithm",
    "device_id",
    "cuda_stream",
    "uncomp_chunk_size",
    "bitstream_kind",
    "execution_policy",
    "checksum_policy",
    "decompress_backend",
    "use_de_sort",
    "algorithm_type",
}


class Kind(Enum):
    """nvCOMP's kinds of bitstream."""

    NVCOMP_NATIVE = 0
    RAW = 1
    WITH_UNCOMPRESSED_SIZE = 2


class Array:
    """Bytes in one of two places; only those on the device can be coded."""

    def __init__(self, data: bytes, place: str) -> None:
        self.data = data
        self.place = place

    def cuda(self) -> Array:
        """A copy on the device."""
        return Array(self.data, "device")

    def cpu(self) -> Array | None:
        """A copy on the host."""
        return Array(self.data, "host")

    def __bytes__(self) -> bytes:
        assert self.place == "host", "a device's memory cannot be read"
        return self.data


class Library(ModuleType):
    """The module ``nvidia.nvcomp``, with what was asked of it."""

    def __init__(self) -> None:
        super().__init__("nvidia.nvcomp")
        self.__version__ = "6.0.0"
        self.BitstreamKind = Kind
        self.made: list[dict[str, Any]] = []
        self.calls: list[str] = []
        #: What the next codecs raise, if anything: when made, and when decoding.
        self.refuses: Exception | None = None
        self.fails: Exception | None = None

    def as_array(self, source: np.ndarray[Any, Any]) -> Array:
        """Wrap a host array of bytes."""
        assert source.dtype == np.uint8
        assert source.ndim == 1
        return Array(source.tobytes(), "host")

    def Codec(self, **options: Any) -> Codec:  # noqa: N802 - nvCOMP's name
        """Make a codec, as a class would be called."""
        assert set(options) <= KEYWORDS
        if self.refuses:
            raise self.refuses
        self.made.append(options)
        return Codec(self, options["algorithm"])


class Codec:
    """One thread's codec of the stand-in."""

    def __init__(self, library: Library, algorithm: str) -> None:
        self.library = library
        self.host = coder_named({"Deflate": "deflate", "Zstd": "zstd"}[algorithm])
        self.thread = threading.get_ident()

    def _note(self, call: str, array: Array) -> None:
        assert self.thread == threading.get_ident(), "a codec belongs to one thread"
        assert array.place == "device"
        assert array.data, "sizes must be greater than zero"
        self.library.calls.append(call)

    def encode(self, array: Array) -> Array:
        """Compress, to the device."""
        self._note("encode", array)
        return Array(self.host.encode(array.data), "device")

    def get_uncomp_buffer_size(self, array: Array) -> int:
        """Size of what the stream decodes to."""
        self._note("size", array)
        return len(self._decoded(array))

    def decode(self, array: Array) -> Array:
        """Decompress, to the device."""
        self._note("decode", array)
        if self.library.fails:
            raise self.library.fails
        return Array(self._decoded(array), "device")

    def _decoded(self, array: Array) -> bytes:
        if self.host.name == "deflate":
            return zlib.decompress(array.data, wbits=-15)
        stated = int.from_bytes(array.data[5:7], "little") + 256  # TEXT's frame has two bytes
        return self.host.decode(array.data, stated)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in, in place of the package."""
    nvidia, library = ModuleType("nvidia"), Library()
    nvidia.nvcomp = library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", library)
    return library


@pytest.fixture(params=["deflate", "zstd"])
def name(request: pytest.FixtureRequest) -> str:
    """Every format that a device writes here."""
    if request.param == "zstd":
        pytest.importorskip("zstandard")
    return str(request.param)


def test_streams_are_raw_ones(library: Library, name: str) -> None:
    """Not nvCOMP's container, and with no option that is not asked for."""
    assert device_coder_named(name).name == name

    assert library.made == [{"algorithm": name.capitalize(), "bitstream_kind": Kind.RAW}]


def test_effort_reaches_deflate(library: Library) -> None:
    """Under nvCOMP's name for it; 0 is an effort, not the lack of one."""
    NvcompCoder("deflate", effort=0)

    assert library.made[0]["algorithm_type"] == 0


def test_what_is_written_is_read_without_a_device(library: Library, name: str) -> None:
    """The bytes of the device's array, from host memory and back."""
    coder: ByteCoder = NvcompCoder(name)

    coded = coder.encode(memoryview(TEXT))

    assert library.calls == ["encode"]
    assert coder_named(name).decode(coded, len(TEXT)) == TEXT


def test_decoding_stays_on_the_cpu_unless_writers_are_trusted(library: Library, name: str) -> None:
    """A corrupt stream is undefined behaviour to nvCOMP."""
    coded = coder_named(name).encode(TEXT)

    assert NvcompCoder(name).decode(coded, len(TEXT)) == TEXT
    assert library.calls == []

    trusting = NvcompCoder(name, may_decode_on_device=True)
    assert trusting.decode(bytearray(coded), len(TEXT)) == TEXT
    assert library.calls == ["size", "decode"]


@pytest.mark.parametrize("off", [-1, 1])
def test_another_size_is_refused_before_it_is_allocated(
    library: Library, name: str, off: int
) -> None:
    """Found by asking for the size, which allocates nothing, or by the frame's own words."""
    coder = NvcompCoder(name, may_decode_on_device=True)

    with pytest.raises(CorruptBlobError, match=str(len(TEXT))):
        coder.decode(coder.encode(TEXT), len(TEXT) + off)

    assert "decode" not in library.calls


@pytest.mark.parametrize("decoded_bytes", [2**28, 2**40])
def test_a_size_that_cannot_be_never_reaches_the_device(
    library: Library, name: str, decoded_bytes: int
) -> None:
    """The rules of the CPU's coders hold first."""
    coder = NvcompCoder(name, may_decode_on_device=True)

    with pytest.raises(CorruptBlobError):
        coder.decode(b"\0" * 9, decoded_bytes)
    with pytest.raises(CorruptBlobError):
        coder.decode(b"", 1)

    assert library.calls == []


@pytest.mark.parametrize("error", [RuntimeError("cannot decompress"), ValueError("bad header")])
def test_what_nvcomp_refuses_is_corrupt(library: Library, name: str, error: Exception) -> None:
    """Whatever the reason, the caller has to recompute."""
    coder = NvcompCoder(name, may_decode_on_device=True)
    library.fails = error

    with pytest.raises(CorruptBlobError, match=f"{name} stream: does not decode to .*: {error}"):
        coder.decode(coder.encode(TEXT), len(TEXT))


def test_nothing_is_coded_without_the_device(library: Library, name: str) -> None:
    """An empty buffer is not taken there, and an empty stream must be a stream all the same."""
    coder = NvcompCoder(name, may_decode_on_device=True)

    coded = coder.encode(b"")

    assert coder.decode(coded, 0) == coder_named(name).decode(coded, 0) == b""
    with pytest.raises(CorruptBlobError):
        coder.decode(coder.encode(TEXT), 0)
    assert library.calls == ["encode"]


def test_a_copy_that_could_not_be_made_is_an_error(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is how nvCOMP says so, which must not become a stream."""
    monkeypatch.setattr(Array, "cpu", lambda _self: None)

    with pytest.raises(RuntimeError, match="could not copy from the device"):
        NvcompCoder("deflate").encode(TEXT)


def test_threads_have_codecs_of_their_own(library: Library) -> None:
    """One coder is shared; nvCOMP's codecs hold scratch memory and may not be."""
    coder = NvcompCoder("deflate")
    coded: list[bytes] = []
    threads = [threading.Thread(target=lambda: coded.append(coder.encode(TEXT))) for _ in range(3)]

    for thread in threads:
        thread.start()
        thread.join()
    coded.append(coder.encode(TEXT))

    assert len(coded) == 4
    assert len(library.made) == 4


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the module is free; making a coder is not."""
    monkeypatch.setitem(sys.modules, "nvidia", None)

    with pytest.raises(BackendUnavailable, match=r"nvcomp .* `pip install kvfabric\[cuda\]`"):
        NvcompCoder("deflate")


def test_without_a_device_it_says_so(library: Library) -> None:
    """With the words of the CUDA runtime; the error survives a trip through Ray."""
    library.refuses = RuntimeError("CUDA driver version is insufficient : code=1000.")

    with pytest.raises(BackendUnavailable, match=r"an NVIDIA driver and a device \(CUDA") as caught:
        NvcompCoder("deflate")

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_older_nvcomp_is_refused(library: Library) -> None:
    """It does not tell the size of a stream."""
    library.__version__ = "5.3.1"

    with pytest.raises(BackendUnavailable, match=r"nvcomp 6 .* there is 5\.3\.1"):
        NvcompCoder("deflate")


@pytest.mark.parametrize(
    ("name", "effort"),
    [("ans", None), ("gdeflate", None), ("Deflate", None), ("deflate", 6), ("deflate", -1)],
)
def test_formats_and_efforts_that_do_not_exist_are_refused(
    library: Library, name: str, effort: int | None
) -> None:
    """ANS and GDeflate are formats of nvCOMP's that no CPU here reads."""
    with pytest.raises(ValueError, match=r"need one of deflate, zstd|need an effort of 0\.\.5"):
        NvcompCoder(name, effort=effort)


def test_zstd_has_no_effort(library: Library) -> None:
    """There is one setting of it; another is not taken in silence."""
    with pytest.raises(ValueError, match="with deflate, got 1 with zstd"):
        NvcompCoder("zstd", effort=1)


@pytest.mark.parametrize("effort", [None, 0, 5])
def test_the_real_package_knows_the_options(effort: int | None) -> None:
    """It checks keywords before it looks for a device, and refuses others by ValueError."""
    nvcomp = pytest.importorskip("nvidia.nvcomp", exc_type=ImportError)
    with pytest.raises(ValueError, match="Unsupported argument"):
        nvcomp.Codec(nothing_of_the_kind=1)

    with contextlib.suppress(BackendUnavailable):
        NvcompCoder("deflate", effort=effort)


def test_the_real_package_knows_the_algorithms() -> None:
    """Names are checked, too, before a device is looked for."""
    nvcomp = pytest.importorskip("nvidia.nvcomp", exc_type=ImportError)

    for algorithm in ("Deflate", "Zstd"):
        with contextlib.suppress(RuntimeError):
            nvcomp.Codec(algorithm=algorithm, bitstream_kind=nvcomp.BitstreamKind.RAW)
    with pytest.raises(ValueError, match="Unknown algorithm"):
        nvcomp.Codec(algorithm="Rans", bitstream_kind=nvcomp.BitstreamKind.RAW)
    assert hasattr(nvcomp.Codec, "get_uncomp_buffer_size")
