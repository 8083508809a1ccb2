"""Coefficients to symbols and back: one step for all, a dead zone, centroids.

A coefficient ``y`` of a token whose step is ``s`` becomes

    code = sign(y) * floor(|y| / s + offset)          value = sign * (|code| - bias) * s

with offset and bias of its class (`codec.symbol_classes`), and a value of 0 for code 0.  Of
a code, the low bits that its coefficient keeps apart go to bit planes; the rest, rounded
down, becomes a zigzag symbol (0, -1, +1, -2, ...), or the class's escape symbol with the
number itself in a list.

Symbols and planes are arrays with a row per coefficient, which is the order they are coded
in.  All loops are compiled; a call uses one thread and holds no Python lock.

Source: dead-zone quantization with centroid reconstruction is Sullivan, "Efficient scalar
quantization of exponential and Laplacian random variables", IEEE Trans. Inf. Theory 42(5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from codec.errors import CorruptBlobError
from codec.symbol_classes import NUM_CLASSES, SymbolClasses, step_factor

MAX_CODE = (1 << 30) - 1
"""Greatest magnitude of a code; what is larger is held there, and is an outlier anyway."""

_TILE = 32
_LIMIT = np.float32(1 << 30)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
Rule = tuple[Ints, Ints, Ints, Floats, Ints, Floats, Floats, Floats]


class StepCodes(NamedTuple):
    """Coded coefficients of some tokens."""

    symbols_CT: Bytes
    """Zigzag of the high part of each code, or the escape of its class."""

    low_PT: Bytes
    """0 or 1: bit planes of all coefficients that keep some apart, lowest plane first."""

    escapes_N: Ints
    """High parts that no symbol stands for, coefficient after coefficient."""


class Layout(NamedTuple):
    """What is known of each coefficient before it is coded."""

    level_C: Ints
    """Place on the ladder of classes, after low bits were taken off."""

    low_bits_C: Ints
    """Bits kept apart."""

    @property
    def num_planes(self) -> int:
        """Bit planes of all coefficients together."""
        return int(self.low_bits_C.sum())

    def rows(self, part: slice) -> Layout:
        """The layout of a run of the coefficients."""
        return Layout(self.level_C[part], self.low_bits_C[part])


def quantize_steps(
    values_TC: Floats, step: float, shift_T: Ints, layout: Layout, classes: SymbolClasses
) -> StepCodes:
    """Codes of coefficients.

    Parameters
    ----------
    values_TC
        Shape ``(T, C)``, float32, finite.
    step
        Step of a token whose shift is 0.
    shift_T
        Shape ``(T,)``, int32: see `codec.symbol_classes`.

    Raises
    ------
    ValueError
        If a value is not finite, or shapes disagree.
    """
    num_tokens, num_coefficients = values_TC.shape
    rule = _rule(step, shift_T, layout, classes, (num_tokens, num_coefficients))
    symbols_CT = np.empty((num_coefficients, num_tokens), np.uint8)
    low_PT = np.zeros((layout.num_planes, num_tokens), np.uint8)
    first_plane_C = _starts(layout.low_bits_C)
    num_escapes = _quantize(values_TC, rule, first_plane_C, symbols_CT, low_PT)
    if num_escapes < 0:
        raise ValueError("coefficients must be finite")
    escapes_N = np.empty(num_escapes, np.int32)
    if num_escapes:
        _gather_escapes(values_TC, rule, symbols_CT, escapes_N)
    return StepCodes(symbols_CT, low_PT, escapes_N)


def dequantize_steps(
    codes: StepCodes, step: float, shift_T: Ints, layout: Layout, classes: SymbolClasses
) -> Floats:
    """The coefficients that codes stand for: shape ``(T, C)``, float32.

    Raises
    ------
    CorruptBlobError
        If a symbol is outside the alphabet of its class, the list of escapes is not as
        long as there are escape symbols, or holds a number that a symbol stands for.
    """
    num_coefficients, num_tokens = codes.symbols_CT.shape
    rule = _rule(step, shift_T, layout, classes, (num_tokens, num_coefficients))
    first_escape_C = np.empty(num_coefficients, np.int64)
    if _count_escapes(codes.symbols_CT, rule, first_escape_C) != len(codes.escapes_N):
        raise CorruptBlobError("escapes", f"{len(codes.escapes_N)} are not as many as symbols say")
    out_CT = np.empty((num_coefficients, num_tokens), np.float32)
    first_plane_C = _starts(layout.low_bits_C)
    if _dequantize(codes, rule, first_plane_C, first_escape_C, out_CT):
        raise CorruptBlobError("symbols", "a symbol or an escaped number is out of range")
    return out_CT.T


def quantization_errors(
    values_TC: Floats, step: float, shift_T: Ints, layout: Layout, classes: SymbolClasses
) -> Doubles:
    """Squared error of each token's coefficients in squares of its own step, shape ``(T,)``.

    It is not finite where a coefficient is not.
    """
    errors_T = np.zeros(len(values_TC))
    _errors(values_TC, _rule(step, shift_T, layout, classes, values_TC.shape), errors_T)
    return errors_T


class ClassCounts(NamedTuple):
    """What a fit learns from quantizing coefficients (`count_classes`)."""

    symbols_KA: Doubles
    """How often each zigzag symbol occurs; the last column counts all that are larger."""

    bias_K4: Doubles
    """Codes of magnitude 1, and what their values lack of 1, in steps; the same above 1."""


def count_classes(
    values_TC: Floats,
    step: float,
    shift_T: Ints,
    layout: Layout,
    *,
    offset_K: Floats,
    num_symbols: int,
) -> ClassCounts:
    """Count symbols and centroids of coefficients by class."""
    counts = ClassCounts(
        np.zeros((NUM_CLASSES, num_symbols), np.float64), np.zeros((NUM_CLASSES, 4), np.float64)
    )
    step_T = np.float32(step) * step_factor(shift_T)
    parts = (layout.level_C, layout.low_bits_C, shift_T, step_T, offset_K)
    _count(values_TC, parts, counts.symbols_KA, counts.bias_K4)
    return counts


class Gains(NamedTuple):
    """What coding brings, added up over tokens: by coefficient, or by class."""

    coded: Doubles
    """Coefficients of tokens that are coded."""

    bits: Doubles
    """Bits they take."""

    saved: Doubles
    """Squared error that coding saves over dropping, in squares of the token's step."""


