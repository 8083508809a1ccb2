"""Digests are the same everywhere, and no two things share one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.geometry import Stage
from codec.identity import ChunkKey, ComponentKey, Namespace, digest

NAMESPACE = Namespace(weights="0123abcd", dtype="bfloat16", geometry="l0-30.h0-3/64")

#: The first was checked with coreutils: ``b2sum -l 128`` over lengths and parts.
GOLDEN = {
    "673c5020bea58705f4a5d4b9977b6451": digest("kvfabric.namespace.1", b"ab", b"c"),
    "7c8c62da16ab5104dc218dff4ebde524": digest("d"),
    "db0e9ef6eda2afdbce2c42fecfedc790": digest("d", b""),
    "5cc8d92d48a5924b86a33dfaf1c4150e": NAMESPACE.digest(),
    "5879d53754204c4d2c2247f4aa81b74c": replace(
        NAMESPACE, adapter="sql@2", tenant_salt="\u00fc"
    ).digest(),
}

parts = st.lists(st.binary(max_size=6), max_size=4)
namespaces = st.builds(
    Namespace, **{field.name: st.text("ab=.\u00fc", max_size=3) for field in fields(Namespace)}
)


@pytest.mark.parametrize("golden", GOLDEN)
def test_digest_is_what_it_was_when_blobs_were_written(golden: str) -> None:
    """A change of these bytes would lose every stored component."""
    assert GOLDEN[golden].hex() == golden


@given(st.text(max_size=3), parts, st.text(max_size=3), parts)
def test_other_parts_have_another_digest(
    domain_a: str, parts_a: list[bytes], domain_b: str, parts_b: list[bytes]
) -> None:
    """Neither moving bytes between neighbors nor moving them into the domain collides."""
    same = (domain_a, parts_a) == (domain_b, parts_b)

    assert (digest(domain_a, *parts_a) == digest(domain_b, *parts_b)) == same


@given(st.binary(max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_where_parts_are_cut_matters(data: bytes, cut_a: int, cut_b: int) -> None:
    """The same bytes in other parts are another list."""
    cut_a, cut_b = min(cut_a, len(data)), min(cut_b, len(data))
    a, b = (digest("d", data[:cut], data[cut:]) for cut in (cut_a, cut_b))

    assert (a == b) == (cut_a == cut_b)
    assert digest("d", data) not in {a, b}


@given(namespaces, namespaces)
def test_namespaces_that_differ_have_other_digests(a: Namespace, b: Namespace) -> None:
    """KV of one adapter, tenant or dtype is never found under another's."""
    assert (a.digest() == b.digest()) == (a == b)


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_of_a_namespace_counts(field: str) -> None:
    """A field that was left out of the digest would mix what it tells apart."""
    changed = replace(NAMESPACE, **{field: "other"})

    assert changed.digest() != NAMESPACE.digest()


def test_a_fresh_process_finds_the_same_digests() -> None:
    """Python's own hash is seeded per process and must not leak into names."""
    program = (
        "from tests.codec.test_identity import GOLDEN\n"
        "print(hash('kvfabric'), *(d.hex() for d in GOLDEN.values()))"
    )
    root = str(Path(__file__).parents[2])
    seeds = ("1", "2")

    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": root},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in seeds
    ]

    assert runs[0][0] != runs[1][0]
    assert runs[0][1:] == runs[1][1:] == list(GOLDEN)


def test_a_component_is_named_by_chunk_stage_and_class() -> None:
    """The name shows all three, so that two workers' shares of a chunk differ in it."""
    key = ChunkKey(bytes(15) + b"\x01")

    assert str(ComponentKey(key, Stage(0, 2, 1, 3))) == f"{'00' * 15}01/l0-2.h1-3/unbounded"
    assert ComponentKey(key, Stage(0, 2, 0, 1)) != ComponentKey(key, Stage(0, 2, 1, 2))
