"""Rows to codes on a GPU, for both profiles.

1. One kernel reads the engine's rows, turns keys back, subtracts the mean and multiplies
   with the directions, all in 32 bits.
2. In the entropy profile it then quantizes in registers: one byte per coefficient comes
   out, and a 32-bit code where that byte does not say all (`codec.kernels.step_tables`,
   whose `split_codes` makes of it what a blob stores).
3. In the paper's profile a block's shift and scale need the whole block, up to 1,024
   coefficients of a token, which no thread block holds.  The coefficients go through
   memory (for a chunk they stay in the second-level cache); a second kernel finds the
   ranges, a third makes the codes and packs them.

Given the same coefficients, symbols and bytes are those of `codec.step_quantizer`,
`codec.quantizer` and `codec.packing`.  The product sums in another order than theirs.

A codec of the entropy profile needs coefficients before it can say which rows are to be
stored exactly, and before these, from the keys, how each token is shifted.  So it would
call `project` with the direction of `codec.importance` as the only one, then `project` with
the ranks that follow (`codec.projection`), and `quantize_steps` for the rows that are left.
`encode_steps` is the last two in one, where all rows are to be coded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import CodePlane, StepTables, TokenSteps
from codec.kernels.triton_backend import LAUNCH_OPTIONS, launching_on, triton
from codec.kernels.triton_encode_kernels import (
    project_kernel,
    project_steps_kernel,
    quantize_steps_kernel,
)
from codec.kernels.triton_pack_kernels import pack_kernel, ranges_kernel
from codec.kernels.triton_rows import (
    PAIRS_PER_TILE,
    ROW_DTYPES,
    TOKENS_PER_TILE,
    Precision,
    RotaryTables,
    check_directions,
    check_shape,
    check_steps,
    check_together,
    rotary_arguments,
    row_shape,
)

COEFFICIENTS_PER_TILE: Final = 64


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Codes and metadata of a chunk, as the blob's sections have them."""

    packed: Tensor
    """Shape ``(bytes,)``, uint8; `BlockLayout.plane` cuts it."""

    shift_TB: Tensor
    """Shape ``(T, B)``, float16."""

    scale_TB: Tensor
    """Shape ``(T, B)``, float16."""


def encode_steps(
    rows_TLHD: Tensor,
    tables: StepTables,
    tokens: TokenSteps,
    *,
    mean_W: Tensor,
    forward_WC: Tensor,
    rotary: RotaryTables | None = None,
    precision: Precision = "ieee",
) -> CodePlane:
    """Project rows and quantize them, in one kernel.

    Parameters
    ----------
    rows_TLHD
        Shape ``(T, L, H, D)``, contiguous: values, or keys as the engine holds them.
    tables, tokens
        How coefficients are quantized, and ``tables.tokens`` of the rows' shifts and ranks.
    mean_W, forward_WC
        Mean and directions; these float16 or float32, any strides.
    rotary
        Tables of the tokens' positions: keys are turned back with them.
    precision
        How the product is made; anything but ``ieee`` moves codes near a border.

    Returns
    -------
    coded
        Symbols, and always a plane.

    Raises
    ------
    ValueError
        If a shape, type or device does not fit, or a coefficient is not finite.  Reading
        that waits for the device.
    """
    _check_rows(rows_TLHD, mean_W, forward_WC, rotary)
    size = (len(rows_TLHD), forward_WC.shape[1])
    check_steps(tables, tokens, size, rows_TLHD.device)
    symbols_CT, plane_CT, flag = _step_outputs(size, rows_TLHD.device)
    if symbols_CT.numel():
        with launching_on(rows_TLHD.device):
            project_steps_kernel[_grid(*size)](
                symbols_ptr=symbols_CT,
                plane_ptr=plane_CT,
                flag_ptr=flag,
                rank_ptr=tokens.rank_T,
                PRECISION=precision,
                **_step_arguments(tables, tokens),
                **_project_arguments(rows_TLHD, mean_W, forward_WC, rotary),
            )
    _refuse_flag(flag)
    return CodePlane(symbols_CT, plane_CT)


