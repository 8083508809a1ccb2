"""Undo and redo the rotary positions of keys.

A rotary embedding turns each pair of a key's dimensions by an angle, position times
frequency, and may scale the result.  Keys are alike across positions only before that,
so the codec undoes it before it codes and redoes it after it decodes.

1. The cosines and sines are computed as engines compute them: angles in 32 bits, then
   scaled, then rounded to the data type of the engine's tables.
2. ``rotate`` applies that matrix in 32 bits.
3. ``unrotate`` applies its exact inverse, the transpose over ``cos^2 + sin^2``.  The
   division takes out the scaling of YaRN *and* what the rounding of the tables did.

The frequencies are numbers given to us.  They are read from a running model, never
worked out again from its configuration: linear, llama3 and YaRN scaling need no code here.

Dynamic and LongRoPE scaling take other frequencies once the sequence is longer than a known
length, for all keys that are computed from then on.  Such a spec has a bound: it holds for
sequences up to that length, and positions past it are refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import torch

from codec.errors import UnsupportedModelError
from codec.identity import digest

Style = Literal["half", "interleaved"]
"""Which dimensions pair up: ``(i, i + F)`` as in GPT-NeoX, or ``(2i, 2i + 1)`` as in GPT-J."""

TABLE_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
STATIC_ROPE_TYPES: Final = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Published scalings whose frequencies do not depend on how long the sequence is."""

CHANGING_ROPE_TYPES: Final = frozenset({"dynamic", "longrope"})
"""Those whose frequencies hold up to a known length, and then change."""


