"""Finding a model's rotation from what it caches."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from codec.errors import UnsupportedModelError
from codec.rope import RotarySpec, Style
from fabric.engines.probe import (
    TOLERANCES,
    RotaryCandidate,
    constant_inputs,
    fit_rotary,
    probe_positions,
    rotary_candidates,
)

POSITIONS = probe_positions(4096)
LOCAL = RotaryCandidate((1.0, 0.25, 0.0625), 1.0, "default")
GLOBAL = RotaryCandidate((1.0, 0.5, 0.015625), 1.25, "yarn")
NARROW = RotaryCandidate((0.75,), 1.0, "default")
DYNAMIC = RotaryCandidate(LOCAL.inv_freq_F, 1.0, "dynamic", max_positions=8000)
LONG = RotaryCandidate(GLOBAL.inv_freq_F, GLOBAL.attention_scaling, "longrope", 16_000, 9000)


def spec_of(layers: list[RotaryCandidate | None], style: Style, dtype: torch.dtype) -> RotarySpec:
    """The spec of a model whose layers use these; None is a layer that does not rotate."""
    return RotarySpec(
        inv_freq_LF=tuple(c.inv_freq_F if c else (0.0, 0.0, 0.0) for c in layers),
        attention_scaling_L=tuple(c.attention_scaling if c else 1.0 for c in layers),
        style=style,
        table_dtype=str(dtype).removeprefix("torch."),
    )


def cached_by(
    spec: RotarySpec, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What such a model caches of constant inputs: keys rotated, values all alike."""
    generator = torch.Generator().manual_seed(seed)
    still = torch.randn(1, spec.num_layers, 2, spec.rotary_dim + 2, generator=generator)
    still = still.expand(len(POSITIONS), -1, -1, -1)
    return spec.rotate(still, torch.tensor(POSITIONS)).to(dtype), still.to(dtype)


def fit(keys: torch.Tensor, values: torch.Tensor, candidates: list[RotaryCandidate]) -> RotarySpec:
    """`fit_rotary` at the positions of this module."""
    return fit_rotary(keys, values, POSITIONS, candidates, name="model")


def fit_spread(candidate: RotaryCandidate) -> float:
    """How far from constant keys of `LOCAL` are after being undone with ``candidate``."""
    keys, _ = cached_by(spec_of([LOCAL], "half", torch.float32), torch.float32)
    spec = spec_of([candidate], "half", torch.float32)
    undone = spec.unrotate(keys, torch.tensor(POSITIONS))
    return float((undone - undone.mean(dim=0)).norm() / undone.norm())


@settings(deadline=None)
@given(
    layers=st.lists(st.sampled_from([LOCAL, GLOBAL, None]), min_size=1, max_size=4),
    style=st.sampled_from(["half", "interleaved"]),
    dtype=st.sampled_from(sorted(TOLERANCES, key=str)),
    seed=st.integers(0, 1000),
)
def test_the_rotation_that_was_done_is_the_one_found(
    layers: list[RotaryCandidate | None], style: Style, dtype: torch.dtype, seed: int
) -> None:
    """For any mix of layers; a model that rotates nothing has no style and one frequency."""
    spec = spec_of(layers, style, dtype)

    found = fit(*cached_by(spec, dtype, seed), [GLOBAL, NARROW, LOCAL])

    if any(layers):
        assert found == spec
    else:
        assert found.inv_freq_LF == ((0.0,),) * len(layers)


