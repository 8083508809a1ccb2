"""The plan digest: stable, and moved by every field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from policies.retention.digest import canonical_fields, plan_digest
from policies.retention.plan import compile_program
from policies.retention.program import (
    AttentionState,
    CrossState,
    HeadRange,
    KvShape,
    Program,
    Reader,
    RecurrentState,
)
from policies.retention.serial import read_program, write_program
from tests.policies.retention.samples import rel

SHAPE = KvShape(num_kv_heads=2, key_dim=4, value_dim=4, dtype="bfloat16")
STATE = AttentionState(
    name="a",
    layers=(0, 2),
    reads=rel("q - k < 64 or k < 16"),
    bytes_per_token_layer=32,
    heads=HeadRange(0, 2),
    shape=SHAPE,
    readers=(Reader(3, rel("q - k < 8")),),
)
SSM = RecurrentState(name="r", layers=(1,), bytes_per_layer=64)
ENC = CrossState(name="c", layers=(0,), bytes_per_token_layer=8, source_tokens=20)
PROGRAM = Program(page_tokens=16, states=(STATE, SSM, ENC))
GOLDEN = "2c22e75c781eb8fa25c6b013973a1338"


def digest_of(*states: Any, page_tokens: int = 16, step_tokens: int = 1) -> str:
    """Digest of a program of these states."""
    program = Program(page_tokens=page_tokens, states=states)
    return plan_digest(compile_program(program, step_tokens=step_tokens)).hex()


def test_digest_is_the_same_everywhere() -> None:
    """A golden value: another process, machine or Python must agree."""
    assert digest_of(*PROGRAM.states) == GOLDEN


def test_digest_survives_serialization() -> None:
    """The JSON form is the program."""
    again = read_program(write_program(PROGRAM))

    assert plan_digest(compile_program(again)) == plan_digest(compile_program(PROGRAM))


CHANGES: list[tuple[str, Any]] = [
    ("relation text", replace(STATE, reads=rel("q - k <= 63 or k < 16"))),
    ("sink", replace(STATE, reads=rel("q - k < 64 or k < 15"))),
    ("name", replace(STATE, name="b")),
    ("layers", replace(STATE, layers=(0, 1))),
    ("width", replace(STATE, bytes_per_token_layer=64, shape=None)),
    ("no shape", replace(STATE, shape=None)),
    ("dtype", replace(STATE, shape=replace(SHAPE, dtype="float16"))),
    ("widths swapped", replace(STATE, shape=replace(SHAPE, key_dim=6, value_dim=2))),
    ("heads", replace(STATE, heads=HeadRange(1, 3))),
    ("no heads", replace(STATE, heads=None)),
    ("reader's layer", replace(STATE, readers=(Reader(4, rel("q - k < 8")),))),
    ("reader's relation", replace(STATE, readers=(Reader(3, rel("q - k < 9")),))),
    ("no reader", replace(STATE, readers=())),
]


@pytest.mark.parametrize("changed", [c[1] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_every_field_of_a_state_is_covered(changed: AttentionState) -> None:
    """Also those that compile to the same classes."""
    assert digest_of(changed, SSM, ENC) != digest_of(STATE, SSM, ENC)


@pytest.mark.parametrize(
    "changed",
    [
        (STATE, replace(SSM, bytes_per_layer=65), ENC),
        (STATE, SSM, replace(ENC, source_tokens=21)),
        (STATE, SSM, replace(ENC, bytes_per_token_layer=9)),
        (STATE, SSM),
        (SSM, STATE, ENC),
    ],
)
def test_the_other_states_are_covered(changed: tuple[Any, ...]) -> None:
    """And their order."""
    assert digest_of(*changed) != digest_of(STATE, SSM, ENC)


def test_page_and_step_are_covered() -> None:
    """They change the addresses."""
    found = {
        digest_of(STATE),
        digest_of(STATE, page_tokens=8),
        digest_of(STATE, step_tokens=2),
        digest_of(STATE, step_tokens=3),
    }

    assert len(found) == 4


def test_a_name_cannot_pass_for_other_fields() -> None:
    """Fields are length-prefixed, so text in a name stays a name."""
    sly = replace(STATE, name="a\nlayers=0,2")

    fields = list(canonical_fields(compile_program(Program(page_tokens=16, states=(sly,)))))
    assert "name=a\nlayers=0,2" in fields
    assert digest_of(sly) != digest_of(STATE)