def coding_gains(
    values_TC: Floats, step: float, shift_T: Ints, layout: Layout, classes: SymbolClasses
) -> tuple[Gains, Gains]:
    """What coding costs and is worth: for each coefficient, and for each class."""
    rule = _rule(step, shift_T, layout, classes, values_TC.shape)
    bits_KA = np.ascontiguousarray(classes.models.bits_KA, np.float32)
    by_C, by_K = (np.zeros((3, length)) for length in (values_TC.shape[1], NUM_CLASSES))
    _gain(values_TC, rule, bits_KA, by_C, by_K)
    return Gains(*by_C), Gains(*by_K)


def _rule(
    step: float, shift_T: Ints, layout: Layout, classes: SymbolClasses, shape: tuple[int, ...]
) -> Rule:
    """The arguments of the compiled loops, checked once."""
    num_tokens, num_coefficients = shape
    if shift_T.shape != (num_tokens,) or layout.level_C.shape != (num_coefficients,):
        raise ValueError(
            f"need {num_tokens} shifts and {num_coefficients} levels, "
            f"got {shift_T.shape} and {layout.level_C.shape}"
        )
    return (
        layout.level_C,
        layout.low_bits_C,
        shift_T,
        np.float32(step) * step_factor(shift_T),
        classes.alphabet_K,
        classes.offset_K,
        classes.bias1_K,
        classes.bias2_K,
    )


