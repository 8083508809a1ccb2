"""How many bytes a layer of a Hugging Face model keeps.

Recurrent layers keep the last inputs of a short convolution in the cache's data type, and
a state matrix in 32 bits, as Transformers does (a test counts the bytes of its caches).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from codec.errors import RetentionError
from policies.retention.hf_fields import Fields
from policies.retention.program import KvShape

STATE_BYTES: Final = 4
"""Bytes of one element of a recurrent state matrix."""


def kv_shape(fields: Fields, dtype: str) -> KvShape:
    """Shape of one token's keys and values in one layer."""
    if fields.family.width == "latent":
        return KvShape(
            num_kv_heads=1,
            key_dim=fields.count("kv_lora_rank"),
            value_dim=fields.count("qk_rope_head_dim"),
            dtype=dtype,
        )
    heads = fields.get("num_key_value_heads")
    if heads is None:  # one kv head per query head
        heads = fields.count("num_attention_heads", rule="no-head-geometry")
    if type(heads) is not int or heads < 1:
        raise fields.refuse("num_key_value_heads", "need a positive integer", "no-head-geometry")
    dim = head_dim(fields)
    return KvShape(num_kv_heads=heads, key_dim=dim, value_dim=dim, dtype=dtype)


def head_dim(fields: Fields) -> int:
    """Size of a head: the field, or the hidden size over the heads where that is exact."""
    if fields.family.has_head_dim and fields.get("head_dim") is not None:
        return fields.count("head_dim", rule="no-head-geometry")
    hidden = fields.count("hidden_size", rule="no-head-geometry")
    heads = fields.count("num_attention_heads", rule="no-head-geometry")
    if hidden % heads:
        term = f"hidden_size={hidden}, num_attention_heads={heads}"
        raise RetentionError("no-head-geometry", term, "need a hidden size that the heads divide")
    if fields.get("head_dim") not in (None, hidden // heads):
        raise fields.refuse("head_dim", f"this model type takes {hidden // heads}", "bad-field")
    return hidden // heads


def _mamba(fields: Fields, element_bytes: int) -> int:
    inner = fields.count("expand", default=2) * fields.count("hidden_size")
    conv = fields.count("conv_kernel", default=4) * element_bytes
    return inner * (conv + fields.count("state_size", default=16) * STATE_BYTES)


def _mamba2(fields: Fields, element_bytes: int) -> int:
    inner = fields.count("expand", default=2) * fields.count("hidden_size")
    state = fields.count("state_size", default=128)
    channels = inner + 2 * fields.count("n_groups", default=8) * state
    heads = fields.count("num_heads", default=128) * fields.count("head_dim", default=64)
    if heads != inner:
        raise fields.refuse("num_heads", f"num_heads * head_dim is {heads}, not {inner}")
    conv = channels * fields.count("conv_kernel", default=4)
    return conv * element_bytes + heads * state * STATE_BYTES


def _jamba(fields: Fields, element_bytes: int) -> int:
    inner = fields.count("mamba_expand", default=2) * fields.count("hidden_size")
    conv = fields.count("mamba_d_conv", default=4) * element_bytes
    return inner * (conv + fields.count("mamba_d_state", default=16) * STATE_BYTES)


def _falcon_h1(fields: Fields, element_bytes: int) -> int:
    if "mamba_d_ssm" in fields.config and fields.config["mamba_d_ssm"] is None:
        inner = fields.count("mamba_expand", default=2) * fields.count("hidden_size")
    else:
        inner = fields.count("mamba_d_ssm", default=1024)
    state = fields.count("mamba_d_state", default=256)
    channels = inner + 2 * fields.count("mamba_n_groups", default=1) * state
    heads = fields.count("mamba_n_heads", default=128)
    if inner % heads:
        raise fields.refuse("mamba_n_heads", f"must divide {inner}")
    if fields.get("mamba_d_head") not in (None, "auto", inner // heads):
        raise fields.refuse("mamba_d_head", f"need {inner // heads}")
    conv = channels * fields.count("mamba_d_conv", default=4)
    return conv * element_bytes + inner * state * STATE_BYTES


def _delta(fields: Fields, element_bytes: int) -> int:
    key_dim = fields.count("linear_key_head_dim", default=128)
    value_dim = fields.count("linear_value_head_dim", default=128)
    key_heads = fields.count("linear_num_key_heads", default=16)
    value_heads = fields.count("linear_num_value_heads", default=32)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    conv = channels * fields.count("linear_conv_kernel_dim", default=4)
    return conv * element_bytes + value_heads * key_dim * value_dim * STATE_BYTES


RECURRENT_BYTES: Final[Mapping[str, Callable[[Fields, int], int]]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "delta": _delta,
}
