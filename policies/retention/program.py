"""A retention program: the state that a model keeps per request, and who reads it.

Three kinds of state:

* `AttentionState`: keys and values of some layers (or of a range of their kv heads), read
  as a relation says.  A layer that reads another layer's keys and values, as models with
  shared caches have, is a `Reader`: it stores nothing, and what it reads stays.
* `RecurrentState`: one fixed-size state per layer, replaced in place at every boundary and
  of use at exactly one.
* `CrossState`: keys and values of an encoder's output, written once, kept until release.

A program that exists is consistent: names are unique, and no layer's keys are owned twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from codec.errors import RetentionError
from policies.retention.ir import Relation, any_of

ELEMENT_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""Data types that a cache may be stored in."""

MAX_COUNT: Final = 2**40
"""No count or size in a program is larger."""


def check_count(name: str, value: object, rule: str) -> None:
    """Refuse anything but an integer in ``1 .. MAX_COUNT``."""
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise RetentionError(rule, f"{name}={value!r}", f"need {name} in 1..{MAX_COUNT}")


def _check_layers(name: str, layers: tuple[int, ...]) -> None:
    if not name:
        raise RetentionError("empty-name", "name=''", "a state needs a name")
    if not layers:
        raise RetentionError("empty-layers", f"{name}.layers", "a state needs a layer")
    if any(type(layer) is not int or not 0 <= layer < MAX_COUNT for layer in layers):
        raise RetentionError("bad-layers", f"{name}.layers={layers}", "need layers from 0 up")
    if any(a >= b for a, b in pairwise(layers)):
        raise RetentionError("bad-layers", f"{name}.layers={layers}", "need rising layers")


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Kv heads ``[start, stop)`` of a layer."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if any(type(end) is not int for end in (self.start, self.stop)):
            raise RetentionError("not-an-integer", str(self), "need integers")
        if not 0 <= self.start < self.stop:
            raise RetentionError("empty-head-range", str(self), "need 0 <= start < stop")

    def __str__(self) -> str:
        return f"heads=[{self.start}, {self.stop})"

    @property
    def num_heads(self) -> int:
        """Heads in the range."""
        return self.stop - self.start

    def overlaps(self, other: HeadRange) -> bool:
        """Whether a head is in both."""
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token's keys and values of one layer look like; the two widths may differ."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "key_dim", "value_dim"):
            check_count(name, getattr(self, name), "zero-bytes")
        if self.dtype not in ELEMENT_BYTES:
            known = ", ".join(ELEMENT_BYTES)
            raise RetentionError("unknown-dtype", f"dtype={self.dtype!r}", f"need one of {known}")

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        elements = self.num_kv_heads * (self.key_dim + self.value_dim)
        return elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Reader:
    """A layer that reads the keys and values another layer stores."""

    layer: int
    reads: Relation

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise RetentionError("bad-layers", f"layer={self.layer!r}", "need a layer from 0 up")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """Keys and values of some layers, read as ``reads`` and the readers say."""

    name: str
    layers: tuple[int, ...]
    """Layers that store; rising."""

    reads: Relation
    bytes_per_token_layer: int
    heads: HeadRange | None = None
    """Kv heads meant; all of them if nothing."""

    shape: KvShape | None = None
    """Where the bytes come from, if known."""

    readers: tuple[Reader, ...] = ()
    """Further layers that read what these store."""

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        width = "bytes_per_token_layer"
        check_count(width, self.bytes_per_token_layer, "zero-bytes")
        if self.shape and self.shape.bytes_per_token_layer != self.bytes_per_token_layer:
            raise RetentionError(
                "bad-shape",
                f"{self.name}.{width}={self.bytes_per_token_layer}",
                f"its shape has {self.shape.bytes_per_token_layer} bytes",
            )
        if self.shape and self.heads and self.shape.num_kv_heads != self.heads.num_heads:
            raise RetentionError("bad-shape", f"{self.name}.{self.heads}", "not as many as heads")

    @property
    def all_reads(self) -> Relation:
        """Whatever its own layers or its readers may read."""
        return any_of(*dict.fromkeys([self.reads, *(reader.reads for reader in self.readers)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A fixed-size state per layer, replaced in place by every step."""

    name: str
    layers: tuple[int, ...]
    bytes_per_layer: int

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        check_count("bytes_per_layer", self.bytes_per_layer, "zero-bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossState:
    """Keys and values of an encoder's output, kept until the request is released."""

    name: str
    layers: tuple[int, ...]
    bytes_per_token_layer: int
    source_tokens: int
    """Most encoder positions of a request."""

    def __post_init__(self) -> None:
        _check_layers(self.name, self.layers)
        check_count("bytes_per_token_layer", self.bytes_per_token_layer, "zero-bytes")
        check_count("source_tokens", self.source_tokens, "zero-bytes")


State = AttentionState | RecurrentState | CrossState


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All the state of one model."""

    page_tokens: int
    states: tuple[State, ...]

    def __post_init__(self) -> None:
        check_count("page_tokens", self.page_tokens, "bad-page")
        if not self.states:
            raise RetentionError("empty-plan", "states=[]", "a program needs a state")
        seen: set[str] = set()
        for state in self.states:
            if state.name in seen:
                raise RetentionError("duplicate-class", f"name={state.name!r}", "name used twice")
            seen.add(state.name)
        for kind in (AttentionState, RecurrentState, CrossState):
            _check_owners([state for state in self.states if isinstance(state, kind)])

    @property
    def attention(self) -> tuple[AttentionState, ...]:
        """The states that hold keys and values of the sequence itself."""
        return tuple(state for state in self.states if isinstance(state, AttentionState))

    @property
    def num_layers(self) -> int:
        """One more than the last layer that stores or reads."""
        last = max(state.layers[-1] for state in self.states)
        readers = (reader.layer for state in self.attention for reader in state.readers)
        return 1 + max([last, *readers])


def _check_owners(states: Iterable[State]) -> None:
    """Refuse a layer with two owners, unless their heads are disjoint."""
    owners: dict[int, list[tuple[str, HeadRange | None]]] = {}
    for state in states:
        readers = state.readers if isinstance(state, AttentionState) else ()
        heads = state.heads if isinstance(state, AttentionState) else None
        layers = [(layer, heads) for layer in state.layers]
        for layer, here in [*layers, *((reader.layer, None) for reader in readers)]:
            for other, theirs in owners.setdefault(layer, []):
                _check_apart(layer, (state.name, here), (other, theirs))
            owners[layer].append((state.name, here))


def _check_apart(
    layer: int, a: tuple[str, HeadRange | None], b: tuple[str, HeadRange | None]
) -> None:
    where = f"layer {layer} of {b[0]!r} and {a[0]!r}"
    if a[1] is None or b[1] is None:
        raise RetentionError("layer-overlap", where, "a layer's keys have one owner")
    if a[1].overlaps(b[1]):
        raise RetentionError("head-overlap", f"{where}, {b[1]} and {a[1]}", "heads have one owner")