def _starts(low_bits_C: Ints) -> Longs:
    return np.cumsum(low_bits_C, dtype=np.int64) - low_bits_C


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _class(level: Any, shift: Any, table_K: Any) -> Any:  # noqa: ANN401 - compiled for each type
    # From the table: a constant of another module would be frozen into the compiler's cache.
    return min(max(level + shift, 0), len(table_K) - 1)


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _code(value: Any, step: Any, offset: Any) -> Any:  # noqa: ANN401
    magnitude = np.floor(np.abs(value) / step + offset)
    code = np.int32(MAX_CODE) if magnitude >= _LIMIT else np.int32(magnitude)
    return -code if value < 0 else code


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _zigzag(code: Any) -> Any:  # noqa: ANN401
    return -2 * code - 1 if code < 0 else 2 * code


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _is_escape(symbol: Any, alphabet: Any) -> Any:  # noqa: ANN401
    """A class that is not coded has an alphabet of one symbol, which is no escape."""
    return alphabet > 1 and symbol == alphabet - 1


@njit(nogil=True, cache=True, error_model="numpy")
def _quantize(
    values_TC: Floats, rule: Rule, first_plane_C: Longs, symbols_CT: Bytes, low_PT: Bytes
) -> int:
    """Write symbols and planes; how many escapes there are, or -1 for a bad value."""
    level_C, low_bits_C, shift_T, step_T, alphabet_K, offset_K, _, _ = rule
    num_tokens, num_coefficients = values_TC.shape
    num_escapes = 0
    # Square tiles: rows are read, and columns written, while they are in the first cache.
    for first_c in range(0, num_coefficients, _TILE):
        for first_t in range(0, num_tokens, _TILE):
            for c in range(first_c, min(first_c + _TILE, num_coefficients)):
                low_bits = low_bits_C[c]
                for t in range(first_t, min(first_t + _TILE, num_tokens)):
                    value = values_TC[t, c]
                    if not np.isfinite(value):
                        return -1
                    k = _class(level_C[c], shift_T[t], alphabet_K)
                    if alphabet_K[k] == 1:  # Never of a coefficient with low bits.
                        symbols_CT[c, t] = 0
                        continue
                    code = _code(value, step_T[t], offset_K[k])
                    for plane in range(low_bits):
                        low_PT[first_plane_C[c] + plane, t] = (code >> plane) & 1
                    symbol = _zigzag(np.int64(code) >> low_bits)
                    if symbol >= alphabet_K[k] - 1:
                        symbol = np.int64(alphabet_K[k] - 1)
                        num_escapes += int(symbol > 0)
                    symbols_CT[c, t] = symbol
    return num_escapes


@njit(nogil=True, cache=True, error_model="numpy")
def _gather_escapes(values_TC: Floats, rule: Rule, symbols_CT: Bytes, escapes_N: Ints) -> None:
    """Work out the escaped numbers again, in coding order."""
    level_C, low_bits_C, shift_T, step_T, alphabet_K, offset_K, _, _ = rule
    at = 0
    for c in range(symbols_CT.shape[0]):
        for t in range(symbols_CT.shape[1]):
            k = _class(level_C[c], shift_T[t], alphabet_K)
            if _is_escape(symbols_CT[c, t], alphabet_K[k]):
                escapes_N[at] = _code(values_TC[t, c], step_T[t], offset_K[k]) >> low_bits_C[c]
                at += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _count_escapes(symbols_CT: Bytes, rule: Rule, first_C: Longs) -> int:
    """Write where each coefficient's escapes start; how many there are in all."""
    level_C, _, shift_T, _, alphabet_K, _, _, _ = rule
    total = 0
    for c in range(symbols_CT.shape[0]):
        first_C[c] = total
        for t in range(symbols_CT.shape[1]):
            total += _is_escape(
                symbols_CT[c, t], alphabet_K[_class(level_C[c], shift_T[t], alphabet_K)]
            )
    return total


