"""The device side of `codec.kernels.triton_encode`: products, and codes of the step quantizer.

Divisions are the exactly rounded ones, so that codes are those of `codec.step_quantizer`;
no product is added to anything before it is rounded.
"""

from __future__ import annotations

from typing import Final

from codec.kernels.triton_backend import tl, triton
from codec.kernels.triton_rows import load_turns, pair_elements
from codec.step_quantizer import MAX_CODE
from codec.symbol_classes import NUM_CLASSES

_MAX_CODE: Final = tl.constexpr(MAX_CODE)
#: The next float past it.
_PAST_CODES: Final = tl.constexpr(float(MAX_CODE + 1))
LAST_CLASS: Final = tl.constexpr(NUM_CLASSES - 1)
"""Where kernels of both directions stop on the ladder of classes."""


@triton.jit  # type: ignore[untyped-decorator]
def _project(  # noqa: PLR0917 - kernels have no keyword-only arguments
    rows_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    forward_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    tokens_T: tl.tensor,
    columns_C: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    stride_w: tl.tensor,
    stride_c: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """Coefficients of one tile, 32 bits; zeros from the rank of a token on."""
    rank_T = tl.load(rank_ptr + tokens_T, mask=tokens_T < num_tokens, other=0)
    # A tile that lies past the rank of all its tokens costs no product.
    has_any = tl.max(rank_T, axis=0) > tl.min(columns_C, axis=0)
    num_wanted = tl.where(has_any, num_pairs, 0)
    tokens_T1 = tokens_T.to(tl.int64)[:, None]
    token_mask_T1 = (tokens_T < num_tokens)[:, None]
    column_mask_1C = (columns_C < num_coefficients)[None, :]
    result = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for start in range(0, num_wanted, BLOCK_P):
        pairs_P = start + tl.arange(0, BLOCK_P)
        pair_mask_P = pairs_P < num_pairs
        head_P, within_P, first_P, second_P, has_second_P = pair_elements(
            pairs_P, HEAD_DIM, ROTARY_PAIRS, INTERLEAVED
        )
        second_mask_P = pair_mask_P & has_second_P
        row_T1 = rows_ptr + tokens_T1 * row_width
        mask_TP = token_mask_T1 & pair_mask_P[None, :]
        first = tl.load(row_T1 + first_P[None, :], mask=mask_TP, other=0.0).to(tl.float32)
        mask_TP = token_mask_T1 & second_mask_P[None, :]
        second = tl.load(row_T1 + second_P[None, :], mask=mask_TP, other=0.0).to(tl.float32)
        if ROTARY_PAIRS > 0:
            cos, sin = load_turns(
                cos_ptr,
                sin_ptr,
                table_ptr,
                num_tables,
                num_heads,
                tokens_T1,
                token_mask_T1,
                head_P,
                within_P,
                pair_mask_P,
                ROTARY_PAIRS,
            )
            turned = first * cos - second * sin
            second = second * cos + first * sin
            first = turned
        first -= tl.load(mean_ptr + first_P, mask=pair_mask_P, other=0.0)[None, :]
        second -= tl.load(mean_ptr + second_P, mask=second_mask_P, other=0.0)[None, :]
        column_1C = forward_ptr + columns_C[None, :] * stride_c
        mask_PC = pair_mask_P[:, None] & column_mask_1C
        weights = tl.load(column_1C + first_P[:, None] * stride_w, mask=mask_PC, other=0.0)
        result = tl.dot(first, weights.to(tl.float32), result, input_precision=PRECISION)
        mask_PC = second_mask_P[:, None] & column_mask_1C
        weights = tl.load(column_1C + second_P[:, None] * stride_w, mask=mask_PC, other=0.0)
        result = tl.dot(second, weights.to(tl.float32), result, input_precision=PRECISION)
    return tl.where(columns_C[None, :] < rank_T[:, None], result, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _flag_unless_finite(values_TC: tl.tensor, mask_TC: tl.tensor, flag_ptr: tl.tensor) -> tl.tensor:
    """Raise the flag if a value is not finite; the values with zeros in place of those."""
    is_bad_TC = mask_TC & ~(tl.abs(values_TC) < float("inf"))
    num_bad = tl.sum(tl.sum(is_bad_TC.to(tl.int32), axis=1), axis=0)
    tl.store(flag_ptr, 1, mask=num_bad > 0)
    return tl.where(is_bad_TC, 0.0, values_TC)


@triton.jit  # type: ignore[untyped-decorator]
def _write_codes(  # noqa: PLR0917 - as above
    values_TC: tl.tensor,
    level_ptr: tl.tensor,
    low_bits_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    step_ptr: tl.tensor,
    alphabet_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    symbols_ptr: tl.tensor,
    plane_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    tokens_T: tl.tensor,
    columns_C: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
) -> None:
    """Quantize one tile; a code goes to the plane only where its symbol does not say all."""
    token_mask_T = tokens_T < num_tokens
    column_mask_C = columns_C < num_coefficients
    mask_TC = token_mask_T[:, None] & column_mask_C[None, :]
    values_TC = _flag_unless_finite(values_TC, mask_TC, flag_ptr)
    level_C = tl.load(level_ptr + columns_C, mask=column_mask_C, other=0)
    low_bits_1C = tl.load(low_bits_ptr + columns_C, mask=column_mask_C, other=0)[None, :]
    shift_T = tl.load(shift_ptr + tokens_T, mask=token_mask_T, other=0)
    step_T = tl.load(step_ptr + tokens_T, mask=token_mask_T, other=1.0)
    class_TC = tl.minimum(tl.maximum(level_C[None, :] + shift_T[:, None], 0), LAST_CLASS)
    offset_TC = tl.load(offset_ptr + class_TC)
    escape_TC = tl.load(alphabet_ptr + class_TC) - 1
    units_TC = tl.math.div_rn(tl.abs(values_TC), tl.zeros_like(values_TC) + step_T[:, None])
    magnitude_TC = tl.minimum(tl.floor(units_TC + offset_TC), _PAST_CODES)
    code_TC = tl.minimum(magnitude_TC.to(tl.int32), _MAX_CODE)
    code_TC = tl.where(values_TC < 0, -code_TC, code_TC)
    high_TC = code_TC >> low_bits_1C
    symbol_TC = tl.minimum(tl.where(high_TC < 0, -2 * high_TC - 1, 2 * high_TC), escape_TC)
    at_TC = columns_C.to(tl.int64)[None, :] * num_tokens + tokens_T[:, None]
    tl.store(symbols_ptr + at_TC, symbol_TC.to(tl.uint8), mask=mask_TC)
    is_escape_TC = (symbol_TC == escape_TC) & (escape_TC > 0)
    is_in_plane_TC = mask_TC & (is_escape_TC | (low_bits_1C > 0))
    tl.store(plane_ptr + at_TC, code_TC, mask=is_in_plane_TC)


@triton.jit  # type: ignore[untyped-decorator]
def project_steps_kernel(  # noqa: PLR0917 - as above
    rows_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    forward_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    level_ptr: tl.tensor,
    low_bits_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    step_ptr: tl.tensor,
    alphabet_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    symbols_ptr: tl.tensor,
    plane_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    stride_w: tl.tensor,
    stride_c: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Rows to codes."""
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    values_TC = _project(
        rows_ptr,
        mean_ptr,
        forward_ptr,
        cos_ptr,
        sin_ptr,
        table_ptr,
        rank_ptr,
        tokens_T,
        columns_C,
        num_tokens,
        num_coefficients,
        stride_w,
        stride_c,
        row_width,
        num_tables,
        num_heads,
        num_pairs,
        HEAD_DIM,
        ROTARY_PAIRS,
        INTERLEAVED,
        PRECISION,
        BLOCK_T,
        BLOCK_C,
        BLOCK_P,
    )
    _write_codes(
        values_TC,
        level_ptr,
        low_bits_ptr,
        shift_ptr,
        step_ptr,
        alphabet_ptr,
        offset_ptr,
        symbols_ptr,
        plane_ptr,
        flag_ptr,
        tokens_T,
        columns_C,
        num_tokens,
        num_coefficients,
    )


@triton.jit  # type: ignore[untyped-decorator]
def quantize_steps_kernel(  # noqa: PLR0917 - as above
    coefficients_ptr: tl.tensor,
    level_ptr: tl.tensor,
    low_bits_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    step_ptr: tl.tensor,
    alphabet_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    symbols_ptr: tl.tensor,
    plane_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """Coefficients to codes."""
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_TC = (tokens_T < num_tokens)[:, None] & (columns_C < num_coefficients)[None, :]
    at_TC = tokens_T.to(tl.int64)[:, None] * num_coefficients + columns_C[None, :]
    values_TC = tl.load(coefficients_ptr + at_TC, mask=mask_TC, other=0.0)
    _write_codes(
        values_TC,
        level_ptr,
        low_bits_ptr,
        shift_ptr,
        step_ptr,
        alphabet_ptr,
        offset_ptr,
        symbols_ptr,
        plane_ptr,
        flag_ptr,
        tokens_T,
        columns_C,
        num_tokens,
        num_coefficients,
    )


@triton.jit  # type: ignore[untyped-decorator]
def project_kernel(  # noqa: PLR0917 - as above
    rows_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    forward_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    coefficients_ptr: tl.tensor,
    flag_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    stride_w: tl.tensor,
    stride_c: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Rows to coefficients."""
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    values_TC = _project(
        rows_ptr,
        mean_ptr,
        forward_ptr,
        cos_ptr,
        sin_ptr,
        table_ptr,
        rank_ptr,
        tokens_T,
        columns_C,
        num_tokens,
        num_coefficients,
        stride_w,
        stride_c,
        row_width,
        num_tables,
        num_heads,
        num_pairs,
        HEAD_DIM,
        ROTARY_PAIRS,
        INTERLEAVED,
        PRECISION,
        BLOCK_T,
        BLOCK_C,
        BLOCK_P,
    )
    mask_TC = (tokens_T < num_tokens)[:, None] & (columns_C < num_coefficients)[None, :]
    values_TC = _flag_unless_finite(values_TC, mask_TC, flag_ptr)
    at_TC = tokens_T.to(tl.int64)[:, None] * num_coefficients + columns_C[None, :]
    tl.store(coefficients_ptr + at_TC, values_TC, mask=mask_TC)
