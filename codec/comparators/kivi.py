"""KIVI: integers with a zero point and a scale, keys per channel, values per token.

A *group* is up to 64 elements that share a zero point and a scale, float16 each:

* of keys, 64 consecutive tokens of one channel of one head.  Fewer than 64 tokens are no
  group: they stay in bfloat16, as KIVI's residual does;
* of values, 64 consecutive channels of one token and head; the last group of a head may
  have fewer.  Values need no residual: a group never waits for a token.

The zero point is rounded down and the scale up, so that the group's range covers every
element and no error is over half a scale (but for what float16 cannot hold, which
saturates).  With ``b`` bits and ``T = 64 g + r`` tokens there are, of

* keys: ``8 b g L H D`` bytes of codes, ``4 g L H D`` of zero points and scales,
  ``2 r L H D`` of residual;
* values: ``ceil(T L H n b / 8)`` bytes of codes for each run of ``n`` channels, and
  ``4 T L H ceil(D / 64)`` of zero points and scales.

KIVI also keeps the newest 128 tokens of both kinds in 16 bits; here the caller's window
does that for every arm alike.

Source: arXiv 2402.02750, section 4 (its groups have 32 elements; 64 is the cheaper choice
and the one measured before).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from codec.comparators.wire import Reader, pack_codes, tensor_bytes, to_bfloat16

GROUP = 64
"""Most elements that share a zero point and a scale."""

_HALF_MAX = 65504.0


class Groups(NamedTuple):
    """Codes of some groups, and what is needed to undo them."""

    codes: Tensor
    """Uint8, of the values' shape."""

    zero: Tensor
    """Float16; 1 where the values' shape has the grouped axis."""

    scale: Tensor
    """As ``zero``; not negative."""

    def values(self) -> Tensor:
        """What the codes stand for: float32."""
        return self.codes.float() * self.scale.float() + self.zero.float()

    def to_bytes(self, bits: int) -> bytes:
        """Codes, then zero points, then scales."""
        return pack_codes(self.codes, bits) + tensor_bytes(self.zero) + tensor_bytes(self.scale)

    @classmethod
    def read(cls, reader: Reader, shape: tuple[int, ...], axis: int, bits: int) -> Groups:
        """Undo `to_bytes` for values of ``shape``, grouped along ``axis``."""
        shared = tuple(1 if number == axis else size for number, size in enumerate(shape))
        return cls(
            reader.codes(shape, bits),
            reader.elements(shared, torch.float16),
            reader.elements(shared, torch.float16),
        )


def quantize_groups(values: Tensor, axis: int, bits: int) -> Groups:
    """Quantize float32 ``values`` in groups that are all of ``axis``, not negative."""
    levels = (1 << bits) - 1
    low = values.amin(dim=axis, keepdim=True)
    high = values.amax(dim=axis, keepdim=True)
    zero = _half_at_most(low)
    scale = -_half_at_most(-(high - zero.float()).clamp_min(0) / levels)
    step = scale.float()
    # A zero step means a group that is its zero point throughout.
    units = torch.where(step == 0, 0.0, (values - zero.float()) / torch.where(step == 0, 1.0, step))
    return Groups(units.round().clamp(0, levels).to(torch.uint8), zero, scale)


@dataclass(frozen=True, slots=True)
class PerChannelCoder:
    """Codes keys: groups of 64 tokens of one channel, the tokens left over in 16 bits."""

    bits: int

    def encode(self, array_TLHD: Tensor) -> bytes:
        """The groups' bytes, then the residual tokens."""
        num_grouped = len(array_TLHD) // GROUP * GROUP
        grouped = array_TLHD[:num_grouped].reshape(-1, GROUP, *array_TLHD.shape[1:])
        residual = tensor_bytes(to_bfloat16(array_TLHD[num_grouped:]))
        if not num_grouped:
            return residual
        return quantize_groups(grouped, 1, self.bits).to_bytes(self.bits) + residual

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        reader = Reader(data)
        num_groups, num_residual = divmod(shape[0], GROUP)
        grouped = Groups.read(reader, (num_groups, GROUP, *shape[1:]), 1, self.bits)
        residual = reader.elements((num_residual, *shape[1:]), torch.bfloat16)
        reader.close()
        return torch.cat([grouped.values().flatten(0, 1), residual.float()])


@dataclass(frozen=True, slots=True)
class PerTokenCoder:
    """Codes values: groups of up to 64 channels of one token and head."""

    bits: int

    def encode(self, array_TLHD: Tensor) -> bytes:
        """The bytes of the first 64 channels of every head, then of the next, and so on."""
        starts = range(0, array_TLHD.shape[3], GROUP)
        runs = [array_TLHD[..., start : start + GROUP] for start in starts]
        return b"".join(quantize_groups(run, 3, self.bits).to_bytes(self.bits) for run in runs)

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        reader = Reader(data)
        widths = [min(GROUP, shape[3] - start) for start in range(0, shape[3], GROUP)]
        runs = [Groups.read(reader, (*shape[:3], width), 3, self.bits) for width in widths]
        reader.close()
        return torch.cat([run.values() for run in runs], dim=3)


def _half_at_most(values: Tensor) -> Tensor:
    """Greatest float16 that is not over each value; the least finite one below its range."""
    bounded = values.clamp(-_HALF_MAX, _HALF_MAX).numpy()
    half = bounded.astype(np.float16)
    is_over = half.astype(np.float32) > bounded
    half[is_over] = np.nextafter(half[is_over], np.float16(-np.inf))
    return torch.from_numpy(half)
