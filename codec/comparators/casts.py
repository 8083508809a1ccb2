"""The arms that only change the data type: what 16 bits and 8 bits per element give.

| arm | stored | bytes of ``N`` elements per kind |
|---|---|---|
| `RawArm` | nothing changes | ``2 N``, counted and not made |
| `Fp8Coder` | E4M3, saturating | ``N`` |
| `Fp8Coder`, scaled | E4M3 of each layer and head over its float32 scale | ``N + 4 L H`` |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from codec.comparators.arm import Restored, checked, raw_bytes
from codec.comparators.wire import Reader, tensor_bytes
from codec.quantizer import FP8_MAX


@dataclass(frozen=True, slots=True)
class RawArm:
    """What goes in comes back, at the cost of 16 bits per element.

    The elements are those of the engine, even if it computes in more bits: this arm is
    the zero of every quality scale, and 1 on the scale of ratios.
    """

    name: ClassVar[str] = "raw"

    def restore(self, keys_TLHD: Tensor, values_TLHD: Tensor) -> Restored:
        """See `codec.comparators.arm.Arm.restore`."""
        keys, values = checked(keys_TLHD, values_TLHD)
        return Restored(
            keys_TLHD=keys.clone(),
            values_TLHD=values.clone(),
            stored_bytes=raw_bytes(keys, values),
        )


@dataclass(frozen=True, slots=True)
class Fp8Coder:
    """Casts to E4M3: three bits of mantissa, greatest value 448, least 2 ** -9."""

    is_scaled: bool = False
    """Bring the largest element of each layer and head to 448 first."""

    def encode(self, array_TLHD: Tensor) -> bytes:
        """The codes, behind the scales if there are any."""
        scale = torch.ones(array_TLHD.shape[1:3])
        if self.is_scaled:
            peak = array_TLHD.abs().amax(dim=(0, 3)) / FP8_MAX
            # A scale under the least normal number would have too few bits to divide by.
            scale = torch.where(peak < torch.finfo(torch.float32).tiny, 1.0, peak)
        units = (array_TLHD / scale[:, :, None]).clamp(-FP8_MAX, FP8_MAX)
        codes = tensor_bytes(units.to(torch.float8_e4m3fn).view(torch.uint8))
        return tensor_bytes(scale) + codes if self.is_scaled else codes

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        reader = Reader(data)
        scale = torch.ones(shape[1:3])
        if self.is_scaled:
            scale = reader.elements(shape[1:3], torch.float32)
        units = reader.elements(shape, torch.uint8).view(torch.float8_e4m3fn).float()
        reader.close()
        return units * scale[:, :, None]
