"""The kernels can be built for devices, which takes more than the interpreter does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from codec.errors import BackendUnavailable
from tests.codec.kernels.interpreter import HAS_TRITON

#: Small tiles, which are built quickly; Ampere and Hopper. Nothing is run, so no device is needed.
BUILD = """
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.compiler import ASTSource
from codec.kernels import triton_decode_kernels as decode
from codec.kernels import triton_encode_kernels as encode
from codec.kernels import triton_pack_kernels as packing
from codec.kernels.triton_backend import LAUNCH_OPTIONS

TYPES = {
    "rows": "bf16", "out": "bf16", "table": "i32", "level": "i32", "low_bits": "i32",
    "alphabet": "i32", "symbols": "u8", "plane": "i32", "flag": "i32", "scale": "fp16",
    "block": "i32", "column": "i32", "bits": "i32", "row_start": "i64", "packed": "u8",
    "rank": "i32",
}
CONSTANTS = {
    "HEAD_DIM": 6, "ROTARY_PAIRS": 2, "INTERLEAVED": True, "HAS_PLANE": True,
    "BLOCK_T": 16, "BLOCK_C": 16, "BLOCK_P": 16, "BLOCK_K": 16,
}
KERNELS = (
    encode.project_kernel, encode.project_steps_kernel, encode.quantize_steps_kernel,
    packing.ranges_kernel, packing.pack_kernel,
    decode.steps_to_rows_kernel, decode.blocks_to_rows_kernel,
)
for capability, precision, directions in ((80, "ieee", "fp16"), (90, "tf32x3", "fp32")):
    TYPES["forward"] = TYPES["inverse"] = directions
    for kernel in KERNELS:
        # Of a token, in steps of the ladder; of a block, in coefficients.
        TYPES["shift"] = "i32" if "level_ptr" in kernel.arg_names else "fp16"
        known = {**CONSTANTS, "PRECISION": precision}
        constants = {name: known[name] for name in kernel.arg_names if name in known}
        signature = {
            name: "constexpr" if name in constants
            else "*" + TYPES.get(name[:-4], "fp32") if name.endswith("_ptr") else "i32"
            for name in kernel.arg_names
        }
        source = ASTSource(kernel, signature, constants)
        built = compile(source, target=GPUTarget("cuda", capability, 32), options=LAUNCH_OPTIONS)
        ptx = built.asm["ptx"]
        assert "div.full" not in ptx and "div.approx" not in ptx, "a division is not exact"
        print(kernel.__name__)
"""


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_can_be_built_for_devices(tmp_path: Path) -> None:
    """All seven, for two of them; and no division in them is an approximation."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", BUILD],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 14


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that fails says what to install."""
    spec = importlib.util.find_spec("codec.kernels.triton_backend")
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setitem(sys.modules, "triton", None)

    with pytest.raises(BackendUnavailable, match=r"kvfabric\[cuda\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
