"""The transform codec: PCA coefficients, quantized in blocks, DEFLATEd, in a blob.

Encoding one component of ``T`` tokens:

1. keys lose their rotary positions; rows are flattened layer-major;
2. rows of sink positions, and rows that would come back worse than the calibration
   allows, are set aside as *exact rows*, stored in the engine's dtype bit for bit;
3. all other rows are projected, quantized block by block, packed and DEFLATEd.

Sections, ``k`` for keys and ``v`` for values; those that would be empty are left out:

| name | content, once inflated |
|---|---|
| ``exact.rows`` | u32 little-endian row numbers within the chunk, rising; stored, not coded |
| ``k.exact``, ``v.exact`` | those rows, ``(T', L, H, D)`` in the blob's dtype; stored |
| ``k.int2`` ``k.int4`` ``k.fp8`` | codes of all blocks of a type, in order (`codec.packing`) |
| ``k.shift`` ``k.scale`` | float16 per block and token, as byte planes |

Exact keys are kept rotated, as the engine holds them, so that they come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from codec.allocation import Allocation
from codec.blob import FORMAT_VERSION, Blob, BlobHeader, Buffer, Section, pack_blob, read_blob
from codec.calibration import Calibration, KindCalibration
from codec.codec import TORCH_DTYPES, check_identity, layers_within, tokens_within
from codec.entropy.deflate import DeflateCoder
from codec.errors import CorruptBlobError
from codec.exact_rows import (
    all_finite,
    checked_rows,
    exact_sections,
    exact_values,
    read_exact_rows,
    to_dtype,
)
from codec.geometry import Stage
from codec.identity import CodecId, digest
from codec.packing import pack, pack_halves, packed_bytes, unpack, unpack_halves
from codec.quantizer import CODED_TYPES, BlockType, QuantizedBlock, dequantize, quantize
from codec.timing import StepTimes


class KvtcCodec:
    """Codes components of one stage with one calibration; immutable, so threads may share it."""

    name = "kvtc"
    #: What comes back is near what went in, not equal to it.
    is_lossless = False

    def __init__(self, calibration: Calibration, *, namespace: bytes | None = None) -> None:
        """Code with ``calibration``, and refuse blobs of another namespace if one is given."""
        self.calibration = calibration
        self.namespace = namespace
        self.codec_id = CodecId(
            digest("kvfabric.codec.kvtc", str(FORMAT_VERSION).encode(), calibration.digest)
        )
        self._coder = DeflateCoder()

    @property
    def stage(self) -> Stage:
        """The share of the model whose components it codes."""
        return self.calibration.stage

    def encode(
        self,
        keys_TLHD: Tensor,
        values_TLHD: Tensor,
        *,
        header: BlobHeader,
        steps: StepTimes | None = None,
    ) -> bytes:
        """See `codec.codec.Codec.encode`.

        Raises
        ------
        ValueError
            Also if an element is not finite: such a cache must not be kept.
        """
        steps = steps or StepTimes()
        self._check_header(header)
        keys_TLHD = checked_rows("keys", keys_TLHD, header, header.key_head_dim)
        values_TLHD = checked_rows("values", values_TLHD, header, header.value_head_dim)
        positions = torch.arange(header.start_position, header.start_position + header.num_tokens)
        with steps.step("rope"):
            keys_TW = self.calibration.rotary.unrotate(keys_TLHD, positions).flatten(1)
        values_TW = values_TLHD.float().flatten(1)
        with steps.step("project"):
            keys_TC = self.calibration.keys.basis.project(keys_TW)
            values_TC = self.calibration.values.basis.project(values_TW)
        with steps.step("quantize"):
            is_exact = positions < self.calibration.config.sink_tokens
            is_exact |= _is_outlier(keys_TW, keys_TC, self.calibration.keys)
            is_exact |= _is_outlier(values_TW, values_TC, self.calibration.values)
            sections = [
                *exact_sections(is_exact, keys_TLHD, values_TLHD),
                *self._coded_sections("k", keys_TC[~is_exact], self.calibration.keys.allocation),
                *self._coded_sections(
                    "v", values_TC[~is_exact], self.calibration.values.allocation
                ),
            ]
        return pack_blob(header, sections)

    def decode(
        self,
        buf: Buffer,
        *,
        layers: range | None = None,
        num_tokens: int | None = None,
        steps: StepTimes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `codec.codec.Codec.decode`; a slice costs its share of the projection."""
        steps = steps or StepTimes()
        with steps.step("verify"):
            blob = read_blob(buf)
            header = blob.header
            self._check_header(header)
        layers = layers_within(self.stage, layers)
        num_tokens = tokens_within(header, num_tokens)
        is_exact = read_exact_rows(blob)
        num_exact = int(is_exact.sum())
        tensors = []
        for kind, part, head_dim in (
            ("k", self.calibration.keys, header.key_head_dim),
            ("v", self.calibration.values, header.value_head_dim),
        ):
            coefficients = self._coefficients(blob, kind, part.allocation, ~is_exact, steps)
            coefficients = coefficients[: int((~is_exact[:num_tokens]).sum())]
            tensors.append(
                self._rows(
                    coefficients, kind, part=part, layers=layers, head_dim=head_dim, steps=steps
                )
            )
        keys, values = tensors
        with steps.step("rope"):
            positions = torch.arange(header.start_position, header.start_position + num_tokens)
            local = range(
                layers.start - self.stage.layer_start, layers.stop - self.stage.layer_start
            )
            rotary = self.calibration.rotary.of_layers(local)
            keys = rotary.rotate(keys, positions[~is_exact[:num_tokens]])
        shown = is_exact[:num_tokens]
        return (
            _merge(keys, exact_values(blob, "k", num_exact, local), shown, header),
            _merge(values, exact_values(blob, "v", num_exact, local), shown, header),
        )

    def example(self, num_tokens: int, dtype: str) -> tuple[Tensor, Tensor]:
        """See `codec.codec.Codec.example`: rows drawn from the basis, keys at positions 0..T-1."""
        draw = torch.Generator().manual_seed(0)
        shape = self.calibration.geometry
        arrays = []
        for part, dim in (
            (self.calibration.keys, shape.key_head_dim),
            (self.calibration.values, shape.value_head_dim),
        ):
            spread_C = part.basis.variance_C[: part.basis.rank].sqrt()
            rows = part.basis.reconstruct(
                torch.randn(num_tokens, part.basis.rank, generator=draw) * spread_C
            )
            arrays.append(rows.view(num_tokens, shape.num_layers, shape.num_kv_heads, dim))
        keys = self.calibration.rotary.rotate(arrays[0], torch.arange(num_tokens))
        return keys.to(TORCH_DTYPES[dtype]), arrays[1].to(TORCH_DTYPES[dtype])

    def _check_header(self, header: BlobHeader) -> None:
        check_identity(
            header,
            codec_id=self.codec_id,
            namespace=self.namespace,
            stage=self.stage,
            geometry=self.calibration.geometry,
        )

    def _coded_sections(
        self, kind: str, coefficients_TC: Tensor, allocation: Allocation
    ) -> Iterator[Section]:
        if not len(coefficients_TC) or not allocation.blocks:
            return
        coded = [
            (
                block.block_type,
                quantize(coefficients_TC[:, block.start : block.stop], block.block_type),
            )
            for block in allocation.blocks
        ]
        for block_type in CODED_TYPES:
            codes = [block.codes_TB for its_type, block in coded if its_type is block_type]
            if codes:
                packed = pack(torch.cat(codes, dim=1), block_type.bits)
                yield self._deflated(f"{kind}.{block_type.name.lower()}", packed)
        shifts = torch.stack([block.shift_T for _, block in coded], dim=1)
        scales = torch.stack([block.scale_T for _, block in coded], dim=1)
        yield self._deflated(f"{kind}.shift", pack_halves(shifts))
        yield self._deflated(f"{kind}.scale", pack_halves(scales))

    def _deflated(self, name: str, data: bytes) -> Section:
        return Section(name, self._coder.encode(data), len(data))

    def _inflated(self, blob: Blob, name: str, wanted_bytes: int) -> bytes:
        section = blob.section(name)
        if section.decoded_bytes != wanted_bytes:
            raise CorruptBlobError(
                f"section {name}", f"need {wanted_bytes} bytes, states {section.decoded_bytes}"
            )
        return self._coder.decode(section.data, wanted_bytes)

    def _coefficients(
        self, blob: Blob, kind: str, allocation: Allocation, is_coded: Tensor, steps: StepTimes
    ) -> Tensor:
        """Dequantized coefficients of the coded rows, shape ``(T', C)``."""
        num_rows = int(is_coded.sum())
        result = torch.zeros(num_rows, allocation.rank)
        if not num_rows or not allocation.blocks:
            return result
        codes_of_type: dict[BlockType, Tensor] = {}
        with steps.step("entropy"):
            inflated = {
                block_type: self._inflated(
                    blob,
                    f"{kind}.{block_type.name.lower()}",
                    packed_bytes(num_rows, width, block_type.bits),
                )
                for block_type in CODED_TYPES
                if (width := _coded_width(allocation, block_type))
            }
            metadata_bytes = 2 * num_rows * len(allocation.blocks)
            planes = [
                self._inflated(blob, f"{kind}.{name}", metadata_bytes)
                for name in ("shift", "scale")
            ]
        with steps.step("dequantize"):
            for block_type, data in inflated.items():
                width = _coded_width(allocation, block_type)
                codes_of_type[block_type] = unpack(
                    data, num_tokens=num_rows, num_coefficients=width, bits=block_type.bits
                )
            shifts, scales = (
                unpack_halves(plane, num_tokens=num_rows, num_columns=len(allocation.blocks))
                for plane in planes
            )
            used = dict.fromkeys(codes_of_type, 0)
            for number, block in enumerate(allocation.blocks):
                at = used[block.block_type]
                used[block.block_type] += block.size
                codes = codes_of_type[block.block_type][:, at : at + block.size].contiguous()
                coded = QuantizedBlock(codes, shifts[:, number], scales[:, number])
                result[:, block.start : block.stop] = dequantize(coded, block.block_type)
        return result

    def _rows(
        self,
        coefficients: Tensor,
        kind: str,
        *,
        part: KindCalibration,
        layers: range,
        head_dim: int,
        steps: StepTimes,
    ) -> Tensor:
        """Rows of the wanted layers, shape ``(T', L, H, D)``, float32."""
        with steps.step("project"):
            num_heads = self.calibration.geometry.num_kv_heads
            per_layer = num_heads * head_dim
            first = (layers.start - self.stage.layer_start) * per_layer
            rows = part.basis.reconstruct(
                coefficients, slice(first, first + len(layers) * per_layer)
            )
        if not all_finite(rows):
            raise CorruptBlobError(f"section {kind}.fp8", "a coefficient is not a number")
        return rows.view(len(rows), len(layers), num_heads, head_dim)


