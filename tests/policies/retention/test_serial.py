"""Programs as JSON: round trips, and every field checked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from codec.errors import RetentionError
from policies.retention.ir import MAX_DEPTH, Relation
from policies.retention.program import (
    AttentionState,
    CrossState,
    HeadRange,
    KvShape,
    Program,
    Reader,
    RecurrentState,
)
from policies.retention.serial import (
    SCHEMA,
    read_program,
    read_relation,
    read_term,
    write_program,
    write_relation,
)
from tests.policies.retention.samples import rel, relations, relaxed

SHAPE = KvShape(num_kv_heads=2, key_dim=16, value_dim=8, dtype="bfloat16")
EVERYTHING = Program(
    page_tokens=16,
    states=(
        AttentionState(
            name="swa",
            layers=(0, 2),
            reads=rel("q - k < 128 or k < 4"),
            bytes_per_token_layer=96,
            heads=HeadRange(2, 4),
            shape=SHAPE,
            readers=(Reader(3, rel("q - k < 8")),),
        ),
        AttentionState(name="full", layers=(1,), reads=rel("true"), bytes_per_token_layer=64),
        RecurrentState(name="ssm", layers=(0,), bytes_per_layer=4096),
        CrossState(name="encoder", layers=(0,), bytes_per_token_layer=64, source_tokens=1500),
    ),
)


def plain() -> dict[str, Any]:
    """The least program, to be spoiled."""
    state = {
        "kind": "attention",
        "name": "s",
        "layers": [0],
        "bytes_per_token_layer": 128,
        "reads": ["<", ["-", "q", "k"], 8],
    }
    return {"schema": SCHEMA, "page_tokens": 16, "states": [state]}


def test_program_comes_back() -> None:
    """Every kind of state and every optional field."""
    assert read_program(write_program(EVERYTHING)) == EVERYTHING


@relaxed
@given(relations())
def test_relation_comes_back(relation: Relation) -> None:
    """The list form loses nothing."""
    text = json.dumps(write_relation(relation))

    assert read_relation(json.loads(text)) == relation


def test_empty_combinations_have_their_plain_meaning() -> None:
    """An empty "and" holds, an empty "or" does not."""
    assert read_relation(["and"]) == read_relation(True)
    assert read_relation(["or"]) == read_relation(False)
    assert read_relation(["or", ["<", "k", 3]]) == rel("k < 3")


SPOILED: list[tuple[str, Any, str]] = [
    ("schema", "orbitkv.retention-ir.v1", "wrong-schema"),
    ("schema", None, "wrong-schema"),
    ("page_tokens", 0, "bad-page"),
    ("page_tokens", -1, "bad-page"),
    ("page_tokens", 16.0, "not-an-integer"),
    ("page_tokens", True, "not-an-integer"),
    ("states", [], "empty-plan"),
    ("states", {}, "syntax"),
    ("states", [3], "syntax"),
    ("extra", 1, "unknown-field"),
]


@pytest.mark.parametrize(("name", "value", "rule"), SPOILED)
def test_spoiled_program_is_refused(name: str, value: object, rule: str) -> None:
    """Each field of the program, one at a time."""
    program = {**plain(), name: value}

    with pytest.raises(RetentionError) as caught:
        read_program(json.dumps(program))

    assert caught.value.rule == rule


SPOILED_STATE: list[tuple[str, Any, str]] = [
    ("kind", "dilated", "syntax"),
    ("kind", ["attention"], "syntax"),
    ("name", "", "empty-name"),
    ("name", 3, "syntax"),
    ("layers", [], "empty-layers"),
    ("layers", [0, 0], "bad-layers"),
    ("layers", [1, 0], "bad-layers"),
    ("layers", [-1], "bad-layers"),
    ("layers", [0.5], "not-an-integer"),
    ("layers", [False], "not-an-integer"),
    ("layers", 0, "syntax"),
    ("bytes_per_token_layer", 0, "zero-bytes"),
    ("bytes_per_token_layer", -4, "zero-bytes"),
    ("bytes_per_token_layer", "128", "not-an-integer"),
    ("heads", [3, 3], "empty-head-range"),
    ("heads", [3], "syntax"),
    ("heads", [0.0, 1], "not-an-integer"),
    ("shape", {"num_kv_heads": 1}, "missing-field"),
    ("shape", [], "syntax"),
    ("readers", [{"layer": 1}], "missing-field"),
    ("readers", [{"layer": 1, "reads": True, "why": 0}], "unknown-field"),
    ("window", 128, "unknown-field"),
    ("reads", None, "syntax"),
    ("reads", "true", "syntax"),
    ("reads", 1, "syntax"),
    ("reads", [], "syntax"),
    ("reads", ["not", True], "syntax"),
    ("reads", [">", "q", "k"], "syntax"),
    ("reads", [["<"], "q", "k"], "syntax"),
    ("reads", ["<", "q"], "syntax"),
    ("reads", ["<", "q", "k", 3], "syntax"),
    ("reads", ["<", "x", 3], "syntax"),
    ("reads", ["<", "q", 3.0], "syntax"),
    ("reads", ["<", "q", True], "syntax"),
    ("reads", ["<", ["*", "q", "k"], 3], "syntax"),
    ("reads", ["<", ["%", "q", "k"], 3], "syntax"),
    ("reads", ["<", ["%", "q", 0], 3], "bad-modulus"),
    ("reads", ["<", ["//", "q", -1], 3], "bad-divisor"),
    ("reads", ["<", "q", 2**63], "overflow"),
]


@pytest.mark.parametrize(("name", "value", "rule"), SPOILED_STATE)
def test_spoiled_state_is_refused(name: str, value: object, rule: str) -> None:
    """Each field of a state, one at a time."""
    program = plain()
    program["states"][0][name] = value

    with pytest.raises(RetentionError) as caught:
        read_program(json.dumps(program))

    assert caught.value.rule == rule


@pytest.mark.parametrize("name", ["kind", "name", "layers", "bytes_per_token_layer", "reads"])
def test_missing_field_is_named(name: str) -> None:
    """Nothing has a silent default."""
    program = plain()
    del program["states"][0][name]

    with pytest.raises(RetentionError, match=name):
        read_program(json.dumps(program))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "{",
        '{"schema": NaN}',
        '{"schema": 1, "schema": 1}',
        '{"page_tokens": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_other_json_is_refused(text: str) -> None:
    """Not JSON, not an object, a field twice, numbers without end."""
    with pytest.raises(RetentionError):
        read_program(text)


def test_a_field_given_twice_is_named() -> None:
    """Even with the same value."""
    text = write_program(EVERYTHING).replace('"page_tokens"', '"page_tokens": 16, "page_tokens"')

    with pytest.raises(RetentionError, match=r"given twice: field 'page_tokens'"):
        read_program(text)


def test_nesting_is_bounded() -> None:
    """Before the stack is."""
    term: Any = "q"
    relation: Any = True
    for _ in range(MAX_DEPTH + 2):
        term, relation = ["+", term, 1], ["and", relation, True]

    for read, value in ((read_term, term), (read_relation, relation)):
        with pytest.raises(RetentionError) as caught:
            read(value)
        assert caught.value.rule == "too-large"
