"""The step quantizer against a slow one in plain Python, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.entropy.models import SymbolModels
from codec.errors import CorruptBlobError
from codec.step_quantizer import (
    MAX_CODE,
    Layout,
    StepCodes,
    coding_gains,
    count_classes,
    dequantize_steps,
    quantization_errors,
    quantize_steps,
)
from codec.symbol_classes import (
    MAX_FIRST_CLASS,
    MAX_LEVEL,
    MAX_SHIFT,
    NUM_CLASSES,
    SymbolClasses,
    step_factor,
)

BIG = np.float32(3e38)


def classes_of(alphabets: list[int], *, seed: int = 0, first_class: int = 0) -> SymbolClasses:
    """Classes whose alphabets repeat a list, with offsets and biases of their own."""
    rng = np.random.default_rng(seed)
    alphabet_K = np.resize(alphabets, NUM_CLASSES)
    alphabet_K[:first_class] = 1
    floor_KA = np.arange(256) < alphabet_K[:, None]
    counts_KA = np.where(floor_KA, rng.integers(1, 50, floor_KA.shape), 0)
    return SymbolClasses(
        models=SymbolModels.fit(counts_KA, floor=floor_KA),
        offset_K=rng.uniform(0.2, 0.5, NUM_CLASSES).astype(np.float32),
        bias1_K=rng.uniform(-0.1, 0.1, NUM_CLASSES).astype(np.float32),
        bias2_K=rng.uniform(-0.1, 0.1, NUM_CLASSES).astype(np.float32),
    )


class Case(NamedTuple):
    """Coefficients and all that says how they are coded."""

    values_TC: Any
    step: float
    shift_T: Any
    layout: Layout
    classes: SymbolClasses

    def klass(self, t: int, c: int) -> int:
        """The class of one coefficient of one token."""
        return int(np.clip(self.layout.level_C[c] + self.shift_T[t], 0, NUM_CLASSES - 1))

    def code(self, t: int, c: int) -> int:
        """The code of one coefficient, by the rule of the module's docstring."""
        if self.klass(t, c) < self.classes.first_class:
            return 0
        step = np.float32(self.step) * step_factor(self.shift_T)[t]
        offset = self.classes.offset_K[self.klass(t, c)]
        value = self.values_TC[t, c]
        magnitude = min(int(np.floor(np.abs(value) / step + offset)), MAX_CODE)
        return -magnitude if value < 0 else magnitude

    def unit_value(self, t: int, c: int) -> float:
        """What the code stands for, in the token's steps."""
        code, k = self.code(t, c), self.klass(t, c)
        if not code:
            return 0.0
        bias = self.classes.bias1_K[k] if abs(code) == 1 else self.classes.bias2_K[k]
        return float(np.sign(code) * (abs(code) - float(bias)))

    def symbol(self, t: int, c: int) -> tuple[int, int | None]:
        """Symbol of one coefficient, and its escaped number if it has one."""
        high = self.code(t, c) >> int(self.layout.low_bits_C[c])
        zigzag = 2 * high if high >= 0 else -2 * high - 1
        escape = int(self.classes.alphabet_K[self.klass(t, c)]) - 1
        if not escape:
            return 0, None
        return (zigzag, None) if zigzag < escape else (escape, high)

    def quantized(self) -> StepCodes:
        """Codes by the module."""
        return quantize_steps(*self)

    def dequantized(self, codes: StepCodes) -> Any:
        """Values by the module."""
        return dequantize_steps(codes, *self[1:])


def a_case(
    num_tokens: int = 37,
    num_coefficients: int = 41,
    *,
    seed: int = 0,
    alphabets: Any = (3, 8, 40),
    first_class: int = 0,
) -> Case:
    """Coefficients of very different spreads, some of which keep low bits apart."""
    rng = np.random.default_rng(seed)
    level_C = rng.integers(0, MAX_LEVEL + 1, num_coefficients).astype(np.int32)
    low_bits_C = rng.choice([0, 0, 1, 5], num_coefficients).astype(np.int32)
    # Classes that are not coded come below what keeps low bits apart.
    low_bits_C[level_C < first_class + MAX_SHIFT] = 0
    spread_C = 2.0 ** rng.uniform(-2, 5, num_coefficients)
    return Case(
        rng.laplace(0, spread_C, (num_tokens, num_coefficients)).astype(np.float32),
        0.7,
        rng.integers(-9, 10, num_tokens).astype(np.int32),
        Layout(level_C, low_bits_C),
        classes_of(list(alphabets), seed=seed, first_class=first_class),
    )


