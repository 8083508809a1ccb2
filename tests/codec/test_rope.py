"""`RotarySpec`: undoing gives back what was rotated.  As models do it: its own module."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import UnsupportedModelError
from codec.rope import CHANGING_ROPE_TYPES, STATIC_ROPE_TYPES, RotarySpec, check_static

EPSILON = {"float32": 1.2e-7, "bfloat16": 7.8e-3, "float16": 9.8e-4}
FREQUENCIES = st.floats(0.0, 2.0, width=32)


@st.composite
def specs(draw: st.DrawFn) -> RotarySpec:
    """Any valid spec of up to three layers, which may rotate unlike one another."""
    num_layers = draw(st.integers(1, 3))
    num_frequencies = draw(st.integers(1, 4))
    row = st.lists(FREQUENCIES, min_size=num_frequencies, max_size=num_frequencies).map(tuple)
    rows = draw(st.lists(row, min_size=1, max_size=2))
    layers = [draw(st.sampled_from(rows)) for _ in range(num_layers)]
    return RotarySpec(
        inv_freq_LF=tuple(layers),
        attention_scaling_L=tuple(draw(st.sampled_from([1.0, 0.5, 1.37])) for _ in layers),
        style=draw(st.sampled_from(["half", "interleaved"])),
        table_dtype=draw(st.sampled_from(sorted(EPSILON))),
        max_positions=draw(st.sampled_from([None, 200_001, 300_000])),
    )


@st.composite
def rotations(draw: st.DrawFn) -> tuple[RotarySpec, torch.Tensor, torch.Tensor]:
    """A spec, keys that it can rotate, and their positions."""
    spec = draw(specs())
    positions = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
    heads, extra = draw(st.integers(1, 2)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (len(positions), spec.num_layers, heads, spec.rotary_dim + extra)
    return spec, torch.randn(shape, generator=generator), torch.tensor(positions)


def rotate_in_complex(
    spec: RotarySpec, keys_TLHD: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """An oracle that shares nothing with the module: pairs as complex numbers, 64 bits."""
    keys = keys_TLHD.double().numpy().copy()
    half = spec.rotary_dim // 2
    inv_freq_LF = np.array(spec.inv_freq_LF)
    angles_TLF = positions_T.numpy()[:, None, None] * inv_freq_LF[None]
    turn = np.exp(1j * angles_TLF) * np.array(spec.attention_scaling_L)[None, :, None]
    if spec.style == "half":
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    turned = (keys[..., first] + 1j * keys[..., second]) * turn[:, :, None]
    keys[..., first], keys[..., second] = turned.real, turned.imag
    return torch.from_numpy(keys)


def largest_of_pairs(spec: RotarySpec, keys_TLHD: torch.Tensor) -> torch.Tensor:
    """Each element's larger one of its pair; of dimensions past the pairs, nothing."""
    width, half = spec.rotary_dim, spec.rotary_dim // 2
    sizes = keys_TLHD.abs()
    order = torch.arange(width)
    other = (order + half) % width if spec.style == "half" else order ^ 1
    largest = torch.zeros_like(sizes)
    largest[..., :width] = torch.maximum(sizes[..., :width], sizes[..., other])
    return largest


@settings(deadline=None, max_examples=300)  # the first example pays for the start of torch
@given(rotations(), st.floats(-40, 40), st.booleans())
def test_undo_and_redo_give_the_keys_back(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor], exponent: float, undo_first: bool
) -> None:
    """Within 7 units in the last place of a pair's larger element, in either order.

    With ``u`` half a unit, ``a`` the larger element and ``t = |cos| + |sin|``: one product and
    sum each way lose ``2 u t a`` and ``2 u t^2 a / n``, ``n = cos^2 + sin^2``; the first is
    turned back by at most ``t / n``; the coefficients of the inverse lose ``3 u`` of
    ``t^2 a / n``.  As ``t^2 <= 2 n``, that is ``14 u a`` in all.  So it is whatever the tables
    are rounded to: the inverse is of the rounded matrix.
    """
    spec, keys, positions = case
    keys = keys * 2.0**exponent

    first, second = (spec.unrotate, spec.rotate) if undo_first else (spec.rotate, spec.unrotate)
    again = second(first(keys, positions), positions)

    error = (again.double() - keys.double()).abs()
    assert (error <= 7.001 * 2.0**-23 * largest_of_pairs(spec, keys)).all()