def quantize_steps(coefficients_TC: Tensor, tables: StepTables, tokens: TokenSteps) -> CodePlane:
    """Quantize coefficients that are there already, float32; the rest as `encode_steps`."""
    size = (coefficients_TC.shape[0], coefficients_TC.shape[1])
    device = coefficients_TC.device
    check_shape("coefficients_TC", coefficients_TC, size, torch.float32)
    check_together(device, coefficients_TC=coefficients_TC)
    check_steps(tables, tokens, size, device)
    symbols_CT, plane_CT, flag = _step_outputs(size, device)
    if symbols_CT.numel():
        with launching_on(device):
            quantize_steps_kernel[_grid(*size)](
                coefficients_ptr=coefficients_TC,
                symbols_ptr=symbols_CT,
                plane_ptr=plane_CT,
                flag_ptr=flag,
                num_tokens=size[0],
                num_coefficients=size[1],
                BLOCK_T=TOKENS_PER_TILE,
                BLOCK_C=COEFFICIENTS_PER_TILE,
                **_step_arguments(tables, tokens),
                **LAUNCH_OPTIONS,
            )
    _refuse_flag(flag)
    return CodePlane(symbols_CT, plane_CT)


def project(
    rows_TLHD: Tensor,
    *,
    mean_W: Tensor,
    forward_WC: Tensor,
    rank_T: Tensor | None = None,
    rotary: RotaryTables | None = None,
    precision: Precision = "ieee",
) -> Tensor:
    """Coefficients of rows, shape ``(T, C)``, float32; other arguments as for `encode_steps`.

    Parameters
    ----------
    rank_T
        Shape ``(T,)``, int32: `TokenSteps.rank_T`; without it, tokens have all coefficients.

    Raises
    ------
    ValueError
        If a shape, type or device does not fit, or a coefficient is not finite.
    """
    _check_rows(rows_TLHD, mean_W, forward_WC, rotary)
    size = (len(rows_TLHD), forward_WC.shape[1])
    if rank_T is None:
        rank_T = torch.full(size[:1], size[1], dtype=torch.int32, device=rows_TLHD.device)
    check_shape("rank_T", rank_T, size[:1], torch.int32)
    check_together(rows_TLHD.device, rank_T=rank_T)
    coefficients_TC = torch.empty(size, dtype=torch.float32, device=rows_TLHD.device)
    flag = torch.zeros(1, dtype=torch.int32, device=rows_TLHD.device)
    if coefficients_TC.numel():
        with launching_on(rows_TLHD.device):
            project_kernel[_grid(*size)](
                rank_ptr=rank_T,
                coefficients_ptr=coefficients_TC,
                flag_ptr=flag,
                PRECISION=precision,
                **_project_arguments(rows_TLHD, mean_W, forward_WC, rotary),
            )
    _refuse_flag(flag)
    return coefficients_TC


def encode_blocks(
    rows_TLHD: Tensor,
    *,
    mean_W: Tensor,
    forward_WC: Tensor,
    layout: BlockLayout,
    rotary: RotaryTables | None = None,
    precision: Precision = "ieee",
) -> PackedRows:
    """Project rows and code them block by block; arguments as for `encode_steps`.

    Parameters
    ----------
    layout
        Tables of the allocation, for as many tokens as there are rows.
    """
    coefficients_TC = project(
        rows_TLHD, mean_W=mean_W, forward_WC=forward_WC, rotary=rotary, precision=precision
    )
    return quantize_blocks(coefficients_TC, layout)


