"""Code planes: what kernels write becomes what blobs store, and the other way round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import CorruptBlobError
from codec.kernels.step_tables import (
    CodePlane,
    DeviceCodes,
    StepTables,
    TokenSteps,
    join_codes,
    split_codes,
)
from codec.step_quantizer import MAX_CODE, Layout, StepCodes, dequantize_steps, quantize_steps
from codec.symbol_classes import SymbolClasses, class_of, split_levels, step_factor
from tests.suites.fused import on_host, some_classes, whole_codes
from tests.suites.quiet import QUIET

STEP = 0.3


class Chunk(NamedTuple):
    """Codes of a chunk, and how they were made."""

    layout: Layout
    classes: SymbolClasses
    shift_T: Any
    codes: DeviceCodes

    @property
    def tables(self) -> StepTables:
        """On the host."""
        return StepTables.of(self.layout, self.classes, STEP)

    @property
    def tokens(self) -> TokenSteps:
        """Of all tokens."""
        return self.tables.tokens(self.shift_T)

    @property
    def is_escape_CT(self) -> torch.Tensor:  # noqa: N802
        """Where a symbol says nothing, by the classes of the host."""
        class_CT = class_of(self.layout.level_C[:, None], self.shift_T)
        last_CT = torch.from_numpy(self.classes.alphabet_K[class_CT] - 1)
        return (self.codes.symbols_CT == last_CT) & (last_CT > 0)

    @property
    def whole_CT(self) -> torch.Tensor:  # noqa: N802
        """What the codes stand for."""
        return whole_codes(self.codes, self.layout, self.shift_T, self.classes)

    def fault(self, codes: DeviceCodes) -> str | None:
        """What the processor finds corrupt in other codes of this chunk."""
        arrays = StepCodes(*(array.numpy() for array in codes))
        try:
            dequantize_steps(arrays, STEP, self.shift_T, self.layout, self.classes)
        except CorruptBlobError as error:
            return str(error)
        return None


def make_chunk(seed: int, num_tokens: int, rank: int, scale: float) -> Chunk:
    """Random values, in classes on the whole ladder and past both of its ends."""
    rng = np.random.default_rng(seed)
    level_C = rng.integers(-5, 45, rank).astype(np.int32)
    level_C[::5] = rng.choice([0, 120])
    low_bits_C, level_C = split_levels(level_C)
    layout = Layout(level_C, low_bits_C)
    classes = some_classes(seed, 2, 9)
    shift_T = rng.integers(-9, 10, num_tokens).astype(np.int32)
    values_TC = (scale * rng.standard_normal((num_tokens, rank))).astype(np.float32)
    codes = on_host(quantize_steps(values_TC, STEP, shift_T, layout, classes))
    return Chunk(layout, classes, shift_T, codes)


scales = st.sampled_from([0.1, 1.0, 30.0, 1e6, 1e12])
chunks = st.builds(
    make_chunk, st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 5]), st.integers(0, 7), scales
)


@QUIET
@given(chunks)
def test_codes_join_where_symbols_do_not_say_all(chunk: Chunk) -> None:
    """There the plane has the whole code, and there is none where nothing needs it."""
    joined = join_codes(chunk.codes, chunk.tables, chunk.tokens)

    assert joined.symbols_CT is chunk.codes.symbols_CT
    is_escape_CT = chunk.is_escape_CT
    is_told_CT = is_escape_CT | torch.from_numpy(chunk.layout.low_bits_C > 0)[:, None]
    if joined.plane_CT is None:
        assert not is_escape_CT.any()
        assert chunk.layout.num_planes == 0
    else:
        assert joined.plane_CT.dtype == torch.int32
        assert torch.equal(joined.plane_CT[is_told_CT].long(), chunk.whole_CT[is_told_CT])


@QUIET
@given(chunks, st.integers(0, 7), st.integers(-99, 99))
def test_codes_split_band_by_band(chunk: Chunk, cut: int, filler: int) -> None:
    """What a kernel left undefined does not matter; bands in turn are the whole."""
    tables, tokens = chunk.tables, chunk.tokens
    is_told_CT = chunk.is_escape_CT | (tables.low_bits_C > 0)[:, None]
    plane_CT = torch.where(is_told_CT, chunk.whole_CT, filler).int()
    coded = CodePlane(chunk.codes.symbols_CT, plane_CT)

    bands = [split_codes(coded, tables, tokens, part) for part in (slice(cut), slice(cut, None))]

    for whole, wanted, *parts in zip(
        split_codes(coded, tables, tokens), chunk.codes, *bands, strict=True
    ):
        assert whole.dtype is wanted.dtype
        assert torch.equal(whole, wanted)
        assert torch.equal(torch.cat(parts), wanted)


@QUIET
@given(chunks, st.data())
def test_damage_is_what_the_processor_calls_damage(chunk: Chunk, data: st.DataObject) -> None:
    """A symbol or an escape changed, or an escape too few."""
    symbols_CT, low_PT, escapes_N = (array.clone() for array in chunk.codes)
    if symbols_CT.numel() and data.draw(st.booleans()):
        symbols_CT.view(-1)[data.draw(st.integers(0, symbols_CT.numel() - 1))] = data.draw(
            st.integers(0, 12)
        )
    if len(escapes_N) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(escapes_N) - 1))
        limits = [
            sign * ((MAX_CODE >> bits) + more)
            for sign in (1, -1)
            for bits in (0, 2, 16)
            for more in (1, 2)
        ]
        escapes_N[at] = data.draw(st.sampled_from([0, -1, 3, -(2**31), 2**31 - 1, *limits]))
    if len(escapes_N) and data.draw(st.booleans()):
        escapes_N = escapes_N[1:].clone()
    damaged = DeviceCodes(symbols_CT, low_PT, escapes_N)
    fault = chunk.fault(damaged)

    if fault is None:
        joined = join_codes(damaged, chunk.tables, chunk.tokens)
        again = chunk._replace(codes=damaged)
        if joined.plane_CT is not None and len(escapes_N):
            is_escape_CT = again.is_escape_CT
            assert torch.equal(joined.plane_CT[is_escape_CT].long(), again.whole_CT[is_escape_CT])
    else:
        with pytest.raises(CorruptBlobError) as caught:
            join_codes(damaged, chunk.tables, chunk.tokens)
        assert str(caught.value) == fault


@pytest.mark.parametrize(
    ("low_bits", "high", "is_good"),
    [
        (0, 2**30, True),
        (0, 2**30 + 1, False),
        (0, -(2**30), True),
        (0, -(2**30) - 1, False),
        (0, -(2**31), False),
        (3, 2**27, True),
        (3, 2**27 + 1, False),
        (16, -(2**14), True),
        (16, -(2**14) - 1, False),
        (16, 0, False),
    ],
)
def test_escapes_end_where_codes_end(low_bits: int, high: int, is_good: bool) -> None:
    """The processor's bound to the number, which keeps codes within 32 bits."""
    layout = Layout(np.array([20], np.int32), np.array([low_bits], np.int32))
    classes = some_classes(0, 9, 9)
    symbols_CT = torch.full((1, 1), 8, dtype=torch.uint8)
    low_PT = torch.ones(low_bits, 1, dtype=torch.uint8)
    codes = DeviceCodes(symbols_CT, low_PT, torch.tensor([high], dtype=torch.int32))
    chunk = Chunk(layout, classes, np.zeros(1, np.int32), codes)

    assert (chunk.fault(codes) is None) == is_good
    if is_good:
        joined = join_codes(codes, chunk.tables, chunk.tokens)
        assert joined.plane_CT is not None
        assert joined.plane_CT.item() == (high << low_bits) + 2**low_bits - 1
    else:
        with pytest.raises(CorruptBlobError, match="out of range"):
            join_codes(codes, chunk.tables, chunk.tokens)