@settings(deadline=None)  # the first example pays for the start of torch
@given(rotations())
def test_rotation_agrees_with_complex_numbers(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor],
) -> None:
    """Up to the rounding of the tables, and of the angles, which grow with the position."""
    spec, keys, positions = case
    positions = positions % 1000

    error = (spec.rotate(keys, positions).double() - rotate_in_complex(spec, keys, positions)).abs()

    allowed = 2000 * EPSILON["float32"] + 2 * EPSILON[spec.table_dtype]
    assert error.max() <= 2 * 1.37 * keys.abs().max() * allowed


@settings(deadline=None)  # the first example pays for the start of torch
@given(rotations())
def test_dimensions_past_the_rotary_ones_are_left_alone(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor],
) -> None:
    """To the bit, under partial rotary embeddings."""
    spec, keys, positions = case

    for turned in (spec.rotate(keys, positions), spec.unrotate(keys, positions)):
        assert torch.equal(turned[..., spec.rotary_dim :], keys[..., spec.rotary_dim :])


@settings(deadline=None)  # the first example pays for the start of torch
@given(rotations())
def test_a_run_of_layers_rotates_as_it_does_in_the_whole(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor],
) -> None:
    """A stage decodes its layers alone."""
    spec, keys, positions = case
    whole = spec.unrotate(keys, positions)

    for start in range(spec.num_layers):
        part = spec.of_layers(range(start, spec.num_layers))
        assert torch.equal(part.unrotate(keys[:, start:], positions), whole[:, start:])


@settings(deadline=None)  # the first example pays for the start of torch
@given(specs())
def test_a_spec_survives_json_msgpack_and_pickle(spec: RotarySpec) -> None:
    """Frequencies come back to the last bit, and so does the digest."""
    fields = spec.to_dict()

    for again in (
        RotarySpec.from_dict(json.loads(json.dumps(fields))),
        RotarySpec.from_dict(msgpack.unpackb(msgpack.packb(fields))),
        pickle.loads(pickle.dumps(spec)),
    ):
        assert again == spec
        assert again.digest() == spec.digest()


@settings(deadline=None)  # the first example pays for the start of torch
@given(specs(), specs())
def test_digests_are_equal_exactly_when_specs_are(one: RotarySpec, other: RotarySpec) -> None:
    """A namespace can stand for the rotation."""
    assert (one.digest() == other.digest()) == (one == other)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.fixed_dictionaries(
                {},
                optional=dict.fromkeys(
                    ["style", "table_dtype", "rows", "row_of_layer", "inv_freq", "scaling"], inner
                ),
            )
        ),
        max_leaves=12,
    ).filter(lambda fields: isinstance(fields, dict))
)
def test_garbage_is_refused_with_one_kind_of_error(fields: dict[str, Any]) -> None:
    """A calibration file may hold anything."""
    with pytest.raises(ValueError, match=r"."):
        RotarySpec.from_dict(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("style", "neox"),
        ("style", ["half"]),
        ("table_dtype", "int8"),
        ("table_dtype", {}),
        ("rows", []),
        ("rows", [{"inv_freq": [0.5], "scaling": 0.0}]),
        ("rows", [{"inv_freq": [0.5]}]),
        ("rows", [{"inv_freq": [], "scaling": 1.0}]),
        ("rows", [{"inv_freq": [10**400], "scaling": 1.0}]),
        ("row_of_layer", []),
        ("row_of_layer", [-1]),
        ("row_of_layer", [1]),
        ("row_of_layer", [False]),
        ("row_of_layer", [0.0]),
        ("more", 1),
        ("max_positions", 0),
        ("max_positions", True),
        ("max_positions", 64.0),
        ("max_positions", 2**63),
        ("max_positions", [64]),
    ],
)
def test_one_wrong_field_is_refused(field: str, value: object) -> None:
    """Each by itself, in a dictionary that is otherwise right."""
    fields = RotarySpec.uniform([0.5], num_layers=1).to_dict()
    assert RotarySpec.from_dict(copy.deepcopy(fields)).num_layers == 1

    with pytest.raises(ValueError, match=r"."):
        RotarySpec.from_dict(fields | {field: value})