shapes = st.tuples(st.sampled_from([0, 1, 2, 31, 33]), st.sampled_from([0, 1, 3, 32, 35]))


@settings(max_examples=25, deadline=None)
@given(
    shapes,
    st.integers(0, 1000),
    st.sampled_from([(2, 3), (3, 8, 40), (256,)]),
    st.sampled_from([0, 1, 10, MAX_FIRST_CLASS]),
)
def test_symbols_planes_and_escapes_are_those_of_the_rule(
    shape: tuple[int, int], seed: int, alphabets: tuple[int, ...], first_class: int
) -> None:
    """One at a time in plain Python, in the documented order."""
    case = a_case(*shape, seed=seed, alphabets=alphabets, first_class=first_class)

    codes = case.quantized()

    escapes, planes = [], []
    for c in range(shape[1]):
        for t in range(shape[0]):
            symbol, escaped = case.symbol(t, c)
            assert codes.symbols_CT[c, t] == symbol
            escapes += [] if escaped is None else [escaped]
        planes += [
            [case.code(t, c) >> plane & 1 for t in range(shape[0])]
            for plane in range(case.layout.low_bits_C[c])
        ]
    assert codes.escapes_N.tolist() == escapes
    assert codes.low_PT.tolist() == planes
    assert codes.low_PT.shape[0] == case.layout.num_planes


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 1000), st.sampled_from([0, 10, MAX_FIRST_CLASS]))
def test_values_come_back_as_the_centroids_of_their_codes(
    shape: tuple[int, int], seed: int, first_class: int
) -> None:
    """The same plain Python, the other way round."""
    case = a_case(*shape, seed=seed, first_class=first_class)

    found_TC = case.dequantized(case.quantized())

    step_T = case.step * step_factor(case.shift_T).astype(np.float64)
    assert found_TC.shape == shape
    assert found_TC.dtype == np.float32
    for t in range(shape[0]):
        for c in range(shape[1]):
            assert found_TC[t, c] == pytest.approx(case.unit_value(t, c) * step_T[t], rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000))
def test_an_error_is_at_most_a_step_less_the_offset(seed: int) -> None:
    """Within the dead zone at most ``1 - offset`` steps, beyond it a bias more."""
    case = a_case(seed=seed)
    found_TC = case.dequantized(case.quantized())

    step_T = case.step * step_factor(case.shift_T)
    error_TC = np.abs(found_TC - case.values_TC) / step_T[:, None]
    klass_TC = np.clip(case.layout.level_C + case.shift_T[:, None], 0, NUM_CLASSES - 1)
    bound_TC = 1 - case.classes.offset_K[klass_TC] + 0.1
    # Numbers of many steps are rounded in float32 themselves.
    assert (error_TC <= bound_TC + 1e-6 * np.abs(case.values_TC) / step_T[:, None] + 1e-5).all()
    zero_TC = found_TC == 0
    assert (np.abs(case.values_TC)[zero_TC] < (step_T[:, None] * (bound_TC - 0.1))[zero_TC]).all()
    assert zero_TC.any()
    assert not zero_TC.all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [(0, 0), (36, 40), (33, 2)])
def test_a_value_that_is_not_finite_is_refused(bad: float, where: tuple[int, int]) -> None:
    """In any tile."""
    case = a_case()
    case.values_TC[where] = bad

    with pytest.raises(ValueError, match="must be finite"):
        case.quantized()


def test_the_largest_floats_are_held_at_the_largest_code() -> None:
    """They do not wrap round, with or without low bits."""
    case = a_case(2, 2)
    case.values_TC[:] = [[BIG, -BIG], [-BIG, BIG]]
    case = case._replace(layout=Layout(case.layout.level_C, np.array([0, 5], np.int32)))

    codes = case.quantized()
    found_TC = case.dequantized(codes)

    assert codes.escapes_N[:2].tolist() == [MAX_CODE, -MAX_CODE]
    assert (np.sign(found_TC) == np.sign(case.values_TC)).all()
    step_T = case.step * step_factor(case.shift_T)
    assert np.abs(found_TC) / step_T[:, None] == pytest.approx(MAX_CODE, rel=1e-6)


