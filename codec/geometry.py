"""The shape of a model's KV cache, and the share of it that one worker holds.

Letters that end array names, here and in every module of the codec:
``T`` token positions, ``L`` layers, ``H`` kv heads, ``D`` dimensions of one head,
``W`` one row (all layers and heads of a stage, layer-major, then head, then
dimension), ``C`` coefficients of a basis, ``F`` rotary frequencies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RAW_BYTES_PER_ELEMENT = 2
"""Every ratio we print is against 16-bit storage, whatever the engine computes in."""

_STAGE = re.compile(r"l(\d{1,9})-(\d{1,9})\.h(\d{1,9})-(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """A layer range times a kv-head range: one pipeline (and tensor) rank's share.

    Examples
    --------
    >>> str(Stage(0, 30, 0, 3))
    'l0-30.h0-3'
    >>> Stage.parse("l0-30.h0-3").num_layers
    30
    """

    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.layer_start < self.layer_stop:
            raise ValueError(
                f"need 0 <= start < stop, got layers {self.layer_start, self.layer_stop}"
            )
        if not 0 <= self.head_start < self.head_stop:
            raise ValueError(f"need 0 <= start < stop, got heads {self.head_start, self.head_stop}")

    @property
    def num_layers(self) -> int:
        """Layers in the stage."""
        return self.layer_stop - self.layer_start

    @property
    def num_heads(self) -> int:
        """Kv heads per layer in the stage."""
        return self.head_stop - self.head_start

    def __str__(self) -> str:
        return f"l{self.layer_start}-{self.layer_stop}.h{self.head_start}-{self.head_stop}"

    @classmethod
    def parse(cls, text: str) -> Stage:
        """Read the form that ``str`` writes.

        Raises
        ------
        ValueError
            If ``text`` is not exactly that form, or a range is empty.
        """
        found = _STAGE.fullmatch(text)
        if found is None:
            raise ValueError(f"need a stage such as l0-30.h0-3, got {text!r}")
        stage = cls(*(int(part) for part in found.groups()))
        if str(stage) != text:
            raise ValueError(f"need a stage such as l0-30.h0-3, got {text!r}")
        return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Layers, heads and widths of one stage's cache (or of the whole model's)."""

    num_layers: int
    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "key_head_dim", "value_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def key_width(self) -> int:
        """Elements in one token's row of keys: ``L * H * D``."""
        return self.num_layers * self.num_kv_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Elements in one token's row of values."""
        return self.num_layers * self.num_kv_heads * self.value_head_dim

    @property
    def raw_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in 16 bits: what ratios are measured against."""
        return (self.key_width + self.value_width) * RAW_BYTES_PER_ELEMENT

    @property
    def whole(self) -> Stage:
        """The stage that holds everything."""
        return Stage(0, self.num_layers, 0, self.num_kv_heads)

    def of_stage(self, stage: Stage) -> KVGeometry:
        """Geometry of the part of this cache that ``stage`` holds.

        Raises
        ------
        ValueError
            If ``stage`` reaches outside this geometry.
        """
        if stage.layer_stop > self.num_layers or stage.head_stop > self.num_kv_heads:
            raise ValueError(f"stage {stage} reaches outside {self.whole}")
        return KVGeometry(
            num_layers=stage.num_layers,
            num_kv_heads=stage.num_heads,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
        )

    def split_layers(self, num_stages: int) -> tuple[Stage, ...]:
        """Cut the layers into ``num_stages`` runs whose lengths differ by at most one."""
        if not 1 <= num_stages <= self.num_layers:
            raise ValueError(f"need 1..{self.num_layers} stages, got {num_stages}")
        cuts = [self.num_layers * i // num_stages for i in range(num_stages + 1)]
        return tuple(Stage(cuts[i], cuts[i + 1], 0, self.num_kv_heads) for i in range(num_stages))
