"""The arms of an evaluation: ways to code rows of a cache, and to bring them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from codec.codec import Codec
from codec.comparators.arm import Arm as Comparator
from codec.geometry import KVGeometry
from codec.header import BlobHeader
from codec.identity import ChunkKey, ComponentKey, digest
from fabric.engines.protocol import Engine

TOKENS_PER_CHUNK: Final = 256
"""As the fabric stores prefixes unless it is told otherwise."""


class Arm(Protocol):
    """Codes rows and gives them back from what it stored of them."""

    @property
    def name(self) -> str:
        """What tables call it; no two arms of a run have the same."""
        ...

    @property
    def target(self) -> float | None:
        """Compression it aims for; ``None`` where it has no such setting."""
        ...

    def code(
        self, keys_TLHD: Tensor, values_TLHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor, int]:
        """Code consecutive tokens of the whole model.

        Returns
        -------
        keys_TLHD, values_TLHD
            Of the shapes and dtype that went in.
        stored_bytes
            All that is kept of these tokens.
        """
        ...


class FullPrecision:
    """Changes nothing: the zero of every scale of quality, and 1 on that of ratios."""

    name = "full"
    target = None

    def __init__(self, geometry: KVGeometry) -> None:
        """Count bytes as the model's 16-bit cache has them."""
        self._bytes_per_token = geometry.raw_bytes_per_token

    def code(
        self, keys_TLHD: Tensor, values_TLHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `Arm.code`."""
        del start_position
        return keys_TLHD, values_TLHD, len(keys_TLHD) * self._bytes_per_token


class CodecArm:
    """The codecs of all stages, used together on chunks as the fabric stores them."""

    def __init__(
        self,
        name: str,
        codecs: Sequence[Codec],
        engine: Engine[Any],
        *,
        target: float | None = None,
        tokens_per_chunk: int = TOKENS_PER_CHUNK,
    ) -> None:
        """Code with ``codecs``, one per stage; whole blobs are counted.

        Raises
        ------
        ValueError
            If the stages are not those of the engine's model, each layer once.
        """
        stages = tuple(codec.stage for codec in codecs)
        if not stages or stages != engine.geometry.split_layers(len(stages)):
            raise ValueError(f"need codecs of {engine.geometry.whole}, got stages {stages}")
        self.name = name
        self.target = target
        self.codecs = tuple(codecs)
        self._geometry = engine.geometry
        self._namespace = engine.namespace()
        self._tokens_per_chunk = tokens_per_chunk

    def code(
        self, keys_TLHD: Tensor, values_TLHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `Arm.code`."""
        keys, values = torch.empty_like(keys_TLHD), torch.empty_like(values_TLHD)
        stored_bytes = 0
        for start in range(0, len(keys_TLHD), self._tokens_per_chunk):
            rows = slice(start, min(start + self._tokens_per_chunk, len(keys_TLHD)))
            for codec in self.codecs:
                layers = slice(codec.stage.layer_start, codec.stage.layer_stop)
                header = self._header(codec, start_position + start, rows.stop - rows.start)
                blob = codec.encode(
                    keys_TLHD[rows, layers], values_TLHD[rows, layers], header=header
                )
                stored_bytes += len(blob)
                keys[rows, layers], values[rows, layers] = codec.decode(blob)
        return keys, values, stored_bytes

    def _header(self, codec: Codec, start_position: int, num_tokens: int) -> BlobHeader:
        shape = self._geometry.of_stage(codec.stage)
        return BlobHeader(
            namespace=self._namespace.digest(),
            codec=codec.codec_id,
            component=ComponentKey(
                ChunkKey(digest("kvfabric.evaluation.chunk", str(start_position).encode())),
                codec.stage,
            ),
            start_position=start_position,
            num_tokens=num_tokens,
            # Nobody will look these blobs up by their tokens.
            first_token=0,
            last_token=0,
            dtype=self._namespace.dtype,
            num_layers=shape.num_layers,
            num_heads=shape.num_kv_heads,
            key_head_dim=shape.key_head_dim,
            value_head_dim=shape.value_head_dim,
        )


class ComparatorArm:
    """A rival of `codec.comparators`, which codes all tokens as one piece."""

    target = None

    def __init__(self, comparator: Comparator) -> None:
        """Code with ``comparator``, under its own name."""
        self.name = comparator.name
        self._comparator = comparator

    def code(
        self, keys_TLHD: Tensor, values_TLHD: Tensor, start_position: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `Arm.code`."""
        del start_position
        restored = self._comparator.restore(keys_TLHD, values_TLHD)
        return (
            restored.keys_TLHD.to(keys_TLHD.dtype),
            restored.values_TLHD.to(values_TLHD.dtype),
            restored.stored_bytes,
        )
