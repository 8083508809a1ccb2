"""Codes of 2, 4 or 8 bits to bytes and back, and 16-bit planes to byte planes.

Bit order: one coefficient after the other, and within a coefficient one token after the
other, so that a byte holds consecutive *tokens* of one coefficient.  The lowest bits
hold the earliest token.  A coefficient starts on a byte border; unused high bits of its
last byte are zero, and reading refuses anything else.  Neighbouring tokens of one
coefficient are distributed alike, which is what DEFLATE can see (docs/codec.md).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from codec.errors import CorruptBlobError


def packed_bytes(num_tokens: int, num_coefficients: int, bits: int) -> int:
    """Bytes that `pack` writes.

    Examples
    --------
    >>> packed_bytes(num_tokens=5, num_coefficients=3, bits=2)
    6
    """
    return num_coefficients * -(-num_tokens * bits // 8)


def pack(codes_TC: Tensor, bits: int) -> bytes:
    """Pack codes below ``2**bits``.

    Parameters
    ----------
    codes_TC
        Shape ``(T, C)``, uint8, every value below ``2**bits``.
    bits
        2, 4 or 8.

    Raises
    ------
    ValueError
        If ``bits`` is another number, or a code does not fit.
    """
    per_byte = _codes_per_byte(bits)
    codes_CT = np.ascontiguousarray(codes_TC.numpy().T)
    if codes_CT.size and int(codes_CT.max()) >= 2**bits:
        raise ValueError(f"code {int(codes_CT.max())} does not fit in {bits} bits")
    num_coefficients, num_tokens = codes_CT.shape
    padded = np.zeros((num_coefficients, -(-num_tokens // per_byte) * per_byte), dtype=np.uint8)
    padded[:, :num_tokens] = codes_CT
    lanes = padded.reshape(num_coefficients, padded.shape[1] // per_byte, per_byte)
    packed = np.zeros(lanes.shape[:2], dtype=np.uint8)
    for lane in range(per_byte):
        packed |= lanes[:, :, lane] << np.uint8(lane * bits)
    return packed.tobytes()


def unpack(data: bytes, *, num_tokens: int, num_coefficients: int, bits: int) -> Tensor:
    """Undo `pack`.

    Returns
    -------
    codes_TC
        Shape ``(T, C)``, uint8.

    Raises
    ------
    CorruptBlobError
        If the length is not exactly what these counts need, or a padding bit is set.
    """
    per_byte = _codes_per_byte(bits)
    wanted = packed_bytes(num_tokens, num_coefficients, bits)
    if len(data) != wanted:
        raise CorruptBlobError("codes", f"need {wanted} bytes, got {len(data)}")
    width = -(-num_tokens // per_byte)
    packed = np.frombuffer(data, dtype=np.uint8).reshape(num_coefficients, width)
    mask = np.uint8(2**bits - 1)
    lanes = np.stack(
        [(packed >> np.uint8(lane * bits)) & mask for lane in range(per_byte)], axis=-1
    )
    codes_CT = lanes.reshape(num_coefficients, width * per_byte)
    if codes_CT[:, num_tokens:].any():
        raise CorruptBlobError("codes", "padding bits are set")
    return torch.from_numpy(codes_CT[:, :num_tokens].T.copy())


def pack_halves(values_TN: Tensor) -> bytes:
    """Write float16 values as two planes, all low bytes then all high bytes.

    High bytes (sign, exponent) repeat and compress; low bytes hardly do.

    Parameters
    ----------
    values_TN
        Shape ``(T, N)``, float16; written with the second axis outermost.
    """
    raw = np.ascontiguousarray(values_TN.numpy().T).view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(raw.T).tobytes()


def unpack_halves(data: bytes, *, num_tokens: int, num_columns: int) -> Tensor:
    """Undo `pack_halves`: shape ``(T, N)``, float16.

    Raises
    ------
    CorruptBlobError
        If the length is wrong, or a value is not finite.
    """
    if len(data) != 2 * num_tokens * num_columns:
        wanted = 2 * num_tokens * num_columns
        raise CorruptBlobError("metadata", f"need {wanted} bytes, got {len(data)}")
    planes: npt.NDArray[np.uint8] = np.frombuffer(data, dtype=np.uint8).reshape(2, -1)
    halves = planes.T.copy().view(np.float16).reshape(num_columns, num_tokens)
    if not np.isfinite(halves).all():
        raise CorruptBlobError("metadata", "a shift or scale is not finite")
    return torch.from_numpy(halves.T.copy())


def _codes_per_byte(bits: int) -> int:
    if bits not in (2, 4, 8):
        raise ValueError(f"need 2, 4 or 8 bits, got {bits}")
    return 8 // bits
