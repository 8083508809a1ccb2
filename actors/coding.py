"""Chunks of a prompt to blobs in a worker, and blobs in a worker to a prompt's cache.

`store_chunks` codes every whole chunk for every stage.  `assemble` puts a prefix together
again: it checks that each blob is the one the tokens ask for (a digest that collides is
a miss, not wrong output), decodes it, and sets the rows in their places.  A blob that
fails a check is quarantined, and the caller recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.codecs import CodecBank
from actors.worker import Worker
from codec.blob import BlobHeader, read_header
from codec.codec import TORCH_DTYPES, Codec, check_identity
from codec.errors import CorruptBlobError, IdentityMismatchError
from codec.geometry import KVGeometry, Stage
from codec.identity import DIGEST_BYTES, ChunkKey, CodecId, ComponentKey, Digest
from codec.timing import StepTimes
from policies.planner import STEPS_BY_STORED_BYTES
from policies.residency.events import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The identity of a run of whole chunks from the start of a prompt."""

    namespace: Digest
    keys: tuple[ChunkKey, ...]
    """One per chunk, chained."""

    tokens: tuple[int, ...]
    """At least ``len(keys) * tokens_per_chunk``."""

    tokens_per_chunk: int
    dtype: str
    """Of the engine's cache."""

    geometry: KVGeometry
    """Of the whole model."""

    def __post_init__(self) -> None:
        if self.tokens_per_chunk < 1 or len(self.tokens) < len(self.keys) * self.tokens_per_chunk:
            raise ValueError(
                f"need {self.tokens_per_chunk} tokens for each of {len(self.keys)} chunks, "
                f"got {len(self.tokens)}"
            )
        if self.dtype not in TORCH_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, got {self.dtype!r}")

    def header(self, chunk: int, stage: Stage, codec: CodecId) -> BlobHeader:
        """Header that the blob of one chunk for one stage must have."""
        start = chunk * self.tokens_per_chunk
        shape = self.geometry.of_stage(stage)
        return BlobHeader(
            namespace=self.namespace,
            codec=codec,
            component=ComponentKey(self.keys[chunk], stage),
            start_position=start,
            num_tokens=self.tokens_per_chunk,
            first_token=self.tokens[start],
            last_token=self.tokens[start + self.tokens_per_chunk - 1],
            dtype=self.dtype,
            num_layers=shape.num_layers,
            num_heads=shape.num_kv_heads,
            key_head_dim=shape.key_head_dim,
            value_head_dim=shape.value_head_dim,
        )


def store_chunks(
    worker: Worker,
    bank: CodecBank,
    prefix: Prefix,
    *,
    keys_TLHD: Tensor,
    values_TLHD: Tensor,
    codecs: Sequence[CodecId],
    first_chunk: int = 0,
) -> list[Placement]:
    """Code and store the chunks from ``first_chunk`` on, with each of ``codecs``.

    A chunk that the worker holds stays as it is: its tokens are coded once, so that a
    cache which came out of a lossy codec is not coded again on top.

    Parameters
    ----------
    keys_TLHD, values_TLHD
        Whole model, rotated keys, from token ``first_chunk * tokens_per_chunk`` on.

    Raises
    ------
    UnknownCodecError
        If a codec is not loaded; nothing was stored then.
    ValueError
        If the arrays are not the prefix's in shape and dtype, or an element is not finite;
        nothing was stored then either.
    ArenaFullError
        If the arena is full.  Chunks stored before that stay: a shorter prefix is a
        correct one.
    """
    loaded = [bank.find(codec_id) for codec_id in codecs]
    _check_arrays(prefix, len(prefix.keys) - first_chunk, keys_TLHD, values_TLHD)
    placements = []
    size = prefix.tokens_per_chunk
    for chunk in range(first_chunk, len(prefix.keys)):
        rows = slice((chunk - first_chunk) * size, (chunk - first_chunk + 1) * size)
        for codec in loaded:
            held = worker.placement(ComponentKey(prefix.keys[chunk], codec.stage), codec.codec_id)
            if held is not None:
                placements.append(held)
                continue
            layers = slice(codec.stage.layer_start, codec.stage.layer_stop)
            heads = slice(codec.stage.head_start, codec.stage.head_stop)
            blob = codec.encode(
                keys_TLHD[rows, layers, heads].contiguous(),
                values_TLHD[rows, layers, heads].contiguous(),
                header=prefix.header(chunk, codec.stage, codec.codec_id),
            )
            placements.append(worker.put(blob))
    return placements


