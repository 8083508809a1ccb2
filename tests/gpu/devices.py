"""Whether there is a device for these tests, and if not, why."""

from __future__ import annotations

import ctypes
from functools import cache

from actors.arena.driver_cuda import CudaVmmDriver
from codec.errors import BackendUnavailable
from tests.fakes.cuda_fake import fake_cuda

PROBE_BYTES = 64 << 20
"""A budget that is whole granules of any device."""


def why_no_device() -> str | None:
    """Why no test can run on a device in this process; None if they can."""
    if fake_cuda.cache_info().currsize:
        return "the stand-in for libcuda is bound in this process: run tests/gpu by itself"
    return _why_no_driver()


def has_library() -> bool:
    """Whether the machine has an NVIDIA driver, found out without binding to it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@cache
def _why_no_driver() -> str | None:
    try:
        make_driver(1).close()
    except BackendUnavailable as error:
        return str(error)
    return None


def make_driver(capacity_granules: int) -> CudaVmmDriver:
    """A driver of the first device, with a budget in granules of its own."""
    return CudaVmmDriver(0, capacity_bytes=capacity_granules * _granule_bytes())


@cache
def _granule_bytes() -> int:
    probe = CudaVmmDriver(0, capacity_bytes=PROBE_BYTES)
    granule_bytes = probe.caps().granule_min_bytes
    probe.close()
    return granule_bytes
