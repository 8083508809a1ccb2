"""What the fabric knows of one model: enough to name its chunks and find its codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.coding import Prefix
from codec.geometry import KVGeometry, Stage
from codec.identity import CodecId, Digest
from policies.planner import DECODE_STEPS
from policies.residency.keys import chunk_keys

RAW_STEPS = ("verify", "handoff")
"""Decoding steps of the raw codec: it has no transform to undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSet:
    """One way to store a model: a codec for each of its stages."""

    name: str
    """``entropy``, ``kvtc`` or ``raw``."""

    codecs: tuple[CodecId, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """Decoding steps, as the planner names them."""
        return RAW_STEPS if self.name == "raw" else DECODE_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model that is served, and how its cache is kept."""

    name: str
    namespace: Digest
    geometry: KVGeometry
    dtype: str
    tokens_per_chunk: int
    stages: tuple[Stage, ...]
    codec_sets: tuple[CodecSet, ...]

    def __post_init__(self) -> None:
        for codec_set in self.codec_sets:
            if len(codec_set.codecs) != len(self.stages):
                raise ValueError(
                    f"codec set {codec_set.name} needs {len(self.stages)} codecs, "
                    f"got {len(codec_set.codecs)}"
                )

    def codec_set(self, name: str) -> CodecSet:
        """The way to store the model that is called ``name``.

        Raises
        ------
        KeyError
            If there is none.
        """
        return {codec_set.name: codec_set for codec_set in self.codec_sets}[name]

    def prefix(self, tokens: Sequence[int]) -> Prefix:
        """Identity of the whole chunks of a prompt.

        Raises
        ------
        ValueError
            If a token id is not one.
        """
        keys = chunk_keys(self.namespace, tokens, tokens_per_chunk=self.tokens_per_chunk)
        return Prefix(
            namespace=self.namespace,
            keys=tuple(keys),
            tokens=tuple(tokens),
            tokens_per_chunk=self.tokens_per_chunk,
            dtype=self.dtype,
            geometry=self.geometry,
        )
