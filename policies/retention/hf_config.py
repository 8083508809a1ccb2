"""Read a Hugging Face ``config.json`` into a retention program.

1. The model type is looked up in `hf_tables`; an unknown type is refused by name.
2. Fields that shape attention but that the type does not read must be unset.
3. A rule per type lists the type of each layer, as Transformers would build its cache.
4. Layers of equal type become one state; sizes come from the heads, from MLA's latent, or
   from a recurrent layer's own fields.

A multimodal config is read through its ``text_config``.  Image tokens that attend to each
other within one image read later keys of the same step only, which does not lengthen a
lifetime.  Nothing is guessed: what is unproven is refused, naming the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from codec.errors import RetentionError
from policies.retention.hf_fields import Fields
from policies.retention.hf_sizes import RECURRENT_BYTES, kv_shape
from policies.retention.hf_tables import (
    CHUNKED,
    ENDINGS,
    FAMILIES,
    FULL,
    HYBRID,
    LINEAR,
    SHAPING,
    SLIDING,
    WRAPPERS,
    Family,
)
from policies.retention.ir import (
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Query,
    Relation,
    Truth,
)
from policies.retention.program import (
    ELEMENT_BYTES,
    AttentionState,
    KvShape,
    Program,
    Reader,
    RecurrentState,
    State,
)

DEFAULT_DTYPE: Final = "bfloat16"
"""Taken if neither the caller nor the config names a data type."""

STATE_NAMES: Final = {FULL: "full", HYBRID: "full", SLIDING: "swa", CHUNKED: "chunked"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgram:
    """A model's program, and what it was read from."""

    program: Program
    model_type: str
    evidence: str
    """``explicit`` layer types, or ``uniform-full``, ``uniform-window``, ``pattern``."""

    layer_types: tuple[str, ...]
    """Per layer, in Transformers' words."""

    shared_layers: frozenset[int]
    """Layers that read another layer's keys and values and store none."""

    dtype: str
    shape: KvShape | None
    """One token's keys and values; nothing if no layer has any."""


def read_config(
    config: Mapping[str, object], *, page_tokens: int = 16, dtype: str | None = None
) -> ModelProgram:
    """The retention program of the model that ``config`` describes.

    Parameters
    ----------
    config
        The parsed ``config.json``.
    dtype
        Data type of the cache; the config's own by default.

    Raises
    ------
    RetentionError
        Naming the field that is missing, wrong, or not understood for this model type.
    """
    model_type, inner, family = _find_family(config)
    fields = Fields(inner, family)
    _refuse_strangers(fields)
    num_layers = fields.count("num_hidden_layers")
    layer_types, is_listed = LAYER_RULES[family.layers](fields, num_layers)
    chosen = _dtype(dtype, inner, config)
    shape = kv_shape(fields, chosen) if set(layer_types) - {LINEAR} else None
    shared = _shared_layers(fields, layer_types)
    states = _attention_states(fields, layer_types, shared, shape)
    states += _recurrent_states(fields, layer_types, chosen)
    return ModelProgram(
        program=Program(page_tokens=page_tokens, states=tuple(states)),
        model_type=model_type,
        evidence=_evidence(layer_types, is_listed),
        layer_types=layer_types,
        shared_layers=shared,
        dtype=chosen,
        shape=shape,
    )


