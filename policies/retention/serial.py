"""Retention programs as strict JSON.

A term is ``"q"``, ``"k"``, an integer or ``[operator, term, term]``; a predicate is a
boolean, ``[comparison, term, term]`` or ``["and" | "or", predicate, ...]``::

    {"schema": "kvfabric.retention.1", "page_tokens": 16, "states": [
      {"kind": "attention", "name": "swa", "layers": [0, 1], "bytes_per_token_layer": 4096,
       "reads": ["<", ["-", "q", "k"], 1024]}]}

Refused, each with the place: unknown or missing fields, a field given twice, numbers that
are not integers, another schema, and everything that `ir` and `program` refuse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from codec.errors import RetentionError
from policies.retention.ir import (
    MAX_DEPTH,
    And,
    AtMost,
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Or,
    Query,
    Relation,
    Sum,
    Term,
    Truth,
    all_of,
    any_of,
)
from policies.retention.program import (
    AttentionState,
    CrossState,
    HeadRange,
    KvShape,
    Program,
    Reader,
    RecurrentState,
    State,
)

SCHEMA: Final = "kvfabric.retention.1"
COMPARISONS: Final[dict[str, type[Less | AtMost | Equal]]] = {"<": Less, "<=": AtMost, "==": Equal}


def _refuse(where: str, why: str, rule: str = "syntax") -> NoReturn:
    raise RetentionError(rule, where, why)


def read_term(value: object, depth: int = 0) -> Term:
    """Read the JSON form of a term."""
    if depth > MAX_DEPTH:
        _refuse("term", f"nested deeper than {MAX_DEPTH}", "too-large")
    if value in ("q", "k"):
        return Query() if value == "q" else Key()
    if type(value) is int:
        return Constant(value)
    if not isinstance(value, list) or len(value) != 3:
        _refuse(f"term {_clip(value)}", "need 'q', 'k', an integer or [operator, a, b]")
    operator, left, right = value
    first = read_term(left, depth + 1)
    match operator:
        case "+" | "-":
            kind = Sum if operator == "+" else Difference
            return kind(first, read_term(right, depth + 1))
        case "//" | "%":
            if type(right) is not int:
                _refuse(f"divisor {_clip(right)}", "need an integer")
            return FloorDivision(first, right) if operator == "//" else Modulo(first, right)
        case _:
            _refuse(f"operator {_clip(operator)}", "need one of + - // %")


def read_relation(value: object, depth: int = 0) -> Relation:
    """Read the JSON form of a predicate."""
    if depth > MAX_DEPTH:
        _refuse("predicate", f"nested deeper than {MAX_DEPTH}", "too-large")
    if isinstance(value, bool):
        return Truth(value)
    if not isinstance(value, list) or not value:
        _refuse(f"predicate {_clip(value)}", "need a boolean or [operator, ...]")
    operator, *rest = value
    if operator in ("and", "or"):
        parts = [read_relation(part, depth + 1) for part in rest]
        return all_of(*parts) if operator == "and" else any_of(*parts)
    if not isinstance(operator, str) or operator not in COMPARISONS:
        _refuse(f"operator {_clip(operator)}", "need one of < <= == and or")
    if len(rest) != 2:
        _refuse(f"predicate {_clip(value)}", "a comparison has two terms")
    return COMPARISONS[operator](read_term(rest[0]), read_term(rest[1]))


def write_term(term: Term) -> object:
    """The JSON form of a term."""
    match term:
        case Query() | Key():
            return str(term)
        case Constant(value):
            return value
        case Sum(left, right) | Difference(left, right):
            sign = "+" if isinstance(term, Sum) else "-"
            return [sign, write_term(left), write_term(right)]
        case FloorDivision(inner, divisor) | Modulo(inner, divisor):
            sign = "//" if isinstance(term, FloorDivision) else "%"
            return [sign, write_term(inner), divisor]


def write_relation(relation: Relation) -> object:
    """The JSON form of a predicate."""
    match relation:
        case Truth(value):
            return value
        case And(parts) | Or(parts):
            word = "and" if isinstance(relation, And) else "or"
            return [word, *(write_relation(part) for part in parts)]
        case Less(left, right) | AtMost(left, right) | Equal(left, right):
            sign = next(sign for sign, kind in COMPARISONS.items() if type(relation) is kind)
            return [sign, write_term(left), write_term(right)]


def _clip(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fields(
    where: str, value: object, required: set[str], optional: frozenset[str] = frozenset()
) -> Mapping[str, object]:
    """The fields of a JSON object that must have exactly these."""
    if not isinstance(value, dict):
        _refuse(f"{where}={_clip(value)}", "need an object")
    for name in value:
        if name not in required | optional:
            _refuse(f"{where}.{name}", "unknown field", "unknown-field")
    for name in sorted(required):
        if name not in value:
            _refuse(f"{where}.{name}", "missing field", "missing-field")
    return value


def _integer(where: str, value: object) -> int:
    if type(value) is not int:
        _refuse(f"{where}={_clip(value)}", "need an integer", "not-an-integer")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(f"{where}={_clip(value)}", "need a string")
    return value


def _list(where: str, value: object) -> list[object]:
    if not isinstance(value, list):
        _refuse(f"{where}={_clip(value)}", "need a list")
    return value


def _layers(where: str, value: object) -> tuple[int, ...]:
    return tuple(_integer(f"{where}.layers", layer) for layer in _list(where, value))


def _heads(where: str, value: object) -> HeadRange | None:
    if value is None:
        return None
    ends = _list(where, value)
    if len(ends) != 2:
        _refuse(f"{where}={_clip(value)}", "need [start, stop]")
    return HeadRange(_integer(where, ends[0]), _integer(where, ends[1]))


def _shape(where: str, value: object) -> KvShape | None:
    if value is None:
        return None
    found = _fields(where, value, {"num_kv_heads", "key_dim", "value_dim", "dtype"})
    return KvShape(
        num_kv_heads=_integer(where, found["num_kv_heads"]),
        key_dim=_integer(where, found["key_dim"]),
        value_dim=_integer(where, found["value_dim"]),
        dtype=_text(where, found["dtype"]),
    )


def _attention(where: str, value: object) -> State:
    required = {"kind", "name", "layers", "bytes_per_token_layer", "reads"}
    found = _fields(where, value, required, frozenset({"heads", "shape", "readers"}))
    readers = []
    for index, entry in enumerate(_list(f"{where}.readers", found.get("readers", []))):
        reader = _fields(f"{where}.readers[{index}]", entry, {"layer", "reads"})
        layer = _integer(f"{where}.readers[{index}].layer", reader["layer"])
        readers.append(Reader(layer, read_relation(reader["reads"])))
    return AttentionState(
        name=_text(f"{where}.name", found["name"]),
        layers=_layers(where, found["layers"]),
        reads=read_relation(found["reads"]),
        bytes_per_token_layer=_integer(where, found["bytes_per_token_layer"]),
        heads=_heads(f"{where}.heads", found.get("heads")),
        shape=_shape(f"{where}.shape", found.get("shape")),
        readers=tuple(readers),
    )


def _recurrent(where: str, value: object) -> State:
    found = _fields(where, value, {"kind", "name", "layers", "bytes_per_layer"})
    return RecurrentState(
        name=_text(f"{where}.name", found["name"]),
        layers=_layers(where, found["layers"]),
        bytes_per_layer=_integer(where, found["bytes_per_layer"]),
    )


def _cross(where: str, value: object) -> State:
    required = {"kind", "name", "layers", "bytes_per_token_layer", "source_tokens"}
    found = _fields(where, value, required)
    return CrossState(
        name=_text(f"{where}.name", found["name"]),
        layers=_layers(where, found["layers"]),
        bytes_per_token_layer=_integer(where, found["bytes_per_token_layer"]),
        source_tokens=_integer(where, found["source_tokens"]),
    )


_KINDS: Final[dict[str, Callable[[str, object], State]]] = {
    "attention": _attention,
    "recurrent": _recurrent,
    "cross": _cross,
}


def read_program(text: str) -> Program:
    """Read the form that `write_program` writes.

    Raises
    ------
    RetentionError
        Naming the field, and what would be right.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_int=_int, parse_constant=_no_constant
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise RetentionError("syntax", "program", f"not JSON ({error})") from None
    found = _fields("program", value, {"schema", "page_tokens", "states"})
    if found["schema"] != SCHEMA:
        _refuse(f"schema={_clip(found['schema'])}", f"need {SCHEMA!r}", "wrong-schema")
    states = []
    for index, entry in enumerate(_list("program.states", found["states"])):
        where = f"states[{index}]"
        kind = entry.get("kind") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or kind not in _KINDS:
            _refuse(f"{where}.kind={_clip(kind)}", f"need one of {', '.join(_KINDS)}")
        states.append(_KINDS[kind](where, entry))
    page_tokens = _integer("program.page_tokens", found["page_tokens"])
    return Program(page_tokens=page_tokens, states=tuple(states))


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        _refuse(f"field {twice!r}", "given twice", "unknown-field")
    return found