@settings(deadline=None, max_examples=30)
@given(
    style=st.sampled_from(["half", "interleaved"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_tables_that_were_not_rounded_are_found(
    style: Style, dtype: torch.dtype, seed: int
) -> None:
    """From all layers together, though what differs is less than what the keys lost."""
    layers = 2 * [LOCAL, GLOBAL, None, LOCAL, GLOBAL, LOCAL]
    spec = replace(spec_of(layers, style, dtype), table_dtype="float32")

    assert fit(*cached_by(spec, dtype, seed), [GLOBAL, LOCAL]) == spec


def test_of_frequencies_that_nearly_agree_the_closest_are_taken() -> None:
    """A scaling may leave all but the lowest as they were; the order does not decide."""
    near = RotaryCandidate((1.0, 0.25, 0.0625 + 2**-20), 1.0, "linear")
    assert fit_spread(near) < TOLERANCES[torch.float32]

    for candidates in ([near, LOCAL], [LOCAL, near]):
        keys, values = cached_by(spec_of([LOCAL], "half", torch.float32), torch.float32)
        assert fit(keys, values, candidates).inv_freq_LF == (LOCAL.inv_freq_F,)


def test_frequencies_for_wider_heads_are_passed_over() -> None:
    """Those of an image encoder, say."""
    keys, values = cached_by(spec_of([LOCAL], "half", torch.float32), torch.float32)
    wide = RotaryCandidate((0.5,) * keys.shape[3], 1.0, "default")

    assert fit(keys, values, [wide, LOCAL]).inv_freq_LF == (LOCAL.inv_freq_F,)


def test_keys_turned_by_something_else_are_refused() -> None:
    """Fail closed, naming the layer."""
    keys, values = cached_by(spec_of([LOCAL, GLOBAL], "half", torch.float32), torch.float32)

    with pytest.raises(UnsupportedModelError, match="model layer 1: its keys are not turned"):
        fit(keys, values, [LOCAL])


def test_keys_of_nothing_are_refused() -> None:
    """All zero, they would fit anything."""
    keys, values = cached_by(spec_of([LOCAL], "half", torch.float32), torch.float32)

    with pytest.raises(UnsupportedModelError, match="model layer 0: its keys"):
        fit(torch.zeros_like(keys), values, [LOCAL])


def test_values_that_depend_on_the_position_are_refused() -> None:
    """As where latent attention keeps its rotated part there."""
    keys, _ = cached_by(spec_of([LOCAL, LOCAL], "half", torch.float32), torch.float32)

    with pytest.raises(UnsupportedModelError, match="model layer 0: its cached values depend"):
        fit(keys, keys, [LOCAL])


def test_layers_that_pair_differently_are_refused() -> None:
    """One spec has one style; no known model mixes them."""
    half, pairs = (
        cached_by(spec_of([LOCAL], style, torch.float32), torch.float32)
        for style in ("half", "interleaved")
    )
    keys, values = (torch.cat(both, dim=1) for both in zip(half, pairs, strict=True))

    with pytest.raises(UnsupportedModelError, match="rotate keys in different ways"):
        fit(keys, values, [LOCAL])


def test_layers_that_rotate_different_widths_are_refused() -> None:
    """A narrow rotation cannot be written as a wide one with zeros: other dimensions pair up."""
    wide = spec_of([LOCAL], "half", torch.float32)
    narrow = RotarySpec.uniform(NARROW.inv_freq_F, num_layers=1)
    keys, values = cached_by(wide, torch.float32)
    other = narrow.rotate(values, torch.tensor(POSITIONS))

    with pytest.raises(UnsupportedModelError, match="rotate keys in different ways"):
        fit(torch.cat([keys, other], dim=1), torch.cat([values, values], dim=1), [LOCAL, NARROW])


@pytest.mark.parametrize("candidates", [[DYNAMIC], [LOCAL, DYNAMIC], [DYNAMIC, LOCAL]], ids=len)
def test_frequencies_that_change_later_bound_the_spec(candidates: list[RotaryCandidate]) -> None:
    """Even where others that do not change happen to be equal up to there."""
    spec = spec_of([LOCAL], "half", torch.float32)

    found = fit(*cached_by(spec, torch.float32), candidates)

    assert found == replace(spec, max_positions=8000)


@pytest.mark.parametrize("dtype", sorted(TOLERANCES, key=str), ids=str)
def test_the_layer_that_changes_first_bounds_the_spec(dtype: torch.dtype) -> None:
    """A chunk holds all layers; each scaling has the bound that is its own."""
    for layers, bound in (([LONG, LOCAL], 9000), ([DYNAMIC, LONG], 8000), ([LOCAL, GLOBAL], None)):
        spec = spec_of(list(layers), "half", dtype)
        assert fit(*cached_by(spec, dtype), list(layers)) == replace(spec, max_positions=bound)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "newrope"])
@pytest.mark.parametrize("fits", [True, False])
def test_a_scaling_that_changes_nobody_knows_when_is_named(rope_type: str, fits: bool) -> None:
    """Also rather than that nothing fits, which is true and says less."""
    keys, values = cached_by(
        spec_of([LOCAL if fits else GLOBAL], "half", torch.float32), torch.float32
    )
    unknown = RotaryCandidate(LOCAL.inv_freq_F, 1.0, rope_type)

    with pytest.raises(UnsupportedModelError, match=f"rotary scaling '{rope_type}'"):
        fit(keys, values, [unknown])


def test_a_scaling_that_nobody_uses_does_not_matter() -> None:
    """That of an image encoder, say."""
    keys, values = cached_by(spec_of([GLOBAL], "half", torch.float32), torch.float32)

    unknown = RotaryCandidate(LOCAL.inv_freq_F, 1.0, "newrope")
    found = fit(keys, values, [DYNAMIC, unknown, GLOBAL])

    assert found == spec_of([GLOBAL], "half", torch.float32)


@pytest.mark.parametrize(("max_positions", "expected"), [(1, [0]), (4, [0, 1, 2, 3]), (12, 6)])
def test_positions_stay_within_the_model(max_positions: int, expected: list[int] | int) -> None:
    """Past its end, a model with learned positions has none."""
    positions = probe_positions(max_positions)

    assert positions == expected if isinstance(expected, list) else len(positions) == expected
    assert max(positions) < max_positions


def test_positions_stay_within_what_any_frequencies_hold_for() -> None:
    """Past it, the run itself would change them; those that do not change allow any."""
    yarn = RotaryCandidate(LOCAL.inv_freq_F, 1.0, "yarn", max_positions=99, original_positions=3)

    assert max(probe_positions(10**6, [yarn, LOCAL])) == 7919
    assert max(probe_positions(10**6, [yarn, DYNAMIC, LONG])) == 7919
    for short in (replace(LONG, original_positions=12), replace(DYNAMIC, max_positions=12)):
        assert max(probe_positions(10**6, [yarn, short])) == 11
    assert probe_positions(2, [DYNAMIC]) == [0, 1]


class Rotary(nn.Module):
    """A rotary module as transformers has them, plain or with one set per kind of layer."""

    def __init__(self, rope_type: Any, **fields: Any) -> None:
        super().__init__()
        self.rope_type = rope_type
        for name, value in fields.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)