@njit(nogil=True, cache=True, error_model="numpy")
def _dequantize(
    codes: StepCodes, rule: Rule, first_plane_C: Longs, next_escape_C: Longs, out_CT: Floats
) -> bool:
    """Write every value; whether something in the codes is impossible."""
    level_C, low_bits_C, shift_T, step_T, alphabet_K, _, bias1_K, bias2_K = rule
    symbols_CT, low_PT, escapes_N = codes
    for c in range(symbols_CT.shape[0]):
        low_bits = low_bits_C[c]
        for t in range(symbols_CT.shape[1]):
            k = _class(level_C[c], shift_T[t], alphabet_K)
            symbol = np.int64(symbols_CT[c, t])
            escape = np.int64(alphabet_K[k] - 1)
            if symbol > escape:
                return True
            code = -((symbol + 1) >> 1) if symbol & 1 else symbol >> 1
            if _is_escape(symbol, alphabet_K[k]):
                code = np.int64(escapes_N[next_escape_C[c]])
                next_escape_C[c] += 1
                if _zigzag(code) < escape or np.abs(code) > (MAX_CODE >> low_bits) + 1:
                    return True
            if low_bits:
                code <<= low_bits
                for plane in range(low_bits):
                    code |= np.int64(low_PT[first_plane_C[c] + plane, t]) << plane
            out_CT[c, t] = _value(code, step_T[t], bias1_K[k], bias2_K[k])
    return False


@njit(nogil=True, cache=True, error_model="numpy", inline="always")
def _value(code: Any, step: Any, bias1: Any, bias2: Any) -> Any:  # noqa: ANN401
    if code == 0:
        return np.float32(0)
    magnitude = np.abs(code)
    value = (np.float32(magnitude) - (bias1 if magnitude == 1 else bias2)) * step
    return -value if code < 0 else value


@njit(nogil=True, cache=True, error_model="numpy")
def _errors(values_TC: Floats, rule: Rule, errors_T: Doubles) -> None:
    level_C, _, shift_T, step_T, alphabet_K, offset_K, bias1_K, bias2_K = rule
    one = np.float32(1)
    # Coefficients are outermost, as those of an encoder lie.
    for c in range(values_TC.shape[1]):
        for t in range(values_TC.shape[0]):
            value = values_TC[t, c] / step_T[t]
            if not np.isfinite(values_TC[t, c]):
                errors_T[t] = np.inf
            k = _class(level_C[c], shift_T[t], alphabet_K)
            if alphabet_K[k] > 1:
                value -= _value(_code(value, one, offset_K[k]), one, bias1_K[k], bias2_K[k])
            errors_T[t] += np.square(value)


@njit(nogil=True, cache=True, error_model="numpy")
def _count(
    values_TC: Floats,
    parts: tuple[Ints, Ints, Ints, Floats, Floats],
    symbols_KA: Doubles,
    bias_K4: Doubles,
) -> None:
    level_C, low_bits_C, shift_T, step_T, offset_K = parts
    last = symbols_KA.shape[1] - 1
    for t in range(values_TC.shape[0]):
        for c in range(values_TC.shape[1]):
            k = _class(level_C[c], shift_T[t], offset_K)
            code = _code(values_TC[t, c], step_T[t], offset_K[k])
            symbols_KA[k, min(_zigzag(np.int64(code) >> low_bits_C[c]), last)] += 1
            magnitude = np.abs(code)
            if magnitude:
                column = 0 if magnitude == 1 else 2
                bias_K4[k, column] += 1
                bias_K4[k, column + 1] += magnitude - np.abs(values_TC[t, c]) / step_T[t]


@njit(nogil=True, cache=True, error_model="numpy")
def _gain(values_TC: Floats, rule: Rule, bits_KA: Floats, by_C: Doubles, by_K: Doubles) -> None:
    level_C, low_bits_C, shift_T, step_T, alphabet_K, offset_K, bias1_K, bias2_K = rule
    for t in range(values_TC.shape[0]):
        for c in range(values_TC.shape[1]):
            k = _class(level_C[c], shift_T[t], alphabet_K)
            if alphabet_K[k] == 1:
                continue
            value = values_TC[t, c] / step_T[t]
            code = _code(values_TC[t, c], step_T[t], offset_K[k])
            symbol = _zigzag(np.int64(code) >> low_bits_C[c])
            # An escaped number costs its 32 bits on top of the escape.
            last = np.int64(alphabet_K[k] - 1)
            bits = low_bits_C[c] + bits_KA[k, min(symbol, last)] + 32 * (symbol >= last)
            left = value - _value(code, np.float32(1), bias1_K[k], bias2_K[k])
            saved = value * value - left * left
            for gains, at in ((by_C, c), (by_K, k)):
                gains[0, at] += 1
                gains[1, at] += bits
                gains[2, at] += saved
