"""Range coding of symbols with static models: rANS in 32 interleaved lanes.

Symbols are an array ``(C, T)``: row ``c`` holds coefficient ``c`` of every token and is
coded under model ``model_of_C[c]``, or that many rows further on as ``shift_T[t]`` says,
held within the models.  Token ``t`` belongs to lane ``t % 32``.  A lane's
state is a number in ``[2**16, 2**32)``; what the decoder does with it, for one symbol:

1. the low 12 bits are a slot, and the model says which symbol owns it;
2. ``state = frequency * (state >> 12) + slot - first slot of the symbol``;
3. if that is below ``2**16``: ``state = state << 16 | next word of the stream``.

Coefficients come one after another; within one, tokens in rising order.  So the words
that a group of 32 tokens takes lie side by side in lane order, and a processor with 32
lanes finds its words by counting the lanes before it (`codec.kernels.triton_rans`).
The encoder undoes these steps from the last symbol to the first.

The stream, little-endian: u32 states of lanes ``0 .. min(T, 32) - 1``, then u16 words in
the order in which the decoder takes them.  The encoder starts each lane at ``2**16``, so
the decoder must end there with every word used: that is checked, and finds most damage;
what it cannot find is the blob's checksum to find.  No symbols are coded as no bytes.

Source: Duda's rANS (arXiv 1311.2540); the lanes follow Giesen's "Interleaved entropy
coders" (arXiv 1402.3392); order and framing are ours.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from codec.blob import Buffer, byte_view
from codec.entropy.models import PROB_BITS, TOTAL, SymbolModels
from codec.errors import CorruptBlobError

LANES = 32
"""Tokens that are coded side by side."""
LOW = 1 << 16
"""Least state; what every lane of the encoder starts at, and of the decoder ends at."""
MAX_SHIFT = 255
"""Most that a token's shift may be, either way: models are rows of a table, hardly more."""
STREAM = "rans stream"
"""What `CorruptBlobError` calls the bytes."""

# Operands of one type: in numba, as in NumPy, mixed ones turn into wider ones or floats.
_ONE_WORD = np.uint32(16)
_PROB_BITS = np.uint32(PROB_BITS)
_SLOT_MASK = np.uint32(TOTAL - 1)
_WORD_MASK = np.uint32(LOW - 1)
_FULL_BITS = np.uint32(32 - PROB_BITS)
_LOW = np.uint32(LOW)
_NONE = np.uint32(0)
_FIRST = np.int32(0)


def encode_symbols(
    symbols_CT: NDArray[np.uint8],
    model_of_C: ArrayLike,
    models: SymbolModels,
    shift_T: ArrayLike | None = None,
) -> bytes:
    """The stream of ``symbols_CT``; the same bytes on every machine.

    Parameters
    ----------
    symbols_CT
        Shape ``(C, T)``, uint8.
    model_of_C
        Shape ``(C,)``: the row of ``models`` that each coefficient is coded under.
    shift_T
        Shape ``(T,)``: added to the row for each token; the sum is held within the rows.

    Raises
    ------
    ValueError
        If shapes, types or model numbers are not as said, or a symbol has frequency 0.
    """
    if symbols_CT.ndim != 2 or symbols_CT.dtype != np.uint8:
        raise ValueError(f"need uint8 (C, T), got {symbols_CT.dtype} {symbols_CT.shape}")
    model_of_C = checked_models(model_of_C, models)
    if len(model_of_C) != len(symbols_CT):
        raise ValueError(f"{len(model_of_C)} model numbers for {len(symbols_CT)} coefficients")
    shift_T = checked_shifts(shift_T, symbols_CT.shape[1])
    state_N = np.full(LANES, LOW, np.uint32)
    # A symbol gives one word at most, and a word not given is put where the next will be.
    words = np.empty(symbols_CT.size, np.uint16)
    first = _encode(_frozen(symbols_CT), model_of_C, shift_T, models.share_KA, state_N, words)
    if first < 0:
        row = -1 - first
        model_T = np.clip(model_of_C[row] + shift_T, 0, models.num_models - 1)
        at = int(np.flatnonzero(models.share_KA[model_T, symbols_CT[row]] == 0)[-1])
        raise ValueError(
            f"model {model_T[at]} of coefficient {row} cannot code {symbols_CT[row, at]}"
        )
    states = state_N[: stored_states(*symbols_CT.shape)].astype("<u4")
    return states.tobytes() + words[first:].astype("<u2", copy=False).tobytes()


