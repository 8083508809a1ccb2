"""The coder of `codec.entropy.rans` for many streams at once, in Triton.

One program, which is one warp, codes one stream; thread ``n`` of the warp is lane ``n``.
A group of 32 tokens is one step of the warp: every lane does the arithmetic of its own
token, and a running count over "does this lane take a word" says where each lane's word
lies.  So the bytes are those of the other coder, in both directions.

1. Streams of a call lie one after another in one array of u16 words; so do their symbols,
   their model numbers and their shifts.  Nothing needs more than the alignment of its own
   type.
2. A table of seven numbers for each stream says where its parts are and how long.
3. The encoder does not know how long a stream will be.  Each gets room for the longest;
   words fill it from its end, the states come before them, and so the stream ends up in
   one piece at the end of its room.

A program never leaves the room of its stream, whatever the words in it are: loads and
stores are masked by its lengths, and every table has an entry for all that can be asked.

Set ``TRITON_INTERPRET=1`` before Triton is first imported, and the kernels run on
processors, slowly: that is how they are tested where there is no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from codec.blob import Buffer, byte_view
from codec.entropy import rans
from codec.entropy.models import MAX_ALPHABET, PROB_BITS, TOTAL, SymbolModels
from codec.errors import CorruptBlobError
from codec.kernels.triton_backend import LAUNCH_OPTIONS, launching_on, tl, triton

_LANES = tl.constexpr(rans.LANES)
_LOW = tl.constexpr(rans.LOW)
_WORD_MASK = tl.constexpr(rans.LOW - 1)
_PROB_BITS = tl.constexpr(PROB_BITS)
_FULL_BITS = tl.constexpr(32 - PROB_BITS)
_SLOTS = tl.constexpr(TOTAL)
_SYMBOLS = tl.constexpr(MAX_ALPHABET)
_FIELDS = tl.constexpr(7)
_ONE_WARP = {**LAUNCH_OPTIONS, "num_warps": 1}


@dataclass(frozen=True)
class DeviceModels:
    """Tables of models where the kernels can read them."""

    models: SymbolModels
    """What they are of."""
    share_KA: Tensor
    """As `SymbolModels.share_KA`, on the device."""
    symbol_of_slot_KS: Tensor
    """As `SymbolModels.symbol_of_slot_KS`, on the device."""

    @classmethod
    def of(cls, models: SymbolModels, device: torch.device) -> DeviceModels:
        """The tables of ``models``, copied to ``device``."""
        tables = models.share_KA, models.symbol_of_slot_KS
        return cls(models, *(torch.from_numpy(table.copy()).to(device) for table in tables))

    @property
    def device(self) -> torch.device:
        """Where the tables are, and where streams are coded."""
        return self.share_KA.device


def encode_streams(
    symbols: Sequence[Tensor],
    model_of: Sequence[ArrayLike],
    models: DeviceModels,
    shifts: Sequence[ArrayLike | None] | None = None,
) -> list[bytes]:
    """The streams of arrays of symbols, each as `rans.encode_symbols` makes it.

    Parameters
    ----------
    symbols
        For each stream, shape ``(C, T)``, uint8.
    model_of
        For each stream, shape ``(C,)``: the models of its coefficients.
    shifts
        For each stream, shape ``(T,)``, what its tokens add to those numbers, or None.

    Raises
    ------
    ValueError
        If shapes, types, shifts or model numbers are not as said, or a symbol has frequency 0.
    """
    for symbols_CT in symbols:
        if symbols_CT.ndim != 2 or symbols_CT.dtype != torch.uint8:
            raise ValueError(f"need uint8 (C, T), got {symbols_CT.dtype} {symbols_CT.shape}")
    model_rows = [rans.checked_models(row, models.models) for row in model_of]
    shapes = [(int(array.shape[0]), int(array.shape[1])) for array in symbols]
    if [len(row) for row in model_rows] != [num for num, _ in shapes]:
        raise ValueError("need one model number for each coefficient of each stream")
    shift_rows = _checked_shifts(shifts, [num_tokens for _, num_tokens in shapes])
    rooms = [2 * rans.stored_states(*shape) + shape[0] * shape[1] for shape in shapes]
    if not sum(rooms):
        return [b""] * len(shapes)
    device = models.device
    flat = torch.cat([array.to(device).reshape(-1) for array in symbols])
    words = torch.empty(sum(rooms), dtype=torch.uint16, device=device)
    used = torch.empty(len(shapes), dtype=torch.int64, device=device)
    with launching_on(device):
        _encode_kernel[(len(shapes),)](
            flat,
            _stream_table(shapes, rooms, device),
            _joined(model_rows, device),
            _joined(shift_rows, device),
            models.share_KA,
            words,
            used,
            models.models.num_models,
            **_ONE_WARP,
        )
    used_words = used.tolist()
    if min(used_words) < 0:
        raise ValueError(f"stream {used_words.index(-1)} has a symbol that its model cannot code")
    filled = words.cpu().numpy().astype("<u2", copy=False)
    ends = accumulate(rooms)
    return [filled[end - n : end].tobytes() for end, n in zip(ends, used_words, strict=True)]


def decode_streams(
    streams: Sequence[Buffer],
    model_of: Sequence[ArrayLike],
    models: DeviceModels,
    num_tokens: Sequence[int],
    shifts: Sequence[ArrayLike | None] | None = None,
) -> list[Tensor]:
    """The symbols of streams: for each, shape ``(C, T)``, uint8, on the device of ``models``.

    Parameters
    ----------
    model_of, num_tokens, shifts
        For each stream, as `rans.decode_symbols` takes them.

    Raises
    ------
    CorruptBlobError
        If one of the streams is not of that many symbols.
    ValueError
        If model numbers, shifts or token counts are no legal values.
    """
    model_rows = [rans.checked_models(row, models.models) for row in model_of]
    if not len(streams) == len(model_rows) == len(num_tokens) or min(num_tokens, default=0) < 0:
        raise ValueError("need model numbers and a number of tokens >= 0 for each stream")
    shapes = [(len(row), num) for row, num in zip(model_rows, num_tokens, strict=True)]
    for stream, shape in zip(streams, shapes, strict=True):
        rans.split_stream(stream, *shape)
    shift_rows = _checked_shifts(shifts, num_tokens)
    device = models.device
    sizes = [num_coefficients * num for num_coefficients, num in shapes]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    if sum(sizes):
        views = [byte_view(stream) for stream in streams]
        joined = np.frombuffer(b"".join(views), "<u2").astype(np.uint16)
        words = torch.from_numpy(joined).to(device)
        is_good = torch.empty(len(shapes), dtype=torch.int32, device=device)
        with launching_on(device):
            _decode_kernel[(len(shapes),)](
                words,
                _stream_table(shapes, [len(view) // 2 for view in views], device),
                _joined(model_rows, device),
                _joined(shift_rows, device),
                models.share_KA,
                models.symbol_of_slot_KS,
                flat,
                is_good,
                models.models.num_models,
                **_ONE_WARP,
            )
        if not bool(is_good.all()):
            bad = is_good.tolist().index(0)
            raise CorruptBlobError(rans.STREAM, f"stream {bad} does not end where its symbols end")
    return [
        part.reshape(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)
    ]


def _stream_table(
    shapes: Sequence[tuple[int, int]], num_words: Sequence[int], device: torch.device
) -> Tensor:
    """First word, words, first symbol, model number and shift, C and T of each stream."""
    sizes = [num_coefficients * num_tokens for num_coefficients, num_tokens in shapes]
    columns = [
        _starts(num_words),
        num_words,
        _starts(sizes),
        _starts([num_coefficients for num_coefficients, _ in shapes]),
        _starts([num_tokens for _, num_tokens in shapes]),
        [num_coefficients for num_coefficients, _ in shapes],
        [num_tokens for _, num_tokens in shapes],
    ]
    return torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)


def _checked_shifts(
    shifts: Sequence[ArrayLike | None] | None, num_tokens: Sequence[int]
) -> list[NDArray[np.int32]]:
    """Shifts of each stream; zeros if there are none."""
    rows = [None] * len(num_tokens) if shifts is None else shifts
    if len(rows) != len(num_tokens):
        raise ValueError(f"need shifts for each stream, got {len(rows)} for {len(num_tokens)}")
    return [rans.checked_shifts(row, num) for row, num in zip(rows, num_tokens, strict=True)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each of some parts begins that lie one after another."""
    return list(accumulate(sizes, initial=0))[:-1]