def _coded_width(allocation: Allocation, block_type: BlockType) -> int:
    return sum(block.size for block in allocation.blocks if block.block_type is block_type)


def _is_outlier(rows_TW: Tensor, coefficients_TC: Tensor, part: KindCalibration) -> Tensor:
    """Which rows would come back with more error than the calibration allows.

    The energy outside the basis and the quantization error add up, as the basis is
    orthonormal; neither needs the reconstruction.
    """
    allocation = part.allocation
    left = coefficients_TC.clone()
    for block in allocation.blocks:
        span = slice(block.start, block.stop)
        coded = quantize(coefficients_TC[:, span], block.block_type)
        left[:, span] -= dequantize(coded, block.block_type)
    outside = (rows_TW - part.basis.mean_W).square().sum(dim=1) - coefficients_TC.square().sum(
        dim=1
    )
    # Not `>`: an error that overflowed is not a number, and such a row is exact too.
    return ~(outside + left.square().sum(dim=1) <= part.max_row_error)


def _merge(coded: Tensor, exact: Tensor, is_exact: Tensor, header: BlobHeader) -> Tensor:
    """Rows in their places: shape ``(T, L, H, D)``, in the blob's dtype."""
    dtype = TORCH_DTYPES[header.dtype]
    result = torch.empty((len(is_exact), *coded.shape[1:]), dtype=dtype)
    result[~is_exact] = to_dtype(coded, dtype)
    result[is_exact] = exact[: int(is_exact.sum())]
    return result