def check_static(
    rope_type: str, *, max_positions: int | None = None, original_positions: int | None = None
) -> int | None:
    """Say up to which length a scaling's frequencies hold, or refuse it.

    Keys already cached keep the frequencies they were computed with, so that a sequence which
    outgrows the length would hold keys of two kinds, and which are which would depend on how
    it was cut into runs.

    Parameters
    ----------
    rope_type
        Name of the scaling, as Hugging Face configurations have it.
    max_positions, original_positions
        Positions the model accepts, past which dynamic scaling changes its frequencies, and
        those it was first trained on, past which LongRoPE does.

    Returns
    -------
    bound
        Longest sequence, in tokens, for which the first frequencies hold; ``None``: any.

    Raises
    ------
    UnsupportedModelError
        If the scaling is not known, or its bound is not given.

    Source
    ------
    Transformers 5.24, ``modeling_rope_utils.dynamic_rope_update``.
    """
    if rope_type in STATIC_ROPE_TYPES:
        return None
    if rope_type not in CHANGING_ROPE_TYPES:
        known = ", ".join(sorted(STATIC_ROPE_TYPES | CHANGING_ROPE_TYPES))
        raise UnsupportedModelError(f"rotary scaling {rope_type!r}", f"need one of {known}")
    bound = max_positions if rope_type == "dynamic" else original_positions
    if not bound:
        raise UnsupportedModelError(
            f"rotary scaling {rope_type!r}",
            "its frequencies depend on the length, and from which on is not known",
        )
    return bound


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """How a model (or the part of it in one stage) rotates its keys; equal specs rotate alike.

    Examples
    --------
    >>> spec = RotarySpec.uniform([1.0, 0.5], num_layers=3)
    >>> spec.num_layers, spec.rotary_dim
    (3, 4)
    """

    inv_freq_LF: tuple[tuple[float, ...], ...]
    """Radians per position of each pair, each layer; values a 32-bit float can hold.

    A layer that does not rotate its keys has zeros."""

    attention_scaling_L: tuple[float, ...]
    """Factor on the cosines and sines of each layer; 1 except under YaRN and LongRoPE."""

    style: Style = "half"

    table_dtype: str = "float32"
    """Data type the engine rounds its cosines and sines to: that of the model, as a rule."""

    max_positions: int | None = None
    """Longest sequence that is rotated so, hence the first position refused; None: any."""

    def __post_init__(self) -> None:
        if not self.inv_freq_LF or not self.inv_freq_LF[0]:
            raise ValueError("need at least one layer and one frequency")
        if len({len(row) for row in self.inv_freq_LF}) != 1:
            raise ValueError("need equally many frequencies in every layer")
        if len(self.attention_scaling_L) != len(self.inv_freq_LF):
            raise ValueError(
                f"need a scaling per layer, got {len(self.attention_scaling_L)} "
                f"for {len(self.inv_freq_LF)} layers"
            )
        if self.style not in ("half", "interleaved"):
            raise ValueError(f"need style half or interleaved, got {self.style!r}")
        if self.table_dtype not in TABLE_DTYPES:
            raise ValueError(f"need table_dtype in {list(TABLE_DTYPES)}, got {self.table_dtype!r}")
        for frequency in {value for row in self.inv_freq_LF for value in row}:
            if not (0 <= frequency < math.inf and _as_float32(frequency) == frequency):
                raise ValueError(f"need finite 32-bit frequencies >= 0, got {frequency!r}")
        for scaling in set(self.attention_scaling_L):
            if not 0 < scaling < math.inf:
                raise ValueError(f"need finite scalings > 0, got {scaling!r}")
        _check_bound(self.max_positions)

    @classmethod
    def uniform(
        cls,
        inv_freq_F: Sequence[float] | torch.Tensor,
        *,
        num_layers: int,
        attention_scaling: float = 1.0,
        style: Style = "half",
        table_dtype: str = "float32",
        max_positions: int | None = None,
    ) -> RotarySpec:
        """Spec of a model whose layers all rotate alike; frequencies are rounded to 32 bits."""
        row = tuple(float(v) for v in torch.as_tensor(inv_freq_F, dtype=torch.float32).tolist())
        return cls(
            inv_freq_LF=(row,) * num_layers,
            attention_scaling_L=(float(attention_scaling),) * num_layers,
            style=style,
            table_dtype=table_dtype,
            max_positions=max_positions,
        )

    @property
    def num_layers(self) -> int:
        """Layers that the spec describes."""
        return len(self.inv_freq_LF)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated; those past it are left alone."""
        return 2 * len(self.inv_freq_LF[0])

    def of_layers(self, layers: range) -> RotarySpec:
        """Spec of a run of these layers, as a stage needs it.

        Raises
        ------
        ValueError
            If ``layers`` is empty, skips layers, or reaches outside.
        """
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.num_layers:
            raise ValueError(f"need a run of 0..{self.num_layers}, got {layers}")
        run = slice(layers.start, layers.stop)
        return replace(
            self,
            inv_freq_LF=self.inv_freq_LF[run],
            attention_scaling_L=self.attention_scaling_L[run],
        )

    def check_length(self, num_positions: int) -> None:
        """Refuse a sequence longer than this spec holds for.

        Raises
        ------
        UnsupportedModelError
            If ``num_positions`` exceeds `max_positions`.
        """
        if self.max_positions is not None and num_positions > self.max_positions:
            raise UnsupportedModelError(
                f"a sequence of {num_positions} positions",
                f"this model's rotary frequencies change past {self.max_positions}",
            )

    def rotate(self, keys_TLHD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Turn keys to their positions.

        Parameters
        ----------
        keys_TLHD
            Shape ``(T, L, H, D)``, any float type, ``D >= rotary_dim``; before rotation.
        positions_T
            Shape ``(T,)``, integers: absolute positions, in any order.

        Returns
        -------
        rotated_TLHD
            A new tensor of that shape, ``float32``, on the device of the keys.

        Raises
        ------
        UnsupportedModelError
            If a position lies at or past `max_positions`.
        ValueError
            If the shapes or types are others.
        """
        return self._turn(keys_TLHD, positions_T, undo=False)

    def unrotate(self, keys_TLHD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Turn keys back, so that `rotate` gives them again; arguments and errors as there.

        An element of ``unrotate(rotate(keys))`` is within 7 units of ``2**-23`` of the larger
        element of its pair, whatever the tables are rounded to: 2 roundings each way, which
        the pair's mixing at most doubles, and 3 in the coefficients of the inverse.
        """
        return self._turn(keys_TLHD, positions_T, undo=True)

    def digest(self) -> str:
        """Text that is equal for equal specs, on every machine: part of a namespace."""
        rows, row_of_layer_L = self._distinct
        domain, bound = "kvfabric.rotary.1", b""
        if self.max_positions is not None:
            # A domain of its own: specs with no bound keep the digests they always had.
            domain, bound = "kvfabric.rotary.bounded.1", struct.pack("<Q", self.max_positions)
        return digest(
            domain,
            *filter(None, [bound]),
            self.style.encode(),
            self.table_dtype.encode(),
            # Adding zero turns -0.0, which is equal to 0.0 but has other bytes, into it.
            *(struct.pack(f"<{len(row)}fd", *(v + 0.0 for v in row), s) for row, s in rows),
            struct.pack(f"<{self.num_layers}I", *row_of_layer_L),
        ).hex()

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers for JSON or msgpack; each distinct layer is written once."""
        rows, row_of_layer_L = self._distinct
        return {
            "style": self.style,
            "table_dtype": self.table_dtype,
            "rows": [{"inv_freq": list(row), "scaling": scaling} for row, scaling in rows],
            "row_of_layer": list(row_of_layer_L),
        } | ({} if self.max_positions is None else {"max_positions": self.max_positions})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RotarySpec:
        """Read what `to_dict` wrote.

        Raises
        ------
        ValueError
            If a field is missing, unknown or of the wrong kind, or the spec is not valid.
        """
        try:
            if set(fields) - {"max_positions"} != {"style", "table_dtype", "rows", "row_of_layer"}:
                raise ValueError(f"unknown or missing fields among {sorted(fields)}")
            rows = [
                (tuple(float(v) for v in row["inv_freq"]), float(row["scaling"]))
                for row in fields["rows"]
            ]
            layers = [rows[_index(i, len(rows))] for i in fields["row_of_layer"]]
            return cls(
                inv_freq_LF=tuple(row for row, _ in layers),
                attention_scaling_L=tuple(scaling for _, scaling in layers),
                style=fields["style"],
                table_dtype=fields["table_dtype"],
                max_positions=fields.get("max_positions"),
            )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"not a rotary spec: {error!r}") from error

    @cached_property
    def _distinct(self) -> tuple[list[tuple[tuple[float, ...], float]], tuple[int, ...]]:
        """The distinct (frequencies, scaling), in order of first use, and each layer's."""
        layers = list(zip(self.inv_freq_LF, self.attention_scaling_L, strict=True))
        rows = list(dict.fromkeys(layers))
        index = {row: i for i, row in enumerate(rows)}
        return rows, tuple(index[layer] for layer in layers)

    def _tables(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, shape ``(T, L, 1, F)``, or ``(T, 1, 1, F)`` where layers agree."""
        rows, row_of_layer_L = self._distinct
        device = positions_T.device
        inv_freq_UF = torch.tensor([row for row, _ in rows], dtype=torch.float32, device=device)
        scaling_U1 = torch.tensor([[s] for _, s in rows], dtype=torch.float32, device=device)
        # Layers that rotate alike share a row: most models have one or two.
        angles_TUF = positions_T.to(torch.float32)[:, None, None] * inv_freq_UF
        dtype = TABLE_DTYPES[self.table_dtype]
        cos, sin = (
            (table * scaling_U1).to(dtype).to(torch.float32)
            for table in (angles_TUF.cos(), angles_TUF.sin())
        )
        if len(rows) > 1:
            layers_L = torch.tensor(row_of_layer_L, device=device)
            cos, sin = cos[:, layers_L], sin[:, layers_L]
        return cos.unsqueeze(2), sin.unsqueeze(2)

    def _turn(
        self, keys_TLHD: torch.Tensor, positions_T: torch.Tensor, *, undo: bool
    ) -> torch.Tensor:
        """Apply the rotation, or its exact inverse, to a copy in 32 bits."""
        self._check_shapes(keys_TLHD, positions_T)
        cos, sin = self._tables(positions_T.to(keys_TLHD.device))
        out = keys_TLHD.to(torch.float32, copy=True)
        width, half = self.rotary_dim, self.rotary_dim // 2
        if self.style == "half":
            first, second = out[..., :half], out[..., half:width]
        else:
            first, second = out[..., 0:width:2], out[..., 1:width:2]
        if undo:
            norm = cos.square() + sin.square()
            cos, sin = cos / norm, -sin / norm
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)
        return out

    def _check_shapes(self, keys_TLHD: torch.Tensor, positions_T: torch.Tensor) -> None:
        """Refuse arguments that broadcasting would otherwise stretch to fit."""
        if keys_TLHD.ndim != 4 or not keys_TLHD.is_floating_point():
            raise ValueError(
                f"need float keys (T, L, H, D), got {keys_TLHD.dtype} {tuple(keys_TLHD.shape)}"
            )
        num_tokens, num_layers, _, head_dim = keys_TLHD.shape
        if num_layers != self.num_layers:
            raise ValueError(f"need {self.num_layers} layers, got {num_layers}")
        if head_dim < self.rotary_dim:
            raise ValueError(f"need heads of {self.rotary_dim} or wider, got {head_dim}")
        if positions_T.shape != (num_tokens,) or positions_T.is_floating_point():
            raise ValueError(
                f"need {num_tokens} integer positions, "
                f"got {positions_T.dtype} {tuple(positions_T.shape)}"
            )
        # Only where there is a bound: reading the highest position waits for a device.
        if self.max_positions is not None and num_tokens:
            self.check_length(int(positions_T.max()) + 1)


def _check_bound(max_positions: object) -> None:
    """Refuse what is no length; a bool would pass for one."""
    if max_positions is None or (type(max_positions) is int and 0 < max_positions < 2**63):
        return
    raise ValueError(f"need 0 < max_positions < 2**63 or none, got {max_positions!r}")


def _as_float32(value: float) -> float:
    """Nearest 32-bit float, or infinity where there is none."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def _index(value: object, length: int) -> int:
    """``value`` as an index below ``length``; unlike Python's, never negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < length:
        raise ValueError(f"need 0 <= row < {length}, got {value!r}")
    return value
