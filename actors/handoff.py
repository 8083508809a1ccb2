"""Tensors as plain byte arrays, which cross from process to process without a copy.

Ray moves numpy arrays through shared memory and pickles everything else; numpy knows no
bfloat16.  So an array crosses as its bytes, with the last axis in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from codec.codec import TORCH_DTYPES


@dataclass(frozen=True, slots=True)
class KvArrays:
    """Keys and values of consecutive tokens of a whole model, rotated keys."""

    keys_TLHB: npt.NDArray[np.uint8]
    """Shape ``(T, L, H, bytes of D)``."""

    values_TLHB: npt.NDArray[np.uint8]
    dtype: str

    @classmethod
    def of(cls, keys_TLHD: Tensor, values_TLHD: Tensor) -> KvArrays:
        """The bytes of two tensors; shared with them where they are contiguous."""
        dtype = str(keys_TLHD.dtype).removeprefix("torch.")
        if dtype not in TORCH_DTYPES or values_TLHD.dtype != keys_TLHD.dtype:
            raise ValueError(
                f"need one dtype of {', '.join(TORCH_DTYPES)}, "
                f"got {keys_TLHD.dtype} and {values_TLHD.dtype}"
            )
        return cls(_bytes(keys_TLHD), _bytes(values_TLHD), dtype)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Keys and values as tensors of their own: what Ray hands over is read-only."""
        dtype = TORCH_DTYPES[self.dtype]
        keys, values = (
            torch.from_numpy(array.copy()).view(dtype)
            for array in (self.keys_TLHB, self.values_TLHB)
        )
        return keys, values


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return array
