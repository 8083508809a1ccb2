"""Zstandard (RFC 8878): one frame that states the size of its content, and nothing after it.

A frame is walked from block to block before any of it is decoded.  That costs three bytes
read per 128 KiB and settles what the library would settle late or not at all: that the
size stated is the one expected *and* can be reached, that the frame is whole, and that no
second or skippable frame follows.  Frames with a dictionary or without a size are refused.
"""

from __future__ import annotations

from types import ModuleType

from codec.blob import Buffer, byte_view
from codec.errors import BackendUnavailable, CorruptBlobError

MAX_BLOCK_BYTES = 1 << 17
"""Most bytes that one block of a frame can stand for."""
MAX_BYTES = (1 << 31) - 1
"""Most bytes that are coded at once: what nvCOMP takes."""

_MAGIC = b"\x28\xb5\x2f\xfd"
_PART = "zstd frame"
#: Bytes of the content size field by its two-bit flag, where a window is described.
_SIZE_FIELD_BYTES = (0, 2, 4, 8)


class ZstdCoder:
    """Codes with one setting of effort, which decoding need not know."""

    name = "zstd"

    def __init__(self, level: int = 1) -> None:
        """Code with ``level``, 1 (fast) to 22 (small).

        Raises
        ------
        ValueError
            If ``level`` is not in 1..22.
        BackendUnavailable
            Without the package ``zstandard``.
        """
        if not 1 <= level <= 22:
            raise ValueError(f"level must be in 1..22, got {level}")
        _library()
        self.level = level

    def encode(self, data: Buffer) -> bytes:
        """One frame without a checksum; the same bytes wherever this libzstd runs.

        Raises
        ------
        ValueError
            If ``data`` has more than `MAX_BYTES`.
        """
        view = byte_view(data)
        if len(view) > MAX_BYTES:
            raise ValueError(f"zstd takes at most {MAX_BYTES} bytes, got {len(view)}")
        # The library's contexts are not for several threads at once, so none is kept.
        compressor = _library().ZstdCompressor(
            level=self.level, write_content_size=True, write_checksum=False, write_dict_id=False
        )
        return bytes(compressor.compress(view))

    def decode(self, data: Buffer, decoded_bytes: int) -> bytes:
        """See `codec.entropy.coder.ByteCoder.decode`."""
        view = byte_view(data)
        check_frame(view, decoded_bytes)
        if decoded_bytes == 0:
            return b""
        library = _library()
        try:
            decoded = library.ZstdDecompressor().decompress(
                view, max_output_size=decoded_bytes, allow_extra_data=False
            )
        except library.ZstdError as error:
            raise CorruptBlobError(
                _PART, f"does not decode to {decoded_bytes} bytes: {error}"
            ) from None
        if len(decoded) != decoded_bytes:
            raise CorruptBlobError(_PART, f"decodes to {len(decoded)} bytes, not {decoded_bytes}")
        return bytes(decoded)


def check_frame(view: memoryview, decoded_bytes: int) -> None:
    """Refuse all but one whole frame that states, and can reach, ``decoded_bytes``.

    Nothing is decoded and nothing allocated.  What lies in compressed blocks is not looked
    at, so a frame that passes may still not decode.

    Raises
    ------
    CorruptBlobError
        Naming what is wrong.

    Source
    ------
    RFC 8878, sections 3.1.1.1 and 3.1.1.2.
    """
    stated_bytes, at, has_checksum = _read_header(view)
    if stated_bytes != decoded_bytes or decoded_bytes > MAX_BYTES:
        raise CorruptBlobError(_PART, f"states {stated_bytes} bytes, need {decoded_bytes}")
    known_bytes, num_compressed, at = _walk_blocks(view, at)
    end = at + 4 * has_checksum
    if end != len(view):
        raise CorruptBlobError(_PART, f"ends after {end} bytes of {len(view)}")
    # A compressed block makes at least one byte and at most a full block of them.
    most_bytes = known_bytes + num_compressed * MAX_BLOCK_BYTES
    if not known_bytes + num_compressed <= decoded_bytes <= most_bytes:
        raise CorruptBlobError(_PART, f"its blocks cannot decode to {decoded_bytes} bytes")


def _read_header(view: memoryview) -> tuple[int, int, bool]:
    """Content size, where the first block starts, and whether a checksum ends the frame."""
    if len(view) < 6 or bytes(view[:4]) != _MAGIC:
        raise CorruptBlobError(_PART, f"no frame starts with {bytes(view[:4]).hex() or 'nothing'}")
    descriptor = view[4]
    if descriptor & 0b1011:
        raise CorruptBlobError(_PART, f"has a dictionary or a reserved bit: {descriptor:#04x}")
    flag, is_single_segment = descriptor >> 6, bool(descriptor & 0b10_0000)
    size_bytes = _SIZE_FIELD_BYTES[flag] or int(is_single_segment)
    if not size_bytes:
        raise CorruptBlobError(_PART, "does not state the size of its content")
    start = 5 if is_single_segment else 6
    at = start + size_bytes
    if at > len(view):
        raise CorruptBlobError(_PART, f"is cut at {len(view)} bytes, within its header")
    offset = 256 if size_bytes == 2 else 0
    return int.from_bytes(view[start:at], "little") + offset, at, bool(descriptor & 0b100)


def _walk_blocks(view: memoryview, at: int) -> tuple[int, int, int]:
    """Bytes of all plain blocks, the number of compressed ones, and where the last ends."""
    known_bytes = num_compressed = 0
    is_last = False
    while not is_last:
        if at + 3 > len(view):
            raise CorruptBlobError(_PART, f"is cut at {len(view)} bytes, before its last block")
        head = int.from_bytes(view[at : at + 3], "little")
        is_last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        if kind == 3 or size > MAX_BLOCK_BYTES:
            raise CorruptBlobError(_PART, f"has a block of type {kind} and {size} bytes")
        if kind == 2:
            num_compressed += 1
        else:
            known_bytes += size
        at += 3 + (1 if kind == 1 else size)
    return known_bytes, num_compressed, at


def _library() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise BackendUnavailable("zstandard", "run `pip install kvfabric[zstd]`") from error
    return zstandard
