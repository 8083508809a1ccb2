"""Arms that lose nothing but what bfloat16 does: general coders on the 16-bit elements.

Elements are rounded to bfloat16 (an engine that computes in it loses nothing) and lie
in the engine's order, token first.  Two layouts:

* *plain*: two bytes per element, the low one first;
* *planes*: all low bytes, then all high bytes.  High bytes are sign and most of the
  exponent and repeat; low bytes are all but noise.

Keys and values are coded apart, each as one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from codec.comparators.wire import Reader, tensor_bytes, to_bfloat16
from codec.entropy.coder import ByteCoder


@dataclass(frozen=True, slots=True)
class BytesCoder:
    """Codes the bytes of bfloat16 elements with a byte coder."""

    make_coder: Callable[[], ByteCoder]
    """Called at every use, so that a coder whose package is missing is missed only then."""

    has_planes: bool = False
    """Lay low and high bytes out apart."""

    def encode(self, array_TLHD: Tensor) -> bytes:
        """One stream of the coder.

        Raises
        ------
        BackendUnavailable
            If the coder needs a package that is not installed.
        """
        data = tensor_bytes(to_bfloat16(array_TLHD))
        return self.make_coder().encode(_transposed(data, 2) if self.has_planes else data)

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """See `codec.comparators.arm.ArrayCoder.decode`."""
        decoded = self.make_coder().decode(data, 2 * prod(shape))
        if self.has_planes:
            decoded = _transposed(decoded, prod(shape))
        return Reader(decoded).elements(shape, torch.bfloat16).float()


def _transposed(data: bytes, num_columns: int) -> bytes:
    """The bytes as a matrix of that many columns, written column after column."""
    matrix = np.frombuffer(data, dtype=np.uint8).reshape(-1, num_columns)
    return np.ascontiguousarray(matrix.T).tobytes()
