"""Floors: the arithmetic and the bytes of each step, and rates from a given clock."""

from __future__ import annotations

import pytest

from codec.timing import StepTimes
from fabric.codec_bench.chunks import decode_chunks, encode_chunks, prefix
from fabric.codec_bench.floors import (
    MachineRates,
    StepWork,
    decode_work,
    encode_work,
    measure_rates,
)
from tests.fabric.codec_bench.small import PAIR, Made, entropy_codec

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
    keys, values = codec.calibration.keys.rank, codec.calibration.values.rank

    assert keys != values
    encode, decode = encode_work(codec, 10, 1000), decode_work(codec, 10, 1000)

    assert encode["project"] == StepWork(flops=10 * 2 * 64 * (keys + values))
    assert decode["project"] == encode["project"]
    assert encode["rope"] == decode["rope"] == StepWork(num_bytes=10 * 64 * 4 * 2)
    assert (
        encode["quantize"] == decode["dequantize"] == StepWork(num_bytes=10 * 5 * (keys + values))
    )
    assert encode["entropy"] == decode["entropy"] == StepWork(num_bytes=10 * (keys + values) + 1000)
    assert decode["verify"] == StepWork(num_bytes=1000)


def test_every_step_that_the_codec_times_has_a_floor(made: Made) -> None:
    """A step that is renamed there must be renamed here."""
    codec = entropy_codec(made.codecs)
    cache, _ = made.engine.prefill(prefix(made.loaded, 40))
    rows = made.engine.capture(cache, 0, 40)
    encode_steps, decode_steps = StepTimes(), StepTimes()

    blobs = encode_chunks(made.engine, codec, rows, 16, encode_steps)
    decode_chunks(codec, blobs, decode_steps)

    assert set(encode_steps.seconds) == set(encode_work(codec, 40, 1))
    assert set(decode_steps.seconds) == set(decode_work(codec, 40, 1))


def test_the_default_clock_moves() -> None:
    """Small arrays are enough to see it; nothing is said of how fast."""
    found = measure_rates(gemm_size=16, copy_bytes=1 << 12, num_tries=1)

    assert found.flops_per_s > 0
    assert found.bytes_per_s > 0
