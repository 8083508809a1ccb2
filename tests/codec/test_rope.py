"""`RotarySpec`: undoing gives back what was rotated, as the models themselves rotate it."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import UnsupportedModelError
from codec.rope import STATIC_ROPE_TYPES, RotarySpec, Style, check_static

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


@settings(deadline=None)  # the first example pays for the start of torch
@given(rotations())
def test_undo_after_redo_gives_the_keys_back(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor],
) -> None:
    """Whatever the tables are rounded to: the inverse is of the rounded matrix."""
    spec, keys, positions = case

    again = spec.unrotate(spec.rotate(keys, positions), positions)

    torch.testing.assert_close(again, keys, rtol=0, atol=1e-5)


@settings(deadline=None)  # the first example pays for the start of torch
@given(rotations())
def test_redo_after_undo_gives_the_keys_back(
    case: tuple[RotarySpec, torch.Tensor, torch.Tensor],
) -> None:
    """The order in which the codec does it."""
    spec, keys, positions = case

    again = spec.rotate(spec.unrotate(keys, positions), positions)

    torch.testing.assert_close(again, keys, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("rope_type", sorted(STATIC_ROPE_TYPES))
def test_static_scalings_are_served(rope_type: str) -> None:
    """Their frequencies are the same whatever the length."""
    check_static(rope_type)


@pytest.mark.parametrize(
    ("rope_type", "limits", "why"),
    [
        ("dynamic", {}, "length"),
        ("dynamic", {"max_positions": 4096, "original_positions": 4096}, "length"),
        ("longrope", {}, "length"),
        ("longrope", {"max_positions": 4097, "original_positions": 4096}, "past position 4096"),
        ("newrope", {}, "need one of default"),
    ],
)
def test_scalings_that_change_with_the_length_are_refused(
    rope_type: str, limits: dict[str, int], why: str
) -> None:
    """Keys already stored would have been rotated by other frequencies."""
    with pytest.raises(UnsupportedModelError, match=why) as caught:
        check_static(rope_type, **limits)

    assert rope_type in str(caught.value)


def test_longrope_is_served_where_it_cannot_switch() -> None:
    """The model ends where its first set of frequencies does."""
    check_static("longrope", max_positions=4096, original_positions=4096)


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
}


def model_rotation(
    family: str, dtype: torch.dtype, scaling: str = "default", **config: Any
) -> tuple[RotarySpec, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A transformers model's own rotation: its spec, keys, rotated keys, and positions."""
    pytest.importorskip("transformers")
    configuration = importlib.import_module(f"transformers.models.{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    prefix = {"llama": "Llama", "cohere": "Cohere", "glm": "Glm", "gpt_neox": "GPTNeoX"}[family]
    config = getattr(configuration, f"{prefix}Config")(
        hidden_size=128,
        num_attention_heads=4,
        **({"head_dim": 32} if family == "glm" else {}),
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": scaling, **SCALINGS[scaling]}
        | config,
    )
    module = getattr(modeling, f"{prefix}RotaryEmbedding")(config)
    positions = torch.tensor([0, 1, 2, 77, 300, 1023])
    keys_THD = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = module(keys_THD[None], positions[None])
    keys_BHTD = keys_THD.transpose(0, 1)[None]
    _, rotated_BHTD = modeling.apply_rotary_pos_emb(keys_BHTD, keys_BHTD, cos, sin)
    style: Style = "interleaved" if family in ("cohere", "glm") else "half"
    spec = RotarySpec.uniform(
        module.inv_freq,
        num_layers=1,
        attention_scaling=module.attention_scaling,
        style=style,
        table_dtype=str(dtype).removeprefix("torch."),
    )
    return spec, keys_THD[:, None], rotated_BHTD[0].transpose(0, 1)[:, None], positions


FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    *(("llama", scaling, {}) for scaling in SCALINGS),
    ("gpt_neox", "default", {"partial_rotary_factor": 0.25}),
    ("cohere", "default", {}),
    ("glm", "default", {"partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("family", "scaling", "config"), FAMILIES, ids=str)
def test_rotation_is_that_of_transformers(
    family: str, scaling: str, config: dict[str, Any]
) -> None:
    """Halves, neighbours, parts of a head, scaled frequencies and scaled tables."""
    spec, keys, rotated, positions = model_rotation(family, torch.float32, scaling, **config)

    torch.testing.assert_close(spec.rotate(keys, positions), rotated, rtol=0, atol=1e-6)
    torch.testing.assert_close(spec.unrotate(rotated, positions), keys, rtol=0, atol=2e-6)


def test_the_cases_above_differ() -> None:
    """Partial and scaled rotations would otherwise be compared with plain ones."""
    rotations = [model_rotation(f, torch.float32, s, **c) for f, s, c in FAMILIES]

    assert len({spec.digest() for spec, *_ in rotations}) == len(FAMILIES)
    assert {spec.rotary_dim for spec, *_ in rotations} == {8, 16, 32}
    assert {spec.attention_scaling_L[0] != 1 for spec, *_ in rotations} == {True, False}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("family", "scaling", "config"), FAMILIES, ids=str)
def test_undo_in_16_bits_loses_only_what_the_model_rounded(
    family: str, scaling: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Two products and a sum, each rounded by half a unit in the last place."""
    spec, keys, rotated, positions = model_rotation(family, dtype, scaling, **config)

    error = (spec.unrotate(rotated, positions) - keys.float()).norm() / keys.float().norm()

    assert error < EPSILON[spec.table_dtype] / 2


def test_tables_are_rounded_as_the_engine_rounds_them() -> None:
    """Undoing with exact tables what was done with rounded ones costs accuracy."""
    spec, keys, rotated, positions = model_rotation("llama", torch.bfloat16)
    exact = RotarySpec(inv_freq_LF=spec.inv_freq_LF, attention_scaling_L=spec.attention_scaling_L)

    error = (spec.unrotate(rotated, positions) - keys.float()).norm()
    worse = (exact.unrotate(rotated, positions) - keys.float()).norm()

    assert error < 0.95 * worse