def test_candidates_are_the_buffers_of_rotary_modules() -> None:
    """Plain, per kind of layer, and bare; the copies of dynamic scalings do not count."""
    one, two = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 0.25], dtype=torch.float64)
    model = nn.ModuleList(
        [
            Rotary("yarn", inv_freq=one, original_inv_freq=one, attention_scaling=1.5),
            Rotary(
                {"local": "default", "global": "linear"},
                local_inv_freq=one,
                local_original_inv_freq=two,
                local_attention_scaling=1.0,
                global_inv_freq=two,
                global_attention_scaling=2.0,
            ),
            nn.BatchNorm1d(3),
        ]
    )
    bare = nn.Module()
    bare.register_buffer("inv_freq", two)

    assert rotary_candidates(model) == [
        RotaryCandidate((1.0, 0.5), 1.5, "yarn"),
        RotaryCandidate((1.0, 0.5), 1.0, "default"),
        RotaryCandidate((1.0, 0.25), 2.0, "linear"),
    ]
    assert rotary_candidates(bare) == [RotaryCandidate((1.0, 0.25), 1.0, "default")]
    assert rotary_candidates(nn.Linear(2, 2)) == []


def test_candidates_of_changing_scalings_are_the_first_ones_and_their_limits() -> None:
    """A longer run may have left others; which limit counts is for `check_static`."""
    now, first = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 0.5])
    limits = {"original_max_position_embeddings": 64, "rope_theta": 1e4}
    common: dict[str, Any] = {"original_max_seq_len": 512, "attention_scaling": 1.5}
    one = SimpleNamespace(rope_parameters=limits)
    per_kind = SimpleNamespace(rope_parameters={"local": {}, "global": limits})
    model = nn.ModuleList(
        [
            Rotary("longrope", inv_freq=now, original_inv_freq=first, config=one, **common),
            Rotary("dynamic", inv_freq=now, original_inv_freq=first, config=None, **common),
            Rotary("yarn", inv_freq=now, original_inv_freq=first, config=one, **common),
            Rotary(
                {"local": "linear", "global": "longrope"},
                local_inv_freq=now,
                global_inv_freq=now,
                global_original_inv_freq=first,
                config=per_kind,
            ),
        ]
    )

    found = rotary_candidates(model)

    assert found == [
        RotaryCandidate((1.0, 0.5), 1.5, "longrope", 512, 64),
        RotaryCandidate((1.0, 0.5), 1.5, "dynamic", 512, None),
        RotaryCandidate((0.5, 0.25), 1.5, "yarn", 512, 64),
        RotaryCandidate((0.5, 0.25), 1.0, "linear", None, None),
        RotaryCandidate((1.0, 0.5), 1.0, "longrope", None, 64),
    ]
    assert [candidate.bound for candidate in found] == [64, 512, None, None, 64]


class Layer(nn.Module):
    """A layer that says what it was given."""

    def __init__(self, layer_idx: int | None) -> None:
        super().__init__()
        if layer_idx is not None:
            self.layer_idx = layer_idx

    def forward(self, hidden_states: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Give it back."""
        return hidden_states * scale


@pytest.mark.parametrize("by_name", [True, False])
def test_layers_see_one_input_everywhere(by_name: bool) -> None:
    """However they are called, and only within the block."""
    layer, states = Layer(0), torch.arange(6.0).reshape(1, 3, 2)

    with constant_inputs(nn.ModuleList([layer])):
        seen = layer(hidden_states=states, scale=2.0) if by_name else layer(states, 2.0)

    assert torch.equal(seen, torch.tensor([[[0.0, 2.0]] * 3]))
    assert torch.equal(layer(states), states)


def test_modules_that_are_no_layers_are_left_alone() -> None:
    """Rotary modules and the head have no index."""
    other, states = Layer(None), torch.arange(6.0).reshape(1, 3, 2)

    with constant_inputs(nn.ModuleList([other])):
        assert torch.equal(other(states), states)


def test_hooks_are_removed_when_the_run_fails() -> None:
    """The model is used again, or by someone else."""
    layer, states = Layer(0), torch.arange(6.0).reshape(1, 3, 2)

    with pytest.raises(MemoryError), constant_inputs(nn.ModuleList([layer])):
        raise MemoryError

    assert torch.equal(layer(states), states)
