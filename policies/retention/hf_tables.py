"""What is known of Hugging Face model types: one row each, and nothing else is served.

A row says which fields shape the model's cache, what an absent field means to
Transformers, which layer types can occur and how wide they are.  A field that shapes
attention but is not in a model's row must be unset.  The rows are checked against the cache
that Transformers builds for a tiny model of each config (tests), so that they cannot drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"
HYBRID: Final = "hybrid"
"""Layer types, under the names that Transformers gives them."""

LEGACY_TYPES: Final = {"attention": FULL, "mamba": LINEAR}
"""Older names of layer types."""

SHAPING: Final = frozenset({
    "_sliding_window_pattern",
    "add_cross_attention",
    "attention_chunk_size",
    "attention_types",
    "attention_window",
    "attn_layer_offset",
    "attn_layer_period",
    "cross_attention_layers",
    "dual_chunk_attention_config",
    "full_attention_interval",
    "global_attn_every_n_layers",
    "index_topk",
    "is_encoder_decoder",
    "kv_sharing_modes",
    "layer_switch",
    "layer_types",
    "layers_block_type",
    "local_attention",
    "max_window_layers",
    "no_rope_layer_interval",
    "no_rope_layers",
    "num_kv_shared_layers",
    "order_of_interleaved_layers",
    "sliding_window",
    "sliding_window_pattern",
    "sparse_attention",
    "use_bidirectional_attention",
    "use_sliding_window",
    "window_size",
})  # fmt: skip
"""Fields that say which query reads which key, in one model or another."""

WRAPPERS: Final = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
}
"""Multimodal types whose ``text_config`` is read, and its type where it names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model type."""

    layers: str
    """Name of the rule that lists the layer types, in `hf_config`."""

    prefix: str
    """What the names of its architectures start with."""

    shaping: frozenset[str] = frozenset()
    """The fields of `SHAPING` that the rule reads."""

    allowed: frozenset[str] = frozenset({FULL})
    """Layer types that may occur."""

    width: str = "heads"
    """``heads``: kv heads times head size; ``latent``: MLA's latent and rotary parts."""

    recurrent: str = ""
    """Name of the rule for the size of recurrent state; empty if there is none."""

    has_head_dim: bool = True
    """Whether a ``head_dim`` field is honored; else it must equal hidden size / heads."""

    defaults: Mapping[str, int | bool | None] = field(default_factory=dict)
    """What Transformers takes for fields that released configs leave out."""

    pattern: int = 0
    """Every so many layers one is not sliding (or not linear), by default."""


_QWEN: Final = frozenset(
    {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
)
_WINDOWED: Final = frozenset({FULL, SLIDING})
_QWEN_DEFAULTS: Final = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family(layers="full", prefix="Llama"),
    "mistral": Family(
        layers="uniform",
        prefix="Mistral",
        shaping=frozenset({"sliding_window"}),
        allowed=_WINDOWED,
        defaults={"sliding_window": 4096},
    ),
    "mixtral": Family(
        layers="uniform",
        prefix="Mixtral",
        shaping=frozenset({"sliding_window"}),
        allowed=_WINDOWED,
        defaults={"sliding_window": None},
    ),
    "phi3": Family(
        layers="uniform",
        prefix="Phi3",
        shaping=frozenset({"sliding_window"}),
        allowed=_WINDOWED,
        defaults={"sliding_window": None},
    ),
    "qwen2": Family(
        layers="qwen", prefix="Qwen2", shaping=_QWEN, allowed=_WINDOWED, defaults=_QWEN_DEFAULTS
    ),
    "qwen3": Family(
        layers="qwen",
        prefix="Qwen3",
        shaping=_QWEN,
        allowed=_WINDOWED,
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        layers="gated",
        prefix="Qwen3Moe",
        shaping=frozenset({"max_window_layers", "sliding_window", "use_sliding_window"}),
        allowed=_WINDOWED,
        defaults={**_QWEN_DEFAULTS, "head_dim": None},
    ),
    "gemma2": Family(
        layers="pattern",
        prefix="Gemma2",
        shaping=frozenset({"layer_types", "sliding_window"}),
        allowed=_WINDOWED,
        defaults={"head_dim": 256},
        pattern=2,
    ),
    "gemma3_text": Family(
        layers="pattern",
        prefix="Gemma3",
        shaping=frozenset({
            "_sliding_window_pattern", "layer_types", "sliding_window", "sliding_window_pattern",
        }),
        allowed=_WINDOWED,
        defaults={
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
        },
        pattern=6,
    ),
    "gemma3n_text": Family(
        layers="pattern",
        prefix="Gemma3n",
        shaping=frozenset({"layer_types", "num_kv_shared_layers", "sliding_window"}),
        allowed=_WINDOWED,
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 15,
            "sliding_window": 512,
        },
        pattern=5,
    ),
    "gpt_oss": Family(
        layers="pattern",
        prefix="GptOss",
        shaping=frozenset({"layer_types", "sliding_window"}),
        allowed=_WINDOWED,
        pattern=2,
    ),
    "cohere2": Family(
        layers="pattern",
        prefix="Cohere2",
        shaping=frozenset({
            "layer_switch", "layer_types", "order_of_interleaved_layers", "sliding_window",
            "sliding_window_pattern",
        }),
        allowed=_WINDOWED,
        has_head_dim=False,
        pattern=4,
    ),
    "llama4_text": Family(
        layers="llama4",
        prefix="Llama4",
        shaping=frozenset({
            "attention_chunk_size", "layer_types", "no_rope_layer_interval", "no_rope_layers",
        }),
        allowed=frozenset({FULL, CHUNKED}),
        defaults={
            "attention_chunk_size": 8192,
            "head_dim": 128,
            "no_rope_layer_interval": 4,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "deepseek_v2": Family(layers="full", prefix="DeepseekV2", width="latent"),
    "deepseek_v3": Family(layers="full", prefix="DeepseekV3", width="latent"),
    "mamba": Family(
        layers="linear", prefix="Mamba", allowed=frozenset({LINEAR}), recurrent="mamba"
    ),
    "mamba2": Family(
        layers="linear", prefix="Mamba2", allowed=frozenset({LINEAR}), recurrent="mamba2"
    ),
    "jamba": Family(
        layers="jamba",
        prefix="Jamba",
        shaping=frozenset({"attn_layer_offset", "attn_layer_period", "layers_block_type"}),
        allowed=frozenset({FULL, LINEAR}),
        recurrent="jamba",
        has_head_dim=False,
        defaults={"attn_layer_offset": 4, "attn_layer_period": 8},
    ),
    "qwen3_next": Family(
        layers="interval",
        prefix="Qwen3Next",
        shaping=frozenset({"full_attention_interval", "layer_types"}),
        allowed=frozenset({FULL, LINEAR}),
        recurrent="delta",
        defaults={"head_dim": 256},
        pattern=4,
    ),
    "falcon_h1": Family(
        layers="hybrid", prefix="FalconH1", allowed=frozenset({HYBRID}), recurrent="falcon_h1"
    ),
}  # fmt: skip
"""Every model type that is served, by its name in ``model_type``."""

ENDINGS: Final = ("ForCausalLM", "ForConditionalGeneration", "Model", "TextModel")
"""How the names of architectures end that run the decoder as the row describes it."""
