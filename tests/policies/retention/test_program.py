"""Programs: what exists is consistent."""

from __future__ import annotations

from typing import Any

import pytest

from codec.errors import RetentionError
from policies.retention.program import (
    MAX_COUNT,
    AttentionState,
    CrossState,
    HeadRange,
    KvShape,
    Program,
    Reader,
    RecurrentState,
    State,
)
from tests.policies.retention.samples import rel


def attention(name: str = "s", *layers: int, **fields: Any) -> AttentionState:
    """A state that differs from a plain one in ``fields``."""
    plain = {"reads": rel("q - k < 8"), "bytes_per_token_layer": 128}
    return AttentionState(name=name, layers=layers or (0,), **{**plain, **fields})


def refused(*states: State, page_tokens: int = 16) -> str:
    """The rule by which a program of these states is refused."""
    with pytest.raises(RetentionError) as caught:
        Program(page_tokens=page_tokens, states=states)
    return caught.value.rule


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"name": ""}, "empty-name"),
        ({"layers": ()}, "empty-layers"),
        ({"layers": (1, 1)}, "bad-layers"),
        ({"layers": (2, 1)}, "bad-layers"),
        ({"layers": (-1,)}, "bad-layers"),
        ({"layers": (True,)}, "bad-layers"),
        ({"bytes_per_token_layer": 0}, "zero-bytes"),
        ({"bytes_per_token_layer": 1.5}, "zero-bytes"),
        ({"bytes_per_token_layer": MAX_COUNT + 1}, "zero-bytes"),
    ],
)
def test_impossible_states_cannot_be_built(fields: dict[str, Any], rule: str) -> None:
    """One field at a time."""
    plain = {"name": "s", "layers": (0,), "reads": rel("true"), "bytes_per_token_layer": 8}

    with pytest.raises(RetentionError) as caught:
        AttentionState(**{**plain, **fields})

    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("build", "rule"),
    [
        (lambda: RecurrentState(name="r", layers=(0,), bytes_per_layer=0), "zero-bytes"),
        (lambda: RecurrentState(name="", layers=(0,), bytes_per_layer=4), "empty-name"),
        (
            lambda: CrossState(name="c", layers=(0,), bytes_per_token_layer=4, source_tokens=0),
            "zero-bytes",
        ),
        (lambda: HeadRange(3, 3), "empty-head-range"),
        (lambda: HeadRange(-1, 3), "empty-head-range"),
        (lambda: HeadRange(0, 1.0), "not-an-integer"),
        (lambda: Reader(-1, rel("true")), "bad-layers"),
        (lambda: KvShape(num_kv_heads=0, key_dim=1, value_dim=1, dtype="int8"), "zero-bytes"),
        (lambda: KvShape(num_kv_heads=1, key_dim=1, value_dim=1, dtype="int4"), "unknown-dtype"),
    ],
)
def test_impossible_parts_cannot_be_built(build: Any, rule: str) -> None:
    """States of the other kinds, and what states are made of."""
    with pytest.raises(RetentionError) as caught:
        build()

    assert caught.value.rule == rule


def test_widths_of_keys_and_values_may_differ() -> None:
    """As in latent attention: 512 for the latent, 64 for the rotary part."""
    shape = KvShape(num_kv_heads=1, key_dim=512, value_dim=64, dtype="bfloat16")

    assert shape.bytes_per_token_layer == 1152


def test_bytes_and_shape_must_agree() -> None:
    """Two sources of one number."""
    shape = KvShape(num_kv_heads=2, key_dim=16, value_dim=16, dtype="bfloat16")

    assert attention(shape=shape, heads=HeadRange(4, 6)).shape == shape
    for fields in ({"bytes_per_token_layer": 64}, {"heads": HeadRange(0, 3)}):
        with pytest.raises(RetentionError) as caught:
            attention(shape=shape, **fields)
        assert caught.value.rule == "bad-shape"


def test_program_needs_states_with_names_of_their_own() -> None:
    """And a page size."""
    assert refused() == "empty-plan"
    assert refused(attention("a", 0), attention("a", 1)) == "duplicate-class"
    assert refused(attention(), page_tokens=0) == "bad-page"


def test_a_layer_has_one_owner() -> None:
    """Of its keys; ranged and unranged states do not mix."""
    assert refused(attention("a", 0), attention("b", 0)) == "layer-overlap"
    ranged = attention("b", 0, heads=HeadRange(0, 2))
    assert refused(attention("a", 0), ranged) == "layer-overlap"


def test_heads_have_one_owner() -> None:
    """Disjoint ranges share a layer."""
    first = attention("a", 0, heads=HeadRange(0, 8))
    Program(page_tokens=16, states=(first, attention("b", 0, heads=HeadRange(8, 12))))

    assert refused(first, attention("b", 0, heads=HeadRange(4, 12))) == "head-overlap"


def test_kinds_of_state_share_layers() -> None:
    """A hybrid layer has keys and a recurrent state, a decoder layer keys and the encoder's."""
    program = Program(
        page_tokens=16,
        states=(
            attention("a", 0, 1),
            RecurrentState(name="r", layers=(0, 1), bytes_per_layer=64),
            CrossState(name="c", layers=(1,), bytes_per_token_layer=8, source_tokens=9),
        ),
    )

    assert program.num_layers == 2
    assert [state.name for state in program.attention] == ["a"]
    twice = RecurrentState(name="r2", layers=(1,), bytes_per_layer=64)
    assert refused(*program.states, twice) == "layer-overlap"


def test_a_reader_keeps_what_it_reads() -> None:
    """A layer that shares another's keys may read further back than their owner."""
    state = attention("a", 0, readers=(Reader(1, rel("true")), Reader(2, rel("q - k < 8"))))
    program = Program(page_tokens=16, states=(state,))

    assert str(state.all_reads) == "q - k < 8 or true"
    assert program.num_layers == 3
    assert refused(state, attention("b", 2)) == "layer-overlap"
