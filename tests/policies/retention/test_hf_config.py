"""Reading configs: released models come out right, the unproven is refused by its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codec.errors import RetentionError
from policies.retention.hf_config import LAYER_RULES, ModelProgram, read_config
from policies.retention.hf_sizes import RECURRENT_BYTES
from policies.retention.hf_tables import CHUNKED, FAMILIES, FULL, LINEAR, SHAPING, SLIDING
from policies.retention.plan import Plan, compile_program

DATA = Path(__file__).parents[2] / "data" / "retention"
MODELS: dict[str, dict[str, Any]] = {
    entry["name"]: entry["config"]
    for entry in json.loads((DATA / "model_configs.json").read_text())
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
HYBRID_LAYERS = [SLIDING, FULL, SLIDING, FULL]


def config_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A small config of a type."""
    return {**LLAMA, "model_type": kind, **fields}


def refusal(config: dict[str, Any], **options: Any) -> RetentionError:
    """The error by which a config is refused."""
    with pytest.raises(RetentionError) as caught:
        read_config(config, **options)
    return caught.value


def model(name: str, **options: Any) -> tuple[ModelProgram, Plan]:
    """A released model, and its plan."""
    found = read_config(MODELS[name], **options)
    return found, compile_program(found.program)


def test_smollm2_is_full_attention() -> None:
    """30 layers, 3 kv heads of 64: nothing dies."""
    found, plan = model("SmolLM2-135M-Instruct")

    assert found.evidence == "uniform-full"
    assert plan.classes[0].width_bytes == 768
    assert plan.held_bytes(8192) == plan.all_full_bytes(8192) == 8192 * 768 * 30


def test_gemma_3_270m_keeps_three_layers_whole() -> None:
    """15 of 18 layers have a window of 512; every sixth is full."""
    found, plan = model("Gemma-3-270m")
    full, swa = plan.classes if plan.classes[0].name == "full" else plan.classes[::-1]

    assert [n for n, kind in enumerate(found.layer_types) if kind == FULL] == [5, 11, 17]
    assert (full.layers, len(swa.layers)) == ((5, 11, 17), 15)
    assert (full.width_bytes, swa.address.cells) == (1024, 33)
    assert plan.held_bytes(32_768) == 1024 * (3 * 32_768 + 15 * 33 * 16)


@pytest.mark.parametrize(
    ("name", "layers", "per_token"),
    [
        ("Llama-3.1-8B", {FULL: 32}, 131_072),
        ("Qwen2.5-7B", {FULL: 28}, 57_344),
        ("Mistral-7B-v0.1", {SLIDING: 32}, 131_072),
        ("gpt-oss-20b", {SLIDING: 12, FULL: 12}, 49_152),
        ("Gemma-3-12B", {SLIDING: 40, FULL: 8}, 393_216),
        ("Llama-4-Scout-17B-16E", {CHUNKED: 36, FULL: 12}, 196_608),
        ("DeepSeek-V3", {FULL: 61}, 70_272),
        ("Qwen3-Next-80B-A3B", {LINEAR: 36, FULL: 12}, 24_576),
        ("Jamba-v0.1", {LINEAR: 28, FULL: 4}, 16_384),
    ],
)
def test_released_models_have_their_known_bytes_per_token(
    name: str, layers: dict[str, int], per_token: int
) -> None:
    """Layer types, and keys and values of one token over all layers, in 16 bits."""
    found, plan = model(name, page_tokens=1)

    assert {kind: found.layer_types.count(kind) for kind in layers} == layers
    assert plan.all_full_bytes(2) - plan.all_full_bytes(1) == per_token


@pytest.mark.parametrize(
    ("config", "evidence"),
    [
        (LLAMA, "uniform-full"),
        (config_of("mistral", sliding_window=32), "uniform-window"),
        (config_of("mistral", sliding_window=None), "uniform-full"),
        (config_of("gpt_oss", sliding_window=32, layer_types=HYBRID_LAYERS), "explicit"),
        (config_of("gpt_oss", sliding_window=32), "pattern"),
    ],
)
def test_evidence_says_where_the_layers_come_from(config: dict[str, Any], evidence: str) -> None:
    """A list in the config, or the type's own rule."""
    assert read_config(config).evidence == evidence


def test_nested_text_configs_are_read() -> None:
    """With the type they name, or the wrapper's own."""
    text = {**config_of("gemma3_text", sliding_window=32, head_dim=16)}
    named = {"model_type": "gemma3", "text_config": text, "torch_dtype": "float16"}
    bare = {**named, "text_config": {k: v for k, v in text.items() if k != "model_type"}}

    assert read_config(named).dtype == "float16"
    assert read_config(named).program == read_config(bare).program


