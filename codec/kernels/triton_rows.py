"""What the fused kernels of both directions share: how a row is cut, and its rotation.

Kernels walk a row in *pairs* of elements of one head, so that a rotation needs nothing
from another thread block.  Of a head of ``D`` elements whose first ``2 F`` rotate, pair
``i < F`` is the rotary pair ``i``; the rest is halved, so that both members of
consecutive pairs are consecutive elements.  Keys, values (``F = 0``), both styles and
odd heads (a last pair without second member) go through the same code.

Importing this without Triton raises `BackendUnavailable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from codec.kernels.step_tables import StepTables, TokenSteps
from codec.kernels.triton_backend import tl, triton
from codec.rope import TABLE_DTYPES, RotarySpec

Precision = Literal["ieee", "tf32x3", "tf32"]
"""How products of 32-bit floats are made: exactly, in three tensor-core passes, or in one."""

TOKENS_PER_TILE: Final = 64
PAIRS_PER_TILE: Final = 32
ROW_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

_MAX_SPAN: Final = 2**31


@dataclass(frozen=True, kw_only=True)
class RotaryTables:
    """Cosines and sines of some positions, once for each distinct layer."""

    cos_TUF: Tensor
    """Shape ``(T, U, F)``, float32."""

    sin_TUF: Tensor
    """Shape ``(T, U, F)``, float32."""

    table_of_layer_L: Tensor
    """Shape ``(L,)``, int32: which of the ``U`` each layer uses."""

    is_interleaved: bool
    """Whether pairs are neighbors (GPT-J), rather than half the rotary part apart."""

    @classmethod
    def of(cls, spec: RotarySpec, positions_T: Tensor) -> RotaryTables:
        """Tables that `RotarySpec.rotate` uses, on the device of ``positions_T``.

        Parameters
        ----------
        positions_T
            Shape ``(T,)``, integers.

        Raises
        ------
        UnsupportedModelError
            If a position lies past those that ``spec`` holds for.
        ValueError
            If the positions are not a vector of integers.
        """
        if positions_T.ndim != 1 or positions_T.is_floating_point():
            raise ValueError(
                f"need integer positions (T,), got {positions_T.dtype} {tuple(positions_T.shape)}"
            )
        if spec.max_positions is not None and len(positions_T):
            spec.check_length(int(positions_T.max()) + 1)
        fields, device = spec.to_dict(), positions_T.device
        rows = fields["rows"]
        freq_UF = torch.tensor([r["inv_freq"] for r in rows], dtype=torch.float32, device=device)
        scaling_U1 = torch.tensor([[r["scaling"]] for r in rows], dtype=torch.float32).to(device)
        angles_TUF = positions_T.to(torch.float32)[:, None, None] * freq_UF
        dtype = TABLE_DTYPES[spec.table_dtype]
        cos_TUF, sin_TUF = (
            (table * scaling_U1).to(dtype).to(torch.float32).contiguous()
            for table in (angles_TUF.cos(), angles_TUF.sin())
        )
        return cls(
            cos_TUF=cos_TUF,
            sin_TUF=sin_TUF,
            table_of_layer_L=torch.tensor(fields["row_of_layer"], dtype=torch.int32, device=device),
            is_interleaved=spec.style == "interleaved",
        )

    def undone(self) -> RotaryTables:
        """Tables whose rotation is the exact inverse: the transpose over ``cos^2 + sin^2``."""
        norm_TUF = self.cos_TUF.square() + self.sin_TUF.square()
        return RotaryTables(
            cos_TUF=self.cos_TUF / norm_TUF,
            sin_TUF=-self.sin_TUF / norm_TUF,
            table_of_layer_L=self.table_of_layer_L,
            is_interleaved=self.is_interleaved,
        )


@dataclass(frozen=True, slots=True)
class RowShape:
    """How many layers, heads, and elements of a head a row has, and how many of these rotate."""

    num_layers: int
    num_heads: int
    head_dim: int
    num_rotary_pairs: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.num_layers * self.num_heads * self.head_dim

    @property
    def pairs_per_head(self) -> int:
        """Pairs that a head is cut into; the last may lack its second member."""
        return self.num_rotary_pairs + (self.head_dim - 2 * self.num_rotary_pairs + 1) // 2

    @property
    def num_pairs(self) -> int:
        """Pairs that a row is cut into."""
        return self.num_layers * self.num_heads * self.pairs_per_head


def row_shape(shape_TLHD: tuple[int, ...], rotary: RotaryTables | None) -> RowShape:
    """Check that rows of that shape and these tables fit each other.

    Raises
    ------
    ValueError
        If they do not.
    """
    if len(shape_TLHD) != 4:
        raise ValueError(f"need rows (T, L, H, D), got {shape_TLHD}")
    num_tokens, num_layers, num_heads, head_dim = shape_TLHD
    if rotary is None:
        return RowShape(num_layers, num_heads, head_dim, 0)
    num_tables, num_pairs = rotary.cos_TUF.shape[1:]
    if len(rotary.cos_TUF) != num_tokens or len(rotary.table_of_layer_L) != num_layers:
        raise ValueError(
            f"need tables of {num_tokens} tokens and {num_layers} layers, "
            f"got {len(rotary.cos_TUF)} and {len(rotary.table_of_layer_L)}"
        )
    if head_dim < 2 * num_pairs or rotary.sin_TUF.shape != (num_tokens, num_tables, num_pairs):
        raise ValueError(f"tables of {num_pairs} pairs do not fit heads of {head_dim}")
    return RowShape(num_layers, num_heads, head_dim, num_pairs)


def rotary_arguments(
    rotary: RotaryTables | None, shape: RowShape, stand_in: Tensor
) -> dict[str, Tensor | int]:
    """Keyword arguments of a kernel that say how to rotate; ``stand_in`` is never read."""
    return {
        "cos_ptr": stand_in if rotary is None else rotary.cos_TUF,
        "sin_ptr": stand_in if rotary is None else rotary.sin_TUF,
        "table_ptr": stand_in if rotary is None else rotary.table_of_layer_L,
        "num_tables": 1 if rotary is None else rotary.cos_TUF.shape[1],
        "num_heads": shape.num_heads,
        "num_pairs": shape.num_pairs,
        "HEAD_DIM": shape.head_dim,
        "ROTARY_PAIRS": shape.num_rotary_pairs,
        "INTERLEAVED": rotary is not None and rotary.is_interleaved,
    }


def check_together(device: torch.device, **arrays: Tensor | None) -> None:
    """Refuse arrays that a kernel could not read: on another device, or not contiguous.

    Raises
    ------
    ValueError
        Naming the array.
    """
    for name, array in arrays.items():
        if array is None:
            continue
        if array.device != device:
            raise ValueError(f"{name} must be on {device}, got {array.device}")
        if not array.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def check_shape(name: str, array: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Refuse an array of another shape or type.

    Raises
    ------
    ValueError
        Naming the array, what is needed, and what was found.
    """
    if tuple(array.shape) != shape or array.dtype not in dtypes:
        raise ValueError(
            f"{name} must be {' or '.join(map(str, dtypes))} of shape {shape}, "
            f"got {array.dtype} {tuple(array.shape)}"
        )


