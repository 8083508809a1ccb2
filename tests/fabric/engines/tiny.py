"""Random models of a few thousand weights: every kind of layer, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine

VOCABULARY = 97
WINDOW = 6
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large enough that the likeliest token depends on all that came before.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_ALTERNATING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": _DYNAMIC}),
    "phi3-longrope": (
        "Phi3Config",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 64},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 1]}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "cohere": ("CohereConfig", {"tie_word_embeddings": False}),
    "olmo2": ("Olmo2Config", {}),
    "gpt-neox": ("GPTNeoXConfig", {"rope_parameters": _PARTIAL}),
    "qwen3-next": ("Qwen3NextConfig", {"layer_types": _LINEAR}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 4,
        },
    ),
    "mamba": ("MambaConfig", {"state_size": 4}),
    "llama4": ("Llama4TextConfig", {"attention_chunk_size": 16, "num_local_experts": 2}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "num_kv_shared_layers": 2,
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    ),
    "rwkv": ("RwkvConfig", {"attention_hidden_size": 32}),
    "gptj": ("GPTJConfig", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "t5": ("T5Config", {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16}),
}


def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `CONFIGS` with weights that depend on nothing but its name."""
    class_name, options = CONFIGS[name]
    config = getattr(transformers, class_name)(**_COMMON | options)
    auto = AutoModelForCausalLM if name != "t5" else transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(config, dtype=dtype).eval()


def tiny_engine(
    name: str, dtype: torch.dtype = torch.float32, *, window_tokens: int = 8
) -> TransformersEngine:
    """An engine around a tiny model."""
    loaded = LoadedModel(tiny_model(name, dtype), None, name, f"weights of {name}")
    return TransformersEngine(loaded, window_tokens=window_tokens)


def some_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens that a tiny model knows, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (num_tokens,), generator=generator).tolist()


def logits_without_cache(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """The oracle: one plain run over the whole sequence, shape ``(tokens, vocabulary)``."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    logits: torch.Tensor = output.logits[0].float()
    return logits


def tokens_without_cache(model: Any, tokens: Sequence[int], num_new: int) -> list[int]:
    """The oracle, greedily continued by running everything again for each token."""
    sequence = list(tokens)
    for _ in range(num_new):
        sequence.append(int(logits_without_cache(model, sequence)[-1].argmax()))
    return sequence[len(tokens) :]
