"""The device side of `codec.kernels.triton_encode`: blocks, their ranges and packed codes.

Divisions are the exactly rounded ones, so that codes are those of `codec.quantizer`.
"""

from __future__ import annotations

from typing import Final

from codec.kernels.triton_backend import tl, triton

_HALF_MAX: Final = tl.constexpr(65504.0)
_FP8_MAX: Final = tl.constexpr(448.0)
#: Adding it and taking it away rounds a float in [0, 2**22] to an integer, ties to even.
_ROUNDER: Final = tl.constexpr(8388608.0)


@triton.jit  # type: ignore[untyped-decorator]
def _to_half(values: tl.tensor) -> tl.tensor:
    """Nearest float16, saturating."""
    return tl.minimum(tl.maximum(values, -_HALF_MAX), _HALF_MAX).to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def ranges_kernel(  # noqa: PLR0917 - kernels have no keyword-only arguments
    coefficients_ptr: tl.tensor,
    block_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Shift and scale of one block, for some tokens."""
    block = tl.program_id(0)
    tokens_T = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    token_mask_T = tokens_T < num_tokens
    first = tl.load(block_ptr + 3 * block)
    stop = tl.load(block_ptr + 3 * block + 1)
    bits = tl.load(block_ptr + 3 * block + 2)
    row_T1 = coefficients_ptr + tokens_T.to(tl.int64)[:, None] * num_coefficients
    low_T = tl.full((BLOCK_T,), float("inf"), dtype=tl.float32)
    high_T = tl.full((BLOCK_T,), float("-inf"), dtype=tl.float32)
    for start in range(first, stop, BLOCK_C):
        # Columns past the end are its last one again, which changes no extreme.
        columns_C = tl.minimum(start + tl.arange(0, BLOCK_C), stop - 1)
        values_TC = tl.load(row_T1 + columns_C[None, :], mask=token_mask_T[:, None], other=0.0)
        low_T = tl.minimum(low_T, tl.min(values_TC, axis=1))
        high_T = tl.maximum(high_T, tl.max(values_TC, axis=1))
    is_float = bits == 8
    shift_T = _to_half(tl.where(is_float, (low_T + high_T) * 0.5, low_T))
    middle_T = shift_T.to(tl.float32)
    # The farthest value is an extreme: rounding a difference keeps its order.
    reach_T = tl.maximum(tl.abs(high_T - middle_T), tl.abs(low_T - middle_T))
    span_T = tl.where(is_float, reach_T, tl.maximum(high_T - middle_T, 0.0))
    levels = tl.where(is_float, _FP8_MAX, ((1 << bits) - 1).to(tl.float32))
    scale_T = _to_half(tl.math.div_rn(span_T, tl.zeros_like(span_T) + levels))
    at_T = tokens_T.to(tl.int64) * num_blocks + block
    tl.store(shift_ptr + at_T, shift_T, mask=token_mask_T)
    tl.store(scale_ptr + at_T, scale_T, mask=token_mask_T)


@triton.jit  # type: ignore[untyped-decorator]
def _to_e4m3(values: tl.tensor) -> tl.tensor:
    """Bits of the nearest E4M3 of values within +-448, ties to even, as int32.

    In integers, because processors before compute capability 8.9 have no such conversion.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Keep 3 of 23 bits of mantissa; the exponent's bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2**-6 codes are multiples of 2**-9.
    subnormal = (tl.minimum(tl.abs(values), 1.0) * 512.0 + _ROUNDER - _ROUNDER).to(tl.int32)
    code = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def pack_kernel(  # noqa: PLR0917 - as above
    coefficients_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    column_ptr: tl.tensor,
    block_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    num_blocks: tl.tensor,
    num_coded: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Codes of some coefficients: a row of bytes each, each byte 4, 2 or 1 tokens of it."""
    bytes_1B = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[None, :]
    coded_N = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    coded_mask_N = coded_N < num_coded
    column_N1 = tl.load(column_ptr + coded_N, mask=coded_mask_N, other=0)[:, None]
    block_N1 = tl.load(block_ptr + coded_N, mask=coded_mask_N, other=0)[:, None]
    bits_N1 = tl.load(bits_ptr + coded_N, mask=coded_mask_N, other=8)[:, None]
    row_start_N = tl.load(row_start_ptr + coded_N, mask=coded_mask_N, other=0)
    is_float_N1 = bits_N1 == 8
    tokens_per_byte_N1 = 8 // bits_N1
    levels_N1 = tl.where(is_float_N1, 0, (1 << bits_N1) - 1).to(tl.float32)
    packed_NB = tl.zeros((BLOCK_C, BLOCK_T), dtype=tl.int32)
    for lane in tl.static_range(4):
        tokens_NB = bytes_1B * tokens_per_byte_N1 + lane
        mask_NB = (lane < tokens_per_byte_N1) & (tokens_NB < num_tokens) & coded_mask_N[:, None]
        row_NB = tokens_NB.to(tl.int64)
        value_at_NB = coefficients_ptr + row_NB * num_coefficients + column_N1
        metadata_NB = row_NB * num_blocks + block_N1
        values_NB = tl.load(value_at_NB, mask=mask_NB, other=0.0)
        shift_NB = tl.load(shift_ptr + metadata_NB, mask=mask_NB, other=0.0).to(tl.float32)
        scale_NB = tl.load(scale_ptr + metadata_NB, mask=mask_NB, other=0.0).to(tl.float32)
        is_constant_NB = scale_NB == 0
        units_NB = tl.math.div_rn(values_NB - shift_NB, tl.where(is_constant_NB, 1.0, scale_NB))
        units_NB = tl.where(is_constant_NB, 0.0, units_NB)
        whole_NB = tl.minimum(tl.maximum(units_NB, 0.0), levels_N1) + _ROUNDER - _ROUNDER
        float_NB = _to_e4m3(tl.minimum(tl.maximum(units_NB, -_FP8_MAX), _FP8_MAX))
        code_NB = tl.where(is_float_N1, float_NB, whole_NB.to(tl.int32))
        packed_NB |= tl.where(mask_NB, code_NB << (lane * bits_N1), 0)
    row_bytes_N1 = tl.cdiv(num_tokens * bits_N1, 8)
    mask_NB = coded_mask_N[:, None] & (bytes_1B < row_bytes_N1)
    at_NB = row_start_N[:, None] + bytes_1B
    tl.store(packed_ptr + at_NB, packed_NB.to(tl.uint8), mask=mask_NB)
