"""The measurement of kernels: what can be checked without a device."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.codec_throughput import GEOMETRIES, NO_DEVICE, Limits, floor_s, main, plan_of


def test_the_floor_is_the_greater_of_both() -> None:
    """Bytes of rows, directions and codes; two operations per product."""
    sizes = {"num_tokens": 4, "width": 8, "num_coefficients": 2}
    sizes |= {"direction_bytes": 4, "code_bytes": 4}

    assert floor_s(**sizes, limits=Limits(1.0, 1e9)) == 2 * 4 * 8 + 4 * 8 * 2 + 4
    assert floor_s(**sizes, limits=Limits(1e9, 1.0)) == 2 * 4 * 8 * 2


def test_geometries_are_those_of_the_models() -> None:
    """Keys of a token, in 16-bit elements."""
    assert [g.width for g in GEOMETRIES] == [32768, 40960, 12288]


def test_plans_code_every_coefficient() -> None:
    """With a last block that may be smaller."""
    plan = plan_of(130)

    assert [(b.start, b.size) for b in plan.blocks] == [(0, 64), (64, 64), (128, 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """And fails, so that no script takes silence for a measurement."""
    assert main([]) == 1
    assert NO_DEVICE in capsys.readouterr().err
