"""The coder that leaves bytes as they are."""

from __future__ import annotations

from codec.blob import Buffer, byte_view
from codec.errors import CorruptBlobError


class StoredCoder:
    """Stores; the control for other coders, and right for bytes that do not compress."""

    name = "stored"

    def encode(self, data: Buffer) -> bytes:
        """A copy of ``data``."""
        return bytes(byte_view(data))

    def decode(self, data: Buffer, decoded_bytes: int) -> bytes:
        """See `codec.entropy.coder.ByteCoder.decode`."""
        view = byte_view(data)
        if len(view) != decoded_bytes:
            raise CorruptBlobError("stored bytes", f"need {decoded_bytes} bytes, got {len(view)}")
        return bytes(view)
