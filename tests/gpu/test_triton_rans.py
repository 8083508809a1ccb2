"""The kernels of `codec.kernels.triton_rans` on a device: the suite of all such coders.

Kernels that another test has loaded for the interpreter reach no device: run
``pytest tests/gpu``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from codec.entropy.models import SymbolModels
from codec.entropy.rans import encode_symbols
from codec.errors import CorruptBlobError
from tests.codec.test_rans import StreamsSuite, Symbols, make_case
from tests.gpu.devices import has_library

pytestmark = pytest.mark.gpu
if not has_library():
    # In one line for all of them.
    pytest.skip("no NVIDIA driver here: nothing was tested on a device", allow_module_level=True)
if not torch.cuda.is_available():
    pytest.skip(f"torch {torch.__version__} reaches no CUDA device", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

KERNELS: Any = importlib.import_module("codec.kernels.triton_rans")
if type(KERNELS._decode_kernel).__name__ != "JITFunction":
    pytest.skip("kernels are loaded for the interpreter: run tests/gpu", allow_module_level=True)

DEVICE = torch.device("cuda")


class TestDevice(StreamsSuite):
    """The same streams, and the same refusals, as on processors."""

    def encode(
        self,
        symbols: Sequence[Symbols],
        model_of: Sequence[Any],
        models: SymbolModels,
        shifts: Sequence[Any] | None = None,
    ) -> list[bytes]:
        """See `triton_rans.encode_streams`; symbols lie on the device."""
        tables = KERNELS.DeviceModels.of(models, DEVICE)
        arrays = [torch.from_numpy(array).to(DEVICE) for array in symbols]
        streams: list[bytes] = KERNELS.encode_streams(arrays, model_of, tables, shifts)
        return streams

    def decode(
        self,
        streams: Sequence[bytes],
        model_of: Sequence[Any],
        models: SymbolModels,
        num_tokens: Sequence[int],
        shifts: Sequence[Any] | None = None,
    ) -> list[Symbols]:
        """See `triton_rans.decode_streams`; symbols stay on the device."""
        tables = KERNELS.DeviceModels.of(models, DEVICE)
        decoded = KERNELS.decode_streams(streams, model_of, tables, num_tokens, shifts)
        assert all(array.device.type == DEVICE.type for array in decoded)
        return [array.cpu().numpy() for array in decoded]

    def test_many_streams_at_once_come_back(self) -> None:
        """More than the device runs side by side, of many sizes."""
        shapes = [(1 + s % 7, 1 + 37 * s % 300) for s in range(700)]
        case = make_case(11, shapes, (5, 17), 3)

        streams = self.encode(*case)

        rows = zip(case.symbols, case.model_of, case.shifts or [], strict=True)
        assert streams == [encode_symbols(s, k, case.models, shift) for s, k, shift in rows]
        self.check_back(streams, case)

    def test_random_bytes_are_refused(self) -> None:
        """The kernel ends, and the device is sound afterwards."""
        rng = np.random.default_rng(12)
        case = make_case(13, [(40, 256)] * 50, (5, 17))
        streams = self.encode(*case)
        noise = [b"\xff\xff\xff\xff" * 32 + rng.bytes(2 * rng.integers(0, 10_000)) for _ in streams]

        with pytest.raises(CorruptBlobError):
            self.decode(noise, case.model_of, case.models, case.num_tokens)

        self.check_back(streams, case)