def test_steps_of_tokens_are_the_processors() -> None:
    """The same bits, for every shift."""
    chunk = make_chunk(0, 5, 3, 1.0)
    shift_T = np.arange(-9, 10)

    tokens = chunk.tables.tokens(shift_T.tolist())

    assert tokens.shift_T.dtype == torch.int32
    assert tokens.shift_T.tolist() == shift_T.tolist()
    wanted_T = np.float32(STEP) * step_factor(shift_T.astype(np.int32))
    assert tokens.step_T.numpy().tobytes() == wanted_T.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda c: {"symbols_CT": c.symbols_CT.int()},
        lambda c: {"symbols_CT": c.symbols_CT[1:]},
        lambda c: {"low_PT": c.low_PT[1:]},
        lambda c: {"low_PT": c.low_PT[:, 1:]},
        lambda c: {"low_PT": c.low_PT.bool()},
        lambda c: {"escapes_N": c.escapes_N.long()},
        lambda c: {"escapes_N": c.escapes_N[None]},
        lambda c: {"symbols_CT": c.symbols_CT.to("meta")},
    ],
)
def test_codes_of_other_shapes_are_refused(change: Any) -> None:
    """By name; the caller's own, so no corruption."""
    chunk = make_chunk(1, 5, 7, 1.0)
    (name,) = change(chunk.codes)

    with pytest.raises(ValueError, match=f"{name} must be"):
        join_codes(chunk.codes._replace(**change(chunk.codes)), chunk.tables, chunk.tokens)


