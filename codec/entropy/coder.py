"""What every byte coder does."""

from __future__ import annotations

from typing import Protocol

from codec.blob import Buffer


class ByteCoder(Protocol):
    """Makes bytes fewer, and gives exactly them back; immutable.

    A coder adds no checksum: a blob has one over each section's stored bytes.
    """

    @property
    def name(self) -> str:
        """Names the byte format; coders of equal name decode each other's output."""
        ...

    def encode(self, data: Buffer) -> bytes:
        """The coded form of ``data``."""
        ...

    def decode(self, data: Buffer, decoded_bytes: int) -> bytes:
        """What was encoded, which was ``decoded_bytes`` long.

        Whatever ``data`` is, nothing longer than ``decoded_bytes`` is allocated, and at
        most two such buffers at once.

        Raises
        ------
        CorruptBlobError
            If ``data`` is no coded form, or of something of another size.
        """
        ...
