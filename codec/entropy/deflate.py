"""DEFLATE (RFC 1951), without the zlib or gzip frame, through libdeflate.

The bare form is what nvCOMP's Deflate reads and writes as well.  Bytes after the end
of the stream are not looked for: the blob's checksum covers them.
"""

from __future__ import annotations

import deflate

from codec.blob import Buffer, byte_view
from codec.errors import CorruptBlobError

MAX_EXPANSION = 1032
"""Most bytes that one byte of DEFLATE can stand for: matches of 258 in two bits."""
MAX_BYTES = (1 << 31) - 1
"""Most bytes that are coded at once: the wrapper takes a size modulo 2**32."""


class DeflateCoder:
    """Codes with one setting of effort, which decoding need not know."""

    name = "deflate"

    def __init__(self, level: int = 6) -> None:
        """Code with ``level``, 1 (fast) to 12 (small); 0 only frames.

        Raises
        ------
        ValueError
            If ``level`` is not in 0..12.
        """
        if not 0 <= level <= 12:
            raise ValueError(f"level must be in 0..12, got {level}")
        self.level = level

    def encode(self, data: Buffer) -> bytes:
        """One DEFLATE stream; the same bytes on every machine with this libdeflate.

        Raises
        ------
        ValueError
            If ``data`` has more than `MAX_BYTES`.
        """
        view = byte_view(data)
        if len(view) > MAX_BYTES:
            raise ValueError(f"deflate takes at most {MAX_BYTES} bytes, got {len(view)}")
        return bytes(deflate.deflate_compress(view, self.level))

    def decode(self, data: Buffer, decoded_bytes: int) -> bytes:
        """See `codec.entropy.coder.ByteCoder.decode`."""
        view = byte_view(data)
        check_reach(view, decoded_bytes)
        try:
            # Asked for nothing, libdeflate's wrapper does not look at the stream at all.
            decoded = deflate.deflate_decompress(view, max(decoded_bytes, 1))
        except deflate.DeflateError as error:
            raise CorruptBlobError(
                "deflate stream", f"does not decode to {decoded_bytes} bytes: {error}"
            ) from None
        if len(decoded) != decoded_bytes:
            raise CorruptBlobError(
                "deflate stream", f"decodes to {len(decoded)} bytes, not {decoded_bytes}"
            )
        return bytes(decoded)


def check_reach(view: memoryview, decoded_bytes: int) -> None:
    """Refuse a size that no stream of that length decodes to, before it is allocated.

    Raises
    ------
    CorruptBlobError
        If ``decoded_bytes`` is over `MAX_EXPANSION` times as long, or over `MAX_BYTES`.
    """
    if decoded_bytes > min(len(view) * MAX_EXPANSION, MAX_BYTES):
        raise CorruptBlobError(
            "deflate stream", f"{len(view)} bytes cannot decode to {decoded_bytes}"
        )
