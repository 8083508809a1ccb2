"""Coefficients to codes and back: the block types of the KVTC paper.

A block is a run of consecutive coefficients of one token that share a type, a 16-bit
shift and a 16-bit scale.  Integer types are asymmetric (shift is the least value, scale
spans to the greatest); ``fp8`` is E4M3 around the middle of the range, scaled so that
the farthest value lands on 448, because unscaled E4M3 would saturate on the leading
coefficients.  Codes are computed with the *rounded* shift and scale that the decoder
will read, so rounding the metadata costs no hidden error.

Source: KVTC (arXiv 2511.01815v2) sections 3.2 and B.17; where it is silent, docs/codec.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

METADATA_BITS = 32
"""Shift and scale, 16 bits each, per block and token."""

FP8_MAX = 448.0
"""Greatest finite E4M3 value."""

_HALF_MAX = 65504.0


class BlockType(IntEnum):
    """How the coefficients of one block are coded; the value is what the file stores."""

    NONE = 0
    INT2 = 1
    INT4 = 2
    FP8 = 3

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (0, 2, 4, 8)[self]

    def used_bits(self, size: int) -> int:
        """Bits per token of a block of ``size`` coefficients, metadata included."""
        return 0 if self is BlockType.NONE else size * self.bits + METADATA_BITS


CODED_TYPES = (BlockType.INT2, BlockType.INT4, BlockType.FP8)


@dataclass(frozen=True, slots=True)
class QuantizedBlock:
    """Codes of one block for ``T`` tokens, with what is needed to undo them."""

    codes_TB: Tensor
    """Shape ``(T, B)``, uint8; integer codes, or the bits of E4M3."""

    shift_T: Tensor
    """Shape ``(T,)``, float16."""

    scale_T: Tensor
    """Shape ``(T,)``, float16, not negative."""


def _to_half(values: Tensor) -> Tensor:
    return values.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def quantize(values_TB: Tensor, block_type: BlockType) -> QuantizedBlock:
    """Quantize one block of every token.

    Parameters
    ----------
    values_TB
        Shape ``(..., B)``, float32, finite.  Leading axes are kept.
    block_type
        Any but ``NONE``.

    Raises
    ------
    ValueError
        If ``block_type`` is ``NONE``: it has no codes.
    """
    if block_type is BlockType.NONE:
        raise ValueError("a block of type NONE has no codes")
    low, high = values_TB.amin(dim=-1), values_TB.amax(dim=-1)
    if block_type is BlockType.FP8:
        shift = _to_half((low + high) / 2)
        reach = (values_TB - shift.float().unsqueeze(-1)).abs().amax(dim=-1)
        scale = _to_half(reach / FP8_MAX)
    else:
        shift = _to_half(low)
        scale = _to_half((high - shift.float()).clamp_min(0) / (2**block_type.bits - 1))
    step = scale.float().unsqueeze(-1)
    # A zero step means a constant block: every code is zero and the shift says it all.
    units = (values_TB - shift.float().unsqueeze(-1)) / torch.where(step == 0, 1.0, step)
    units = torch.where(step == 0, 0.0, units)
    if block_type is BlockType.FP8:
        codes = units.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = units.round().clamp(0, 2**block_type.bits - 1).to(torch.uint8)
    return QuantizedBlock(codes, shift, scale)


def dequantize(block: QuantizedBlock, block_type: BlockType) -> Tensor:
    """Values that `quantize` stands for: shape of the codes, float32.

    Examples
    --------
    >>> values = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    >>> dequantize(quantize(values, BlockType.INT2), BlockType.INT2).tolist()
    [[0.0, 1.0, 2.0, 3.0]]
    """
    codes = block.codes_TB
    units = (
        codes.view(torch.float8_e4m3fn).float() if block_type is BlockType.FP8 else codes.float()
    )
    return units * block.scale_T.float().unsqueeze(-1) + block.shift_T.float().unsqueeze(-1)


def squared_error(values_TB: Tensor, block_type: BlockType) -> Tensor:
    """Summed squared error of coding the last axis as one block, per leading index.

    ``NONE`` leaves zeros, so its error is the energy of the values.
    """
    if block_type is BlockType.NONE:
        return values_TB.square().sum(dim=-1)
    coded = dequantize(quantize(values_TB, block_type), block_type)
    return (values_TB - coded).square().sum(dim=-1)