def test_strided_input_gives_the_same_codes() -> None:
    """A band is a slice of all coefficients; it need not be copied."""
    case = a_case(40, 60)
    whole_TC = case.values_TC
    part = Layout(case.layout.level_C[::3], case.layout.low_bits_C[::3])

    strided = case._replace(values_TC=whole_TC[:, ::3], layout=part).quantized()
    plain = case._replace(values_TC=whole_TC[:, ::3].copy(), layout=part).quantized()

    for one, other in zip(strided, plain, strict=True):
        assert np.array_equal(one, other)


def test_codes_of_a_run_of_rows_are_a_run_of_the_codes() -> None:
    """Bands are coded one by one."""
    case = a_case()
    whole = case.quantized()

    part = case._replace(
        values_TC=case.values_TC[:, 10:20], layout=case.layout.rows(slice(10, 20))
    ).quantized()

    assert np.array_equal(part.symbols_CT, whole.symbols_CT[10:20])
    first = int(case.layout.low_bits_C[:10].sum())
    assert np.array_equal(part.low_PT, whole.low_PT[first : first + len(part.low_PT)])


def test_zeros_of_either_sign_are_code_zero() -> None:
    """A negative zero has no code of its own."""
    case = a_case(2, 1, alphabets=(8,))
    case.values_TC[:] = [[0.0], [-0.0]]

    assert case.quantized().symbols_CT.tolist() == [[0, 0]]


@pytest.mark.parametrize("change", ["shorter", "longer", "fits", "far", "-far"])
def test_escapes_that_no_writer_makes_are_refused(change: str) -> None:
    """Too few, too many, one that has a symbol, and numbers no value has."""
    case = a_case(alphabets=(8,))
    codes = case.quantized()
    escapes = codes.escapes_N.copy()
    low_bits = int(case.layout.low_bits_C.max())
    if change == "shorter":
        escapes = escapes[:-1]
    elif change == "longer":
        escapes = np.append(escapes, np.int32(50))
    else:
        c, _ = np.argwhere(codes.symbols_CT == 7)[0]
        far = (MAX_CODE >> int(case.layout.low_bits_C[c])) + 2
        escapes[0] = {"fits": 3, "far": far, "-far": -far}[change]
    assert low_bits

    with pytest.raises(CorruptBlobError, match="escape"):
        case.dequantized(codes._replace(escapes_N=escapes))


def test_the_greatest_escapes_that_writers_make_are_taken() -> None:
    """The bound of the reader is that of the writer."""
    case = a_case(1, 2, alphabets=(8,))
    layout = Layout(case.layout.level_C, np.array([0, 5], np.int32))
    case = case._replace(layout=layout)
    codes = case._replace(values_TC=np.array([[-BIG, -BIG]], np.float32)).quantized()

    assert codes.escapes_N.tolist() == [-MAX_CODE, -(MAX_CODE >> 5) - 1]
    assert np.isfinite(case.dequantized(codes)).all()


def test_a_symbol_outside_its_alphabet_is_refused() -> None:
    """Even one that another class has."""
    case = a_case(4, 4, alphabets=(8,))
    codes = case.quantized()
    codes.symbols_CT[3, 3] = 8
    num_escapes = int((codes.symbols_CT == 7).sum())

    with pytest.raises(CorruptBlobError, match="out of range"):
        case.dequantized(codes._replace(escapes_N=np.full(num_escapes, 99, np.int32)))


def test_shapes_that_disagree_are_refused() -> None:
    """The compiled loops do not look."""
    case = a_case()

    with pytest.raises(ValueError, match="need 37 shifts and 41 levels"):
        case._replace(shift_T=case.shift_T[1:]).quantized()
    with pytest.raises(ValueError, match="need 37 shifts and 41 levels"):
        case._replace(layout=case.layout.rows(slice(40))).quantized()
    with pytest.raises(ValueError, match="need 36 shifts and 41 levels"):
        case._replace(shift_T=case.shift_T).dequantized(
            case.quantized()._replace(symbols_CT=np.zeros((41, 36), np.uint8))
        )