def test_only_a_run_of_a_whole_plane_is_split() -> None:
    """Where each coefficient's bits lie is counted from the first."""
    chunk = make_chunk(1, 5, 7, 1.0)
    tables, tokens = chunk.tables, chunk.tokens
    coded = CodePlane(chunk.codes.symbols_CT, chunk.codes.symbols_CT.int())

    for part in (coded.rows(slice(1, None)), CodePlane(coded.symbols_CT, None)):
        with pytest.raises(ValueError, match="need a plane of 7"):
            split_codes(part, tables, tokens)
    with pytest.raises(ValueError, match="a run of them"):
        split_codes(coded, tables, tokens, slice(0, 7, 2))


@pytest.mark.parametrize("shift_T", [[0.5], [[1]], 3])
def test_shifts_are_a_vector_of_integers(shift_T: Any) -> None:
    """Anything else would be cut or broadcast into something."""
    with pytest.raises(ValueError, match="integer shifts"):
        make_chunk(0, 1, 1, 1.0).tables.tokens(shift_T)


@pytest.mark.parametrize("rank_T", [[0.5], [4], [-1], [1, 1], [[1]]])
def test_ranks_are_numbers_of_coefficients(rank_T: Any) -> None:
    """One for each token."""
    with pytest.raises(ValueError, match="ranks"):
        make_chunk(0, 1, 3, 1.0).tables.tokens([0], rank_T)


def test_without_ranks_tokens_have_all_coefficients() -> None:
    """Their number is then that of the tables."""
    tables = make_chunk(0, 1, 3, 1.0).tables

    assert tables.tokens([0, 1]).rank_T.tolist() == [3, 3]
    assert tables.tokens([0, 1], np.array([0, 3])).rank_T.tolist() == [0, 3]


@pytest.mark.parametrize("step", [0.0, -1.0, float("inf"), float("nan")])
def test_a_step_is_above_nothing(step: float) -> None:
    """Coefficients are divided by it."""
    chunk = make_chunk(0, 1, 1, 1.0)

    with pytest.raises(ValueError, match="step above 0"):
        StepTables.of(chunk.layout, chunk.classes, step)


def test_a_layout_has_low_bits_for_every_level() -> None:
    """Kernels read both by the same index."""
    chunk = make_chunk(0, 1, 3, 1.0)
    layout = Layout(chunk.layout.level_C, chunk.layout.low_bits_C[1:])

    with pytest.raises(ValueError, match="as many low bits as levels"):
        StepTables.of(layout, chunk.classes, STEP)
