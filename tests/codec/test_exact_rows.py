"""Exact rows: bit for bit there and back, and lists of rows that no writer makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.blob import Blob, Section
from codec.codec import TORCH_DTYPES
from codec.errors import CorruptBlobError
from codec.exact_rows import (
    SECTIONS,
    checked_rows,
    exact_sections,
    exact_values,
    read_exact_rows,
    to_dtype,
)
from tests.codec.samples import a_header


def blob_of(sections: list[Section], dtype: str = "float32") -> Blob:
    """A blob of 5 tokens, 2 layers, 3 heads with these sections."""
    return Blob(a_header(dtype=dtype), {section.name: section for section in sections})


def some_rows(dtype: str = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the sample header's shape."""
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(5, 2, 3, dim, generator=draw) for dim in (8, 6))
    return keys.to(TORCH_DTYPES[dtype]), values.to(TORCH_DTYPES[dtype])


@given(st.lists(st.booleans(), min_size=5, max_size=5), st.sampled_from(list(TORCH_DTYPES)))
def test_rows_come_back_bit_for_bit(chosen: list[bool], dtype: str) -> None:
    """Any choice of rows, any dtype, any layers."""
    is_exact = torch.tensor(chosen)
    keys, values = some_rows(dtype)

    blob = blob_of(list(exact_sections(is_exact, keys, values)), dtype)

    assert torch.equal(read_exact_rows(blob), is_exact)
    assert list(blob.sections) == (list(SECTIONS) if any(chosen) else [])
    for kind, array in (("k", keys), ("v", values)):
        for layers in (range(2), range(1), range(1, 2)):
            found = exact_values(blob, kind, sum(chosen), layers)
            assert torch.equal(found, array[is_exact][:, layers.start : layers.stop])


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\0" * 8, np.array([1, 0], "<u4"), np.array([5], "<u4"), b"\xff" * 4],
    ids=["empty", "half", "twice", "falling", "outside", "huge"],
)
def test_row_numbers_that_no_writer_makes_are_refused(data: object) -> None:
    """Rows rise and lie within the chunk."""
    stored = bytes(data)  # type: ignore[call-overload]

    with pytest.raises(CorruptBlobError, match=r"exact\.rows"):
        read_exact_rows(blob_of([Section("exact.rows", stored, len(stored))]))


@pytest.mark.parametrize("num_bytes", [0, 191, 193, 384])
def test_rows_of_another_size_are_refused(num_bytes: int) -> None:
    """One float32 row of keys has 2 * 3 * 8 * 4 bytes."""
    blob = blob_of([Section("k.exact", bytes(num_bytes), num_bytes)])

    with pytest.raises(CorruptBlobError, match=rf"k\.exact: need 192 bytes, got {num_bytes}"):
        exact_values(blob, "k", 1, range(2))


def test_missing_rows_are_refused() -> None:
    """If the list says that there are some."""
    with pytest.raises(CorruptBlobError, match=r"v\.exact: is missing"):
        exact_values(blob_of([]), "v", 1, range(2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_are_refused(bad: float) -> None:
    """Such a cache must not be kept."""
    keys, _ = some_rows()
    keys[4, 1, 2, 7] = bad

    with pytest.raises(ValueError, match="keys must be finite"):
        checked_rows("keys", keys, a_header(dtype="float32"), 8)


def test_rows_must_be_as_the_header_says() -> None:
    """Shape and dtype both."""
    keys, _ = some_rows()

    assert torch.equal(checked_rows("keys", keys, a_header(dtype="float32"), 8), keys)
    with pytest.raises(ValueError, match="keys must have shape"):
        checked_rows("keys", keys, a_header(dtype="float32"), 6)
    with pytest.raises(ValueError, match="keys must be bfloat16"):
        checked_rows("keys", keys, a_header(), 8)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
def test_coded_rows_stay_within_the_dtype(dtype: torch.dtype) -> None:
    """What is a little over the limit does not become infinite."""
    limit = torch.finfo(dtype).max

    found = to_dtype(torch.tensor([3e38, -3e38, 1.0, limit]), dtype)

    assert torch.isfinite(found).all()
    assert found[2] == 1
    assert float(found[3]) == limit
