"""The bit-exact codec: what the engine holds, byte for byte.

It is the control for every other codec, and what a component falls back to where no
calibration has passed its quality gate.

Layer ``l``, numbered as in the whole model, has two sections, ``k<l>`` and ``v<l>``:
the layer's array of shape ``(T, H, D)`` in C order, elements little-endian (hosts of
the other byte order are not supported).  All keys come before all values, each in the
order of the layers.  Hence some layers are read from their own sections alone, and the
first tokens from the beginning of each; the bytes of other layers are neither read nor
verified.  Nothing is compressed, and no element is ever computed with: not-a-numbers
keep their payload, and zeros their sign.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from codec.blob import (
    DTYPE_BYTES,
    FORMAT_VERSION,
    Blob,
    BlobHeader,
    Buffer,
    Section,
    pack_blob,
    read_blob,
    read_header,
)
from codec.codec import TORCH_DTYPES, check_identity, layers_within, tokens_within
from codec.errors import CorruptBlobError
from codec.geometry import KVGeometry, Stage
from codec.identity import CodecId, digest
from codec.timing import StepTimes


class RawCodec:
    """Stores keys and values of one stage as they are; immutable."""

    name = "raw"
    #: What it decodes is what it was given, bit for bit.
    is_lossless = True

    def __init__(
        self, stage: Stage, geometry: KVGeometry, dtype: str, *, namespace: bytes | None = None
    ) -> None:
        """Code components of ``stage``.

        Parameters
        ----------
        geometry
            Shape of the stage's own cache: `KVGeometry.of_stage` of the model's.
        dtype
            One of `codec.blob.DTYPE_BYTES`: what goes in and comes out.
        namespace
            Refuse blobs of any other; by default the caller compares.

        Raises
        ------
        ValueError
            If ``geometry`` is not of ``stage``, or ``dtype`` is none that is known.
        """
        if geometry.whole != Stage(0, stage.num_layers, 0, stage.num_heads):
            raise ValueError(f"need the geometry of stage {stage}, got {geometry}")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
        self.stage = stage
        self.geometry = geometry
        self.dtype = dtype
        self.namespace = namespace
        self.codec_id = CodecId(
            digest(
                "kvfabric.codec.raw",
                *(str(FORMAT_VERSION).encode(), dtype.encode(), str(stage).encode()),
                *(str(geometry.key_head_dim).encode(), str(geometry.value_head_dim).encode()),
            )
        )

    def encode(
        self, keys_TLHD: torch.Tensor, values_TLHD: torch.Tensor, *, header: BlobHeader
    ) -> bytes:
        """See `codec.codec.Codec.encode`."""
        self._check_header(header)
        return pack_blob(
            header,
            [
                *self._sections("k", keys_TLHD, header.key_head_dim, header.num_tokens),
                *self._sections("v", values_TLHD, header.value_head_dim, header.num_tokens),
            ],
        )

    def decode(
        self,
        buf: Buffer,
        *,
        layers: range | None = None,
        num_tokens: int | None = None,
        steps: StepTimes | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `codec.codec.Codec.decode`; bytes of other layers are not read.

        All its time is that of the step ``verify``, copying included.

        Rows are copied for the first ``num_tokens`` only, yet all rows of a layer are
        read once: its checksum is over the whole section.
        """
        with (steps or StepTimes()).step("verify"):
            # The header alone first: what it says about sizes is believed from here on.
            header = read_header(buf)
            self._check_header(header)
            layers = layers_within(self.stage, layers)
            num_tokens = tokens_within(header, num_tokens)
            blob = read_blob(buf, only={f"{kind}{layer}" for kind in "kv" for layer in layers})
            keys_L = self._arrays(blob, "k", header.key_head_dim, layers)
            values_L = self._arrays(blob, "v", header.value_head_dim, layers)
            return self._tensor(keys_L, num_tokens), self._tensor(values_L, num_tokens)

    def example(self, num_tokens: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        """See `codec.codec.Codec.example`: noise."""
        draw = torch.Generator().manual_seed(0)
        shape = (num_tokens, self.stage.num_layers, self.stage.num_heads)
        dims = (self.geometry.key_head_dim, self.geometry.value_head_dim)
        keys, values = (
            torch.randn((*shape, dim), generator=draw).to(TORCH_DTYPES[dtype]) for dim in dims
        )
        return keys, values

    def _check_header(self, header: BlobHeader) -> None:
        check_identity(
            header,
            codec_id=self.codec_id,
            namespace=self.namespace,
            stage=self.stage,
            geometry=self.geometry,
            dtype=self.dtype,
        )

    def _sections(
        self, kind: str, array_TLHD: torch.Tensor, head_dim: int, num_tokens: int
    ) -> list[Section]:
        shape = (num_tokens, self.stage.num_layers, self.stage.num_heads, head_dim)
        if tuple(array_TLHD.shape) != shape:
            raise ValueError(f"{kind} must have shape {shape}, got {tuple(array_TLHD.shape)}")
        if array_TLHD.dtype != TORCH_DTYPES[self.dtype]:
            raise ValueError(f"{kind} must be {self.dtype}, got {array_TLHD.dtype}")
        # Bytes from here on, as numpy knows no bfloat16.  A clone has plain strides, where
        # an array of size 1 may call itself contiguous with any, and then has no such view.
        array_LTHD = array_TLHD.cpu().transpose(0, 1)
        array_LTHD = array_LTHD.clone(memory_format=torch.contiguous_format)
        bytes_L = array_LTHD.view(torch.uint8).flatten(1).numpy()
        return [
            Section(f"{kind}{layer}", row.data, row.nbytes)
            for layer, row in enumerate(bytes_L, start=self.stage.layer_start)
        ]

    def _arrays(
        self, blob: Blob, kind: str, head_dim: int, layers: range
    ) -> list[npt.NDArray[np.uint8]]:
        """The bytes of each layer, shape ``(T, H, bytes of D)``, in place."""
        row_bytes = head_dim * DTYPE_BYTES[self.dtype]
        shape = (blob.header.num_tokens, self.stage.num_heads, row_bytes)
        sections = [blob.section(f"{kind}{layer}") for layer in layers]
        for section in sections:
            _check_size(section, math.prod(shape))
        return [np.frombuffer(section.data, np.uint8).reshape(shape) for section in sections]

    def _tensor(self, bytes_L: list[npt.NDArray[np.uint8]], num_tokens: int) -> torch.Tensor:
        _, num_heads, row_bytes = bytes_L[0].shape
        array_TLHD = torch.empty(
            (num_tokens, len(bytes_L), num_heads, row_bytes // DTYPE_BYTES[self.dtype]),
            dtype=TORCH_DTYPES[self.dtype],
        )
        bytes_TLHB = array_TLHD.view(torch.uint8).numpy()
        for i, bytes_THB in enumerate(bytes_L):
            bytes_TLHB[:, i] = bytes_THB[:num_tokens]
        return array_TLHD


def _check_size(section: Section, need_bytes: int) -> None:
    sizes = (len(section.data), section.decoded_bytes)
    if sizes != (need_bytes, need_bytes):
        raise CorruptBlobError(
            f"section {section.name}", f"need {need_bytes} bytes, stored and decoded, got {sizes}"
        )
