"""Floors: the arithmetic and the bytes of each step, and rates from a given clock."""

from __future__ import annotations

from typing import Any

import pytest

from codec import entropy_codec as entropy_codec_module
from codec.step_quantizer import Floats, Ints, StepCodes
from codec.symbol_classes import class_of
from codec.timing import StepTimes
from fabric.codec_bench.chunks import decode_chunks, encode_chunks, prefix
from fabric.codec_bench.floors import (
    Coded,
    MachineRates,
    StepWork,
    coded_in,
    decode_work,
    encode_work,
    measure_rates,
)
from tests.fabric.codec_bench.small import PAIR, Made, entropy_codec

SOME = Coded(num_tokens=1, coefficients=1, products=1, stored_bytes=1)
#: A tiny model has too few rows for its drift to be steady.
pytestmark = pytest.mark.filterwarnings("ignore::codec.drift.DriftWarning")


def test_rates_are_work_over_the_best_time() -> None:
    """Two operations per multiplication; bytes are read and written."""
    # Each try takes a second less than the one before.
    ticks = iter([0, 9, 10, 18, 20, 27, 30, 38, 40, 47, 50, 56])

    found = measure_rates(gemm_size=8, copy_bytes=64, num_tries=3, clock=lambda: float(next(ticks)))

    assert found == MachineRates(flops_per_s=2 * 8**3 / 7, bytes_per_s=2 * 64 / 6)


def test_a_floor_is_the_slower_of_arithmetic_and_bytes() -> None:
    """Neither can be had for less."""
    rates = MachineRates(flops_per_s=100, bytes_per_s=10)

    assert StepWork(flops=200, num_bytes=5).floor_s(rates) == 2
    assert StepWork(flops=200, num_bytes=50).floor_s(rates) == 5
    assert StepWork().floor_s(rates) == 0


def test_work_is_counted_by_hand(made: Made) -> None:
    """Of 10 tokens: 4 layers, 2 heads, 8 dimensions make rows of 64."""
    codec = entropy_codec(made.codecs, PAIR[1])
    coded = Coded(num_tokens=10, coefficients=100, products=6400, stored_bytes=1000)

    encode, decode = encode_work(codec, coded), decode_work(codec, coded)

    assert coded.mean_rank == 10
    assert encode["project"] == decode["project"] == StepWork(flops=2 * 6400)
    assert encode["rope"] == decode["rope"] == StepWork(num_bytes=10 * 64 * 4 * 2)
    assert encode["quantize"] == decode["dequantize"] == StepWork(num_bytes=5 * 100)
    assert encode["entropy"] == decode["entropy"] == StepWork(num_bytes=100 + 1000)
    assert decode["verify"] == StepWork(num_bytes=1000)


def test_what_blobs_hold_is_what_was_quantized(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens stored exactly count as tokens, and have no coefficients."""
    codec = entropy_codec(made.codecs)
    cache, _ = made.engine.prefill(prefix(made.loaded, 40))
    rows = made.engine.capture(cache, 0, 40)
    coded: list[int] = []
    quantize = entropy_codec_module.quantize_steps

    def counted(values_TC: Floats, step: float, shift_T: Ints, *rest: Any) -> StepCodes:
        layout, classes = rest
        alphabet_TC = classes.alphabet_K[class_of(layout.level_C, shift_T[:, None])]
        coded.append(int((alphabet_TC > 1).sum()))
        return quantize(values_TC, step, shift_T, *rest)

    monkeypatch.setattr(entropy_codec_module, "quantize_steps", counted)

    blobs = encode_chunks(made.engine, codec, rows, 16)
    found = coded_in(codec, blobs)

    assert found.num_tokens == 40
    assert found.coefficients == sum(coded) > 0
    # All four layers are one group here, and rows of keys and values 64 wide.
    assert found.products == 64 * found.coefficients
    assert found.stored_bytes == sum(map(len, blobs))


def test_every_step_that_the_codec_times_has_a_floor(made: Made) -> None:
    """A step that is renamed there must be renamed here."""
    codec = entropy_codec(made.codecs)
    cache, _ = made.engine.prefill(prefix(made.loaded, 40))
    rows = made.engine.capture(cache, 0, 40)
    encode_steps, decode_steps = StepTimes(), StepTimes()

    blobs = encode_chunks(made.engine, codec, rows, 16, encode_steps)
    decode_chunks(codec, blobs, decode_steps)

    assert set(encode_steps.seconds) == set(encode_work(codec, SOME))
    assert set(decode_steps.seconds) == set(decode_work(codec, SOME))


def test_the_default_clock_moves() -> None:
    """Small arrays are enough to see it; nothing is said of how fast."""
    found = measure_rates(gemm_size=16, copy_bytes=1 << 12, num_tries=1)

    assert found.flops_per_s > 0
    assert found.bytes_per_s > 0