def _find_family(
    config: Mapping[str, object],
) -> tuple[str, Mapping[str, object], Family]:
    """Model type, the part of the config that describes the decoder, and its row."""
    model_type = config.get("model_type")
    inner: Mapping[str, object] = config
    text = config.get("text_config")
    if text is not None:
        if not isinstance(text, Mapping) or model_type not in WRAPPERS:
            raise RetentionError(
                "unproven-layers",
                f"model_type={model_type!r} with a text_config",
                f"known wrappers are {', '.join(WRAPPERS)}",
            )
        inner, model_type = text, text.get("model_type", WRAPPERS[str(model_type)])
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RetentionError("bad-field", f"architectures={names!r}", "need a list of names")
    if model_type is None and names:
        model_type = next((kind for kind in FAMILIES if _is_of(FAMILIES[kind], names)), None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        where = f"model_type={model_type!r}, architectures={names}"
        raise RetentionError("unproven-layers", where, "this model type is not in the table")
    if names and not _is_of(FAMILIES[model_type], names):
        why = f"not architectures of model type {model_type}"
        raise RetentionError("unproven-layers", f"architectures={names}", why)
    return model_type, inner, FAMILIES[model_type]


def _is_of(family: Family, names: list[str]) -> bool:
    known = {family.prefix + ending for ending in ENDINGS}
    return all(name in known for name in names)


def _refuse_strangers(fields: Fields) -> None:
    """Refuse fields that shape attention in other models and are set in this one."""
    for name in sorted(SHAPING - fields.family.shaping):
        value = fields.config.get(name)
        if value is None or value in ([], {}):
            continue
        is_off = value is False or (type(value) is int and value == 0)
        if name == "use_sliding_window":  # off says something only where a window is set
            is_off = value is False and fields.config.get("sliding_window") is None
        if not is_off:
            raise fields.refuse(name, "not a field of this model type", "unproven-layers")


def _dtype(asked: str | None, *configs: Mapping[str, object]) -> str:
    found: object = asked
    for config in configs:
        if found is None:
            found = config.get("dtype", config.get("torch_dtype"))
    if found is None:
        found = DEFAULT_DTYPE
    if not isinstance(found, str) or found not in ELEMENT_BYTES:
        known = ", ".join(ELEMENT_BYTES)
        raise RetentionError("unknown-dtype", f"dtype={found!r}", f"need one of {known}")
    return found


def _evidence(layer_types: tuple[str, ...], is_listed: bool) -> str:
    if is_listed:
        return "explicit"
    kinds = set(layer_types)
    if kinds == {FULL}:
        return "uniform-full"
    return "uniform-window" if kinds == {SLIDING} else "pattern"


LayerRule = Callable[[Fields, int], tuple[tuple[str, ...], bool]]


def _full(_: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    return (FULL,) * num_layers, False


def _linear(_: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    return (LINEAR,) * num_layers, False


def _hybrid(_: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    return (HYBRID,) * num_layers, False


def _uniform(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    return (FULL if fields.window() is None else SLIDING,) * num_layers, False


def _gated(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """All sliding if ``use_sliding_window``; the count of window layers is not looked at."""
    has_window = fields.flag("use_sliding_window") and fields.window() is not None
    return (SLIDING if has_window else FULL,) * num_layers, False


def _qwen(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """Sliding from layer ``max_window_layers`` on, if ``use_sliding_window``."""
    has_window = fields.flag("use_sliding_window") and fields.window() is not None
    listed = fields.listed_types(num_layers)
    if listed is not None:
        if SLIDING in listed and not has_window:
            raise fields.refuse("use_sliding_window", "layer_types slide, it is off", "no-window")
        return listed, True
    first = fields.get("max_window_layers")
    if type(first) is not int or first < 0:
        raise fields.refuse("max_window_layers", "need a count of layers")
    slides = (has_window and layer >= first for layer in range(num_layers))
    return tuple(SLIDING if sliding else FULL for sliding in slides), False


def _pattern(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """Every n-th layer full, the others sliding."""
    every = fields.count("sliding_window_pattern", default=fields.family.pattern)
    for name in ("_sliding_window_pattern", "layer_switch"):
        if fields.count(name, default=every) != every:
            raise fields.refuse(name, f"the pattern is {every}", "unproven-layers")
    if fields.get("order_of_interleaved_layers") not in (None, "local_attn_first"):
        raise fields.refuse("order_of_interleaved_layers", "not known", "unproven-layers")
    listed = fields.listed_types(num_layers)
    if listed is not None:
        return listed, True
    numbers = range(1, num_layers + 1)
    return tuple(SLIDING if number % every else FULL for number in numbers), False


def _llama4(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """Chunked where rotary positions are used, if there is a chunk size."""
    listed = fields.listed_types(num_layers)
    if listed is not None:
        return listed, True
    every = fields.count("no_rope_layer_interval")
    rotates = fields.get("no_rope_layers") or [
        int(number % every != 0) for number in range(1, num_layers + 1)
    ]
    if not isinstance(rotates, list) or len(rotates) != num_layers:
        raise fields.refuse("no_rope_layers", f"need a list of {num_layers}")
    if not all(type(entry) is int and entry in (0, 1) for entry in rotates):
        raise fields.refuse("no_rope_layers", "need zeros and ones")
    chunk = fields.window("attention_chunk_size")
    return tuple(CHUNKED if entry and chunk is not None else FULL for entry in rotates), False


def _interval(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """Every n-th layer full, the others linear."""
    listed = fields.listed_types(num_layers)
    if listed is not None:
        return listed, True
    every = fields.count("full_attention_interval", default=fields.family.pattern)
    numbers = range(1, num_layers + 1)
    return tuple(LINEAR if number % every else FULL for number in numbers), False


def _jamba(fields: Fields, num_layers: int) -> tuple[tuple[str, ...], bool]:
    """One attention layer per period."""
    period = fields.count("attn_layer_period")
    offset = fields.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise fields.refuse("attn_layer_offset", f"need an integer in 0..{period - 1}")
    found = tuple(FULL if n % period == offset else LINEAR for n in range(num_layers))
    listed = fields.listed_types(num_layers, "layers_block_type")
    if listed is not None and listed != found:
        raise fields.refuse("layers_block_type", "contradicts attn_layer_period", "bad-layers")
    return found, False


LAYER_RULES: Final[Mapping[str, LayerRule]] = {
    "full": _full,
    "linear": _linear,
    "hybrid": _hybrid,
    "uniform": _uniform,
    "gated": _gated,
    "qwen": _qwen,
    "pattern": _pattern,
    "llama4": _llama4,
    "interval": _interval,
    "jamba": _jamba,
}


def _shared_layers(fields: Fields, layer_types: tuple[str, ...]) -> frozenset[int]:
    """Layers at the end that read the last layer of their type that stores."""
    count = fields.get("num_kv_shared_layers") or 0
    if type(count) is not int or not 0 <= count < len(layer_types):
        raise fields.refuse("num_kv_shared_layers", f"need 0..{len(layer_types) - 1}")
    first = len(layer_types) - count
    if set(layer_types[:first]) != set(layer_types):
        raise fields.refuse("num_kv_shared_layers", "a layer type would have no storing layer")
    return frozenset(range(first, len(layer_types)))


def window_relation(window: int) -> Relation:
    """A query reads itself and the ``window - 1`` tokens before it."""
    return Less(Difference(Query(), Key()), Constant(window))


def chunk_relation(chunk: int) -> Relation:
    """A query reads the tokens of its own chunk."""
    return Equal(FloorDivision(Query(), chunk), FloorDivision(Key(), chunk))


def _relation(fields: Fields, layer_type: str) -> Relation:
    if layer_type == SLIDING:
        return window_relation(fields.need_window())
    if layer_type == CHUNKED:
        return chunk_relation(fields.need_window("attention_chunk_size"))
    return Truth(value=True)


def _attention_states(
    fields: Fields, layer_types: tuple[str, ...], shared: frozenset[int], shape: KvShape | None
) -> list[State]:
    states: list[State] = []
    for kind, name in STATE_NAMES.items():
        layers = [layer for layer, found in enumerate(layer_types) if found == kind]
        if not layers or shape is None:
            continue
        reads = _relation(fields, kind)
        states.append(
            AttentionState(
                name=name,
                layers=tuple(layer for layer in layers if layer not in shared),
                reads=reads,
                bytes_per_token_layer=shape.bytes_per_token_layer,
                shape=shape,
                readers=tuple(Reader(layer, reads) for layer in layers if layer in shared),
            )
        )
    return states


def _recurrent_states(fields: Fields, layer_types: tuple[str, ...], dtype: str) -> list[State]:
    layers = tuple(n for n, kind in enumerate(layer_types) if kind in (LINEAR, HYBRID))
    if not layers:
        return []
    nbytes = RECURRENT_BYTES[fields.family.recurrent](fields, ELEMENT_BYTES[dtype])
    return [RecurrentState(name="recurrent", layers=layers, bytes_per_layer=nbytes)]
