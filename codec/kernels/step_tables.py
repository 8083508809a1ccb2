"""The step quantizer's tables on a device, and its codes between kernels and coders.

Kernels have one byte per coefficient, its symbol, and a *code plane*: whole codes as 32-bit
numbers, where the symbol does not say all.  That is where it is the escape of its class, or
the coefficient keeps low bits apart; elsewhere the plane is not defined, and not read.

* After encoding, `split_codes` takes a plane apart into what a blob stores: planes of single
  bits, and the list of escaped numbers.
* Before decoding, `join_codes` puts the plane together again, and checks what it is given
  as `codec.step_quantizer.dequantize_steps` does.

Both are sums over few elements, in plain torch on any device.  A codec whose rows are on a
GPU has one `StepTables` for each kind, made of what `codec.entropy_codec.EntropyCodec` has:
it would split a chunk's codes band by band, join the bands that a blob has, and code symbols
with `codec.kernels.triton_rans` in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from codec.errors import CorruptBlobError
from codec.step_quantizer import MAX_CODE, Layout
from codec.symbol_classes import SymbolClasses, step_factor


class TokenSteps(NamedTuple):
    """What is known of each token before it is coded."""

    shift_T: Tensor
    """Shape ``(T,)``, int32: see `codec.symbol_classes`."""

    step_T: Tensor
    """Shape ``(T,)``, float32: the step of its coefficients."""

    rank_T: Tensor
    """Shape ``(T,)``, int32: how many coefficients it has; the others are zero."""


class DeviceCodes(NamedTuple):
    """`codec.step_quantizer.StepCodes` on a device."""

    symbols_CT: Tensor
    """Shape ``(C, T)``, uint8."""

    low_PT: Tensor
    """Shape ``(P, T)``, uint8, 0 or 1."""

    escapes_N: Tensor
    """Shape ``(N,)``, int32."""


class CodePlane(NamedTuple):
    """Codes as kernels write and read them."""

    symbols_CT: Tensor
    """Shape ``(C, T)``, uint8."""

    plane_CT: Tensor | None
    """Shape ``(C, T)``, int32, defined where symbols do not say all; None if they do."""

    def rows(self, part: slice) -> CodePlane:
        """Codes of a run of the coefficients, views."""
        plane_CT = None if self.plane_CT is None else self.plane_CT[part]
        return CodePlane(self.symbols_CT[part], plane_CT)


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """Layout, classes and step of one kind of rows, where kernels can read them."""

    step: float
    """Step of a token whose shift is 0."""

    level_C: Tensor
    """Shape ``(C,)``, int32."""

    low_bits_C: Tensor
    """Shape ``(C,)``, int32."""

    coefficient_P: Tensor
    """Shape ``(P,)``, int64: whose bit a bit plane has."""

    bit_P: Tensor
    """Shape ``(P,)``, int32: which, 0 being the lowest."""

    alphabet_K: Tensor
    """Shape ``(K,)``, int32."""

    offset_K: Tensor
    """Shape ``(K,)``, float32."""

    bias1_K: Tensor
    """Shape ``(K,)``, float32."""

    bias2_K: Tensor
    """Shape ``(K,)``, float32."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        classes: SymbolClasses,
        step: float,
        *,
        device: torch.device | str = "cpu",
    ) -> StepTables:
        """Tables on ``device``; see `codec.step_quantizer.quantize_steps`.

        Raises
        ------
        ValueError
            If the step is not above 0, or levels and low bits disagree.
        """
        if not 0 < step < float("inf"):
            raise ValueError(f"need a step above 0, got {step}")
        if layout.level_C.ndim != 1 or layout.level_C.shape != layout.low_bits_C.shape:
            raise ValueError(
                f"need as many low bits as levels, "
                f"got {layout.low_bits_C.shape} and {layout.level_C.shape}"
            )

        def moved(array: ArrayLike, dtype: torch.dtype) -> Tensor:
            return torch.tensor(np.asarray(array), dtype=dtype).to(device)

        coefficient_P = np.repeat(np.arange(len(layout.low_bits_C)), layout.low_bits_C)
        first_C = np.cumsum(layout.low_bits_C) - layout.low_bits_C
        return cls(
            step=step,
            level_C=moved(layout.level_C, torch.int32),
            low_bits_C=moved(layout.low_bits_C, torch.int32),
            coefficient_P=moved(coefficient_P, torch.int64),
            bit_P=moved(np.arange(len(coefficient_P)) - first_C[coefficient_P], torch.int32),
            alphabet_K=moved(classes.alphabet_K, torch.int32),
            offset_K=moved(classes.offset_K, torch.float32),
            bias1_K=moved(classes.bias1_K, torch.float32),
            bias2_K=moved(classes.bias2_K, torch.float32),
        )

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.level_C.device

    @property
    def rank(self) -> int:
        """Coefficients of a token."""
        return len(self.level_C)

    @property
    def num_planes(self) -> int:
        """Bit planes of all coefficients together."""
        return len(self.coefficient_P)

    def tokens(self, shift_T: ArrayLike, rank_T: ArrayLike | None = None) -> TokenSteps:
        """What kernels know of tokens, on the device of the tables.

        Parameters
        ----------
        shift_T
            Shape ``(T,)``: see `codec.symbol_classes`.
        rank_T
            Shape ``(T,)``: `codec.projection.ranks_of` the shifts, which keeps kernels from
            work on what is not coded; without it, tokens have all coefficients.

        Raises
        ------
        ValueError
            If they are not two vectors of integers, ranks from 0 to that of the tables.
        """
        shifts = _integers("shifts", shift_T)
        ranks = _integers("ranks", np.full(len(shifts), self.rank) if rank_T is None else rank_T)
        if len(ranks) != len(shifts) or (
            len(ranks) and not 0 <= ranks.min() <= ranks.max() <= self.rank
        ):
            raise ValueError(f"need {len(shifts)} ranks in 0..{self.rank}, got {ranks}")
        # Made on the host, so that steps are the same bits on every device.
        step_T = np.float32(self.step) * step_factor(shifts)
        arrays = (torch.from_numpy(array).to(self.device) for array in (shifts, step_T, ranks))
        return TokenSteps(*arrays)

    def last_symbol_CT(self, tokens: TokenSteps, rows: slice = slice(None)) -> Tensor:  # noqa: N802
        """The greatest symbol of each coefficient and token, shape ``(C, T)``, int32.

        It is the escape, but for classes that are not coded, whose only symbol is 0.
        """
        class_CT = (self.level_C[rows, None] + tokens.shift_T).clamp(0, len(self.alphabet_K) - 1)
        return (self.alphabet_K - 1)[class_CT]


