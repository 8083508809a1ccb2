"""Streams of symbols: the bytes of the format, round trips, and damage.

`StreamsSuite` is what every coder of this format must do; the kernels' tests run it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import njit
from numpy.typing import NDArray

from codec.entropy import rans
from codec.entropy.models import TOTAL, SymbolModels
from codec.entropy.rans import decode_symbols, encode_symbols
from codec.errors import CorruptBlobError
from tests.codec.samples import peak_bytes
from tests.suites.quiet import QUIET

#: One suite runs under several classes on purpose; interpreted kernels are slow.
FEW = settings(QUIET, max_examples=12, suppress_health_check=list(HealthCheck))

Symbols = NDArray[np.uint8]

GOLDEN_FREQ_KA = np.array([[2048, 1024, 1000, 24], [0, TOTAL, 0, 0], [1, 0, 1, 4094]])
GOLDEN_MODEL_OF_C = (0, 2, 1, 0)
GOLDEN_TOKENS = 35
GOLDEN = (
    "0c70810088174200d89ec4209c7a100082281000428d100042000400420004009c360800d4df100082281000"
    "822810008a3c0800420004009c36080082100800428d10004208080042080800d4df10009c36080082100800"
    "821008008a3c0800420808009c7a1000428d1000821008004200040042000400d4df10009c7a10000100"
)


class Case(NamedTuple):
    """Arrays of symbols, and what they are to be coded under."""

    symbols: list[Symbols]
    model_of: list[NDArray[np.int64]]
    models: SymbolModels
    shifts: list[NDArray[np.int64]] | None = None

    @property
    def num_tokens(self) -> list[int]:
        """Of each array."""
        return [symbols_CT.shape[1] for symbols_CT in self.symbols]


def make_models(rng: np.random.Generator, num_models: int, num_symbols: int) -> SymbolModels:
    """Models in which some symbols cannot be coded, and some are all but sure."""
    freq_KA = np.zeros((num_models, num_symbols), np.int64)
    for freq_A in freq_KA:
        codable = rng.permutation(num_symbols)[: rng.integers(1, num_symbols + 1)]
        weights = rng.random(len(codable)) ** rng.integers(1, 40)
        freq_A[codable] = 1 + rng.multinomial(TOTAL - len(codable), weights / weights.sum())
    return SymbolModels(freq_KA)


def make_case(
    seed: int, shapes: Sequence[tuple[int, int]], size: tuple[int, int], max_shift: int = 0
) -> Case:
    """Random symbols: half of the rows as likely as their model says, half of them even."""
    rng = np.random.default_rng(seed)
    models = make_models(rng, *size)
    symbols, model_of, shifts = [], [], []
    for num_coefficients, num_tokens in shapes:
        model_of_C = rng.integers(0, models.num_models, num_coefficients)
        shift_T = rng.integers(-max_shift, max_shift + 1, num_tokens)
        rows = np.zeros((num_coefficients, num_tokens), np.uint8)
        for c, k_T in enumerate(models_of_tokens(model_of_C, shift_T, models)):
            for k in np.unique(k_T):
                freq_A = models.freq_KA[k] if rng.random() < 0.5 else models.freq_KA[k] > 0
                drawn_T = rng.choice(models.num_symbols, num_tokens, p=freq_A / freq_A.sum())
                rows[c, k_T == k] = drawn_T[k_T == k]
        symbols.append(rows)
        model_of.append(model_of_C)
        shifts.append(shift_T)
    return Case(symbols, model_of, models, shifts if max_shift else None)


def models_of_tokens(model_of_C: Any, shift_T: Any, models: SymbolModels) -> NDArray[np.int64]:
    """The model of each coefficient and token, shape ``(C, T)``, one by one."""
    last = models.num_models - 1
    rows = [[min(max(int(k) + int(s), 0), last) for s in shift_T] for k in model_of_C]
    return np.array(rows, np.int64).reshape(len(model_of_C), len(shift_T))


def cases(tokens: Sequence[int], coefficients: int, streams: int) -> st.SearchStrategy[Case]:
    """Cases of up to so many streams of up to so many coefficients, half of them shifted."""
    shape = st.tuples(st.integers(0, coefficients), st.sampled_from(tokens))
    size = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 17, 255, 256]))
    shapes = st.lists(shape, max_size=streams)
    max_shift = st.sampled_from([0, 1, 3])
    return st.builds(make_case, st.integers(0, 2**32 - 1), shapes, size, max_shift)


def starts_of(models: SymbolModels) -> NDArray[np.int64]:
    """The sum of the frequencies before each, and of all of them."""
    freq_KA = models.freq_KA.astype(np.int64)
    return np.concatenate([np.zeros((len(freq_KA), 1), np.int64), freq_KA.cumsum(1)], axis=1)


def reference_encode(
    symbols_CT: Symbols, model_of_C: Any, models: SymbolModels, shift_T: Any = None
) -> bytes:
    """The stream, made with one vector of lanes and one step for each group of tokens."""
    num_coefficients, num_tokens = symbols_CT.shape
    shift_T = np.zeros(num_tokens, np.int64) if shift_T is None else shift_T
    k_CT = models_of_tokens(model_of_C, shift_T, models)
    cum_KA = starts_of(models)
    state_N = np.full(32, 65536, np.int64)
    groups = [np.zeros(0, np.int64)]
    for c in reversed(range(num_coefficients)):
        for start in reversed(range(0, num_tokens, 32)):
            symbols = symbols_CT[c, start : start + 32].astype(np.int64)
            k = k_CT[c, start : start + 32]
            first = cum_KA[k, symbols]
            frequency = cum_KA[k, symbols + 1] - first
            state = state_N[: len(symbols)]
            gives = state >= frequency * 2**20
            groups.append(state[gives] % 65536)
            state = np.where(gives, state // 65536, state)
            state = state // frequency * 4096 + state % frequency + first
            state_N[: len(symbols)] = state
    states = state_N[: min(num_tokens, 32) if num_coefficients else 0]
    words = np.concatenate(groups[::-1])
    return bytes(states.astype("<u4").tobytes() + words.astype("<u2").tobytes())


def reference_decode(
    data: bytes, model_of_C: Any, models: SymbolModels, num_tokens: int, shift_T: Any = None
) -> NDArray[np.int64] | None:
    """The symbols of ``data``, by the same means; None if they do not end with it."""
    shift_T = np.zeros(num_tokens, np.int64) if shift_T is None else shift_T
    k_CT = models_of_tokens(model_of_C, shift_T, models)
    cum_KA = starts_of(models)
    num_states = min(num_tokens, 32) if len(model_of_C) else 0
    state_N = np.full(32, 65536, np.int64)
    state_N[:num_states] = np.frombuffer(data[: 4 * num_states], "<u4")
    words = np.frombuffer(data[4 * num_states :], "<u2").astype(np.int64)
    symbols_CT = np.zeros((len(model_of_C), num_tokens), np.int64)
    for c in range(len(model_of_C)):
        for start in range(0, num_tokens, 32):
            state = state_N[: num_tokens - start]
            k = k_CT[c, start : start + 32]
            slot = state % 4096
            symbols = (cum_KA[k] <= slot[:, None]).sum(1) - 1
            first = cum_KA[k, symbols]
            state = (cum_KA[k, symbols + 1] - first) * (state // 4096) + slot - first
            takes = state < 65536
            if takes.sum() > len(words):
                return None
            state[takes] = state[takes] * 65536 + words[: takes.sum()]
            words = words[takes.sum() :]
            state_N[: len(state)] = state
            symbols_CT[c, start : start + 32] = symbols
    return symbols_CT if not len(words) and (state_N == 65536).all() else None


class StreamsSuite:
    """What a coder of many streams does; a subclass says how it is called."""

    def encode(
        self,
        symbols: Sequence[Symbols],
        model_of: Sequence[Any],
        models: SymbolModels,
        shifts: Sequence[Any] | None = None,
    ) -> list[bytes]:
        """The streams of arrays of symbols."""
        raise NotImplementedError

    def decode(
        self,
        streams: Sequence[bytes],
        model_of: Sequence[Any],
        models: SymbolModels,
        num_tokens: Sequence[int],
        shifts: Sequence[Any] | None = None,
    ) -> list[Symbols]:
        """The symbols of streams."""
        raise NotImplementedError

    @FEW
    @given(cases((0, 1, 31, 32, 33, 65), coefficients=2, streams=3))
    def test_streams_are_those_of_the_reference(self, case: Case) -> None:
        """Bit for bit, and they come back."""
        streams = self.encode(*case)

        shifts = case.shifts or [None] * len(case.symbols)
        rows = zip(case.symbols, case.model_of, shifts, strict=True)
        assert streams == [reference_encode(s, k, case.models, shift) for s, k, shift in rows]
        self.check_back(streams, case)

    def check_back(self, streams: list[bytes], case: Case) -> None:
        """Decoding gives what was encoded, and its shape and type."""
        decoded = self.decode(streams, case.model_of, case.models, case.num_tokens, case.shifts)
        assert len(decoded) == len(case.symbols)
        for found_CT, wanted_CT in zip(decoded, case.symbols, strict=True):
            assert found_CT.dtype == np.uint8
            assert found_CT.shape == wanted_CT.shape
            assert np.array_equal(found_CT, wanted_CT)

    def test_a_long_stream_comes_back(self) -> None:
        """More than eight groups, the last of one token."""
        case = make_case(5, [(5, 257)], (4, 17), 2)

        self.check_back(self.encode(*case), case)

    def test_no_shift_is_a_shift_of_nothing(self) -> None:
        """For all streams, or for one of them."""
        case = make_case(14, [(2, 33)] * 2, (3, 5))
        zeros_T = np.zeros(33, np.int8)

        plain = self.encode(*case)

        for shifts in ([zeros_T] * 2, [None, zeros_T]):
            assert self.encode(case.symbols, case.model_of, case.models, shifts) == plain
            self.check_back(plain, case._replace(shifts=shifts))

    def test_shifted_tokens_take_other_models(self) -> None:
        """Within the models: each here can code one symbol, and so costs nothing."""
        models = SymbolModels(np.eye(3, dtype=np.int64) * TOTAL)
        shift_T = np.array([0, 1, 2, 255, -1, -2, -255, 1])
        symbols_CT = np.array([[0, 1, 2, 2, 0, 0, 0, 1], [1, 2, 2, 2, 0, 0, 0, 2]], np.uint8)
        stream = b"\x00\x00\x01\x00" * 8

        assert self.encode([symbols_CT], [[0, 1]], models, [shift_T]) == [stream]
        (decoded_CT,) = self.decode([stream], [[0, 1]], models, [8], [shift_T])
        assert np.array_equal(decoded_CT, symbols_CT)
        with pytest.raises(ValueError, match="cannot code"):
            self.encode([symbols_CT], [[0, 1]], models, [-shift_T])

    @pytest.mark.parametrize(
        "shift_T", [[0] * 3, [0] * 5, [0.0] * 4, [[0] * 4], [256, 0, 0, 0], [0, 0, 0, -256]]
    )
    def test_shifts_are_checked(self, shift_T: Any) -> None:
        """One small integer for each token, in both directions."""
        models = SymbolModels(np.array([[4096]]))

        with pytest.raises(ValueError, match="shifts"):
            self.encode([np.zeros((1, 4), np.uint8)], [[0]], models, [shift_T])
        with pytest.raises(ValueError, match="shifts"):
            self.decode([b"\x00\x00\x01\x00" * 4], [[0]], models, [4], [shift_T])

    def test_the_bytes_are_pinned(self) -> None:
        """Stored streams outlive the code that wrote them."""
        symbols_CT, model_of_C, models = golden_case()

        (stream,) = self.encode([symbols_CT], [model_of_C], models)

        assert stream.hex() == GOLDEN
        (decoded_CT,) = self.decode([stream], [model_of_C], models, [GOLDEN_TOKENS])
        assert np.array_equal(decoded_CT, symbols_CT)

    @pytest.mark.parametrize("symbol", [1, 3, 4, 255])
    def test_a_symbol_that_cannot_be_coded_is_refused(self, symbol: int) -> None:
        """Frequency 0, inside the alphabet and outside it, wherever it stands."""
        models = SymbolModels(np.array([[4000, 0, 96, 0], [1024] * 4]))
        for at in ((0, 0), (1, 34)):
            symbols_CT = np.zeros((2, 35), np.uint8)
            symbols_CT[at] = symbol
            with pytest.raises(ValueError, match="cannot code"):
                self.encode([np.zeros((1, 3), np.uint8), symbols_CT], [[0], [0, 0]], models)

    def test_what_its_own_model_can_code_is_not_refused(self) -> None:
        """Frequencies are looked up under the model of the coefficient."""
        models = SymbolModels(np.array([[0, 4096], [4096, 0]]))
        symbols_CT = np.repeat(np.array([[1], [0]], np.uint8), 33, axis=1)

        (stream,) = self.encode([symbols_CT], [[0, 1]], models)

        assert stream == b"\x00\x00\x01\x00" * 32
        with pytest.raises(ValueError, match="cannot code"):
            self.encode([symbols_CT], [[1, 0]], models)

    def test_every_cut_and_every_extension_is_refused(self) -> None:
        """A stream of other length is no stream of these symbols."""
        case = make_case(6, [(3, 5)], (1, 5))
        (stream,) = self.encode(*case)
        bad = [stream[:size] for size in range(len(stream))]
        bad += [stream + b"\0" * size for size in (1, 2, 3, 4, 100)]

        for damaged in bad:
            with pytest.raises(CorruptBlobError):
                self.decode([damaged], case.model_of, case.models, [5])

    def test_no_stream_stands_for_another_number_of_tokens_or_coefficients(self) -> None:
        """Neither fewer nor more, neither none."""
        case = make_case(7, [(3, 33)], (1, 5))
        (stream,) = self.encode(*case)

        for num_coefficients, num_tokens in ((3, 32), (3, 34), (2, 33), (4, 33), (0, 33), (3, 0)):
            with pytest.raises(CorruptBlobError):
                self.decode([stream], [[0] * num_coefficients], case.models, [num_tokens])

    def test_one_bad_stream_spoils_the_call(self) -> None:
        """Whichever it is."""
        case = make_case(8, [(2, 33)] * 3, (2, 17))
        streams = self.encode(*case)
        for bad in range(3):
            damaged = [*streams]
            damaged[bad] = flipped(streams[bad], 8 * 3 + 7)
            with pytest.raises(CorruptBlobError):
                self.decode(damaged, case.model_of, case.models, case.num_tokens)

    def test_a_state_below_the_least_is_refused(self) -> None:
        """No encoder writes one."""
        models = SymbolModels(np.array([[4096]]))
        low, least = (np.full(2, state, "<u4").tobytes() for state in (65535, 65536))

        assert self.decode([least], [[0]], models, [2])[0].tolist() == [[0, 0]]
        with pytest.raises(CorruptBlobError):
            self.decode([low], [[0]], models, [2])
        # From state 1 a lane can get to the end as well, by a word that says nothing.
        with pytest.raises(CorruptBlobError):
            self.decode([bytes([1, 0, 0, 0, 0, 0])], [[0]], SymbolModels([[2048, 2048]]), [1])

    @pytest.mark.parametrize("model_of_C", [[2], [-1], [0, 0], [], [0.0], [[0]]])
    def test_model_numbers_are_checked(self, model_of_C: Any) -> None:
        """One row of the models for each coefficient, when encoding."""
        models = SymbolModels(np.array([[4096], [4096]]))

        with pytest.raises(ValueError, match="model"):
            self.encode([np.zeros((1, 4), np.uint8)], [model_of_C], models)

    @pytest.mark.parametrize(
        ("model_of_C", "num_tokens"), [([2], 4), ([-1], 4), ([0.0], 4), ([[0]], 4), ([0], -1)]
    )
    def test_what_to_decode_is_checked(self, model_of_C: Any, num_tokens: int) -> None:
        """Wrong arguments are no fault of the bytes."""
        models = SymbolModels(np.array([[4096], [4096]]))

        with pytest.raises(ValueError, match=r"need|must"):
            self.decode([b"\x00\x00\x01\x00" * 4], [model_of_C], models, [num_tokens])

    @pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.bool_])
    def test_symbols_are_bytes(self, dtype: Any) -> None:
        """Other types are refused, not converted, and so are other shapes."""
        models = SymbolModels(np.array([[4096]]))

        for symbols in (np.zeros((1, 4), dtype), np.zeros(4, np.uint8)):
            with pytest.raises(ValueError, match="need uint8"):
                self.encode([symbols], [[0]], models)


def golden_case() -> tuple[Symbols, NDArray[np.int64], SymbolModels]:
    """Symbols by a rule, under models of three kinds."""
    t = np.arange(GOLDEN_TOKENS)
    rows = [t * t % 7 // 2, 3 - (t == 34) - 3 * (t == 2), t * 0 + 1, (t * 5 + 1) % 11 % 3]
    models = SymbolModels(GOLDEN_FREQ_KA)
    return np.array(rows, np.uint8), np.array(GOLDEN_MODEL_OF_C), models


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class OneByOne(StreamsSuite):
    """Calls the coder of single streams."""

    def encode(
        self,
        symbols: Sequence[Symbols],
        model_of: Sequence[Any],
        models: SymbolModels,
        shifts: Sequence[Any] | None = None,
    ) -> list[bytes]:
        """See `encode_symbols`."""
        rows = zip(symbols, model_of, shifts or [None] * len(symbols), strict=True)
        return [encode_symbols(array, model_C, models, shift) for array, model_C, shift in rows]

    def decode(
        self,
        streams: Sequence[bytes],
        model_of: Sequence[Any],
        models: SymbolModels,
        num_tokens: Sequence[int],
        shifts: Sequence[Any] | None = None,
    ) -> list[Symbols]:
        """See `decode_symbols`."""
        rows = zip(streams, model_of, num_tokens, shifts or [None] * len(streams), strict=True)
        return [decode_symbols(data, k_C, models, num, shift) for data, k_C, num, shift in rows]


class TestCompiled(OneByOne):
    """As it is used."""


class TestBoundsChecked(OneByOne):
    """Compiled so that an index out of bounds raises `IndexError`."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def check_bounds(cls) -> Iterator[None]:
        """Replace both loops for this class."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_encode", "_decode"):
                source = getattr(rans, name).py_func
                checked = njit(nogil=True, error_model="numpy", boundscheck=True)(source)
                patch.setattr(rans, name, checked)
            yield

    @settings(QUIET, max_examples=300)
    @given(st.data(), st.integers(1, 4), st.sampled_from([1, 2, 31, 32, 33, 70]))
    def test_any_bytes_are_refused_or_a_stream(
        self, data: st.DataObject, num_coefficients: int, num_tokens: int
    ) -> None:
        """What decodes is what those symbols encode to: one stream for each array."""
        models = make_models(np.random.default_rng(num_tokens), 2, 3)
        model_of_C = np.arange(num_coefficients) % 2
        states = data.draw(st.binary(max_size=4)) * min(num_tokens, 32)
        stream = states + data.draw(st.binary(max_size=2 * num_tokens))
        try:
            symbols_CT = decode_symbols(stream, model_of_C, models, num_tokens)
        except CorruptBlobError:
            return
        assert encode_symbols(symbols_CT, model_of_C, models) == stream

    @pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 33)])
    def test_every_flip_is_refused_or_gives_other_symbols(self, shape: tuple[int, int]) -> None:
        """The reference agrees on which."""
        case = make_case(9, [shape], (2, 4))
        (stream,), (model_of_C,) = self.encode(*case), case.model_of
        num_refused = 0
        for bit in range(8 * len(stream)):
            damaged = flipped(stream, bit)
            wanted_CT = reference_decode(damaged, model_of_C, case.models, shape[1])
            try:
                symbols_CT = decode_symbols(damaged, model_of_C, case.models, shape[1])
            except CorruptBlobError:
                num_refused += 1
                assert wanted_CT is None or (np.frombuffer(damaged, "<u4", shape[1]) < 65536).any()
            else:
                assert np.array_equal(symbols_CT, wanted_CT)
                assert not np.array_equal(symbols_CT, case.symbols[0])
        assert num_refused > 7 * len(stream)


@settings(QUIET, max_examples=200)
@given(cases((0, 1, 31, 32, 33, 257), coefficients=5, streams=1))
def test_streams_of_many_kinds_come_back(case: Case) -> None:
    """Through either reference as well."""
    shifts = case.shifts or [None] * len(case.symbols)
    for symbols_CT, model_of_C, shift_T in zip(case.symbols, case.model_of, shifts, strict=True):
        stream = encode_symbols(symbols_CT, model_of_C, case.models, shift_T)

        given = (stream, model_of_C, case.models, symbols_CT.shape[1], shift_T)
        assert stream == reference_encode(symbols_CT, model_of_C, case.models, shift_T)
        assert np.array_equal(decode_symbols(*given), symbols_CT)
        assert np.array_equal(reference_decode(*given), symbols_CT)


def test_a_stream_is_as_long_as_its_symbols_are_unlikely() -> None:
    """Within a part in a thousand of the ideal, beside 16 bits for each lane."""
    rng = np.random.default_rng(1)
    models = SymbolModels(np.array([[2900, 800, 300, 90, 6]]))
    symbols_CT = rng.choice(5, (40, 1024), p=models.freq_KA[0] / TOTAL).astype(np.uint8)

    stream = encode_symbols(symbols_CT, [0] * 40, models)

    ideal_bits = models.bits_KA[0][symbols_CT].sum()
    assert 0 < 8 * len(stream) - ideal_bits < 32 * 32 + ideal_bits / 1000


def test_arrays_may_lie_anyhow_in_memory() -> None:
    """Strided, read-only, any integers for model numbers; and one compilation does for all."""
    case = make_case(3, [(4, 70)], (2, 9))
    symbols_CT, model_of_C = case.symbols[0], case.model_of[0]
    plain = encode_symbols(symbols_CT, model_of_C, case.models)

    strided = np.repeat(symbols_CT, 2, axis=1)[:, ::2]
    frozen = symbols_CT.copy()
    frozen.setflags(write=False)

    for array in (strided, np.asfortranarray(symbols_CT), frozen):
        for dtype in (np.uint8, np.uint64):
            assert encode_symbols(array, model_of_C.astype(dtype), case.models) == plain
    assert len(rans._encode.signatures) == 1


def test_streams_may_lie_anywhere_in_memory() -> None:
    """Any buffer, at any address, and it is not written to."""
    case = make_case(4, [(4, 70)], (2, 9))
    symbols_CT, model_of_C = case.symbols[0], case.model_of[0]
    stream = encode_symbols(symbols_CT, model_of_C, case.models)
    shifted = memoryview(b"x" + stream)[1:]

    for data in (shifted, bytearray(stream), memoryview(stream)):
        before = bytes(data)
        found_CT = decode_symbols(data, model_of_C, case.models, 70)
        assert np.array_equal(found_CT, symbols_CT)
        assert bytes(data) == before


def test_a_size_that_the_bytes_cannot_have_costs_no_memory() -> None:
    """It is refused before the symbols' array is made."""
    models = SymbolModels(np.array([[2048, 2048]]))

    with peak_bytes() as peak, pytest.raises(CorruptBlobError):
        decode_symbols(b"\x00\x00\x01\x00" * 31, [0] * 1000, models, 1 << 40)

    assert peak.num_bytes < 100_000


def test_decoding_takes_the_symbols_and_one_copy_of_the_stream() -> None:
    """Whether or not it ends well."""
    models = SymbolModels(np.array([[1] * 255 + [TOTAL - 255]]))
    symbols_CT = np.zeros((64, 512), np.uint8)
    stream = encode_symbols(symbols_CT, [0] * 64, models)
    decode_symbols(stream, [0] * 64, models, 512)

    for data in (stream, flipped(stream, 777)):
        with peak_bytes() as peak:
            try:
                decode_symbols(data, [0] * 64, models, 512)
            except CorruptBlobError:
                assert data != stream
        assert peak.num_bytes < symbols_CT.size + len(stream) + 20_000
