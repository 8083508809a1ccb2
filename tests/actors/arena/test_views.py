"""Typed views share the memory, and the viewer knows how long they live."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from actors.arena.driver_host import HostVmmDriver
from actors.arena.syscalls import PAGE_BYTES
from actors.arena.views import Viewer, keys_values
from codec.errors import VmmBusy, VmmNotReserved
from policies.retention.program import ELEMENT_BYTES, KvShape


class Owner:
    """Something that must be kept alive."""


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
def test_every_data_type_is_seen_where_it_lies(dtype: str) -> None:
    """Keys first, then values, the second layer behind the first; the rest is padding."""
    shape = KvShape(num_kv_heads=2, key_dim=3, value_dim=5, dtype=dtype)
    width = shape.bytes_per_token_layer
    rows = torch.zeros(4, 2 * width + 8, dtype=torch.uint8)
    keys, values = keys_values(rows, shape, width)

    keys[1] = 1
    values[3, 1, 4] = 1

    assert (keys.shape, values.shape) == ((4, 2, 3), (4, 2, 5))
    assert keys.dtype == values.dtype == getattr(torch, dtype)
    size = ELEMENT_BYTES[dtype]
    one = torch.ones(1, dtype=keys.dtype).view(torch.uint8)
    assert torch.equal(rows[1, width : width + 6 * size], one.repeat(6))
    assert torch.equal(rows[3, 2 * width - size : 2 * width], one)
    rows[1, width : width + 6 * size] = 0
    rows[3, 2 * width - size : 2 * width] = 0
    assert not rows.any()


@pytest.mark.parametrize("at", [-24, 2, 12, 24])
def test_a_layer_lies_within_its_row(at: int) -> None:
    """On whole elements; the strides would reach into the next row otherwise."""
    shape = KvShape(num_kv_heads=2, key_dim=1, value_dim=2, dtype="float32")
    rows = torch.zeros(4, 32, dtype=torch.uint8)
    assert len(keys_values(rows[1:3], shape, 8)) == 2
    with pytest.raises(ValueError, match="not a layer's"):
        keys_values(rows, shape, at)


def test_views_of_some_rows_begin_there() -> None:
    """Where the rows themselves are a part of others."""
    shape = KvShape(num_kv_heads=1, key_dim=2, value_dim=2, dtype="int8")
    rows = torch.arange(40, dtype=torch.uint8).view(5, 8)

    keys, values = keys_values(rows[2:4], shape, 4)

    assert keys.flatten().tolist() == [20, 21, 28, 29]
    assert values.flatten().tolist() == [22, 23, 30, 31]


def test_whatever_is_left_of_a_tensor_keeps_its_owner() -> None:
    """And is counted, whichever part it is; the driver cannot be closed before."""
    driver = HostVmmDriver(PAGE_BYTES, PAGE_BYTES)
    va = driver.reserve(PAGE_BYTES)
    viewer = Viewer(driver)
    owner = Owner()
    alive = weakref.ref(owner)
    part = viewer.rows(va, 4, 16, owner)[1:2].view(torch.float32)
    other = viewer.rows(va, 1, 64, None)
    del owner
    gc.collect()

    assert alive() is not None
    assert viewer.num_views == 2
    with pytest.raises(VmmBusy):
        driver.close()
    del part
    assert alive() is None
    assert viewer.num_views == 1
    del other
    assert viewer.num_views == 0
    driver.close()


def test_a_refused_tensor_is_not_counted() -> None:
    """Nobody has it."""
    driver = HostVmmDriver(PAGE_BYTES, PAGE_BYTES)
    viewer = Viewer(driver)
    with pytest.raises(VmmNotReserved):
        viewer.rows(PAGE_BYTES, 1, 16, None)
    assert viewer.num_views == 0
    driver.close()