def _int(digits: str) -> int:
    if len(digits) > 20:
        _refuse(_clip(digits), "an integer of at most 20 digits", "overflow")
    return int(digits)


def _no_constant(word: str) -> NoReturn:
    _refuse(word, "not a number of this format", "not-an-integer")


def write_program(program: Program) -> str:
    """The JSON form, on one line, fields in a fixed order."""
    states = [_write_state(state) for state in program.states]
    return json.dumps({"schema": SCHEMA, "page_tokens": program.page_tokens, "states": states})


def _write_state(state: State) -> dict[str, object]:
    common: dict[str, object] = {"name": state.name, "layers": list(state.layers)}
    match state:
        case RecurrentState():
            return {"kind": "recurrent", **common, "bytes_per_layer": state.bytes_per_layer}
        case CrossState():
            width = {"bytes_per_token_layer": state.bytes_per_token_layer}
            return {"kind": "cross", **common, **width, "source_tokens": state.source_tokens}
        case AttentionState():
            found = {
                "kind": "attention",
                **common,
                "bytes_per_token_layer": state.bytes_per_token_layer,
                "reads": write_relation(state.reads),
            }
            if state.heads:
                found["heads"] = [state.heads.start, state.heads.stop]
            if state.shape:
                fields = ("num_kv_heads", "key_dim", "value_dim", "dtype")
                found["shape"] = {name: getattr(state.shape, name) for name in fields}
            if state.readers:
                found["readers"] = [
                    {"layer": reader.layer, "reads": write_relation(reader.reads)}
                    for reader in state.readers
                ]
            return found
