"""`RotarySpec` against Transformers' own rotary modules, every scaling and every order.

The letters of a bound: ``u`` half a unit in the last place of the model's data type, ``a``
the larger element of a pair, ``s`` the scaling of its tables, so that
``|cos| + |sin| <= sqrt(2) s``.  A model that computes in its own data type rounds two
products and their sum, and so is off by at most ``2 u sqrt(2) s a``; undoing that stretches
it by at most ``sqrt(2) / s``.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from codec.rope import STATIC_ROPE_TYPES, RotarySpec, Style, check_static

pytest.importorskip("transformers")

HEAD_DIM = 32
HALF_UNIT = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SECOND_ORDER = 1.02
"""Products of roundings, and the rounding of the tables, which may lengthen them a little."""

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + i / 16 for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + i for i in range(HEAD_DIM // 2)],
        "original_max_position_embeddings": 256,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.5}


@dataclass(frozen=True)
class Case:
    """One family of models with one scaling."""

    family: str
    prefix: str
    rope_type: str = "default"
    rope: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    style: Style = "half"
    layer_type: str | None = None
    cuts_heads: bool = False
    """Whether attention, not the function that turns, leaves part of a head out."""

    in_32_bits: bool = False
    """Whether the model turns in 32 bits, whatever its own data type."""

    table_dtype: str = ""
    """Data type of its tables, where that is not its own."""

    def __str__(self) -> str:
        return "-".join(filter(None, [self.family, self.rope_type, self.layer_type, *self.rope]))


INTERLEAVED: dict[str, Any] = {"style": "interleaved"}
CASES = [
    *(Case("llama", "Llama", rope_type) for rope_type in SCALINGS),
    Case("llama", "Llama", "yarn", MSCALE),
    Case("llama", "Llama", "yarn", {"attention_factor": 0.75}),
    Case("gpt_neox", "GPTNeoX", rope={"partial_rotary_factor": 0.25}),
    Case("phi", "Phi", "dynamic", {"partial_rotary_factor": 0.5}, cuts_heads=True),
    Case(
        *("phi3", "Phi3", "longrope", {"partial_rotary_factor": 0.5}),
        config={"original_max_position_embeddings": 256},
    ),
    Case("gpt_oss", "GptOss", "yarn", {"truncate": False}),
    Case("glm", "Glm", rope={"partial_rotary_factor": 0.5, "rope_theta": 3e4}, **INTERLEAVED),
    Case("cohere", "Cohere", "linear", in_32_bits=True, **INTERLEAVED),
    Case("ernie4_5", "Ernie4_5", in_32_bits=True, table_dtype="float32", **INTERLEAVED),
    Case("olmo2", "Olmo2", in_32_bits=True, table_dtype="float32"),
    Case("gptj", "GPTJ", cuts_heads=True, config={"rotary_dim": 16}, **INTERLEAVED),
    Case("gemma3", "Gemma3", rope={"rope_theta": 3e4}, layer_type="sliding_attention"),
    Case("gemma3", "Gemma3", "linear", {"rope_theta": 1e6}, layer_type="full_attention"),
]


def make_module(case: Case) -> Any:
    """The family's rotary module."""
    configuration = importlib.import_module(f"transformers.models.{case.family}")
    modeling = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    rope = {"rope_theta": 1e4, "rope_type": case.rope_type, **SCALINGS[case.rope_type]} | case.rope
    if case.family == "phi3":  # half of a head is turned
        rope |= {name: rope[name][: HEAD_DIM // 4] for name in ("short_factor", "long_factor")}
    common: dict[str, Any] = {
        "hidden_size": 4 * HEAD_DIM,
        "num_attention_heads": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 1024,
        "rope_parameters": rope,
    }
    if case.layer_type:
        other = {"rope_theta": 1e3, "rope_type": "default"}
        kinds = ["full_attention", "sliding_attention"]
        common |= {
            "num_hidden_layers": 2,
            "layer_types": kinds,
            "rope_parameters": {kind: rope if kind == case.layer_type else other for kind in kinds},
        }
    if case.family == "gptj":
        common |= {"n_embd": 4 * HEAD_DIM, "n_head": 4, "rope_parameters": None}
    name = f"{case.prefix}TextConfig" if case.family == "gemma3" else f"{case.prefix}Config"
    config = getattr(configuration, name)(**common | case.config)
    return getattr(modeling, f"{case.prefix}RotaryEmbedding")(config)


def bound_of(case: Case) -> int | None:
    """Longest sequence that the module's first frequencies hold for."""
    return check_static(
        case.rope_type,
        max_positions=1024,
        original_positions=SCALINGS[case.rope_type].get("original_max_position_embeddings"),
    )


def spec_of(case: Case, module: Any, dtype: torch.dtype) -> RotarySpec:
    """The module's frequencies as a spec of one layer."""
    if case.family == "gptj":  # has tables only
        inv_freq_F = 1.0 / (10_000 ** (torch.arange(0, 16, 2) / 16))
        return RotarySpec.uniform(
            inv_freq_F, num_layers=1, style=case.style, table_dtype=str(dtype)[6:]
        )
    kind = f"{case.layer_type}_" if case.layer_type else ""
    return RotarySpec.uniform(
        getattr(module, f"{kind}inv_freq"),
        num_layers=1,
        attention_scaling=getattr(module, f"{kind}attention_scaling"),
        style=case.style,
        table_dtype=case.table_dtype or str(dtype).removeprefix("torch."),
        max_positions=bound_of(case),
    )


def turned_by_model(
    case: Case, module: Any, keys_THD: torch.Tensor, positions_T: torch.Tensor
) -> torch.Tensor:
    """Keys as the family's attention turns them."""
    modeling = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    kinds = (case.layer_type,) if case.layer_type else ()
    cos, sin = module(keys_THD[None], positions_T[None], *kinds)
    if case.family == "gptj":  # which gives sines first, and takes heads last but one
        rotated = modeling.apply_rotary_pos_emb(keys_THD[None, ..., :16], cos, sin)[0]
        return torch.cat([rotated, keys_THD[..., 16:]], dim=-1)
    width = cos.shape[-1] if case.cuts_heads else HEAD_DIM
    keys_BHTD = keys_THD.transpose(0, 1)[None, ..., :width]
    _, rotated_BHTD = modeling.apply_rotary_pos_emb(keys_BHTD, keys_BHTD, cos, sin)
    rotated_THD: torch.Tensor = rotated_BHTD[0].transpose(0, 1)
    return torch.cat([rotated_THD, keys_THD[..., width:]], dim=-1)


def rotation(
    case: Case, dtype: torch.dtype
) -> tuple[RotarySpec, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A model's own rotation: its spec, keys, what it made of them, and their positions."""
    module = make_module(case)
    generator = torch.Generator().manual_seed(1)
    last = (bound_of(case) or 1024) - 1
    positions = torch.cat([torch.tensor([0, 1, last]), torch.randint(last, (61,))])
    keys = torch.randn(len(positions), 2, HEAD_DIM, generator=generator).to(dtype)
    rotated = turned_by_model(case, module, keys, positions)
    return spec_of(case, module, dtype), keys[:, None], rotated[:, None], positions


def largest_of_pairs(spec: RotarySpec, keys_TLHD: torch.Tensor) -> torch.Tensor:
    """Each element's larger one of its pair; of dimensions past the pairs, nothing."""
    width, order = spec.rotary_dim, torch.arange(spec.rotary_dim)
    other = (order + width // 2) % width if spec.style == "half" else order ^ 1
    sizes = keys_TLHD.float().abs()
    largest = torch.zeros_like(sizes)
    largest[..., :width] = torch.maximum(sizes[..., :width], sizes[..., other])
    return largest


def test_the_cases_are_what_they_say() -> None:
    """Partial, scaled or interleaved rotations would otherwise be compared with plain ones."""
    specs = [rotation(case, torch.bfloat16)[0] for case in CASES]

    assert len({spec.digest() for spec in specs}) == len(CASES)
    assert {case.rope_type for case in CASES} == STATIC_ROPE_TYPES | {"dynamic", "longrope"}
    assert {spec.rotary_dim for spec in specs} == {8, 16, 32}
    scalings = {
        str(case): spec.attention_scaling_L[0] for case, spec in zip(CASES, specs, strict=True)
    }
    assert {name for name, scaling in scalings.items() if scaling != 1} == {
        name for name in scalings if "yarn" in name or "longrope" in name
    }
    assert scalings["llama-yarn-attention_factor"] == 0.75
    assert 1 < scalings["llama-yarn-mscale-mscale_all_dim"] < scalings["llama-yarn"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_32_bits_keys_are_turned_as_by_the_model(case: Case) -> None:
    """To the last bit: the same products, sums and tables."""
    spec, keys, rotated, positions = rotation(case, torch.float32)

    assert torch.equal(spec.rotate(keys, positions), rotated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_16_bits_only_the_models_own_rounding_differs(case: Case, dtype: torch.dtype) -> None:
    """To the last bit where it turns in 32 bits; else by its products and their sum."""
    spec, keys, rotated, positions = rotation(case, dtype)

    ours = spec.rotate(keys, positions)

    if case.in_32_bits:
        assert torch.equal(ours.to(dtype), rotated)
    else:
        largest = spec.attention_scaling_L[0] * largest_of_pairs(spec, keys)
        allowed = SECOND_ORDER * 2 * math.sqrt(2) * HALF_UNIT[str(dtype)[6:]] * largest
        assert ((ours - rotated.float()).abs() <= allowed).all()
        assert not torch.equal(ours.to(dtype), rotated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_undoing_gives_what_the_model_had(case: Case, dtype: torch.dtype) -> None:
    """Up to its roundings, two units of its data type, and the 7 of 32 bits that are ours."""
    spec, keys, rotated, positions = rotation(case, dtype)

    error = (spec.unrotate(rotated, positions) - keys.float()).abs()

    unit, of_32_bits = 2 * HALF_UNIT[str(dtype)[6:]], 2.0**-23
    units = SECOND_ORDER * (1 if case.in_32_bits else 2) * unit + 7 * of_32_bits
    assert (error <= units * largest_of_pairs(spec, keys)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_redoing_what_was_undone_gives_the_models_bits(case: Case, dtype: torch.dtype) -> None:
    """But for elements so much smaller than their pair's other that 32 bits blur them."""
    spec, _, rotated, positions = rotation(case, dtype)

    again = spec.rotate(spec.unrotate(rotated, positions), positions).to(dtype)

    is_small = rotated.float().abs() < 2.0**-10 * largest_of_pairs(spec, rotated)
    assert torch.equal(again[~is_small], rotated[~is_small])
    assert is_small.float().mean() < 0.01


def test_tables_are_rounded_as_the_model_rounds_them() -> None:
    """Undoing with exact tables what was done with rounded ones costs accuracy."""
    spec, keys, rotated, positions = rotation(CASES[0], torch.bfloat16)
    exact = RotarySpec(inv_freq_LF=spec.inv_freq_LF, attention_scaling_L=spec.attention_scaling_L)

    error = (spec.unrotate(rotated, positions) - keys.float()).norm()
    worse = (exact.unrotate(rotated, positions) - keys.float()).norm()

    assert error < 0.95 * worse


CHANGING = [case for case in CASES if bound_of(case)]


@pytest.mark.parametrize("case", CHANGING, ids=str)
def test_frequencies_change_past_the_bound_and_not_before(case: Case) -> None:
    """For every position of the longer run: which is why the whole sequence is refused."""
    module, bound = make_module(case), bound_of(case)
    assert bound is not None
    spec = spec_of(case, module, torch.float32)
    keys = torch.randn(bound + 1, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(bound + 1)

    up_to_it = turned_by_model(case, module, keys[:bound], positions[:bound])
    past_it = turned_by_model(case, module, keys, positions)

    assert torch.equal(spec.rotate(keys[:bound, None], positions[:bound])[:, 0], up_to_it)
    assert not torch.allclose(past_it[1:bound], up_to_it[1:], atol=1e-3)


@pytest.mark.parametrize("case", CHANGING, ids=str)
def test_a_longer_run_is_forgotten_by_a_shorter_one(case: Case) -> None:
    """Hence an engine that never runs past the bound finds the first frequencies each time."""
    module, bound = make_module(case), bound_of(case)
    assert bound is not None
    spec = spec_of(case, module, torch.float32)
    keys = torch.randn(bound + 9, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(bound + 9)

    turned_by_model(case, module, keys, positions)

    # Dynamic scaling keeps what it had grown to for a run that ends exactly at its bound.
    for num_tokens in (bound - 1, bound):
        turned = turned_by_model(case, module, keys[:num_tokens], positions[:num_tokens])
        expected = spec.rotate(keys[:num_tokens, None], positions[:num_tokens])
        assert torch.equal(turned, expected[:, 0])