def test_the_digest_never_changes() -> None:
    """It names KV that may be on disks already."""
    spec = RotarySpec(
        inv_freq_LF=((1.0, 0.25), (1.0, 0.25), (0.5, 0.125)),
        attention_scaling_L=(1.0, 1.0, 1.25),
        style="interleaved",
        table_dtype="bfloat16",
    )

    assert spec.digest() == "057caa77897ca027f55c549f6fc0b251"
    assert replace(spec, max_positions=4096).digest() == "12cd52e990e1fe6f5cfb9d6fa6623d36"


def test_a_spec_without_a_bound_is_written_as_before_there_were_bounds() -> None:
    """The digest of a calibration is over these words."""
    spec = RotarySpec.uniform([0.5], num_layers=1)

    assert set(spec.to_dict()) == {"style", "table_dtype", "rows", "row_of_layer"}
    assert replace(spec, max_positions=9).to_dict() == spec.to_dict() | {"max_positions": 9}


def test_either_zero_is_the_same_frequency() -> None:
    """Python holds them equal, so the digest must."""
    one, other = (RotarySpec.uniform([zero, 0.5], num_layers=1) for zero in (0.0, -0.0))

    assert one == other
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"inv_freq_LF": ()},
        {"inv_freq_LF": ((),)},
        {"inv_freq_LF": ((0.5, 0.5), (0.5,)), "attention_scaling_L": (1.0, 1.0)},
        {"attention_scaling_L": (1.0, 1.0)},
        {"attention_scaling_L": (0.0,)},
        {"attention_scaling_L": (float("inf"),)},
        {"inv_freq_LF": ((-0.5, 0.5),)},
        {"inv_freq_LF": ((0.1, 0.5),)},
        {"inv_freq_LF": ((float("nan"), 0.5),)},
        {"inv_freq_LF": ((1e300, 0.5),)},
        {"style": "neox"},
        {"table_dtype": "float64"},
        {"max_positions": 0},
        {"max_positions": True},
    ],
    ids=str,
)
def test_a_spec_that_exists_is_valid(change: dict[str, Any]) -> None:
    """Among others, 0.1 is no 32-bit float: a tensor would hold another frequency."""
    fields: dict[str, Any] = {"inv_freq_LF": ((0.5, 0.25),), "attention_scaling_L": (1.0,)}
    assert RotarySpec(**fields).rotary_dim == 4

    with pytest.raises(ValueError, match="need"):
        RotarySpec(**fields | change)


