"""What every codec does, and the check that a blob is the one that was asked for.

Letters that end array names are those of `codec.geometry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from codec.blob import BlobHeader, Buffer
from codec.errors import IdentityMismatchError
from codec.geometry import KVGeometry, Stage
from codec.identity import ChunkKey, CodecId
from codec.timing import StepTimes

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The data types that a blob may decode to, by the names its header has for them."""


class Codec(Protocol):
    """Turns one component's keys and values into a blob, and back.

    Keys are taken and given as the engine holds them: rotated to their positions.
    """

    @property
    def codec_id(self) -> CodecId:
        """Names the codec with its calibration: blobs of equal id decode alike."""
        ...

    @property
    def name(self) -> str:
        """Kind of codec: ``raw``, ``kvtc``."""
        ...

    @property
    def is_lossless(self) -> bool:
        """Whether what it decodes is what it was given, bit for bit."""
        ...

    @property
    def stage(self) -> Stage:
        """The share of the model whose components it codes."""
        ...

    @property
    def namespace(self) -> bytes | None:
        """The only namespace whose blobs it takes; ``None`` if the caller compares."""
        ...

    def encode(
        self, keys_TLHD: torch.Tensor, values_TLHD: torch.Tensor, *, header: BlobHeader
    ) -> bytes:
        """Code one component of this codec's stage.

        Parameters
        ----------
        keys_TLHD
            Shape ``(T, L, H, D)``, all layers and heads of the stage, rotated.
        values_TLHD
            The same shape but for ``D``, which may differ.
        header
            What the tensors are; ``header.codec`` must be `codec_id`.

        Raises
        ------
        IdentityMismatchError
            If the header is not of this codec, stage or geometry.
        ValueError
            If a tensor is not of the shape or dtype that the header gives.
        """
        ...

    def decode(
        self,
        buf: Buffer,
        *,
        layers: range | None = None,
        num_tokens: int | None = None,
        steps: StepTimes | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a blob, or of a slice of it.

        Parameters
        ----------
        buf
            One blob, whose identity and whose every byte that is used are verified
            before a tensor is made.
        layers
            Consecutive layers within `stage`, numbered as in the whole model, so that
            a worker with fewer layers names its own; all of the stage by default.
        num_tokens
            How many rows, from the chunk's first; all by default.
        steps
            Where the seconds of each step are added, under the names of the planner.

        Returns
        -------
        keys_TLHD, values_TLHD
            In the dtype that the header names, ``L`` being ``len(layers)``.

        Raises
        ------
        CodecError
            If the bytes are corrupt, of another version, or of another identity.
        ValueError
            If the slice is empty or reaches outside the blob.
        """
        ...

    def example(self, num_tokens: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Made-up keys and values that are coded as real ones are; the same every time.

        For self-tests and for timing a codec before there is anything to decode.
        """
        ...


def check_identity(
    header: BlobHeader,
    *,
    codec_id: CodecId,
    namespace: bytes | None = None,
    stage: Stage | None = None,
    geometry: KVGeometry | None = None,
    chunk_key: ChunkKey | None = None,
    retention_class: str | None = None,
    start_position: int | None = None,
    num_tokens: int | None = None,
    first_token: int | None = None,
    last_token: int | None = None,
    dtype: str | None = None,
) -> None:
    """Refuse a blob that is sound but not the one wanted; ``None`` asks for nothing.

    Parameters
    ----------
    geometry
        Of the stage, not of the whole model.

    Raises
    ------
    IdentityMismatchError
        With the name of the first field that differs, and both values.
    """
    component = header.component
    wanted_and_found = {
        "codec": (codec_id, header.codec),
        "namespace": (namespace, header.namespace),
        "stage": (stage, component.stage),
        "geometry": (geometry, geometry_of(header)),
        "chunk_key": (chunk_key, component.chunk_key),
        "retention_class": (retention_class, component.retention_class),
        "start_position": (start_position, header.start_position),
        "num_tokens": (num_tokens, header.num_tokens),
        "first_token": (first_token, header.first_token),
        "last_token": (last_token, header.last_token),
        "dtype": (dtype, header.dtype),
    }
    for field, (wanted, found) in wanted_and_found.items():
        if wanted is not None and wanted != found:
            raise IdentityMismatchError(field, _text(wanted), _text(found))


def geometry_of(header: BlobHeader) -> KVGeometry:
    """Shape of the stage's cache, as the header gives it."""
    return KVGeometry(
        num_layers=header.num_layers,
        num_kv_heads=header.num_heads,
        key_head_dim=header.key_head_dim,
        value_head_dim=header.value_head_dim,
    )


def layers_within(stage: Stage, layers: range | None) -> range:
    """The layers that `Codec.decode` is asked for; all of ``stage`` by default.

    Raises
    ------
    ValueError
        If they are not one or more consecutive layers of ``stage``.
    """
    if layers is None:
        return range(stage.layer_start, stage.layer_stop)
    inside = stage.layer_start <= layers.start < layers.stop <= stage.layer_stop
    if layers.step != 1 or not inside:
        raise ValueError(f"need consecutive layers of stage {stage}, got {layers}")
    return layers


def heads_within(stage: Stage, heads: range | None) -> range:
    """The kv heads that a codec is asked for; all of ``stage`` by default.

    Raises
    ------
    ValueError
        If they are not one or more consecutive heads of ``stage``.
    """
    if heads is None:
        return range(stage.head_start, stage.head_stop)
    inside = stage.head_start <= heads.start < heads.stop <= stage.head_stop
    if heads.step != 1 or not inside:
        raise ValueError(f"need consecutive heads of stage {stage}, got {heads}")
    return heads


def tokens_within(header: BlobHeader, num_tokens: int | None) -> int:
    """How many rows `Codec.decode` is asked for; all of the chunk's by default.

    Raises
    ------
    ValueError
        If there are none, or more than the blob has.
    """
    if num_tokens is None:
        return header.num_tokens
    if not 1 <= num_tokens <= header.num_tokens:
        raise ValueError(f"need 1..{header.num_tokens} tokens, got {num_tokens}")
    return num_tokens


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
