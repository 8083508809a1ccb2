"""What this machine can do, and the least that each step of a codec has to do.

A step cannot take less than its arithmetic at the rate of a large matrix product, or than
its bytes, read once and written once, at the rate of a large copy.  Both rates are measured
in the same process, with the same threads, right beside the race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from codec.blob import read_blob
from codec.entropy_codec import EntropyCodec
from codec.entropy_sections import read_shifts
from codec.exact_rows import read_exact_rows

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """What blobs hold: coefficients that tokens are coded with, added up over tokens."""

    num_tokens: int
    """Those stored exactly included."""

    coefficients: int
    """Of keys and values, that tokens are coded with."""

    products: int
    """Multiplications that take rows to those coefficients, or back."""

    stored_bytes: int

    @property
    def mean_rank(self) -> float:
        """Coefficients of keys and values that a token is coded with, in the mean."""
        return self.coefficients / self.num_tokens


def coded_in(codec: EntropyCodec, blobs: Sequence[bytes]) -> Coded:
    """Count what is in blobs, by the shifts that they carry."""
    calibration = codec.calibration
    num_tokens, coefficients, products = 0, 0, 0
    for buf in blobs:
        blob = read_blob(buf)
        is_exact = read_exact_rows(blob)
        shift_T = read_shifts(blob, int((~is_exact).sum()))
        num_tokens += len(is_exact)
        for group in (*calibration.keys.groups, *calibration.values.groups):
            coded = int(calibration.token_ranks(group, shift_T).rank_T.sum())
            coefficients += coded
            products += coded * (group.coordinates.stop - group.coordinates.start)
    return Coded(
        num_tokens=num_tokens,
        coefficients=coefficients,
        products=products,
        stored_bytes=sum(map(len, blobs)),
    )


def encode_work(codec: EntropyCodec, coded: Coded) -> Mapping[str, StepWork]:
    """Least work of encoding, under the names of the steps that the codec times.

    The projection is counted bare: without the energies and the importance that its step
    also computes.
    """
    return {
        "rope": _rope(codec, coded),
        "project": StepWork(flops=2 * coded.products),
        "quantize": StepWork(num_bytes=(FLOAT_BYTES + 1) * coded.coefficients),
        "entropy": StepWork(num_bytes=coded.coefficients + coded.stored_bytes),
    }


def decode_work(codec: EntropyCodec, coded: Coded) -> Mapping[str, StepWork]:
    """Least work of decoding, under the names of the steps that the codec times."""
    return {
        "verify": StepWork(num_bytes=coded.stored_bytes),
        "entropy": StepWork(num_bytes=coded.coefficients + coded.stored_bytes),
        "dequantize": StepWork(num_bytes=(FLOAT_BYTES + 1) * coded.coefficients),
        "project": StepWork(flops=2 * coded.products),
        "rope": _rope(codec, coded),
    }


def _rope(codec: EntropyCodec, coded: Coded) -> StepWork:
    key_width = codec.calibration.geometry.key_width
    return StepWork(num_bytes=2 * FLOAT_BYTES * key_width * coded.num_tokens)


def _best_s(action: Callable[[], object], num_tries: int, clock: Clock) -> float:
    action()
    found = []
    for _ in range(num_tries):
        start = clock()
        action()
        found.append(clock() - start)
    return min(found)
