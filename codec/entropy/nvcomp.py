"""The byte formats of this package, written and read on a CUDA device by nvCOMP 6.

Only formats that a CPU here decodes: a blob outlives the machine that wrote it.  So there
is no ANS (an order-0 coder whose stream only nvCOMP reads, and which gains 1.11-1.16 where
DEFLATE gains 1.17-1.33: KVTC, table 14), no GDeflate (the symbols of DEFLATE in an order
for GPUs, equal in size) and no Bitcomp or Cascaded.  Streams are *raw*: nvCOMP's own
container would put a header of its own around chunks of 64 KiB.

What is written here is not bit for bit what a CPU writes for the same bytes; it decodes to
the same bytes.

Reading is another matter than writing: nvCOMP's headers say that a corrupt stream is
undefined behaviour on every back end.  A checksum proves that bytes are as they were
written, not that the writer meant well.  So decoding happens on the CPU unless the caller
says that it trusts all writers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from codec.blob import Buffer, byte_view
from codec.entropy.coder import ByteCoder
from codec.entropy.deflate import DeflateCoder, check_reach
from codec.entropy.zstd import ZstdCoder, check_frame
from codec.errors import BackendUnavailable, CorruptBlobError

MAX_BYTES = (1 << 31) - 1
"""Most bytes that are coded at once: the least of nvCOMP's limits."""

_REMEDY = "run `pip install kvfabric[cuda]`"
_ALGORITHMS = {"deflate": "Deflate", "zstd": "Zstd"}
_HOST_CODERS: Mapping[str, Callable[[], ByteCoder]] = {"deflate": DeflateCoder, "zstd": ZstdCoder}
_CHECKS = {"deflate": check_reach, "zstd": check_frame}


class NvcompCoder:
    """One byte format on the current CUDA device; threads may share it.

    Calls return once the device is done: data comes from and goes to host memory.
    """

    def __init__(
        self, name: str, *, effort: int | None = None, may_decode_on_device: bool = False
    ) -> None:
        """Code the format ``name``: ``deflate`` or ``zstd``.

        Parameters
        ----------
        effort
            For ``deflate`` only: 0 (entropy coding alone) to 5 (smallest); nvCOMP's own
            default is 1.  3 is the same as 2.
        may_decode_on_device
            Whether every writer is trusted, so that streams need not be proved harmless.

        Raises
        ------
        ValueError
            If there is no such format or effort.
        BackendUnavailable
            Without nvCOMP 6, a CUDA driver or a device, or a CPU decoder of the format.
        """
        if name not in _ALGORITHMS:
            raise ValueError(f"need one of {', '.join(_ALGORITHMS)}, got {name!r}")
        if effort is not None and (name != "deflate" or not 0 <= effort <= 5):
            raise ValueError(f"need an effort of 0..5 with deflate, got {effort} with {name}")
        self.name = name
        self.effort = effort
        self.may_decode_on_device = may_decode_on_device
        self._host = _HOST_CODERS[name]()
        #: A codec of nvCOMP's holds scratch memory and belongs to one thread.
        self._codecs = threading.local()
        self._codec()

    def encode(self, data: Buffer) -> bytes:
        """One stream or frame that CPU decoders of the format read.

        Raises
        ------
        ValueError
            If ``data`` has more than `MAX_BYTES`.
        RuntimeError
            With nvCOMP's words, if the device fails or has no memory left.
        """
        view = byte_view(data)
        if len(view) > MAX_BYTES:
            raise ValueError(f"nvcomp takes at most {MAX_BYTES} bytes, got {len(view)}")
        if not len(view):  # which nvCOMP does not take
            return self._host.encode(view)
        return _fetched(self._codec().encode(_sent(view)))

    def decode(self, data: Buffer, decoded_bytes: int) -> bytes:
        """See `codec.entropy.coder.ByteCoder.decode`.

        On the device, the size is found out before anything is allocated for it; DEFLATE
        does not state it, so that its stream is walked twice.
        """
        if not self.may_decode_on_device or decoded_bytes <= 0:
            return self._host.decode(data, decoded_bytes)
        view = byte_view(data)
        _CHECKS[self.name](view, decoded_bytes)
        codec = self._codec()
        decoded = b""
        try:
            coded = _sent(view)
            found_bytes = codec.get_uncomp_buffer_size(coded)
            if found_bytes == decoded_bytes:
                decoded = _fetched(codec.decode(coded))
                found_bytes = len(decoded)
        except (RuntimeError, ValueError) as error:
            raise CorruptBlobError(
                f"{self.name} stream", f"does not decode to {decoded_bytes} bytes: {error}"
            ) from None
        if found_bytes != decoded_bytes:
            raise CorruptBlobError(
                f"{self.name} stream", f"decodes to {found_bytes} bytes, not {decoded_bytes}"
            )
        return decoded

    def _codec(self) -> Any:  # noqa: ANN401 - nvCOMP ships no types
        """The codec of the calling thread."""
        codec = getattr(self._codecs, "codec", None)
        if codec is None:
            codec = self._codecs.codec = self._make_codec()
        return codec

    def _make_codec(self) -> Any:  # noqa: ANN401 - nvCOMP ships no types
        nvcomp = _library()
        options = {} if self.effort is None else {"algorithm_type": self.effort}
        try:
            return nvcomp.Codec(
                algorithm=_ALGORITHMS[self.name],
                bitstream_kind=nvcomp.BitstreamKind.RAW,
                **options,
            )
        except RuntimeError as error:
            raise BackendUnavailable(
                "nvcomp", f"it needs an NVIDIA driver and a device ({error})"
            ) from error


def _sent(view: memoryview) -> Any:  # noqa: ANN401 - nvCOMP ships no types
    """An array of nvCOMP's on the device with these bytes, which are not empty."""
    return _library().as_array(np.frombuffer(view, dtype=np.uint8)).cuda()


def _fetched(array: Any) -> bytes:  # noqa: ANN401 - nvCOMP ships no types
    """The bytes of an array of nvCOMP's, once the device has made them."""
    on_host = array.cpu()
    if on_host is None:
        raise RuntimeError("nvcomp could not copy from the device")
    return bytes(on_host)


def _library() -> ModuleType:
    try:
        from nvidia import nvcomp  # noqa: PLC0415 - an extra, and loading it takes a second
    except ImportError as error:
        raise BackendUnavailable("nvcomp", _REMEDY) from error
    if int(nvcomp.__version__.split(".")[0]) < 6:
        raise BackendUnavailable("nvcomp 6", f"{_REMEDY}, there is {nvcomp.__version__}")
    return nvcomp  # type: ignore[no-any-return]