def decode_symbols(
    data: Buffer,
    model_of_C: ArrayLike,
    models: SymbolModels,
    num_tokens: int,
    shift_T: ArrayLike | None = None,
) -> NDArray[np.uint8]:
    """The symbols whose stream is ``data``: shape ``(C, T)``, uint8.

    Whatever ``data`` is, nothing outside it is read, and no more is allocated than the
    symbols and a copy of the stream.

    Parameters
    ----------
    model_of_C, shift_T
        As they were encoded.
    num_tokens
        T, as they were encoded.

    Raises
    ------
    CorruptBlobError
        If ``data`` is no stream of that many symbols.
    ValueError
        If another argument is no legal value.
    """
    if num_tokens < 0:
        raise ValueError(f"need num_tokens >= 0, got {num_tokens}")
    model_of_C = checked_models(model_of_C, models)
    state_N, words = split_stream(data, len(model_of_C), num_tokens)
    shift_T = checked_shifts(shift_T, num_tokens)
    padded = np.zeros(len(words) + LANES, np.uint16)
    padded[: len(words)] = words
    symbols_CT = np.empty((len(model_of_C), num_tokens), np.uint8)
    tables = (models.share_KA, models.symbol_of_slot_KS)
    taken = _decode(padded, model_of_C, shift_T, tables, state_N, symbols_CT)
    if taken != len(words) or (state_N != LOW).any():
        raise CorruptBlobError(STREAM, "it does not end where its symbols end")
    return symbols_CT


def stored_states(num_coefficients: int, num_tokens: int) -> int:
    """How many states a stream of that many symbols begins with."""
    return min(num_tokens, LANES) if num_coefficients else 0