def split_codes(
    coded: CodePlane, tables: StepTables, tokens: TokenSteps, rows: slice = slice(None)
) -> DeviceCodes:
    """What a blob stores of a run of coefficients, such as a band.

    Parameters
    ----------
    coded
        All coefficients, as `codec.kernels.triton_encode` writes them; with a plane.
    rows
        Start and stop of the run, without a step.
    """
    start, stop, stride = rows.indices(tables.rank)
    symbols_CT, plane_CT = coded.rows(rows)
    if plane_CT is None or stride != 1 or len(coded.symbols_CT) != tables.rank:
        raise ValueError(f"need a plane of {tables.rank} coefficients, and a run of them")
    is_of_run_P = (tables.coefficient_P >= start) & (tables.coefficient_P < stop)
    coefficient_P, bit_P = tables.coefficient_P[is_of_run_P], tables.bit_P[is_of_run_P]
    low_PT = ((plane_CT[coefficient_P - start] >> bit_P[:, None]) & 1).to(torch.uint8)
    last_CT = tables.last_symbol_CT(tokens, rows)
    is_escape_CT = (symbols_CT == last_CT) & (last_CT > 0)
    low_bits_CT = tables.low_bits_C[rows, None].expand_as(plane_CT)
    escapes_N = plane_CT[is_escape_CT] >> low_bits_CT[is_escape_CT]
    return DeviceCodes(symbols_CT, low_PT, escapes_N)