def _joined(rows: Sequence[NDArray[np.int32]], device: torch.device) -> Tensor:
    """All model numbers, or all shifts, stream after stream."""
    return torch.from_numpy(np.concatenate(rows)).to(device)


@triton.jit  # type: ignore[untyped-decorator]
def _shifted(
    model: tl.tensor, shifts_ptr: tl.tensor, is_active: tl.tensor, num_models: tl.tensor
) -> tl.tensor:
    """The model of each lane, 64 bits: within the models, whatever the shift."""
    shift = tl.load(shifts_ptr, mask=is_active, other=0)
    return tl.minimum(tl.maximum(model + shift, 0), num_models - 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _store_states(words_ptr: tl.tensor, state: tl.tensor, is_stored: tl.tensor) -> None:
    """Each lane's state, the low word first."""
    tl.store(words_ptr, (state & _WORD_MASK).to(tl.uint16), mask=is_stored)
    tl.store(words_ptr + 1, (state >> 16).to(tl.uint16), mask=is_stored)


@triton.jit  # type: ignore[untyped-decorator]
def _encode_kernel(  # noqa: PLR0917 - kernels have no keyword-only arguments
    symbols_ptr: tl.tensor,
    table_ptr: tl.tensor,
    model_of_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    share_ptr: tl.tensor,
    words_ptr: tl.tensor,
    used_ptr: tl.tensor,
    num_models: tl.tensor,
) -> None:
    """Code stream ``program_id`` into the end of its room; the words used, or -1."""
    stream = tl.program_id(0).to(tl.int64)
    fields = table_ptr + stream * _FIELDS
    room = words_ptr + tl.load(fields)
    free = tl.load(fields + 1)
    symbols = symbols_ptr + tl.load(fields + 2)
    model_of = model_of_ptr + tl.load(fields + 3)
    shifts = shift_ptr + tl.load(fields + 4)
    num_coefficients = tl.load(fields + 5)
    num_tokens = tl.load(fields + 6)
    lane = tl.arange(0, _LANES)
    state = tl.full((_LANES,), _LOW, tl.uint32)
    num_uncodable = tl.zeros((_LANES,), tl.int32)
    num_groups = (num_tokens + _LANES - 1) // _LANES
    for back in range(num_coefficients):
        c = num_coefficients - 1 - back
        unshifted = tl.load(model_of + c)
        for group_back in range(num_groups):
            token = (num_groups - 1 - group_back) * _LANES + lane
            is_active = token < num_tokens
            symbol = tl.load(symbols + c * num_tokens + token, mask=is_active, other=0)
            model = _shifted(unshifted, shifts + token, is_active, num_models)
            share_at = share_ptr + model * _SYMBOLS + symbol
            share = tl.load(share_at, mask=is_active, other=0)
            frequency = share >> 16
            num_uncodable += (is_active & (frequency == 0)).to(tl.int32)
            is_coded = is_active & (frequency > 0)
            divisor = tl.where(is_coded, frequency, 1).to(tl.uint32)
            gives = is_coded & ((state >> _FULL_BITS) >= divisor)
            count = gives.to(tl.int32)
            free -= tl.sum(count, 0)
            at = free + tl.cumsum(count, 0) - count
            tl.store(room + at, (state & _WORD_MASK).to(tl.uint16), mask=gives)
            state = tl.where(gives, state >> 16, state)
            quotient = state // divisor
            rest = state - quotient * divisor + (share & _WORD_MASK)
            state = tl.where(is_coded, (quotient << _PROB_BITS) + rest, state)
    num_states = tl.where(num_coefficients > 0, tl.minimum(num_tokens, _LANES), 0)
    free -= 2 * num_states
    _store_states(room + free + 2 * lane, state, lane < num_states)
    is_coded = tl.sum(num_uncodable, 0) == 0
    tl.store(used_ptr + stream, tl.where(is_coded, tl.load(fields + 1) - free, -1))


@triton.jit  # type: ignore[untyped-decorator]
def _decode_kernel(  # noqa: PLR0917 - the same
    words_ptr: tl.tensor,
    table_ptr: tl.tensor,
    model_of_ptr: tl.tensor,
    shift_ptr: tl.tensor,
    share_ptr: tl.tensor,
    symbol_of_slot_ptr: tl.tensor,
    symbols_ptr: tl.tensor,
    is_good_ptr: tl.tensor,
    num_models: tl.tensor,
) -> None:
    """Decode stream ``program_id``; whether it ended as a stream ends."""
    stream = tl.program_id(0).to(tl.int64)
    fields = table_ptr + stream * _FIELDS
    words = words_ptr + tl.load(fields)
    num_words = tl.load(fields + 1)
    symbols = symbols_ptr + tl.load(fields + 2)
    model_of = model_of_ptr + tl.load(fields + 3)
    shifts = shift_ptr + tl.load(fields + 4)
    num_coefficients = tl.load(fields + 5)
    num_tokens = tl.load(fields + 6)
    lane = tl.arange(0, _LANES)
    num_states = tl.where(num_coefficients > 0, tl.minimum(num_tokens, _LANES), 0)
    is_stored = (lane < num_states) & (2 * lane + 1 < num_words)
    low_word = tl.load(words + 2 * lane, mask=is_stored, other=0).to(tl.uint32)
    high_word = tl.load(words + 2 * lane + 1, mask=is_stored, other=1).to(tl.uint32)
    state = (high_word << 16) | low_word
    taken = 2 * num_states
    for c in range(num_coefficients):
        unshifted = tl.load(model_of + c)
        for start in range(0, num_tokens, _LANES):
            token = start + lane
            is_active = token < num_tokens
            model = _shifted(unshifted, shifts + token, is_active, num_models)
            slot = state & (_SLOTS - 1)
            symbol_at = symbol_of_slot_ptr + model * _SLOTS + slot
            symbol = tl.load(symbol_at, mask=is_active, other=0)
            share_at = share_ptr + model * _SYMBOLS + symbol
            share = tl.load(share_at, mask=is_active, other=0)
            updated = (share >> 16) * (state >> _PROB_BITS) + slot - (share & _WORD_MASK)
            state = tl.where(is_active, updated, state)
            takes = is_active & (state < _LOW)
            count = takes.to(tl.int32)
            at = taken + tl.cumsum(count, 0) - count
            word = tl.load(words + at, mask=takes & (at < num_words), other=0).to(tl.uint32)
            state = tl.where(takes, (state << 16) | word, state)
            taken += tl.sum(count, 0)
            tl.store(symbols + c * num_tokens + token, symbol, mask=is_active)
    num_strays = tl.sum((state != _LOW).to(tl.int32), 0)
    tl.store(is_good_ptr + stream, ((num_strays == 0) & (taken == num_words)).to(tl.int32))
