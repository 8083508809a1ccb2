"""Peak memory of encode and decode, numpy's and torch's together, against the raw cache."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from codec.entropy_codec import EntropyCodec
from tests.codec.entropy_samples import header, wide_calibration

NUM_TOKENS = 256
#: Times the raw bytes of the chunk, in the engine's dtype, that the issue allows.
BOUND = 2.0


@cache
def wide_codec() -> EntropyCodec:
    """30 layers of 64 elements in one head: a row of 1,920 keys and as many values."""
    return EntropyCodec(wide_calibration(30, 64, 480))


def peak_of(call: Callable[[], Any]) -> int:
    """Most bytes that numpy, Python and torch hold at once during ``call``, beyond before.

    Python's allocations are read at each call and return of a function (their peak since
    the last one); torch's are the profiler's events.  Both have times, by which they are
    added up.
    """
    # Allocated beforehand, so that the notes are not measured themselves.
    segments_N3 = np.zeros((1 << 17, 3), np.int64)
    num = last = 0

    def note(*_: object) -> None:
        nonlocal num, last
        now, (_, peak) = time.time_ns(), tracemalloc.get_traced_memory()
        segments_N3[num] = last, now, peak - before
        num += 1
        tracemalloc.reset_peak()
        last = now

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        tracemalloc.start()
        before, last = tracemalloc.get_traced_memory()[0], time.time_ns()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
            note()
            tracemalloc.stop()
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and event.nbytes()
    )
    at_N = np.array([at for at, _ in changes])
    held_N = np.cumsum([size for _, size in changes])
    most = 0
    for start, stop, peak in segments_N3[:num].tolist():
        first, end = np.searchsorted(at_N, (start, stop))
        # What was held when the segment began, and whatever came up within it.
        torch_peak = held_N[max(first - 1, 0) : end].max(initial=0)
        most = max(most, peak + int(torch_peak))
    return most


def measured(dtype: str) -> dict[str, float]:
    """Peaks of encode and decode over the raw bytes of a chunk."""
    codec = wide_codec()
    keys, values = codec.example(NUM_TOKENS, dtype)
    described = header(
        *(codec.codec_id, NUM_TOKENS),
        dtype=dtype,
        stage=codec.stage,
        geometry=codec.calibration.geometry,
    )
    blob = codec.encode(keys, values, header=described)
    codec.decode(blob)
    raw = keys.nbytes + values.nbytes
    return {
        "encode": peak_of(lambda: codec.encode(keys, values, header=described)) / raw,
        "decode": peak_of(lambda: codec.decode(blob)) / raw,
    }


@pytest.mark.filterwarnings("ignore::codec.drift.DriftWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encode_and_decode_hold_at_most_twice_the_raw_cache(dtype: str) -> None:
    """Beyond the caller's own tensors: what the codec allocates while it works."""
    found = measured(dtype)

    assert all(0.2 < times <= BOUND for times in found.values()), found


def test_the_measure_sees_both_kinds_of_memory() -> None:
    """Arrays of numpy and tensors of torch that are held together add up."""

    def both() -> int:
        array, tensor = np.ones(1 << 20, np.uint8), torch.ones(1 << 20, dtype=torch.uint8)
        return int(array[0]) + int(tensor[0])

    def one_after_the_other() -> int:
        first = int(np.ones(1 << 20, np.uint8)[0])
        return first + int(torch.ones(1 << 20, dtype=torch.uint8)[0])

    assert 2.0 <= peak_of(both) / 2**20 < 2.2
    assert 1.0 <= peak_of(one_after_the_other) / 2**20 < 1.2
