"""The table of model types against the caches that Transformers builds itself.

For every type, and for every variant of its fields, a tiny random model is built and run.
Layer types, windows, shared layers, kept tokens and bytes per layer must be ours.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from policies.retention.hf_config import ModelProgram, read_config
from policies.retention.hf_tables import CHUNKED, FAMILIES, FULL, HYBRID, LINEAR, SLIDING
from policies.retention.plan import PlannedClass, compile_program

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 20
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 5,
}
ABSENT: Any = ...
NO_HEADS = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "intermediate_size"), ABSENT
)
LISTED = [FULL, SLIDING, SLIDING, FULL, SLIDING, FULL]

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"head_dim": 4}, {"num_key_value_heads": None}, {"num_key_value_heads": ABSENT}],
    "mistral": [{"sliding_window": 8}, {"sliding_window": None}, {}, {"head_dim": 4}],
    "mixtral": [{"sliding_window": 8, "num_local_experts": 2}, {"num_local_experts": 2}],
    "phi3": [{"sliding_window": 8, "pad_token_id": 0}, {"pad_token_id": 0}],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": LISTED},
        {},
    ],
    "qwen3": [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4},
        {"head_dim": 8},
        {},
    ],
    "qwen3_moe": [
        {**MOE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {**MOE, "sliding_window": 8, "head_dim": 4},
    ],
    "gemma2": [
        {"sliding_window": 8, "head_dim": 8},
        {"sliding_window": 8},
        {"sliding_window": 8, "layer_types": LISTED},
    ],
    "gemma3_text": [
        {"sliding_window": 8, "head_dim": 8},
        {"sliding_window": 8, "sliding_window_pattern": 3},
        {"sliding_window": 8, "layer_types": LISTED},
        {"num_attention_heads": ABSENT, "num_key_value_heads": ABSENT},
    ],
    "gemma3n_text": [
        {
            "sliding_window": 8,
            "head_dim": 8,
            "num_kv_shared_layers": shared,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": 64,
            "laurel_rank": 4,
        }
        for shared in (0, 1)
    ],
    "gpt_oss": [
        {"sliding_window": 8, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        {
            "sliding_window": 8,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "layer_types": LISTED,
        },
    ],
    "cohere2": [
        {"sliding_window": 8},
        {"sliding_window": 8, "sliding_window_pattern": 3},
        {"sliding_window": 8, "layer_types": LISTED, "num_key_value_heads": None},
    ],
    "llama4_text": [
        {"attention_chunk_size": 8, "head_dim": 8, **fields}
        for fields in (
            {"num_local_experts": 2, "intermediate_size_mlp": 64},
            {"num_local_experts": 2, "no_rope_layers": [0, 1, 1, 0, 1, 0]},
            {"num_local_experts": 2, "no_rope_layers": []},
            {"num_local_experts": 2, "no_rope_layer_interval": 2},
            {"num_local_experts": 2, "attention_chunk_size": None},
            {"num_local_experts": 2, "layer_types": [CHUNKED, FULL] * 3},
        )
    ],
    "deepseek_v2": [MLA],
    "deepseek_v3": [MLA],
    "mamba": [NO_HEADS, {**NO_HEADS, "state_size": 8, "conv_kernel": 3, "expand": 3}],
    "mamba2": [
        {**NO_HEADS, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
    ],
    "jamba": [
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
        },
        {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_d_conv": 3},
    ],
    "qwen3_next": [
        {
            **MOE,
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            **fields,
        }
        for fields in (
            {},
            {"full_attention_interval": 3},
            {"layer_types": [LINEAR, FULL] * 3, "linear_conv_kernel_dim": 3},
        )
    ],
    "falcon_h1": [
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
        {
            "mamba_d_ssm": None,
            "mamba_n_heads": 4,
            "mamba_d_head": "auto",
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
        },
    ],
}
CASES = [(kind, fields) for kind, variants in VARIANTS.items() for fields in variants]
IDS = [f"{kind}-{index}" for kind, found in VARIANTS.items() for index in range(len(found))]
NAMES = {
    "DynamicLayer": FULL,
    "DynamicSlidingWindowLayer": SLIDING,
    "LinearAttentionLayer": LINEAR,
    "LinearAttentionAndFullAttentionLayer": HYBRID,
}


def raw_config(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as a ``config.json`` has them: what is absent is absent."""
    merged = {**BASE, **fields}
    return {"model_type": kind, **{k: v for k, v in merged.items() if v is not ABSENT}}


