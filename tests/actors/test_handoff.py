"""Arrays that cross processes: every dtype bit for bit, and nothing shared afterwards."""

from __future__ import annotations

import pickle

import pytest
import torch

from actors.handoff import KvArrays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Also where they were not contiguous, and after a pickle as Ray makes it."""
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 5, 3, 4, generator=draw).to(dtype).transpose(0, 1)
    values = torch.randn(5, 2, 3, 6, generator=draw).to(dtype)

    again = pickle.loads(pickle.dumps(KvArrays.of(keys, values))).tensors()

    assert torch.equal(again[0], keys)
    assert torch.equal(again[1], values)


def test_tensors_are_the_receivers_own() -> None:
    """What Ray hands over is read-only, and others may read it too."""
    keys = torch.zeros(1, 1, 1, 2)
    arrays = KvArrays.of(keys, keys)

    arrays.tensors()[0].fill_(1)

    assert arrays.keys_TLHB.sum() == 0


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.int8, torch.int8)])
def test_other_dtypes_are_refused(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """One dtype for both, and one that blobs know."""
    keys, values = (torch.zeros(1, 1, 1, 2, dtype=dtype) for dtype in dtypes)

    with pytest.raises(ValueError, match="need one dtype"):
        KvArrays.of(keys, values)