def split_stream(
    data: Buffer, num_coefficients: int, num_tokens: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """States of all lanes, idle ones at `LOW`, and a view of the words.

    Raises
    ------
    CorruptBlobError
        If ``data`` is too short for the states or does not end with a whole word, holds
        an impossible state, or more words than symbols could take.
    """
    view = byte_view(data)
    num_states = stored_states(num_coefficients, num_tokens)
    num_words, rest = divmod(len(view) - 4 * num_states, 2)
    if rest or not 0 <= num_words <= num_coefficients * num_tokens:
        raise CorruptBlobError(
            STREAM, f"{len(view)} bytes for {num_coefficients} x {num_tokens} symbols"
        )
    state_N = np.full(LANES, LOW, np.uint32)
    state_N[:num_states] = np.frombuffer(view, "<u4", num_states)
    if (state_N < LOW).any():
        raise CorruptBlobError(STREAM, f"a state is below {LOW}")
    return state_N, np.frombuffer(view, "<u2", num_words, 4 * num_states)


def checked_models(model_of_C: ArrayLike, models: SymbolModels) -> NDArray[np.int32]:
    """A copy of ``model_of_C`` as the coders take it.

    Raises
    ------
    ValueError
        If it is no vector of rows of ``models``.
    """
    given_C = np.asarray(model_of_C)
    if given_C.ndim != 1 or (given_C.size and given_C.dtype.kind not in "iu"):
        raise ValueError(
            f"model numbers must be integers (C,), got {given_C.dtype} {given_C.shape}"
        )
    if given_C.size and not 0 <= given_C.min() <= given_C.max() < models.num_models:
        raise ValueError(f"model numbers must be in 0..{models.num_models - 1}")
    return np.array(given_C, dtype=np.int32)


def checked_shifts(shift_T: ArrayLike | None, num_tokens: int) -> NDArray[np.int32]:
    """A copy of ``shift_T`` as the coders take it; zeros if there is none.

    Raises
    ------
    ValueError
        If it is not a small integer for each token.
    """
    if shift_T is None:
        return np.zeros(num_tokens, np.int32)
    given_T = np.asarray(shift_T)
    if given_T.shape != (num_tokens,) or (given_T.size and given_T.dtype.kind not in "iu"):
        raise ValueError(f"need {num_tokens} integer shifts, got {given_T.dtype} {given_T.shape}")
    if given_T.size and max(abs(int(given_T.min())), abs(int(given_T.max()))) > MAX_SHIFT:
        raise ValueError(f"shifts must be within {MAX_SHIFT} either way")
    return np.array(given_T, dtype=np.int32)


def _frozen(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same in C order, read-only: one type, and so one compilation, for every caller."""
    view = np.ascontiguousarray(array).view()
    view.setflags(write=False)
    return view


# Positions are unsigned below: numba would test a signed one for "from the end".


@njit(nogil=True, error_model="numpy")
def _encode(  # noqa: PLR0917 - compiled: no keyword-only arguments
    symbols_CT: NDArray[np.uint8],
    model_of_C: NDArray[np.int32],
    shift_T: NDArray[np.int32],
    share_KA: NDArray[np.uint32],
    state_N: NDArray[np.uint32],
    words: NDArray[np.uint16],
) -> int:
    """Fill ``words`` from its end; the index of the first, or -1 - C of a bad symbol."""
    num_coefficients, num_tokens = symbols_CT.shape
    last_model = np.int32(len(share_KA) - 1)
    free = np.uint64(len(words) - 1)
    for c in range(num_coefficients - 1, -1, -1):
        for start in range((num_tokens - 1) // LANES * LANES, -1, -LANES):
            group = symbols_CT[c, start : min(start + LANES, num_tokens)]
            shifts = shift_T[start : start + LANES]
            for back in range(np.uint64(len(group))):
                lane = np.uint64(len(group)) - np.uint64(1) - back
                row = min(max(model_of_C[c] + shifts[lane], _FIRST), last_model)
                share = share_KA[np.uint64(row), group[lane]]
                frequency = share >> _ONE_WORD
                if frequency == _NONE:
                    return -1 - c
                state = state_N[lane]
                # Would the step below leave 32 bits?  Then the low word goes out first.
                gives = np.uint32((state >> _FULL_BITS) >= frequency)
                words[free] = state & _WORD_MASK
                free -= np.uint64(gives)
                state >>= gives * _ONE_WORD
                quotient = state // frequency
                rest = state - quotient * frequency
                state_N[lane] = (quotient << _PROB_BITS) + rest + (share & _WORD_MASK)
    return int(np.int64(free)) + 1


@njit(nogil=True)
def _decode(  # noqa: PLR0917 - the same
    padded: NDArray[np.uint16],
    model_of_C: NDArray[np.int32],
    shift_T: NDArray[np.int32],
    tables: tuple[NDArray[np.uint32], NDArray[np.uint8]],
    state_N: NDArray[np.uint32],
    symbols_CT: NDArray[np.uint8],
) -> int:
    """Fill ``symbols_CT``; how many words that took, or -1 if there were too few.

    The last `LANES` entries of ``padded`` are no words: a group is decoded without a look
    at the end of the stream, and refused afterwards if it went past it.
    """
    share_KA, symbol_of_slot_KS = tables
    num_coefficients, num_tokens = symbols_CT.shape
    num_words = np.uint64(len(padded) - LANES)
    last_model = np.int32(len(share_KA) - 1)
    taken = np.uint64(0)
    for c in range(num_coefficients):
        for start in range(0, num_tokens, LANES):
            group = symbols_CT[c, start : min(start + LANES, num_tokens)]
            shifts = shift_T[start : start + LANES]
            for lane in range(np.uint64(len(group))):
                state = state_N[lane]
                slot = state & _SLOT_MASK
                row = np.uint64(min(max(model_of_C[c] + shifts[lane], _FIRST), last_model))
                symbol = symbol_of_slot_KS[row, slot]
                share = share_KA[row, symbol]
                state = (share >> _ONE_WORD) * (state >> _PROB_BITS) + slot - (share & _WORD_MASK)
                # Without a branch, which would be guessed wrong every few symbols.
                takes = np.uint32(state < _LOW)
                word = np.uint32(padded[taken])
                state_N[lane] = state << takes * _ONE_WORD | (word & (_NONE - takes))
                taken += np.uint64(takes)
                group[lane] = symbol
            if taken > num_words:
                return -1
    return int(np.int64(taken))
