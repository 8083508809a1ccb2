"""`flat` and `flat_target`: what UCX does not check, checked."""

from __future__ import annotations

import numpy as np
import pytest

from actors.transport.ports import flat, flat_target


def test_a_view_of_anything_contiguous_becomes_bytes() -> None:
    """Without a copy: what is written through it is seen."""
    array = np.zeros((2, 3), dtype=np.uint16)

    view = flat_target(memoryview(array), 12)
    view[:] = bytes(range(12))

    assert view.nbytes == view.shape[0] == 12
    assert array.tobytes() == bytes(range(12))


def test_an_empty_view_stays_empty() -> None:
    """Python itself refuses to cast one of two dimensions."""
    assert flat(memoryview(np.zeros((0, 3)))).nbytes == 0


def test_a_strided_view_is_refused() -> None:
    """Its bytes are not in a row."""
    with pytest.raises(ValueError, match="contiguous"):
        flat(memoryview(bytes(8))[::2])
    with pytest.raises(ValueError, match="contiguous"):
        flat_target(memoryview(bytearray(8))[::2], 4)


def test_a_target_must_be_writable_and_of_the_right_size() -> None:
    """A short one would be truncated, a long one left half old."""
    with pytest.raises(ValueError, match="read-only"):
        flat_target(memoryview(bytes(8)), 8)
    for num_bytes in (7, 9):
        with pytest.raises(ValueError, match="got 8"):
            flat_target(memoryview(bytearray(8)), num_bytes)
