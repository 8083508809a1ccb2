"""For tests of blobs: one plain sample, strategies for any, a measure of memory."""

from __future__ import annotations

import string
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import strategies as st

from codec.blob import BlobHeader, Section, pack_blob
from codec.geometry import Stage
from codec.header import MAX_EXTENT, MAX_POSITION, MAX_TOKENS
from codec.identity import ChunkKey, ComponentKey

#: What section names and retention classes are made of.
NAME_CHARS = string.ascii_letters + string.digits + string.punctuation

names = st.text(NAME_CHARS, min_size=1, max_size=64)
digests = st.binary(min_size=16, max_size=16)
tokens = st.integers(0, 2**32 - 1)
#: Two layers of three heads, neither of which starts a model.
STAGE = Stage(2, 4, 0, 3)


def a_header(*, stage: Stage = STAGE, **changes: Any) -> BlobHeader:
    """A legal header of ``stage``: 5 tokens unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "namespace": bytes(range(16)),
        "codec": bytes(range(16, 32)),
        "component": ComponentKey(ChunkKey(bytes(range(32, 48))), stage),
        "start_position": 256,
        "num_tokens": 5,
        "first_token": 7,
        "last_token": 2**32 - 1,
        "dtype": "bfloat16",
        "num_layers": stage.num_layers,
        "num_heads": stage.num_heads,
        "key_head_dim": 8,
        "value_head_dim": 6,
    }
    return BlobHeader(**{**fields, **changes})


def some_sections() -> list[Section]:
    """Three sections, one of them empty."""
    return [
        Section("k0", b"\x00\x01\x02" * 5, 15),
        Section("empty", b"", 0),
        Section("v0", bytes(range(200, 240)), 80),
    ]


def a_blob() -> bytes:
    """A small blob with all that a blob can have."""
    return pack_blob(a_header(), some_sections())


@st.composite
def stages(draw: st.DrawFn, most: int = MAX_EXTENT) -> Stage:
    """Any legal stage of a model with at most ``most`` layers and heads."""
    ranges = st.lists(st.integers(0, most), min_size=2, max_size=2, unique=True).map(sorted)
    return Stage(*draw(ranges), *draw(ranges))


@st.composite
def headers(draw: st.DrawFn) -> BlobHeader:
    """Any legal header."""
    stage = draw(stages())
    num_tokens = draw(st.integers(1, MAX_TOKENS))
    first_token = draw(tokens)
    return BlobHeader(
        namespace=draw(digests),
        codec=draw(digests),
        component=ComponentKey(ChunkKey(draw(digests)), stage, draw(names)),
        start_position=draw(st.integers(0, MAX_POSITION - num_tokens)),
        num_tokens=num_tokens,
        first_token=first_token,
        last_token=first_token if num_tokens == 1 else draw(tokens),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        num_layers=stage.num_layers,
        num_heads=stage.num_heads,
        key_head_dim=draw(st.integers(1, MAX_EXTENT)),
        value_head_dim=draw(st.integers(1, MAX_EXTENT)),
    )


#: Up to five sections with names of their own, none of which decodes to much.
section_lists = st.lists(
    st.builds(Section, names, st.binary(max_size=64), st.integers(0, 4096)),
    max_size=5,
    unique_by=lambda section: section.name,
)


class Peak:
    """What `peak_bytes` measured; it has no value before its block has ended."""

    num_bytes: int


@contextmanager
def peak_bytes() -> Iterator[Peak]:
    """Measure the most bytes that the block allocated at once, even if it raises."""
    peak = Peak()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield peak
    finally:
        peak.num_bytes = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