def join_codes(codes: DeviceCodes, tables: StepTables, tokens: TokenSteps) -> CodePlane:
    """What kernels decode: symbols, and the plane if there need be one.

    Parameters
    ----------
    codes
        Of all coefficients: bands are one after another, in each of the three arrays.

    Raises
    ------
    CorruptBlobError
        As `codec.step_quantizer.dequantize_steps` does.
    ValueError
        If shapes or types are not those of the tables and tokens.
    """
    _check_codes(codes, tables, len(tokens.shift_T))
    symbols_CT, low_PT, escapes_N = codes
    last_CT = tables.last_symbol_CT(tokens)
    is_escape_CT = (symbols_CT == last_CT) & (last_CT > 0)
    if int(is_escape_CT.sum()) != len(escapes_N):
        raise CorruptBlobError("escapes", f"{len(escapes_N)} are not as many as symbols say")
    low_bits_CT = tables.low_bits_C[:, None].expand_as(symbols_CT)
    is_bad_N = _are_impossible(escapes_N, last_CT[is_escape_CT], low_bits_CT[is_escape_CT])
    if bool((symbols_CT > last_CT).any()) or bool(is_bad_N.any()):
        raise CorruptBlobError("symbols", "a symbol or an escaped number is out of range")
    if not len(escapes_N) and not tables.num_planes:
        return CodePlane(symbols_CT, None)
    symbol_CT = symbols_CT.int()
    high_CT = torch.where((symbol_CT & 1) == 1, -((symbol_CT + 1) >> 1), symbol_CT >> 1)
    high_CT[is_escape_CT] = escapes_N
    plane_CT = high_CT << low_bits_CT
    # The low bits are zero so far, so that adding sets them.
    plane_CT.index_add_(0, tables.coefficient_P, low_PT.int() << tables.bit_P[:, None])
    return CodePlane(symbols_CT, plane_CT)


def _integers(name: str, values: ArrayLike) -> NDArray[np.int32]:
    given_T = np.asarray(values)
    if given_T.ndim != 1 or (given_T.size and given_T.dtype.kind not in "iu"):
        raise ValueError(f"need integer {name} (T,), got {given_T.dtype} {given_T.shape}")
    return given_T.astype(np.int32)


def _are_impossible(escapes_N: Tensor, escape_N: Tensor, low_bits_N: Tensor) -> Tensor:
    """Whether a symbol stands for an escaped number, or no code has it."""
    high_N = escapes_N.to(torch.int64)
    zigzag_N = torch.where(high_N < 0, -2 * high_N - 1, 2 * high_N)
    return (zigzag_N < escape_N) | (high_N.abs() > (MAX_CODE >> low_bits_N) + 1)


def _check_codes(codes: DeviceCodes, tables: StepTables, num_tokens: int) -> None:
    wanted = (
        ("symbols_CT", codes.symbols_CT, (tables.rank, num_tokens), torch.uint8),
        ("low_PT", codes.low_PT, (tables.num_planes, num_tokens), torch.uint8),
        ("escapes_N", codes.escapes_N, (codes.escapes_N.numel(),), torch.int32),
    )
    for name, array, shape, dtype in wanted:
        if tuple(array.shape) != shape or array.dtype is not dtype:
            raise ValueError(
                f"{name} must be {dtype} of shape {shape}, got {array.dtype} {tuple(array.shape)}"
            )
        if array.device != tables.device:
            raise ValueError(f"{name} must be on {tables.device}, got {array.device}")