def test_architectures_alone_name_a_type() -> None:
    """As in configs that have no ``model_type``."""
    config = {k: v for k, v in LLAMA.items() if k != "model_type"}

    assert read_config({**config, "architectures": ["LlamaForCausalLM"]}).model_type == "llama"


@pytest.mark.parametrize(
    ("config", "asked", "wanted"),
    [
        (LLAMA, None, "bfloat16"),
        ({**LLAMA, "torch_dtype": "float16"}, None, "float16"),
        ({**LLAMA, "dtype": "float32"}, None, "float32"),
        ({**LLAMA, "dtype": "float32"}, "int8", "int8"),
    ],
)
def test_the_cache_type_is_asked_for_or_the_config_s(
    config: dict[str, Any], asked: str | None, wanted: str
) -> None:
    """And 16 bits where nobody says."""
    assert read_config(config, dtype=asked).dtype == wanted


def test_shared_layers_store_nothing_and_read() -> None:
    """The last layers of a Gemma 3n read the last storing layer of their type."""
    config = config_of(
        "gemma3n_text", num_hidden_layers=10, head_dim=16, num_kv_shared_layers=5, sliding_window=8
    )
    found = read_config(config)
    full, swa = found.program.attention

    assert found.shared_layers == frozenset(range(5, 10))
    assert (full.layers, [r.layer for r in full.readers]) == ((4,), [9])
    assert (swa.layers, [r.layer for r in swa.readers]) == ((0, 1, 2, 3), [5, 6, 7, 8])
    assert found.program.num_layers == 10


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (config_of("mystery"), "unproven-layers", "mystery"),
    ({"num_hidden_layers": 2}, "unproven-layers", "model_type"),
    (config_of("llama", architectures=["MysteryForCausalLM"]), "unproven-layers", "Mystery"),
    (config_of("llama", architectures=["LlamaForCausalLMEagle3"]), "unproven-layers", "Eagle3"),
    (config_of("llama", architectures="LlamaForCausalLM"), "bad-field", "architectures"),
    (config_of("llama", text_config=LLAMA), "unproven-layers", "text_config"),
    (config_of("paligemma", text_config=LLAMA), "unproven-layers", "paligemma"),
    (config_of("gemma3", text_config=[]), "unproven-layers", "text_config"),
    (config_of("llama", sliding_window=64), "unproven-layers", "sliding_window"),
    (config_of("llama", layer_types=[FULL] * 4), "unproven-layers", "layer_types"),
    (config_of("llama", attention_chunk_size=8), "unproven-layers", "attention_chunk_size"),
    (config_of("llama", is_encoder_decoder=True), "unproven-layers", "is_encoder_decoder"),
    (config_of("deepseek_v3", index_topk=64), "unproven-layers", "index_topk"),
    (
        config_of("mistral", sliding_window=64, use_sliding_window=False),
        "unproven-layers",
        "use_sliding_window",
    ),
    (
        config_of("gemma3_text", sliding_window=64, use_bidirectional_attention=True),
        "unproven-layers",
        "use_bidirectional_attention",
    ),
    (
        config_of("gemma3_text", sliding_window=64, _sliding_window_pattern=4),
        "unproven-layers",
        "_sliding_window_pattern",
    ),
    (config_of("cohere2", sliding_window=64, layer_switch=3), "unproven-layers", "layer_switch"),
    (
        config_of("cohere2", sliding_window=64, order_of_interleaved_layers="global_first"),
        "unproven-layers",
        "order_of_interleaved_layers",
    ),
    (config_of("cohere2", sliding_window=64, head_dim=8), "bad-field", "head_dim"),
    (config_of("gpt_oss", layer_types=HYBRID_LAYERS), "no-window", "sliding_window"),
    (config_of("gpt_oss", sliding_window=0), "window-range", "sliding_window"),
    (config_of("gpt_oss", sliding_window=True), "window-range", "sliding_window"),
    (config_of("gpt_oss", sliding_window=2**63), "window-range", "sliding_window"),
    (config_of("gpt_oss", sliding_window="64"), "window-range", "sliding_window"),
    (config_of("gpt_oss", sliding_window=64, layer_types=[FULL]), "bad-layers", "layer_types"),
    (config_of("gpt_oss", sliding_window=64, layer_types=FULL), "bad-layers", "layer_types"),
    (
        config_of("gpt_oss", sliding_window=64, layer_types=[FULL, "mamba", FULL, FULL]),
        "unknown-layer-type",
        "layer_types[1]",
    ),
    (
        config_of("gpt_oss", sliding_window=64, layer_types=[FULL, 3, FULL, FULL]),
        "unknown-layer-type",
        "layer_types[1]",
    ),
    (
        config_of("qwen2", layer_types=HYBRID_LAYERS, use_sliding_window=False),
        "no-window",
        "use_sliding_window",
    ),
    (config_of("qwen2", use_sliding_window="yes"), "bad-field", "use_sliding_window"),
    (config_of("qwen2", use_sliding_window=True, max_window_layers=-1), "bad-field", "max_window"),
    (config_of("llama4_text", no_rope_layers=[1, 0]), "bad-field", "no_rope_layers"),
    (config_of("llama4_text", no_rope_layers=[1, 0, 2, 1]), "bad-field", "no_rope_layers"),
    (config_of("jamba", attn_layer_offset=8), "bad-field", "attn_layer_offset"),
    (config_of("jamba", layers_block_type=["attention"] * 4), "bad-layers", "layers_block_type"),
    (config_of("gemma3n_text", num_kv_shared_layers=4), "bad-field", "num_kv_shared_layers"),
    (config_of("gemma3n_text", num_kv_shared_layers=-1), "bad-field", "num_kv_shared_layers"),
    (
        config_of("gemma3n_text", num_hidden_layers=5, num_kv_shared_layers=1),
        "bad-field",
        "num_kv_shared_layers",
    ),
    (config_of("llama", num_hidden_layers=0), "bad-field", "num_hidden_layers"),
    (config_of("llama", num_hidden_layers=2.0), "bad-field", "num_hidden_layers"),
    (config_of("llama", num_key_value_heads=0), "no-head-geometry", "num_key_value_heads"),
    (config_of("llama", hidden_size=66), "no-head-geometry", "hidden_size"),
    (config_of("llama", head_dim=-4), "no-head-geometry", "head_dim"),
    (config_of("llama", hidden_size=None), "no-head-geometry", "hidden_size"),
    (config_of("deepseek_v3"), "bad-field", "kv_lora_rank"),
    (config_of("mamba2", num_heads=3), "bad-field", "num_heads"),
    (config_of("falcon_h1", mamba_d_ssm=30, mamba_n_heads=4), "bad-field", "mamba_n_heads"),
    (config_of("falcon_h1", mamba_d_head=3), "bad-field", "mamba_d_head"),
    (config_of("mamba", state_size="16"), "bad-field", "state_size"),
    (config_of("llama", torch_dtype="int3"), "unknown-dtype", "int3"),
    (config_of("llama", torch_dtype=2), "unknown-dtype", "2"),
]