def assemble(
    worker: Worker,
    bank: CodecBank,
    prefix: Prefix,
    *,
    codecs: Sequence[CodecId],
    boundary_tokens: int,
    steps: StepTimes,
) -> tuple[Tensor, Tensor]:
    """The cache of tokens ``[0, boundary_tokens)`` from blobs that ``worker`` holds.

    Parameters
    ----------
    codecs
        One per stage; together their stages must hold every layer and head once.

    Returns
    -------
    keys_TLHD, values_TLHD
        Whole model, rotated keys, in the dtype of ``prefix``.

    Raises
    ------
    UnknownComponentError
        If the worker does not hold a chunk (any more).
    CodecError
        If a blob fails a check; it was quarantined.
    ValueError
        If the boundary or the stages do not fit the prefix.
    """
    _check_cover(bank, prefix, codecs, boundary_tokens)
    shape = prefix.geometry
    front = (boundary_tokens, shape.num_layers, shape.num_kv_heads)
    dtype = TORCH_DTYPES[prefix.dtype]
    keys = torch.empty((*front, shape.key_head_dim), dtype=dtype)
    values = torch.empty((*front, shape.value_head_dim), dtype=dtype)
    size = prefix.tokens_per_chunk
    for codec_id in codecs:
        stage = bank.find(codec_id).stage
        layers = slice(stage.layer_start, stage.layer_stop)
        heads = slice(stage.head_start, stage.head_stop)
        for chunk in range(-(-boundary_tokens // size)):
            stop = min(boundary_tokens, (chunk + 1) * size)
            rows = slice(chunk * size, stop)
            part = _decode(
                worker, bank, prefix.header(chunk, stage, codec_id), stop - rows.start, steps
            )
            keys[rows, layers, heads], values[rows, layers, heads] = part
    return keys, values


def time_decoding(codec: Codec, *, dtype: str, num_tokens: int) -> list[tuple[str, float, float]]:
    """Decode an example chunk and time it: (step, size, seconds) for the latency model.

    The second of two runs counts: the first pays for what later ones find warm.
    """
    keys, values = codec.example(num_tokens, dtype)
    shape = KVGeometry(
        num_layers=codec.stage.num_layers,
        num_kv_heads=codec.stage.num_heads,
        key_head_dim=keys.shape[-1],
        value_head_dim=values.shape[-1],
    )
    header = BlobHeader(
        namespace=codec.namespace or bytes(DIGEST_BYTES),
        codec=codec.codec_id,
        component=ComponentKey(ChunkKey(bytes(DIGEST_BYTES)), codec.stage),
        start_position=0,
        num_tokens=num_tokens,
        first_token=0,
        last_token=0,
        dtype=dtype,
        num_layers=shape.num_layers,
        num_heads=shape.num_kv_heads,
        key_head_dim=shape.key_head_dim,
        value_head_dim=shape.value_head_dim,
    )
    blob = codec.encode(keys, values, header=header)
    for _ in range(2):
        steps = StepTimes()
        codec.decode(blob, steps=steps)
    raw_bytes = shape.raw_bytes_per_token * num_tokens
    return [
        (step, len(blob) if step in STEPS_BY_STORED_BYTES else raw_bytes, seconds)
        for step, seconds in steps.seconds.items()
    ]


def _check_arrays(prefix: Prefix, num_chunks: int, keys: Tensor, values: Tensor) -> None:
    shape = prefix.geometry
    front = (num_chunks * prefix.tokens_per_chunk, shape.num_layers, shape.num_kv_heads)
    for what, array, head_dim in (
        ("keys", keys, shape.key_head_dim),
        ("values", values, shape.value_head_dim),
    ):
        if tuple(array.shape) != (*front, head_dim) or array.dtype != TORCH_DTYPES[prefix.dtype]:
            raise ValueError(
                f"{what} must be {prefix.dtype} of shape {(*front, head_dim)}, "
                f"got {array.dtype} of {tuple(array.shape)}"
            )
        if not torch.isfinite(array).all():
            raise ValueError(f"{what} must be finite to be stored")


def _check_cover(
    bank: CodecBank, prefix: Prefix, codecs: Sequence[CodecId], boundary_tokens: int
) -> None:
    limit = len(prefix.keys) * prefix.tokens_per_chunk
    if not 1 <= boundary_tokens <= limit:
        raise ValueError(f"boundary_tokens must be in 1..{limit}, got {boundary_tokens}")
    held = torch.zeros(prefix.geometry.num_layers, prefix.geometry.num_kv_heads, dtype=torch.int32)
    for codec_id in codecs:
        stage = bank.find(codec_id).stage
        held[stage.layer_start : stage.layer_stop, stage.head_start : stage.head_stop] += 1
    if not (held == 1).all():
        raise ValueError("the codecs' stages must hold every layer and head exactly once")


def _decode(
    worker: Worker, bank: CodecBank, wanted: BlobHeader, num_tokens: int, steps: StepTimes
) -> tuple[Tensor, Tensor]:
    codec_id = CodecId(wanted.codec)
    with worker.get(wanted.component, codec_id) as pin:
        try:
            check_identity(
                read_header(pin.view),
                codec_id=codec_id,
                namespace=wanted.namespace,
                dtype=wanted.dtype,
                start_position=wanted.start_position,
                num_tokens=wanted.num_tokens,
                first_token=wanted.first_token,
                last_token=wanted.last_token,
            )
            return bank.find(codec_id).decode(pin.view, num_tokens=num_tokens, steps=steps)
        except (CorruptBlobError, IdentityMismatchError) as error:
            worker.quarantine(wanted.component, codec_id, str(error))
            raise
