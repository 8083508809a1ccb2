"""What this machine can do, and the least that each step of a codec has to do.

A step cannot take less than its arithmetic at the rate of a large matrix product, or than
its bytes, read once and written once, at the rate of a large copy.  Both rates are measured
in the same process, with the same threads, right beside the race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from codec.entropy_codec import EntropyCodec

GEMM_SIZE: Final = 2048
COPY_BYTES: Final = 256 << 20
NUM_TRIES: Final = 5
FLOAT_BYTES: Final = 4

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """The best of several tries: what a floor is measured against."""

    flops_per_s: float
    """Of a square 32-bit matrix product; a multiplication and an addition are two."""

    bytes_per_s: float
    """Of a copy, bytes read and bytes written both counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """The least that a step does."""

    flops: float = 0.0
    num_bytes: float = 0.0

    def floor_s(self, rates: MachineRates) -> float:
        """The least that it takes."""
        return max(self.flops / rates.flops_per_s, self.num_bytes / rates.bytes_per_s)


def measure_rates(
    *,
    gemm_size: int = GEMM_SIZE,
    copy_bytes: int = COPY_BYTES,
    num_tries: int = NUM_TRIES,
    clock: Clock = time.perf_counter,
) -> MachineRates:
    """Time a large product and a large copy with the threads that torch has now."""
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(gemm_size, gemm_size, generator=draw) for _ in range(2))
    product = torch.empty(gemm_size, gemm_size)
    source = torch.zeros(copy_bytes // FLOAT_BYTES)
    target = torch.zeros_like(source)
    gemm_s = _best_s(lambda: torch.mm(left, right, out=product), num_tries, clock)
    copy_s = _best_s(lambda: target.copy_(source), num_tries, clock)
    return MachineRates(
        flops_per_s=2 * gemm_size**3 / gemm_s,
        bytes_per_s=2 * source.numel() * FLOAT_BYTES / copy_s,
    )


def encode_work(codec: EntropyCodec, num_tokens: int, stored_bytes: int) -> Mapping[str, StepWork]:
    """Least work of encoding, under the names of the steps that the codec times.

    The projection is counted bare: without the energies and the importance that its step
    also computes.
    """
    key_width, _, coefficients = _sizes(codec)
    return {
        "rope": StepWork(num_bytes=2 * FLOAT_BYTES * key_width * num_tokens),
        "project": StepWork(flops=_projection_flops(codec) * num_tokens),
        "quantize": StepWork(num_bytes=(FLOAT_BYTES + 1) * coefficients * num_tokens),
        "entropy": StepWork(num_bytes=coefficients * num_tokens + stored_bytes),
    }


def decode_work(codec: EntropyCodec, num_tokens: int, stored_bytes: int) -> Mapping[str, StepWork]:
    """Least work of decoding, under the names of the steps that the codec times."""
    key_width, _, coefficients = _sizes(codec)
    return {
        "verify": StepWork(num_bytes=stored_bytes),
        "entropy": StepWork(num_bytes=coefficients * num_tokens + stored_bytes),
        "dequantize": StepWork(num_bytes=(FLOAT_BYTES + 1) * coefficients * num_tokens),
        "project": StepWork(flops=_projection_flops(codec) * num_tokens),
        "rope": StepWork(num_bytes=2 * FLOAT_BYTES * key_width * num_tokens),
    }


def _projection_flops(codec: EntropyCodec) -> int:
    """Of one token."""
    keys, values = codec.calibration.keys, codec.calibration.values
    key_width, value_width, _ = _sizes(codec)
    return 2 * (key_width * keys.rank + value_width * values.rank)


def _sizes(codec: EntropyCodec) -> tuple[int, int, int]:
    """Width of keys, width of values, coefficients of both."""
    calibration = codec.calibration
    shape = calibration.geometry
    return (
        shape.key_width,
        shape.value_width,
        calibration.keys.rank + calibration.values.rank,
    )


def _best_s(action: Callable[[], object], num_tries: int, clock: Clock) -> float:
    action()
    found = []
    for _ in range(num_tries):
        start = clock()
        action()
        found.append(clock() - start)
    return min(found)