def quantize_blocks(coefficients_TC: Tensor, layout: BlockLayout) -> PackedRows:
    """Code finite coefficients, shape ``(T, C)``, float32, block by block.

    Raises
    ------
    ValueError
        If a shape, type or device does not fit.
    """
    num_tokens, num_coefficients = coefficients_TC.shape
    if num_tokens != layout.num_tokens or num_coefficients < layout.rank:
        raise ValueError(
            f"need coefficients ({layout.num_tokens}, {layout.rank} or more), "
            f"got {tuple(coefficients_TC.shape)}"
        )
    device = coefficients_TC.device
    check_shape("coefficients_TC", coefficients_TC, (num_tokens, num_coefficients), torch.float32)
    check_together(device, coefficients_TC=coefficients_TC, layout=layout.column_N)
    num_blocks, num_coded = len(layout.block_B3), len(layout.column_N)
    packed = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    shift_TB = torch.empty((num_tokens, num_blocks), dtype=torch.float16, device=device)
    scale_TB = torch.empty_like(shift_TB)
    result = PackedRows(packed, shift_TB, scale_TB)
    if not num_tokens or not num_coded:
        return result
    sizes = (num_tokens, num_coefficients, num_blocks)
    tiles = {"BLOCK_T": TOKENS_PER_TILE, "BLOCK_C": COEFFICIENTS_PER_TILE, **LAUNCH_OPTIONS}
    with launching_on(device):
        ranges_kernel[(num_blocks, triton.cdiv(num_tokens, TOKENS_PER_TILE))](
            coefficients_TC, layout.block_B3, shift_TB, scale_TB, *sizes, **tiles
        )
        pack_kernel[_grid(num_tokens, num_coded)](
            coefficients_TC,
            shift_TB,
            scale_TB,
            layout.column_N,
            layout.block_N,
            layout.bits_N,
            layout.row_start_N,
            packed,
            *sizes,
            num_coded,
            **tiles,
        )
    return result


def _grid(num_tokens: int, num_coefficients: int) -> tuple[int, int]:
    return (
        triton.cdiv(num_tokens, TOKENS_PER_TILE),
        triton.cdiv(num_coefficients, COEFFICIENTS_PER_TILE),
    )


def _check_rows(
    rows_TLHD: Tensor, mean_W: Tensor, forward_WC: Tensor, rotary: RotaryTables | None
) -> None:
    shape = row_shape(tuple(rows_TLHD.shape), rotary)
    check_shape("rows_TLHD", rows_TLHD, tuple(rows_TLHD.shape), *ROW_DTYPES)
    check_shape("mean_W", mean_W, (shape.width,), torch.float32)
    check_directions("forward_WC", forward_WC, (shape.width, forward_WC.shape[-1]), rows_TLHD)
    check_together(
        rows_TLHD.device,
        rows_TLHD=rows_TLHD,
        mean_W=mean_W,
        rotary=None if rotary is None else rotary.cos_TUF,
    )


def _step_arguments(tables: StepTables, tokens: TokenSteps) -> dict[str, Tensor]:
    return {
        "level_ptr": tables.level_C,
        "low_bits_ptr": tables.low_bits_C,
        "shift_ptr": tokens.shift_T,
        "step_ptr": tokens.step_T,
        "alphabet_ptr": tables.alphabet_K,
        "offset_ptr": tables.offset_K,
    }


def _project_arguments(
    rows_TLHD: Tensor,
    mean_W: Tensor,
    forward_WC: Tensor,
    rotary: RotaryTables | None,
) -> dict[str, object]:
    shape = row_shape(tuple(rows_TLHD.shape), rotary)
    undone = None if rotary is None else rotary.undone()
    return {
        "rows_ptr": rows_TLHD,
        "mean_ptr": mean_W,
        "forward_ptr": forward_WC,
        "num_tokens": len(rows_TLHD),
        "num_coefficients": forward_WC.shape[1],
        "stride_w": forward_WC.stride(0),
        "stride_c": forward_WC.stride(1),
        "row_width": shape.width,
        **rotary_arguments(undone, shape, mean_W),
        "BLOCK_T": TOKENS_PER_TILE,
        "BLOCK_C": COEFFICIENTS_PER_TILE,
        "BLOCK_P": PAIRS_PER_TILE,
        **LAUNCH_OPTIONS,
    }


def _step_outputs(size_TC: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols, the code plane, and a flag for what is not finite."""
    size_CT = size_TC[::-1]
    return (
        torch.empty(size_CT, dtype=torch.uint8, device=device),
        torch.empty(size_CT, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )


def _refuse_flag(flag: Tensor) -> None:
    if int(flag):
        raise ValueError("coefficients must be finite")
