"""`chunk_keys`: a name for each whole chunk, the same in every process."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.identity import Digest, Namespace, digest
from policies.residency.keys import MAX_TOKEN_ID, chunk_keys, pack_tokens

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests/golden/chunk_keys.json").read_text())
HERE = digest("test.namespace")

tokens_lists = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=40)


def by_hand(namespace: bytes, tokens: list[int], tokens_per_chunk: int, extra: bytes) -> list[str]:
    """Compute keys from `hashlib` alone: this is how the golden vectors were made."""
    keys = []
    parent = namespace
    for start in range(0, len(tokens) - tokens_per_chunk + 1, tokens_per_chunk):
        chunk = b"".join(t.to_bytes(4, "little") for t in tokens[start : start + tokens_per_chunk])
        message = b""
        for part in (b"kvfabric.chunk.1", parent, chunk, b"" if start else extra):
            message += len(part).to_bytes(8, "little") + part
        parent = hashlib.blake2b(message, digest_size=16).digest()
        keys.append(parent.hex())
    return keys


def arguments(vector: dict[str, Any]) -> tuple[bytes, list[int], int, bytes]:
    """What a golden vector was computed from."""
    return (
        bytes.fromhex(vector["namespace"]),
        vector["tokens"],
        vector["tokens_per_chunk"],
        bytes.fromhex(vector["extra"]),
    )


@pytest.mark.parametrize("vector", GOLDEN["vectors"], ids=lambda vector: vector["name"])
def test_golden_vectors_hold(vector: dict[str, Any]) -> None:
    """Keys that are stored somewhere must mean the same for ever."""
    namespace, tokens, tokens_per_chunk, extra = arguments(vector)

    keys = chunk_keys(Digest(namespace), tokens, tokens_per_chunk=tokens_per_chunk, extra=extra)

    assert [key.hex() for key in keys] == vector["keys"]
    assert by_hand(namespace, tokens, tokens_per_chunk, extra) == vector["keys"]


def test_keys_do_not_depend_on_the_process() -> None:
    """A fresh interpreter with another hash seed names every golden chunk alike."""
    program = (
        "import json, sys\n"
        "from policies.residency.keys import chunk_keys\n"
        "for v in json.load(sys.stdin)['vectors']:\n"
        "    f = bytes.fromhex\n"
        "    keys = chunk_keys(f(v['namespace']), v['tokens'],\n"
        "        tokens_per_chunk=v['tokens_per_chunk'], extra=f(v['extra']))\n"
        "    assert [k.hex() for k in keys] == v['keys'], v['name']\n"
        "print(hash('seed'))\n"
    )
    seen = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(GOLDEN),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 2


@settings(deadline=None)
@given(tokens=tokens_lists, more=tokens_lists, size=st.integers(1, 7))
def test_longer_prompts_begin_with_the_keys_of_shorter_ones(
    tokens: list[int], more: list[int], size: int
) -> None:
    """A key depends on what is before it and in it, and on nothing after; tails have none."""
    short = chunk_keys(HERE, tokens, tokens_per_chunk=size)
    long = chunk_keys(HERE, tokens + more, tokens_per_chunk=size)

    assert len(short) == len(tokens) // size
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 9), min_size=6, max_size=6), at=st.integers(0, 5))
def test_a_token_changes_its_chunk_and_all_after(tokens: list[int], at: int) -> None:
    """Keys are chained: equal tokens after another beginning are another chunk."""
    changed = [*tokens]
    changed[at] += 1

    pairs = zip(
        chunk_keys(HERE, tokens, tokens_per_chunk=2),
        chunk_keys(HERE, changed, tokens_per_chunk=2),
        strict=True,
    )

    assert [a == b for a, b in pairs] == [chunk < at // 2 for chunk in range(3)]


def test_namespaces_and_extra_keys_part_every_chunk() -> None:
    """Tenants, adapters, chunk sizes and images never share a key (day-one item 9)."""
    plain = {"weights": "w", "dtype": "bfloat16", "geometry": "g"}
    namespaces = [
        Namespace(**plain).digest(),
        Namespace(**plain, adapter="x").digest(),
        Namespace(**plain, tenant_salt="x").digest(),
        Namespace(**{**plain, "dtype": "float16"}).digest(),
    ]
    chains = [chunk_keys(n, range(8), tokens_per_chunk=2) for n in namespaces]
    chains.append(chunk_keys(namespaces[0], range(8), tokens_per_chunk=2, extra=b"image"))
    chains.append(chunk_keys(namespaces[0], range(8), tokens_per_chunk=4))

    keys = [key for chain in chains for key in chain]

    assert len(set(keys)) == len(keys)


def test_extra_keys_enter_at_the_root_only() -> None:
    """They are hashed once, and reach later chunks through the chain."""
    with_extra = chunk_keys(HERE, [1, 2], tokens_per_chunk=1, extra=b"image")
    root = Digest(with_extra[0])

    assert with_extra[1] == chunk_keys(root, [2], tokens_per_chunk=1)[0]


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "7"])
@pytest.mark.parametrize("at", [0, 4], ids=["in a chunk", "in the tail"])
def test_what_is_no_u32_is_refused(token: object, at: int) -> None:
    """Nothing is wrapped or rounded, and the culprit is named; also behind the last chunk."""
    tokens: list[Any] = [1, 2, 3, 4, 5]
    tokens[at] = token

    with pytest.raises(ValueError, match=rf"0\.\.4294967295, got {token!r} at {at}"):
        chunk_keys(HERE, tokens, tokens_per_chunk=2)


def test_extremes_of_u32_are_taken_and_little_endian() -> None:
    """The byte order is the format's, not the machine's."""
    assert pack_tokens([0, MAX_TOKEN_ID, 258]) == bytes.fromhex("00000000 ffffffff 02010000")


def test_numpy_token_ids_are_token_ids() -> None:
    """Tokenizers give arrays; the keys are those of the plain list."""
    array = np.arange(6, dtype=np.int64)

    keys = chunk_keys(HERE, array, tokens_per_chunk=3)  # type: ignore[arg-type]

    assert keys == chunk_keys(HERE, list(range(6)), tokens_per_chunk=3)


def test_bad_arguments_are_refused() -> None:
    """A namespace is a digest, and a chunk holds something."""
    with pytest.raises(ValueError, match="must be 16 bytes, got 3"):
        chunk_keys(Digest(b"abc"), [1], tokens_per_chunk=1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        chunk_keys(HERE, [1], tokens_per_chunk=0)
