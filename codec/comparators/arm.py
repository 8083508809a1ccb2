"""What every comparison arm does: a cache to real bytes, and back from those bytes alone.

An arm is a yardstick, not a codec: it has no container, no checksum and no identity.
Its decoder is given the bytes and the arrays' shape, which any container would state.
Whatever else it needs and does not have from a fixed calibration is in the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from codec.geometry import RAW_BYTES_PER_ELEMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What came back, and what it cost to keep."""

    keys_TLHD: Tensor
    """Float32, rotated, of the shape that went in; so are the values."""

    values_TLHD: Tensor
    stored_bytes: int
    """Everything the arm stored for these tokens, keys and values."""

    @property
    def ratio(self) -> float:
        """Bytes of the same elements in 16 bits over stored bytes."""
        return raw_bytes(self.keys_TLHD, self.values_TLHD) / self.stored_bytes


class Arm(Protocol):
    """One way to store a cache."""

    @property
    def name(self) -> str:
        """Names the arm in tables; unlike every other arm's."""
        ...

    def restore(self, keys_TLHD: Tensor, values_TLHD: Tensor) -> Restored:
        """Store a prefix's rows and take them back.

        Parameters
        ----------
        keys_TLHD
            Shape ``(T, L, H, D)``, any float type, finite, rotated as the engine holds
            them; consecutive tokens of one prefix, without sinks and window.
        values_TLHD
            The values of the same tokens; their heads may have another width.

        Raises
        ------
        ValueError
            If the shapes disagree, an extent is zero, or an element is not finite.
        """
        ...


class ArrayCoder(Protocol):
    """Turns one array into bytes, and bytes with the array's shape into an array."""

    def encode(self, array_TLHD: Tensor) -> bytes:
        """All that is stored of a float32 array."""
        ...

    def decode(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        """What the bytes stand for: float32 of ``shape``.

        Raises
        ------
        ValueError
            If the bytes are more or fewer than the shape needs.
        CorruptBlobError
            The same, of arms that hand them to a coder of `codec.entropy`.
        """
        ...


@dataclass(frozen=True, slots=True)
class CodedArm:
    """An arm that codes keys and values apart from each other."""

    name: str
    keys: ArrayCoder
    values: ArrayCoder

    def restore(self, keys_TLHD: Tensor, values_TLHD: Tensor) -> Restored:
        """See `Arm.restore`; the bytes are made, counted, and decoded."""
        keys, values = checked(keys_TLHD, values_TLHD)
        coded_keys, coded_values = self.keys.encode(keys), self.values.encode(values)
        return Restored(
            keys_TLHD=self.keys.decode(coded_keys, tuple(keys.shape)),
            values_TLHD=self.values.decode(coded_values, tuple(values.shape)),
            stored_bytes=len(coded_keys) + len(coded_values),
        )


def checked(keys_TLHD: Tensor, values_TLHD: Tensor) -> tuple[Tensor, Tensor]:
    """Both arrays as contiguous float32 on the host.

    Raises
    ------
    ValueError
        See `Arm.restore`.
    """
    for kind, array in (("keys", keys_TLHD), ("values", values_TLHD)):
        if array.ndim != 4 or not array.is_floating_point() or not array.numel():
            raise ValueError(
                f"need some float {kind} (T, L, H, D), got {array.dtype} {tuple(array.shape)}"
            )
        if not torch.isfinite(array).all():
            raise ValueError(f"{kind} must be finite to be stored")
    if keys_TLHD.shape[:3] != values_TLHD.shape[:3]:
        raise ValueError(
            "keys and values must agree in tokens, layers and heads, "
            f"got {tuple(keys_TLHD.shape)} and {tuple(values_TLHD.shape)}"
        )
    keys, values = (
        array.detach().to("cpu", torch.float32).contiguous() for array in (keys_TLHD, values_TLHD)
    )
    return keys, values


def raw_bytes(keys_TLHD: Tensor, values_TLHD: Tensor) -> int:
    """Bytes of these elements in 16 bits, against which every ratio is."""
    return RAW_BYTES_PER_ELEMENT * (keys_TLHD.numel() + values_TLHD.numel())