def check_steps(
    tables: StepTables, tokens: TokenSteps, size_TC: tuple[int, int], device: torch.device
) -> None:
    """Refuse tables of the step quantizer that are of other tokens, coefficients or devices.

    Raises
    ------
    ValueError
        With what is needed, and what was found.
    """
    found = (len(tokens.shift_T), tables.rank)
    if found != size_TC:
        raise ValueError(
            f"need steps of {size_TC[0]} tokens and {size_TC[1]} coefficients, "
            f"got {found[0]} and {found[1]}"
        )
    check_shape("shift_T", tokens.shift_T, size_TC[:1], torch.int32)
    check_shape("step_T", tokens.step_T, size_TC[:1], torch.float32)
    check_shape("rank_T", tokens.rank_T, size_TC[:1], torch.int32)
    check_together(device, tables=tables.level_C, **tokens._asdict())


def check_directions(name: str, array: Tensor, shape: tuple[int, int], rows: Tensor) -> None:
    """Refuse directions of another shape or device, or too far apart for 32-bit offsets.

    Raises
    ------
    ValueError
        Naming the array, what is needed, and what was found.
    """
    check_shape(name, array, shape, torch.float32, torch.float16)
    # Any strides will do, so only an empty run is asked whether it is contiguous.
    check_together(rows.device, **{name: array[:0]})
    span = sum(n * s for n, s in zip(array.shape, array.stride(), strict=True))
    if span >= _MAX_SPAN:
        raise ValueError(f"{name} must span fewer than {_MAX_SPAN} elements, got {span}")


@triton.jit  # type: ignore[untyped-decorator]
def pair_elements(
    pairs_P: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> tl.tensor:
    """Of each pair: its head, its number in the head, both elements, whether it has two."""
    REST: tl.constexpr = (HEAD_DIM - 2 * ROTARY_PAIRS + 1) // 2
    head = pairs_P // (ROTARY_PAIRS + REST)
    within = pairs_P % (ROTARY_PAIRS + REST)
    rotates = within < ROTARY_PAIRS
    if INTERLEAVED:
        first = tl.where(rotates, 2 * within, within + ROTARY_PAIRS)
        second = tl.where(rotates, first + 1, first + REST)
    else:
        first = tl.where(rotates, within, within + ROTARY_PAIRS)
        second = tl.where(rotates, first + ROTARY_PAIRS, first + REST)
    has_second = second < HEAD_DIM
    start = head * HEAD_DIM
    return head, within, start + first, start + second, has_second


@triton.jit  # type: ignore[untyped-decorator]
def load_turns(  # noqa: PLR0917 - kernels have no keyword-only arguments
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    table_ptr: tl.tensor,
    num_tables: tl.tensor,
    num_heads: tl.tensor,
    tokens_B1: tl.tensor,
    token_mask_B1: tl.tensor,
    head_P: tl.tensor,
    within_P: tl.tensor,
    pair_mask_P: tl.tensor,
    ROTARY_PAIRS: tl.constexpr,
) -> tl.tensor:
    """Cosine and sine of each token and pair: 1 and 0 where a pair does not rotate."""
    rotates_P = pair_mask_P & (within_P < ROTARY_PAIRS)
    table_P = tl.load(table_ptr + head_P // num_heads, mask=rotates_P, other=0)
    at_BP = (tokens_B1 * num_tables + table_P[None, :]) * ROTARY_PAIRS + within_P[None, :]
    mask_BP = token_mask_B1 & rotates_P[None, :]
    cos_BP = tl.load(cos_ptr + at_BP, mask=mask_BP, other=1.0)
    sin_BP = tl.load(sin_ptr + at_BP, mask=mask_BP, other=0.0)
    return cos_BP, sin_BP
