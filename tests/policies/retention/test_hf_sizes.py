"""Sizes: heads, latents and recurrent state, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codec.errors import RetentionError
from policies.retention.hf_fields import Fields
from policies.retention.hf_sizes import RECURRENT_BYTES, head_dim, kv_shape
from policies.retention.hf_tables import FAMILIES
from policies.retention.program import KvShape

HEADS = {"hidden_size": 64, "num_attention_heads": 8}


def fields(kind: str, **config: object) -> Fields:
    """A config of a type in the table."""
    return Fields(config, FAMILIES[kind])


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (HEADS, (8, 8)),
        ({**HEADS, "num_key_value_heads": 2}, (2, 8)),
        ({**HEADS, "num_key_value_heads": None}, (8, 8)),
        ({**HEADS, "head_dim": 16}, (8, 16)),
        ({**HEADS, "head_dim": None}, (8, 8)),
        ({"num_key_value_heads": 2, "head_dim": 16}, (2, 16)),
    ],
)
def test_heads_and_their_size(config: dict[str, object], wanted: tuple[int, int]) -> None:
    """A field of its own, or the hidden size over the heads."""
    shape = kv_shape(fields("llama", **config), "bfloat16")

    assert (shape.num_kv_heads, shape.key_dim) == wanted
    assert shape.key_dim == shape.value_dim


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_attention_heads": 8}, "hidden_size"),
        ({"hidden_size": 64}, "num_attention_heads"),
        ({"hidden_size": 65, "num_attention_heads": 8}, "hidden_size=65"),
        ({**HEADS, "head_dim": 0}, "head_dim"),
        ({**HEADS, "num_key_value_heads": True}, "num_key_value_heads"),
    ],
)
def test_unknown_heads_are_refused(config: dict[str, object], named: str) -> None:
    """Nothing is rounded or guessed."""
    with pytest.raises(RetentionError) as caught:
        kv_shape(fields("llama", **config), "bfloat16")

    assert caught.value.rule == "no-head-geometry"
    assert named in caught.value.term


def test_types_that_ignore_a_head_size_must_agree_with_it() -> None:
    """Otherwise the model would not do what its config says."""
    assert head_dim(fields("cohere2", **HEADS, head_dim=8)) == 8
    with pytest.raises(RetentionError, match="head_dim=16"):
        head_dim(fields("cohere2", **HEADS, head_dim=16))


def test_a_latent_has_two_widths() -> None:
    """The latent in place of keys, the rotary part in place of values, one head."""
    shape = kv_shape(fields("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64), "bfloat16")

    assert shape == KvShape(num_kv_heads=1, key_dim=512, value_dim=64, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kind", "config", "elements", "state"),
    [
        ("mamba", {"hidden_size": 8, "state_size": 4}, 16 * 4, 16 * 4),
        ("mamba", {"hidden_size": 8, "expand": 3, "conv_kernel": 2}, 24 * 2, 24 * 16),
        (
            "mamba2",
            {"hidden_size": 8, "num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 2},
            (16 + 2 * 2 * 4) * 4,
            16 * 4,
        ),
        ("jamba", {"hidden_size": 8, "mamba_d_conv": 3}, 16 * 3, 16 * 16),
        (
            "falcon_h1",
            {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8},
            (32 + 2 * 8) * 4,
            32 * 8,
        ),
        (
            "falcon_h1",
            {"mamba_d_ssm": None, "hidden_size": 8, "mamba_n_heads": 4, "mamba_d_state": 8},
            (16 + 2 * 8) * 4,
            16 * 8,
        ),
        (
            "qwen3_next",
            {
                "linear_key_head_dim": 4,
                "linear_value_head_dim": 2,
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 6,
            },
            (2 * 12 + 12) * 4,
            6 * 4 * 2,
        ),
    ],
)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_recurrent_state(
    kind: str, config: dict[str, object], elements: int, state: int, element_bytes: int
) -> None:
    """A convolution in the cache's type, a state matrix in 32 bits."""
    found = RECURRENT_BYTES[FAMILIES[kind].recurrent](fields(kind, **config), element_bytes)

    assert found == elements * element_bytes + state * 4


def test_heads_of_a_state_must_fill_it() -> None:
    """A contradiction is refused by the field."""
    with pytest.raises(RetentionError, match="num_heads"):
        RECURRENT_BYTES["mamba2"](fields("mamba2", hidden_size=8, num_heads=3, head_dim=4), 2)
    with pytest.raises(RetentionError, match="mamba_n_heads"):
        RECURRENT_BYTES["falcon_h1"](fields("falcon_h1", mamba_d_ssm=30, mamba_n_heads=4), 2)


def test_a_row_decides_by_which_rule() -> None:
    """The same fields, as heads and as a latent."""
    config = {**HEADS, "kv_lora_rank": 4, "qk_rope_head_dim": 2}
    latent = Fields(config, replace(FAMILIES["llama"], width="latent"))

    assert kv_shape(fields("llama", **config), "int8").bytes_per_token_layer == 128
    assert kv_shape(latent, "int8").bytes_per_token_layer == 6