@pytest.mark.parametrize("layers", [range(0), range(1, 3), range(-1, 1), range(0, 2, 2)], ids=str)
def test_layers_outside_the_spec_are_refused(layers: range) -> None:
    """A stage that reaches outside its model is a mistake, not a shorter stage."""
    spec = RotarySpec.uniform([0.5], num_layers=2)

    with pytest.raises(ValueError, match="need a run of"):
        spec.of_layers(layers)


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        (torch.zeros(3, 2, 1), torch.arange(3)),
        (torch.zeros(3, 2, 1, 4, dtype=torch.int32), torch.arange(3)),
        (torch.zeros(3, 1, 1, 4), torch.arange(3)),
        (torch.zeros(3, 2, 1, 3), torch.arange(3)),
        (torch.zeros(3, 2, 1, 4), torch.arange(2)),
        (torch.zeros(3, 2, 1, 4), torch.arange(1)),
        (torch.zeros(3, 2, 1, 4), torch.arange(3.0)),
    ],
    ids=["no heads", "integer keys", "layers", "narrow", "short", "broadcast", "float positions"],
)
def test_shapes_are_not_stretched_to_fit(keys: torch.Tensor, positions: torch.Tensor) -> None:
    """Broadcasting would otherwise give a wrong answer."""
    spec = RotarySpec.uniform([0.5, 0.25], num_layers=2)

    with pytest.raises(ValueError, match="need"):
        spec.rotate(keys, positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_a_new_32_bit_tensor(dtype: torch.dtype) -> None:
    """The engine's own keys stay as they are."""
    spec = RotarySpec.uniform([0.5, 0.25], num_layers=1)
    keys = torch.randn(2, 1, 1, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = keys.clone()

    rotated = spec.rotate(keys, torch.tensor([7, 8]))

    assert rotated.dtype == torch.float32
    assert torch.equal(keys, before)
    assert not torch.equal(rotated, keys.float())


def test_keys_that_share_memory_are_undone_apart() -> None:
    """An expanded view has one row in memory for many positions."""
    spec = RotarySpec.uniform([0.5, 0.25], num_layers=1)
    keys = torch.ones(1, 1, 1, 4).expand(3, 1, 2, 4)

    rotated = spec.rotate(keys, torch.arange(3))

    assert torch.equal(rotated, spec.rotate(keys.contiguous(), torch.arange(3)))


@pytest.mark.parametrize("turn", ["rotate", "unrotate"])
@pytest.mark.parametrize("positions", [[4, 1], [9, 5]], ids=str)
def test_positions_past_the_bound_are_refused(turn: str, positions: list[int]) -> None:
    """Wherever they stand in the order; the keys there have other frequencies."""
    spec = RotarySpec.uniform([0.5, 0.25], num_layers=1, max_positions=max(positions) + 1)
    keys = torch.ones(2, 1, 1, 4)
    assert getattr(spec, turn)(keys, torch.tensor(positions)).shape == keys.shape
    shorter = replace(spec, max_positions=max(positions))

    for narrower in (shorter, shorter.of_layers(range(1))):
        with pytest.raises(UnsupportedModelError, match=f"change past {max(positions)}"):
            getattr(narrower, turn)(keys, torch.tensor(positions))


def test_a_bound_is_a_length() -> None:
    """A sequence may have as many positions, numbered from 0, and no more; none is none."""
    spec = RotarySpec.uniform([0.5], num_layers=1, max_positions=64)

    spec.check_length(64)
    replace(spec, max_positions=None).check_length(10**9)
    with pytest.raises(UnsupportedModelError, match="sequence of 65 positions"):
        spec.check_length(65)
    assert spec.rotate(torch.ones(0, 1, 1, 2), torch.arange(0)).shape == (0, 1, 1, 2)


@pytest.mark.parametrize("rope_type", sorted(STATIC_ROPE_TYPES))
def test_static_scalings_have_no_bound(rope_type: str) -> None:
    """Their frequencies are the same whatever the length."""
    assert check_static(rope_type, max_positions=512, original_positions=64) is None


@pytest.mark.parametrize(
    ("rope_type", "limits", "bound"),
    [
        ("dynamic", {"max_positions": 512}, 512),
        ("dynamic", {"max_positions": 512, "original_positions": 64}, 512),
        ("longrope", {"original_positions": 64}, 64),
        ("longrope", {"max_positions": 512, "original_positions": 64}, 64),
        ("longrope", {"max_positions": 64, "original_positions": 64}, 64),
    ],
)
def test_changing_scalings_are_bounded(rope_type: str, limits: dict[str, int], bound: int) -> None:
    """By the length from which on they change, each by its own."""
    assert check_static(rope_type, **limits) == bound


@pytest.mark.parametrize(
    ("rope_type", "limits", "why"),
    [
        ("dynamic", {}, "not known"),
        ("dynamic", {"original_positions": 64}, "not known"),
        ("longrope", {}, "not known"),
        ("longrope", {"max_positions": 4096}, "not known"),
        ("newrope", {"max_positions": 4096, "original_positions": 64}, "need one of default, dy"),
    ],
)
def test_scalings_that_may_change_anywhere_are_refused(
    rope_type: str, limits: dict[str, int], why: str
) -> None:
    """Keys already stored might have been rotated by other frequencies."""
    assert (rope_type in CHANGING_ROPE_TYPES) == (why == "not known")

    with pytest.raises(UnsupportedModelError, match=why) as caught:
        check_static(rope_type, **limits)

    assert rope_type in str(caught.value)
