"""Codes to rows on a GPU, for both profiles: one kernel from bytes to what the engine wants.

Each thread block makes a tile of tokens by pairs of row elements: for some coefficients
at a time it reads their codes, turns them to numbers in registers and multiplies with
the directions; at the end it adds the mean, turns keys to their positions and rounds to
the wanted type.  No coefficient goes through memory.

In the entropy profile a code is its symbol, or stands in the code plane that
`codec.kernels.step_tables.join_codes` makes first of low bits and escapes, and checks.

Nothing of an untrusted blob is used as an address, so corrupt codes give wrong rows, not
a fault.  Rows may hold what is not a number: from a code of E4M3, or of escapes so large
that a sum overflows.  The caller looks for them.

A codec would write the rows of coded tokens so, and put them between those that are stored
exactly.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import CodePlane, StepTables, TokenSteps
from codec.kernels.triton_backend import LAUNCH_OPTIONS, launching_on, triton
from codec.kernels.triton_decode_kernels import blocks_to_rows_kernel, steps_to_rows_kernel
from codec.kernels.triton_rows import (
    PAIRS_PER_TILE,
    ROW_DTYPES,
    TOKENS_PER_TILE,
    Precision,
    RotaryTables,
    RowShape,
    check_directions,
    check_shape,
    check_steps,
    check_together,
    rotary_arguments,
    row_shape,
)

COEFFICIENTS_PER_STEP: Final = 32


def decode_steps(
    coded: CodePlane,
    tables: StepTables,
    tokens: TokenSteps,
    *,
    mean_W: Tensor,
    inverse_CW: Tensor,
    out_TLHD: Tensor,
    rotary: RotaryTables | None = None,
    precision: Precision = "ieee",
) -> None:
    """Write the rows that codes stand for.

    Parameters
    ----------
    coded, tables, tokens
        Codes of the whole chunk, as they were joined.
    mean_W, inverse_CW
        Mean and inverse directions of the layers of ``out_TLHD``; these float16 or
        float32, any strides, so a run of their columns will do.
    out_TLHD
        Shape ``(T', L, H, D)``, contiguous, float32, bfloat16 or float16: the first
        ``T'`` tokens of the chunk.
    rotary
        Tables of those tokens and layers: keys are turned to their positions with them.

    Raises
    ------
    ValueError
        If a shape, type or device does not fit.
    """
    symbols_CT, plane_CT = coded
    num_coefficients, row_tokens = symbols_CT.shape
    shape = _checked_rows(out_TLHD, mean_W, inverse_CW, rotary, num_coefficients)
    num_tokens = len(out_TLHD)
    if num_tokens > row_tokens:
        raise ValueError(f"need at most {row_tokens} tokens, got {num_tokens}")
    check_steps(tables, tokens, (row_tokens, num_coefficients), out_TLHD.device)
    check_shape("symbols_CT", symbols_CT, (num_coefficients, row_tokens), torch.uint8)
    if plane_CT is not None:
        check_shape("plane_CT", plane_CT, (num_coefficients, row_tokens), torch.int32)
    elif tables.num_planes:
        raise ValueError("need plane_CT: some coefficients keep low bits apart")
    check_together(out_TLHD.device, symbols_CT=symbols_CT, plane_CT=plane_CT)
    if out_TLHD.numel():
        with launching_on(out_TLHD.device):
            steps_to_rows_kernel[_grid(num_tokens, shape)](
                symbols_ptr=symbols_CT,
                plane_ptr=tables.level_C if plane_CT is None else plane_CT,
                level_ptr=tables.level_C,
                low_bits_ptr=tables.low_bits_C,
                shift_ptr=tokens.shift_T,
                step_ptr=tokens.step_T,
                rank_ptr=tokens.rank_T,
                alphabet_ptr=tables.alphabet_K,
                bias1_ptr=tables.bias1_K,
                bias2_ptr=tables.bias2_K,
                row_tokens=row_tokens,
                num_coefficients=num_coefficients,
                HAS_PLANE=plane_CT is not None,
                PRECISION=precision,
                **_row_arguments(out_TLHD, mean_W, inverse_CW, rotary, shape),
            )


def decode_blocks(
    packed: Tensor,
    shift_TB: Tensor,
    scale_TB: Tensor,
    *,
    layout: BlockLayout,
    mean_W: Tensor,
    inverse_CW: Tensor,
    out_TLHD: Tensor,
    rotary: RotaryTables | None = None,
    precision: Precision = "ieee",
) -> None:
    """Write the rows that packed codes stand for; other arguments as for `decode_steps`.

    Parameters
    ----------
    packed
        Shape ``(layout.num_bytes,)``, uint8: the planes of all types, in order.  That
        padding bits are zero is for `codec.packing.unpack` to say.
    shift_TB, scale_TB
        Shape ``(T, B)``, float16.
    inverse_CW
        At least as many directions as the allocation uses.
    """
    shape = _checked_rows(out_TLHD, mean_W, inverse_CW, rotary, None)
    if len(inverse_CW) < layout.rank:
        raise ValueError(f"need {layout.rank} directions or more, got {len(inverse_CW)}")
    num_tokens, num_blocks = len(out_TLHD), len(layout.block_B3)
    if num_tokens > layout.num_tokens:
        raise ValueError(f"need at most {layout.num_tokens} tokens, got {num_tokens}")
    check_shape("packed", packed, (layout.num_bytes,), torch.uint8)
    for name, halves_TB in (("shift_TB", shift_TB), ("scale_TB", scale_TB)):
        check_shape(name, halves_TB, (layout.num_tokens, num_blocks), torch.float16)
    check_together(
        out_TLHD.device,
        packed=packed,
        shift_TB=shift_TB,
        scale_TB=scale_TB,
        layout=layout.column_N,
    )
    if out_TLHD.numel():
        with launching_on(out_TLHD.device):
            blocks_to_rows_kernel[_grid(num_tokens, shape)](
                packed_ptr=packed,
                shift_ptr=shift_TB,
                scale_ptr=scale_TB,
                column_ptr=layout.column_N,
                block_ptr=layout.block_N,
                bits_ptr=layout.bits_N,
                row_start_ptr=layout.row_start_N,
                num_blocks=num_blocks,
                num_coded=len(layout.column_N),
                PRECISION=precision,
                **_row_arguments(out_TLHD, mean_W, inverse_CW, rotary, shape),
            )


def _grid(num_tokens: int, shape: RowShape) -> tuple[int, int]:
    return (
        triton.cdiv(num_tokens, TOKENS_PER_TILE),
        triton.cdiv(shape.num_pairs, PAIRS_PER_TILE),
    )


def _checked_rows(
    out_TLHD: Tensor,
    mean_W: Tensor,
    inverse_CW: Tensor,
    rotary: RotaryTables | None,
    num_coefficients: int | None,
) -> RowShape:
    shape = row_shape(tuple(out_TLHD.shape), rotary)
    rank = inverse_CW.shape[0] if num_coefficients is None else num_coefficients
    check_shape("out_TLHD", out_TLHD, tuple(out_TLHD.shape), *ROW_DTYPES)
    check_shape("mean_W", mean_W, (shape.width,), torch.float32)
    check_directions("inverse_CW", inverse_CW, (rank, shape.width), out_TLHD)
    check_together(
        out_TLHD.device,
        out_TLHD=out_TLHD,
        mean_W=mean_W,
        rotary=None if rotary is None else rotary.cos_TUF,
    )
    return shape


def _row_arguments(
    out_TLHD: Tensor,
    mean_W: Tensor,
    inverse_CW: Tensor,
    rotary: RotaryTables | None,
    shape: RowShape,
) -> dict[str, object]:
    return {
        "mean_ptr": mean_W,
        "inverse_ptr": inverse_CW,
        "out_ptr": out_TLHD,
        "num_tokens": len(out_TLHD),
        "stride_c": inverse_CW.stride(0),
        "stride_w": inverse_CW.stride(1),
        "row_width": shape.width,
        **rotary_arguments(rotary, shape, mean_W),
        "BLOCK_T": TOKENS_PER_TILE,
        "BLOCK_P": PAIRS_PER_TILE,
        "BLOCK_K": COEFFICIENTS_PER_STEP,
        **LAUNCH_OPTIONS,
    }
