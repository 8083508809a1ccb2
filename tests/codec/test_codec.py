"""`check_identity` and the slices of a decode: what was asked for, or a typed refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from codec.blob import DTYPE_BYTES
from codec.codec import (
    TORCH_DTYPES,
    check_identity,
    geometry_of,
    heads_within,
    layers_within,
    tokens_within,
)
from codec.errors import IdentityMismatchError
from codec.geometry import KVGeometry, Stage
from codec.identity import ChunkKey, CodecId
from tests.codec.samples import STAGE, a_header

CODEC = CodecId(bytes(range(16, 32)))
GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=3, key_head_dim=8, value_head_dim=6)
#: All that the sample header is, as `check_identity` takes it.
ALL: dict[str, Any] = {
    "codec_id": CODEC,
    "namespace": bytes(range(16)),
    "stage": STAGE,
    "geometry": GEOMETRY,
    "chunk_key": ChunkKey(bytes(range(32, 48))),
    "retention_class": "unbounded",
    "start_position": 256,
    "num_tokens": 5,
    "first_token": 7,
    "last_token": 2**32 - 1,
    "dtype": "bfloat16",
}
#: For each, something else, which for numbers is the value most easily taken for "any".
OTHERS: dict[str, Any] = {
    "codec_id": CodecId(bytes(16)),
    "namespace": bytes(16),
    "stage": Stage(0, 2, 0, 3),
    "geometry": replace(GEOMETRY, value_head_dim=8),
    "chunk_key": ChunkKey(bytes(16)),
    "retention_class": "",
    "start_position": 0,
    "num_tokens": 0,
    "first_token": 0,
    "last_token": 0,
    "dtype": "float16",
}


def test_the_blob_asked_for_is_accepted() -> None:
    """With everything asked for, and with nothing but the codec."""
    check_identity(a_header(), **ALL)
    check_identity(a_header(), codec_id=CODEC)


@pytest.mark.parametrize("field", ALL)
def test_another_blob_is_refused_by_the_field_that_differs(field: str) -> None:
    """The error carries what a log needs: which field, what was wanted, what was found."""
    with pytest.raises(IdentityMismatchError) as caught:
        check_identity(a_header(), **{**ALL, field: OTHERS[field]})

    def text(value: object) -> str:
        return value.hex() if isinstance(value, bytes) else str(value)

    assert caught.value.field == field.removesuffix("_id")
    assert caught.value.wanted == text(OTHERS[field])
    assert caught.value.found == text(ALL[field])


def test_every_part_of_a_geometry_is_compared() -> None:
    """Tensors of another shape never come out under a matching identity."""
    assert geometry_of(a_header()) == GEOMETRY


def test_every_dtype_of_a_blob_is_one_of_torch() -> None:
    """The two tables name the same types, of the same sizes."""
    sizes = {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}

    assert sizes == DTYPE_BYTES
    assert all(dtype == getattr(torch, name) for name, dtype in TORCH_DTYPES.items())


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, range(2, 4)),
        (range(2, 4), range(2, 4)),
        (range(2, 3), range(2, 3)),
        (range(3, 4), range(3, 4)),
    ],
)
def test_layers_are_numbered_as_in_the_model(asked: range | None, given: range) -> None:
    """A worker names its own layers, whatever stage wrote the blob."""
    assert layers_within(STAGE, asked) == given


@pytest.mark.parametrize(
    "layers", [range(0), range(2, 2), range(1, 3), range(3, 5), range(2, 4, 2), range(3, 1, -1)]
)
def test_layers_outside_the_stage_are_refused(layers: range) -> None:
    """An empty or stepped slice is a mistake as well."""
    with pytest.raises(ValueError, match=r"need consecutive layers of stage l2-4\.h0-3"):
        layers_within(STAGE, layers)


def test_tokens_are_counted_from_the_chunks_first() -> None:
    """All by default, and any shorter run but none."""
    assert [tokens_within(a_header(), n) for n in (None, 1, 5)] == [5, 1, 5]


@pytest.mark.parametrize("num_tokens", [0, -1, 6])
def test_tokens_outside_the_chunk_are_refused(num_tokens: int) -> None:
    """A short answer would be taken for the whole."""
    with pytest.raises(ValueError, match=rf"need 1\.\.5 tokens, got {num_tokens}"):
        tokens_within(a_header(), num_tokens)


#: Heads 3 to 6 of a model.
HEADS = Stage(2, 4, 3, 6)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, range(3, 6)),
        (range(3, 6), range(3, 6)),
        (range(3, 4), range(3, 4)),
        (range(5, 6), range(5, 6)),
        (range(4, 6), range(4, 6)),
    ],
)
def test_heads_are_numbered_as_in_the_model(asked: range | None, given: range) -> None:
    """As layers are."""
    assert heads_within(HEADS, asked) == given


@pytest.mark.parametrize(
    "heads", [range(0), range(3, 3), range(2, 4), range(5, 7), range(3, 6, 2), range(5, 3, -1)]
)
def test_heads_outside_the_stage_are_refused(heads: range) -> None:
    """An empty or stepped slice is a mistake as well."""
    with pytest.raises(ValueError, match=r"need consecutive heads of stage l2-4\.h3-6"):
        heads_within(HEADS, heads)