def run_cache(raw: dict[str, Any]) -> Any:
    """The cache of a tiny random model after one prefill."""
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(raw["model_type"], **fields)
    built = transformers.DynamicCache(config=config)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        output = model(torch.arange(TOKENS)[None], use_cache=True)
    names = ("cache", "past_key_values", "cache_params")
    filled = next(output[name] for name in names if name in output)
    assert [type(layer) for layer in built.layers] == [type(layer) for layer in filled.layers]
    return filled


def owners(model: ModelProgram, layer: int) -> list[PlannedClass]:
    """The classes in which a layer stores something."""
    plan = compile_program(model.program)
    return [found for found in plan.classes if layer in found.layers]


def stored_bytes(layer: Any) -> tuple[int, int]:
    """Bytes of one token's keys and values, and of the fixed-size state, of a cache layer."""
    per_token = fixed = 0
    keys = getattr(layer, "keys", None)
    if keys is not None:
        pairs = (layer.keys, layer.values)
        per_token = sum(t.shape[1] * t.shape[3] * t.element_size() for t in pairs)
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name, None) or {}
        fixed += sum(t.numel() * t.element_size() for t in states.values() if t is not None)
    return per_token, fixed


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=IDS)
def test_table_agrees_with_the_cache(kind: str, fields: dict[str, Any]) -> None:
    """Layer by layer, from the fields alone."""
    raw = raw_config(kind, fields)
    cache = run_cache(raw)
    model = read_config(raw, page_tokens=1, dtype="float32")

    assert len(cache.layers) == len(model.layer_types) == raw["num_hidden_layers"]
    for index, layer in enumerate(cache.layers):
        if type(layer).__name__ == "DummyLayer":
            assert index in model.shared_layers
            assert owners(model, index) == []
            continue
        kept = model.layer_types[index]
        assert NAMES[type(layer).__name__] == (SLIDING if kept == CHUNKED else kept)
        check_layer(layer, kept, owners(model, index))


def check_layer(layer: Any, kind: str, found: list[PlannedClass]) -> None:
    """Bytes, and for windows the tokens that are kept."""
    per_token, fixed = stored_bytes(layer)
    assert sum(c.width_bytes for c in found if c.kind == "attention") == per_token
    assert sum(c.width_bytes for c in found if c.kind == "recurrent") == fixed
    if kind == FULL:
        assert found[0].live_tokens(TOKENS) == layer.keys.shape[2] == TOKENS
    elif kind == SLIDING:
        window = layer.sliding_window
        assert found[0].live_tokens(TOKENS) == layer.keys.shape[2] == min(TOKENS, window - 1)
    elif kind == CHUNKED:  # the cache keeps a window; only the last chunk is ever read
        assert found[0].live_tokens(TOKENS) == TOKENS % layer.sliding_window


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=IDS)
def test_saved_configs_read_the_same(kind: str, fields: dict[str, Any]) -> None:
    """What Transformers writes, with every default spelled out, means what it was read from."""
    raw = raw_config(kind, fields)
    values = {name: value for name, value in raw.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **values)
    saved = json.loads(config.to_json_string(use_diff=False))

    read = read_config(saved, page_tokens=1, dtype="float32")
    wanted = read_config(raw, page_tokens=1, dtype="float32")

    assert read.program == wanted.program
    assert read.layer_types == wanted.layer_types


def test_every_row_is_tried() -> None:
    """A row without a variant here could drift."""
    assert set(VARIANTS) == set(FAMILIES)


@pytest.mark.parametrize("kind", ["jamba", "falcon_h1", "qwen3_next"])
def test_recurrent_state_stays_in_32_bits(kind: str) -> None:
    """The convolution follows the model's type, the state matrix does not."""
    raw = raw_config(kind, VARIANTS[kind][0])
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **fields)
    half = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        cache = half(torch.arange(TOKENS)[None], use_cache=True)["cache"]
    model = read_config(raw, page_tokens=1, dtype="bfloat16")

    (recurrent,) = [c for c in compile_program(model.program).classes if c.kind == "recurrent"]
    assert stored_bytes(cache.layers[recurrent.layers[0]])[1] == recurrent.width_bytes
