"""The stand-in for ``libcuda`` (`libcuda.c`), built, bound to the bindings, and commanded.

It is bound to `cuda.bindings` alone and not under the name ``libcuda.so.1``: other
libraries of the process (UCX) look for that name, and would take the stand-in for more
than it is.  Bindings are bound once in a process, so that a process which runs the
stand-in never reaches a device.
"""

from __future__ import annotations

import atexit
import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("libcuda.c")
DEVICE_NAME = "FAKE (memfd) no GPU"
KINDS = ("handles", "bytes", "maps", "reservations", "contexts", "events", "streams")


class FakeCuda:
    """Commands to the stand-in, and what it counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        self._lib.fake_calls.restype = ctypes.c_long
        self._lib.fake_live.restype = ctypes.c_long
        self._lib.fake_size.argtypes = [ctypes.c_size_t, ctypes.c_size_t]

    @property
    def handle(self) -> int:
        """What the system's loader knows it by."""
        return int(self._lib._handle)

    def size(self, granule_bytes: int, total_bytes: int = 1 << 30) -> None:
        """Set its granule and its memory."""
        self._lib.fake_size(granule_bytes, total_bytes)

    def fail(self, function: str, call: int, code: int) -> None:
        """Have call ``call`` from now on of ``function``, counted from 1, answer ``code``."""
        self._lib.fake_fail(function.encode(), call, code)

    def heal(self) -> None:
        """Forget the fault still to come, and the events held."""
        self._lib.fake_fail(b"", 0, 0)
        self._lib.fake_hold_events(0)

    @property
    def has_fault(self) -> bool:
        """Whether a fault is still to come."""
        return bool(self._lib.fake_has_fault())

    def hold_events(self, queries: int) -> None:
        """Have that many queries of events answer that they are not done."""
        self._lib.fake_hold_events(queries)

    def calls(self, function: str) -> int:
        """Calls of ``function`` so far."""
        return int(self._lib.fake_calls(function.encode()))

    def live(self) -> dict[str, int]:
        """What lives now, by kind."""
        return {kind: int(self._lib.fake_live(kind.encode())) for kind in KINDS}


def build() -> Path:
    """Compile the stand-in; a process does so once.

    Skips the test that asks where there is no compiler.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for libcuda cannot be built")
    folder = Path(tempfile.mkdtemp(prefix="kvfabric-fake-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "libcuda_fake.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(SOURCE), "-lpthread"]
    subprocess.run(command, check=True, capture_output=True)
    return path


def bind(path: Path) -> FakeCuda:
    """Have the bindings of this process use the stand-in, which must be their first library."""
    driver = import_module("cuda.bindings.driver")
    internal: Any = import_module("cuda.bindings._internal.driver")

    fake = FakeCuda(path)
    lookups: list[str] = []

    def find(name: str, *_: Any) -> SimpleNamespace:
        lookups.append(name)
        return SimpleNamespace(_handle_uint=fake.handle)

    real, internal.load_nvidia_dynamic_lib = internal.load_nvidia_dynamic_lib, find
    try:
        driver.cuInit(0)
    finally:
        internal.load_nvidia_dynamic_lib = real
    if not lookups:
        pytest.skip("the CUDA bindings of this process have a library already")
    _, device = driver.cuDeviceGet(0)
    _, name = driver.cuDeviceGetName(64, device)
    assert name.split(b"\0")[0].decode() == DEVICE_NAME
    return fake


@cache
def fake_cuda() -> FakeCuda:
    """The stand-in of this process, bound to the bindings."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    return bind(build())
