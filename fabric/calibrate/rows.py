"""What one stage's share of the cache leaves behind while text runs through the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from codec.basis import Moments
from codec.geometry import KVGeometry, Stage
from codec.rope import RotarySpec
from codec.sensitivity import Metric, Sensitivity, SensitivityMeter

Kinds = tuple[Tensor, Tensor]
"""Keys and values."""
GradientRows = tuple[Tensor, Tensor, Tensor]
"""Keys, gradients of keys, gradients of values."""


@dataclass(kw_only=True)
class StageRows:
    """Moments, held-out rows and sensitivity of one stage; memory does not grow with tokens."""

    stage: Stage
    geometry: KVGeometry
    """Of the stage."""

    rotary: RotarySpec
    """Of the stage's layers."""

    moments: tuple[Moments, Moments] = field(init=False)
    sensitivity: Sensitivity | None = None
    #: Rows kept from the moments, keys and values of the same tokens, bfloat16.
    _held_out: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def __post_init__(self) -> None:
        self.moments = (Moments(self.geometry.key_width), Moments(self.geometry.value_width))

    @property
    def held_out(self) -> Kinds:
        """Rows of keys and of values that the moments have not seen, bfloat16."""
        for rows in self._held_out:
            rows[:] = [torch.cat(rows)]
        return self._held_out[0][0], self._held_out[1][0]

    def share(self, array_TLHD: Tensor) -> Tensor:
        """The stage's part of an array of the whole model, shape ``(T, W)``."""
        layers = slice(self.stage.layer_start, self.stage.layer_stop)
        heads = slice(self.stage.head_start, self.stage.head_stop)
        return array_TLHD[:, layers, heads].flatten(1)

    def add(self, keys_TW: Tensor, values_TW: Tensor) -> None:
        """Count rows in the moments."""
        for moments, rows in zip(self.moments, (keys_TW, values_TW), strict=True):
            moments.add(rows)

    def hold_out(self, keys_TW: Tensor, values_TW: Tensor) -> None:
        """Keep rows from the moments."""
        for kept, rows in zip(self._held_out, (keys_TW, values_TW), strict=True):
            kept.append(rows.bfloat16())

    def measure(self, windows: list[GradientRows]) -> None:
        """Learn the sensitivity from gradients of the whole model, ``(T, L, H, D)``.

        Where nothing reads the stage's tokens (all layers slide past them) they count alike.
        """
        shares = [[self.share(part) for part in window] for window in windows]
        if not any(part.any() for _, *gradients in shares for part in gradients):
            self.sensitivity = _all_alike(self.geometry, torch.cat([keys for keys, *_ in shares]))
            return
        meter = SensitivityMeter(self.geometry)
        for keys, key_gradients, value_gradients in shares:
            meter.add(keys, key_gradients, value_gradients)
        self.sensitivity = meter.result()

    def energies(self, keys_TW: Tensor, values_TW: Tensor) -> Tensor:
        """Energy of each token's keys and values in the metric, shape ``(2, T)``.

        Where there is no metric all coordinates count alike.
        """
        parts = []
        for number, rows in enumerate((keys_TW, values_TW)):
            centered = rows - self.moments[number].shift_W
            if self.sensitivity is not None:
                is_key = number == 0
                part = self.sensitivity
                centered = (part.key_metric if is_key else part.value_metric).scale(centered)
            parts.append(centered.square().sum(dim=1))
        return torch.stack(parts)

    def state(self) -> dict[str, Tensor]:
        """Everything it knows; see `restore`."""
        state: dict[str, Tensor] = {}
        for kind, moments, kept in zip(("k", "v"), self.moments, self._held_out, strict=True):
            state |= {f"{kind}.{name}": part for name, part in moments.state().items()}
            if kept:
                state[f"{kind}.held_out"] = torch.cat(kept)
        if (found := self.sensitivity) is not None:
            state["key_root"] = found.key_metric.root_BDD
            state["value_root"] = found.value_metric.root_BDD
            state["importance"] = found.importance_N
            state["importance_keys"] = found.keys_NW
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        names = ("num_rows", "shift", "sum", "gram", "pending")
        keys, values = (
            Moments.from_state({name: state[f"{kind}.{name}"] for name in names})
            for kind in ("k", "v")
        )
        self.moments = (keys, values)
        for kind, kept in zip(("k", "v"), self._held_out, strict=True):
            kept[:] = [state[f"{kind}.held_out"]] if f"{kind}.held_out" in state else []
        if "importance" in state:
            self.sensitivity = Sensitivity(
                key_metric=Metric(root_BDD=state["key_root"]),
                value_metric=Metric(root_BDD=state["value_root"]),
                keys_NW=state["importance_keys"],
                importance_N=state["importance"],
            )


def _all_alike(geometry: KVGeometry, keys_NW: Tensor) -> Sensitivity:
    num_blocks = geometry.num_layers * geometry.num_kv_heads
    return Sensitivity(
        key_metric=Metric.plain(num_blocks, geometry.key_head_dim),
        value_metric=Metric.plain(num_blocks, geometry.value_head_dim),
        keys_NW=keys_NW,
        importance_N=torch.ones(len(keys_NW)),
    )
