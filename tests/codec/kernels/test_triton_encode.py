"""Encoding kernels under the interpreter; `tests/gpu` runs the same on a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.codec.kernels.interpreter import interpreting, why_not_interpreted
from tests.suites.fused_encode_suite import FusedEncodeSuite

if WHY_NOT := why_not_interpreted("triton_encode"):
    pytest.skip(WHY_NOT, allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Kernels run on host arrays."""
    with interpreting():
        yield


class TestInterpretedEncode(FusedEncodeSuite):
    """The contract."""

    device = "cpu"
