"""The device side of `codec.kernels.triton_decode`, which says what it does."""

from __future__ import annotations

from codec.kernels.triton_backend import tl, triton
from codec.kernels.triton_encode_kernels import LAST_CLASS
from codec.kernels.triton_rows import load_turns, pair_elements


@triton.jit  # type: ignore[untyped-decorator]
def _load_directions(  # noqa: PLR0917 - kernels have no keyword-only arguments
    inverse_ptr: tl.tensor,
    columns_K: tl.tensor,
    column_mask_K: tl.tensor,
    elements_P: tl.tensor,
    element_mask_P: tl.tensor,
    stride_c: tl.tensor,
    stride_w: tl.tensor,
) -> tl.tensor:
    """A tile of the inverse directions, 32 bits."""
    at_KP = columns_K[:, None] * stride_c + elements_P[None, :] * stride_w
    mask_KP = column_mask_K[:, None] & element_mask_P[None, :]
    return tl.load(inverse_ptr + at_KP, mask=mask_KP, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows(  # noqa: PLR0917 - as above
    first_TP: tl.tensor,
    second_TP: tl.tensor,
    mean_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tokens_T: tl.tensor,
    pairs_P: tl.tensor,
    num_tokens: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """Add the mean, turn, round and store one tile."""
    tokens_T1 = tokens_T.to(tl.int64)[:, None]
    token_mask_T1 = (tokens_T < num_tokens)[:, None]
    pair_mask_P = pairs_P < num_pairs
    head_P, within_P, first_P, second_P, has_second_P = pair_elements(
        pairs_P, HEAD_DIM, ROTARY_PAIRS, INTERLEAVED
    )
    second_mask_P = pair_mask_P & has_second_P
    first_TP += tl.load(mean_ptr + first_P, mask=pair_mask_P, other=0.0)[None, :]
    second_TP += tl.load(mean_ptr + second_P, mask=second_mask_P, other=0.0)[None, :]
    if ROTARY_PAIRS > 0:
        cos_TP, sin_TP = load_turns(
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
        turned_TP = first_TP * cos_TP - second_TP * sin_TP
        second_TP = second_TP * cos_TP + first_TP * sin_TP
        first_TP = turned_TP
    row_T1 = out_ptr + tokens_T1 * row_width
    dtype = out_ptr.dtype.element_ty
    mask_TP = token_mask_T1 & pair_mask_P[None, :]
    tl.store(row_T1 + first_P[None, :], first_TP.to(dtype), mask=mask_TP)
    mask_TP = token_mask_T1 & second_mask_P[None, :]
    tl.store(row_T1 + second_P[None, :], second_TP.to(dtype), mask=mask_TP)


@triton.jit  # type: ignore[untyped-decorator]
def _load_steps(  # noqa: PLR0917 - as above
    symbols_ptr: tl.tensor,
    plane_ptr: tl.tensor,
    level_ptr: tl.tensor,
    low_bits_ptr: tl.tensor,
    alphabet_ptr: tl.tensor,
    bias1_ptr: tl.tensor,
    bias2_ptr: tl.tensor,
    columns_K: tl.tensor,
    tokens_T: tl.tensor,
    shift_T: tl.tensor,
    step_T: tl.tensor,
    rank_T: tl.tensor,
    num_coefficients: tl.tensor,
    row_tokens: tl.tensor,
    HAS_PLANE: tl.constexpr,
) -> tl.tensor:
    """Coefficients of one tile, tokens first; zeros from the rank of a token on."""
    column_mask_K = columns_K < num_coefficients
    mask_TK = column_mask_K[None, :] & (columns_K[None, :] < rank_T[:, None])
    level_K = tl.load(level_ptr + columns_K, mask=column_mask_K, other=0)
    class_TK = tl.minimum(tl.maximum(level_K[None, :] + shift_T[:, None], 0), LAST_CLASS)
    at_TK = columns_K.to(tl.int64)[None, :] * row_tokens + tokens_T[:, None]
    symbol_TK = tl.load(symbols_ptr + at_TK, mask=mask_TK, other=0).to(tl.int32)
    is_negative_TK = (symbol_TK & 1) == 1
    magnitude_TK = ((symbol_TK + 1) >> 1).to(tl.float32)
    if HAS_PLANE:
        low_bits_K = tl.load(low_bits_ptr + columns_K, mask=column_mask_K, other=0)
        escape_TK = tl.load(alphabet_ptr + class_TK) - 1
        is_escape_TK = (symbol_TK == escape_TK) & (escape_TK > 0)
        is_in_plane_TK = mask_TK & (is_escape_TK | (low_bits_K[None, :] > 0))
        code_TK = tl.load(plane_ptr + at_TK, mask=is_in_plane_TK, other=0)
        is_negative_TK = tl.where(is_in_plane_TK, code_TK < 0, is_negative_TK)
        magnitude_TK = tl.where(is_in_plane_TK, tl.abs(code_TK.to(tl.float32)), magnitude_TK)
    bias1_TK = tl.load(bias1_ptr + class_TK)
    bias2_TK = tl.load(bias2_ptr + class_TK)
    bias_TK = tl.where(magnitude_TK == 1.0, bias1_TK, bias2_TK)
    value_TK = (magnitude_TK - bias_TK) * step_T[:, None]
    value_TK = tl.where(is_negative_TK, -value_TK, value_TK)
    return tl.where(mask_TK & (magnitude_TK > 0.0), value_TK, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def steps_to_rows_kernel(  # noqa: PLR0917 - as above
    symbols_ptr: tl.tensor,
    plane_ptr: tl.tensor,
    level_ptr: tl.tensor,
    low_bits_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    step_ptr: tl.tensor,
    rank_ptr: tl.tensor,
    alphabet_ptr: tl.tensor,
    bias1_ptr: tl.tensor,
    bias2_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    row_tokens: tl.tensor,
    num_coefficients: tl.tensor,
    stride_c: tl.tensor,
    stride_w: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HAS_PLANE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Symbols and code plane to rows."""
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    pairs_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    pair_mask_P = pairs_P < num_pairs
    _, _, first_P, second_P, has_second_P = pair_elements(
        pairs_P, HEAD_DIM, ROTARY_PAIRS, INTERLEAVED
    )
    token_mask_T = tokens_T < num_tokens
    shift_T = tl.load(shift_ptr + tokens_T, mask=token_mask_T, other=0)
    step_T = tl.load(step_ptr + tokens_T, mask=token_mask_T, other=1.0)
    rank_T = tl.load(rank_ptr + tokens_T, mask=token_mask_T, other=0)
    # What no token of the tile is coded with costs no product.
    num_wanted = tl.minimum(tl.max(rank_T, axis=0), num_coefficients)
    first_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    second_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    for start in range(0, num_wanted, BLOCK_K):
        columns_K = start + tl.arange(0, BLOCK_K)
        column_mask_K = columns_K < num_coefficients
        values_TK = _load_steps(
            symbols_ptr,
            plane_ptr,
            level_ptr,
            low_bits_ptr,
            alphabet_ptr,
            bias1_ptr,
            bias2_ptr,
            columns_K,
            tokens_T,
            shift_T,
            step_T,
            rank_T,
            num_coefficients,
            row_tokens,
            HAS_PLANE,
        )
        tile = _load_directions(
            inverse_ptr, columns_K, column_mask_K, first_P, pair_mask_P, stride_c, stride_w
        )
        first_TP = tl.dot(values_TK, tile, first_TP, input_precision=PRECISION)
        mask_P = pair_mask_P & has_second_P
        tile = _load_directions(
            inverse_ptr, columns_K, column_mask_K, second_P, mask_P, stride_c, stride_w
        )
        second_TP = tl.dot(values_TK, tile, second_TP, input_precision=PRECISION)
    _write_rows(
        first_TP,
        second_TP,
        mean_ptr,
        out_ptr,
        cos_ptr,
        sin_ptr,
        table_ptr,
        tokens_T,
        pairs_P,
        num_tokens,
        row_width,
        num_tables,
        num_heads,
        num_pairs,
        HEAD_DIM,
        ROTARY_PAIRS,
        INTERLEAVED,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _from_e4m3(codes: tl.tensor) -> tl.tensor:
    """Values of E4M3 bits, exact; in integers, as `codec.kernels.triton_pack_kernels` says."""
    magnitude = codes & 0x7F
    normal = ((magnitude + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where((codes & 0x80) != 0, -value, value)


@triton.jit  # type: ignore[untyped-decorator]
def _load_codes(  # noqa: PLR0917 - as above
    packed_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    block_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    coded_K: tl.tensor,
    tokens_T: tl.tensor,
    num_tokens: tl.tensor,
    num_coded: tl.tensor,
    num_blocks: tl.tensor,
) -> tl.tensor:
    """Coefficients of one tile, tokens first; zeros outside."""
    coded_mask_K = coded_K < num_coded
    mask_TK = (tokens_T < num_tokens)[:, None] & coded_mask_K[None, :]
    block_1K = tl.load(block_ptr + coded_K, mask=coded_mask_K, other=0)[None, :]
    bits_1K = tl.load(bits_ptr + coded_K, mask=coded_mask_K, other=8)[None, :]
    row_start_1K = tl.load(row_start_ptr + coded_K, mask=coded_mask_K, other=0)[None, :]
    tokens_T1 = tokens_T[:, None]
    bit_TK = tokens_T1 * bits_1K
    byte_TK = tl.load(packed_ptr + row_start_1K + (bit_TK >> 3), mask=mask_TK, other=0)
    code_TK = (byte_TK.to(tl.int32) >> (bit_TK & 7)) & ((1 << bits_1K) - 1)
    units_TK = tl.where(bits_1K == 8, _from_e4m3(code_TK), code_TK.to(tl.float32))
    metadata_TK = tokens_T1.to(tl.int64) * num_blocks + block_1K
    shift_TK = tl.load(shift_ptr + metadata_TK, mask=mask_TK, other=0.0).to(tl.float32)
    scale_TK = tl.load(scale_ptr + metadata_TK, mask=mask_TK, other=0.0).to(tl.float32)
    return units_TK * scale_TK + shift_TK


@triton.jit  # type: ignore[untyped-decorator]
def blocks_to_rows_kernel(  # noqa: PLR0917 - as above
    packed_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    column_ptr: tl.tensor,
    block_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    row_start_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_blocks: tl.tensor,
    num_coded: tl.tensor,
    stride_c: tl.tensor,
    stride_w: tl.tensor,
    row_width: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Packed codes to rows."""
    tokens_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    pairs_P = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    pair_mask_P = pairs_P < num_pairs
    _, _, first_P, second_P, has_second_P = pair_elements(
        pairs_P, HEAD_DIM, ROTARY_PAIRS, INTERLEAVED
    )
    first_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    second_TP = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    for start in range(0, num_coded, BLOCK_K):
        coded_K = start + tl.arange(0, BLOCK_K)
        coded_mask_K = coded_K < num_coded
        columns_K = tl.load(column_ptr + coded_K, mask=coded_mask_K, other=0)
        values_TK = _load_codes(
            packed_ptr,
            shift_ptr,
            scale_ptr,
            block_ptr,
            bits_ptr,
            row_start_ptr,
            coded_K,
            tokens_T,
            num_tokens,
            num_coded,
            num_blocks,
        )
        tile = _load_directions(
            inverse_ptr, columns_K, coded_mask_K, first_P, pair_mask_P, stride_c, stride_w
        )
        first_TP = tl.dot(values_TK, tile, first_TP, input_precision=PRECISION)
        mask_P = pair_mask_P & has_second_P
        tile = _load_directions(
            inverse_ptr, columns_K, coded_mask_K, second_P, mask_P, stride_c, stride_w
        )
        second_TP = tl.dot(values_TK, tile, second_TP, input_precision=PRECISION)
    _write_rows(
        first_TP,
        second_TP,
        mean_ptr,
        out_ptr,
        cos_ptr,
        sin_ptr,
        table_ptr,
        tokens_T,
        pairs_P,
        num_tokens,
        row_width,
        num_tables,
        num_heads,
        num_pairs,
        HEAD_DIM,
        ROTARY_PAIRS,
        INTERLEAVED,
    )