@pytest.mark.parametrize(
    ("config", "rule", "field"), REFUSED, ids=[f"{n}-{case[2]}" for n, case in enumerate(REFUSED)]
)
def test_the_unproven_is_refused_by_its_field(
    config: dict[str, Any], rule: str, field: str
) -> None:
    """The rule, and the name of the field in the message."""
    error = refusal(config)

    assert error.rule == rule
    assert field in error.term


@pytest.mark.parametrize("value", [None, [], {}])
def test_fields_that_are_unset_do_not_matter(value: object) -> None:
    """Many released configs spell out what they do not use."""
    strangers = dict.fromkeys(SHAPING, value)

    assert read_config({**strangers, **LLAMA}).program == read_config(LLAMA).program


def test_switched_off_fields_do_not_matter() -> None:
    """False and zero say no, where nothing else hangs on it."""
    off = {"add_cross_attention": False, "num_kv_shared_layers": 0, "use_sliding_window": False}

    assert read_config({**LLAMA, **off}).program == read_config(LLAMA).program


def test_page_size_and_type_are_checked() -> None:
    """They come from the caller."""
    assert refusal(LLAMA, page_tokens=0).rule == "bad-page"
    assert refusal(LLAMA, dtype="float64").rule == "unknown-dtype"


def test_every_rule_of_the_table_exists() -> None:
    """And every rule is used."""
    assert {family.layers for family in FAMILIES.values()} == set(LAYER_RULES)
    assert {f.recurrent for f in FAMILIES.values() if f.recurrent} == set(RECURRENT_BYTES)
    assert all(family.shaping <= SHAPING for family in FAMILIES.values())
    assert len({family.prefix for family in FAMILIES.values()}) == len(FAMILIES)
