"""A prefix of real text, and its chunks coded one after the other as the fabric codes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from torch import Tensor

from codec.blob import BlobHeader
from codec.entropy_codec import EntropyCodec
from codec.errors import ConfigError
from codec.identity import ChunkKey, ComponentKey, digest
from codec.timing import StepTimes
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.sets import NATURAL, packaged_text

Rows = tuple[Tensor, Tensor]
"""Keys and values of the same tokens, each of shape ``(T, L, H, D)``."""


def prefix(loaded: LoadedModel, num_tokens: int) -> list[int]:
    """Tokens of the evaluation's natural texts, one after the other, again if they run out."""
    texts = [packaged_text(name) for names in NATURAL.values() for name in names]
    found: list[int] = []
    for text in texts:
        if len(found) < num_tokens:
            found += loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return list(islice(cycle(found), num_tokens))


def longest_prefix(loaded: LoadedModel, num_tokens: int, tokens_per_chunk: int) -> int:
    """``num_tokens``, or the most whole chunks that the model takes if it takes fewer.

    Raises
    ------
    ConfigError
        If it takes no chunk at all.
    """
    limit = getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None)
    if not isinstance(limit, int) or num_tokens <= limit:
        return num_tokens
    whole = limit // tokens_per_chunk * tokens_per_chunk
    if not whole:
        raise ConfigError(f"the model takes {limit} tokens, and a chunk has {tokens_per_chunk}")
    return whole


def encode_chunks(
    engine: Engine[Any],
    codec: EntropyCodec,
    rows: Rows,
    tokens_per_chunk: int,
    steps: StepTimes | None = None,
) -> list[bytes]:
    """Blobs of a prefix, chunk after chunk."""
    keys_TLHD, values_TLHD = rows
    blobs = []
    for start in range(0, len(keys_TLHD), tokens_per_chunk):
        chunk = slice(start, min(start + tokens_per_chunk, len(keys_TLHD)))
        header = _header(engine, codec, chunk)
        blobs.append(codec.encode(keys_TLHD[chunk], values_TLHD[chunk], header=header, steps=steps))
    return blobs


def decode_chunks(
    codec: EntropyCodec, blobs: Sequence[bytes], steps: StepTimes | None = None
) -> list[Rows]:
    """What the blobs hold, all of it at once in memory."""
    return [codec.decode(blob, steps=steps) for blob in blobs]


def _header(engine: Engine[Any], codec: EntropyCodec, chunk: slice) -> BlobHeader:
    shape = engine.geometry.of_stage(codec.stage)
    namespace = engine.namespace()
    return BlobHeader(
        namespace=namespace.digest(),
        codec=codec.codec_id,
        component=ComponentKey(
            ChunkKey(digest("kvfabric.bench.chunk", str(chunk.start).encode())), codec.stage
        ),
        start_position=chunk.start,
        num_tokens=chunk.stop - chunk.start,
        first_token=0,
        last_token=0,
        dtype=namespace.dtype,
        num_layers=shape.num_layers,
        num_heads=shape.num_kv_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
    )
