"""Small sound blobs for tests that do not care what is coded in them."""

from __future__ import annotations

from codec.blob import BlobHeader, Section, pack_blob
from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey, digest

STAGE = Stage(0, 2, 0, 3)
RAW_BYTES_PER_TOKEN = 2 * 3 * (8 + 4) * 2
"""Two layers, three heads, 8 + 4 dimensions, 16 bits."""


def key_of(chunk: int) -> ComponentKey:
    """The component of chunk number ``chunk``."""
    return ComponentKey(ChunkKey(digest("test.chunk", str(chunk).encode())), STAGE)


def codec_of(number: int = 0) -> CodecId:
    """Codec number ``number``."""
    return CodecId(digest("test.codec", str(number).encode()))


def make_blob(
    chunk: int = 0, codec: int = 0, *, payload: bytes = b"payload", num_tokens: int = 16
) -> bytes:
    """A blob of `key_of` and `codec_of` those numbers that holds ``payload``."""
    header = BlobHeader(
        namespace=digest("test.namespace"),
        codec=codec_of(codec),
        component=key_of(chunk),
        start_position=chunk * num_tokens,
        num_tokens=num_tokens,
        first_token=1,
        last_token=2,
        dtype="bfloat16",
        num_layers=STAGE.num_layers,
        num_heads=STAGE.num_heads,
        key_head_dim=8,
        value_head_dim=4,
    )
    return pack_blob(header, [Section("body", payload, len(payload))])
