"""Arrays to bytes for the comparison arms: codes of any width up to 8 bits, and 16-bit floats.

Codes form one stream in the array's C order: code ``i`` has the bits from ``i * bits``
on, least significant first, in bytes counted from the first.  Only the last byte may
have unused bits, and they are zero.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor


def codes_bytes(num_codes: int, bits: int) -> int:
    """Bytes that `pack_codes` writes.

    Examples
    --------
    >>> codes_bytes(5, bits=3)
    2
    """
    return -(-num_codes * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> bytes:
    """Pack unsigned codes below ``2**bits``, whatever their shape.

    Raises
    ------
    ValueError
        If ``bits`` is not in 1..8, or a code does not fit.
    """
    _check_bits(bits)
    flat = codes.flatten().numpy()
    if flat.size and int(flat.max()) >= 1 << bits:
        raise ValueError(f"code {int(flat.max())} does not fit in {bits} bits")
    padded = np.zeros(-(-flat.size // 8) * 8, dtype=np.uint8)
    padded[: flat.size] = flat
    # Eight codes are a whole number of bytes, and fit in one word.
    words = np.zeros(padded.size // 8, dtype="<u8")
    for place, column in enumerate(padded.reshape(-1, 8).T):
        words |= column.astype("<u8") << np.uint64(place * bits)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :bits].tobytes()
    return packed[: codes_bytes(flat.size, bits)]


def unpack_codes(data: bytes, num_codes: int, bits: int) -> Tensor:
    """Undo `pack_codes`: shape ``(num_codes,)``, uint8.

    Raises
    ------
    ValueError
        If ``bits`` is not in 1..8, or the length is not exactly right.
    """
    _check_bits(bits)
    if len(data) != codes_bytes(num_codes, bits):
        raise ValueError(f"need {codes_bytes(num_codes, bits)} bytes of codes, got {len(data)}")
    num_words = -(-num_codes // 8)
    padded = np.zeros((num_words, bits), dtype=np.uint8)
    padded.reshape(-1)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    octets = np.zeros((num_words, 8), dtype=np.uint8)
    octets[:, :bits] = padded
    words = octets.view("<u8")[:, 0]
    mask = np.uint64((1 << bits) - 1)
    columns = [(words >> np.uint64(place * bits)) & mask for place in range(8)]
    codes = np.stack(columns, axis=1).astype(np.uint8).reshape(-1)[:num_codes]
    return torch.from_numpy(codes.copy())


def tensor_bytes(array: Tensor) -> bytes:
    """The elements' bytes, in C order, as this (little-endian) machine has them."""
    return array.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def to_bfloat16(array: Tensor) -> Tensor:
    """Nearest bfloat16, and its greatest finite value for what lies beyond."""
    limit = torch.finfo(torch.bfloat16).max
    return array.clamp(-limit, limit).to(torch.bfloat16)


class Reader:
    """Takes arrays off the front of some bytes, in the order they were written."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        #: Bytes taken so far; never more than there are.
        self._at = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes.

        Raises
        ------
        ValueError
            If fewer are left.
        """
        left = len(self._data) - self._at
        if num_bytes > left:
            raise ValueError(f"need {num_bytes} more bytes, {left} are left")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def codes(self, shape: tuple[int, ...], bits: int) -> Tensor:
        """The next packed codes: uint8 of ``shape``."""
        data = self.take(codes_bytes(prod(shape), bits))
        return unpack_codes(data, prod(shape), bits).view(shape)

    def elements(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next elements of ``dtype``: a tensor of ``shape``."""
        data = self.take(prod(shape) * dtype.itemsize)
        if not data:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)

    def close(self) -> None:
        """Say that everything was read.

        Raises
        ------
        ValueError
            If bytes are left.
        """
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left over")


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"need 1..8 bits, got {bits}")