@pytest.mark.parametrize("first_class", [0, MAX_FIRST_CLASS])
def test_errors_are_those_of_the_round_trip(first_class: int) -> None:
    """In squares of each token's own step; what is not coded counts with all it has."""
    case = a_case(first_class=first_class)
    found_TC = case.dequantized(case.quantized())

    errors_T = quantization_errors(*case)

    step_T = case.step * step_factor(case.shift_T).astype(np.float64)
    wanted_T = np.square(np.subtract(found_TC, case.values_TC, dtype=np.float64)).sum(1)
    assert errors_T == pytest.approx(wanted_T / step_T**2, rel=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_error_of_a_bad_row_is_not_finite(bad: float) -> None:
    """And that of the rows beside it is what it was."""
    case = a_case()
    before_T = quantization_errors(*case)
    case.values_TC[5, 7] = bad

    errors_T = quantization_errors(*case)

    assert not np.isfinite(errors_T[5])
    assert np.array_equal(np.delete(errors_T, 5), np.delete(before_T, 5))


@pytest.mark.parametrize("num_symbols", [4, 256])
def test_counts_are_those_of_the_codes(num_symbols: int) -> None:
    """Symbols by class, all large ones in the last column; codes 1 and above, and their lack."""
    case = a_case()
    symbols_KA = np.zeros((NUM_CLASSES, num_symbols))
    bias_K4 = np.zeros((NUM_CLASSES, 4))
    step_T = case.step * step_factor(case.shift_T)
    for t, c in np.ndindex(case.values_TC.shape):
        code, k = case.code(t, c), case.klass(t, c)
        high = code >> int(case.layout.low_bits_C[c])
        symbols_KA[k, min(2 * high if high >= 0 else -2 * high - 1, num_symbols - 1)] += 1
        if code:
            column = 0 if abs(code) == 1 else 2
            bias_K4[k, column] += 1
            bias_K4[k, column + 1] += abs(code) - abs(case.values_TC[t, c]) / step_T[t]

    counts = count_classes(*case[:4], offset_K=case.classes.offset_K, num_symbols=num_symbols)

    assert np.array_equal(counts.symbols_KA, symbols_KA)
    assert np.array_equal(counts.bias_K4[:, ::2], bias_K4[:, ::2])
    assert counts.bias_K4[:, 1::2] == pytest.approx(bias_K4[:, 1::2], abs=1e-3)


@pytest.mark.parametrize("first_class", [0, MAX_FIRST_CLASS])
def test_gains_are_bits_paid_and_error_saved(first_class: int) -> None:
    """Against the oracle: model bits, low bits, 32 for an escape; error against dropping it."""
    case = a_case(first_class=first_class)
    by_C, by_K = np.zeros((3, case.values_TC.shape[1])), np.zeros((3, NUM_CLASSES))
    step_T = case.step * step_factor(case.shift_T)
    for t, c in np.ndindex(case.values_TC.shape):
        k = case.klass(t, c)
        if k < first_class:
            continue
        symbol, escaped = case.symbol(t, c)
        bits = case.classes.models.bits_KA[k, symbol]
        bits += case.layout.low_bits_C[c] + (0 if escaped is None else 32)
        value = float(case.values_TC[t, c] / step_T[t])
        saved = value**2 - (value - case.unit_value(t, c)) ** 2
        by_C[:, c] += (1, bits, saved)
        by_K[:, k] += (1, bits, saved)

    found_C, found_K = coding_gains(*case)

    for found, wanted in ((found_C, by_C), (found_K, by_K)):
        assert np.array_equal(found.coded, wanted[0])
        assert found.bits == pytest.approx(wanted[1], rel=1e-5)
        assert found.saved == pytest.approx(wanted[2], rel=1e-4, abs=1e-2)


def test_fitted_biases_lower_the_error() -> None:
    """The counted lack is the mean that takes most error away: what centroids are for."""
    case = a_case(200, 41, alphabets=(256,))
    counts = count_classes(*case[:4], offset_K=case.classes.offset_K, num_symbols=256)
    lack_K2 = counts.bias_K4[:, 1::2] / np.maximum(counts.bias_K4[:, ::2], 1)
    zero_K = np.zeros(NUM_CLASSES, np.float32)
    classes = {
        "zero": dataclasses.replace(case.classes, bias1_K=zero_K, bias2_K=zero_K),
        "fitted": dataclasses.replace(
            case.classes,
            bias1_K=lack_K2[:, 0].astype(np.float32),
            bias2_K=lack_K2[:, 1].astype(np.float32),
        ),
    }

    errors = {
        name: quantization_errors(*case._replace(classes=made)).sum()
        for name, made in classes.items()
    }

    assert errors["fitted"] < errors["zero"]
