"""How long the fused kernels take on this machine's device, beside what they must take at least.

``python -m tests.gpu.codec_throughput [FILE]`` prints a table and writes it as JSON.

The floor of a kernel is the greater of two times: its bytes (rows, directions, codes, each
once) over the bandwidth of a device-to-device copy, and its products over the rate of a
square matrix product of the same precision.  Both are measured here, on the same device.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from codec.allocation import Allocation, Block
from codec.entropy.models import TOTAL, SymbolModels
from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import StepTables, join_codes, split_codes
from codec.quantizer import CODED_TYPES
from codec.rope import RotarySpec
from codec.step_quantizer import Layout
from codec.symbol_classes import MAX_LEVEL, NUM_CLASSES, SymbolClasses

NUM_TOKENS = (256, 2048)
ELEMENTS_PER_COEFFICIENT = 16
"""Row elements per coefficient kept: what 8-fold compression comes to, roughly."""
BLOCK_COEFFICIENTS = 64
REPEATS = 10
NO_DEVICE = "no CUDA device here: nothing was measured"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Keys of one model."""

    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.num_layers * self.num_kv_heads * self.head_dim


GEOMETRIES = (
    Geometry("Llama-3.1-8B", 32, 8, 128),
    Geometry("Mistral-NeMo-12B", 40, 8, 128),
    Geometry("gpt-oss-20b", 24, 8, 64),
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device does at best."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    model: str
    kernel: str
    num_tokens: int
    num_coefficients: int
    seconds: float
    floor_s: float
    row_bytes_per_s: float
    """Bytes of 16-bit rows coded or decoded per second."""


def floor_s(
    *,
    num_tokens: int,
    width: int,
    num_coefficients: int,
    direction_bytes: int,
    code_bytes: int,
    limits: Limits,
) -> float:
    """Least time of one kernel: the greater of moving its bytes and making its products.

    Examples
    --------
    >>> sizes = {"num_tokens": 4, "width": 8, "num_coefficients": 2}
    >>> sizes |= {"direction_bytes": 2, "code_bytes": 4}
    >>> floor_s(**sizes, limits=Limits(bytes_per_s=1.0, flops_per_s=1.0))
    128.0
    >>> floor_s(**sizes, limits=Limits(bytes_per_s=1.0, flops_per_s=1e9))
    100.0
    """
    moved_bytes = 2 * num_tokens * width + direction_bytes * width * num_coefficients + code_bytes
    flops = 2 * num_tokens * width * num_coefficients
    return max(moved_bytes / limits.bytes_per_s, flops / limits.flops_per_s)


def main(arguments: list[str]) -> int:
    """Measure, print, write; the exit status."""
    if not torch.cuda.is_available():
        click.echo(NO_DEVICE, err=True)
        return 1
    limits = measured_limits()
    rows = []
    for geometry in GEOMETRIES:
        for num_tokens in NUM_TOKENS:
            for row in measured_rows(geometry, num_tokens, limits):
                click.echo(
                    f"{row.model:17} {row.kernel:14} {row.num_tokens:5} tokens "
                    f"{1e3 * row.seconds:8.3f} ms, floor {1e3 * row.floor_s:7.3f} ms, "
                    f"{row.row_bytes_per_s / 1e9:7.1f} GB/s"
                )
                rows.append(asdict(row))
    report = {**machine(), "limits": asdict(limits), "rows": rows}
    path = Path(arguments[0] if arguments else "build/codec_throughput.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    click.echo(f"written to {path}")
    return 0


def machine() -> dict[str, str]:
    """What the numbers belong to."""
    triton = __import__("triton")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": _driver_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "precision": "ieee",
    }


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n")[0].strip() or "unknown"


def seconds_of(work: Callable[[], object]) -> float:
    """Median device time of ``work``, after runs that build and warm up."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(times)


def measured_limits() -> Limits:
    """Bandwidth of a copy of 1 GiB; rate of a product of 32-bit floats, without tensor cores."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied_s = seconds_of(lambda: target.copy_(source))
    side = 8192
    square = torch.randn(side, side, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    product_s = seconds_of(lambda: square @ square)
    return Limits(2 * (1 << 30) / copied_s, 2 * side**3 / product_s)


def plan_of(num_coefficients: int) -> Allocation:
    """Blocks of all types in turn."""
    starts = range(0, num_coefficients, BLOCK_COEFFICIENTS)
    return Allocation(
        tuple(
            Block(start, min(BLOCK_COEFFICIENTS, num_coefficients - start), CODED_TYPES[i % 3])
            for i, start in enumerate(starts)
        )
    )


def measured_rows(geometry: Geometry, num_tokens: int, limits: Limits) -> Iterator[Row]:
    """All four directions of a model's keys."""
    rank = geometry.width // ELEMENTS_PER_COEFFICIENT
    layout = BlockLayout.of(plan_of(rank), num_tokens=num_tokens, device="cuda")
    metadata_bytes = 4 * num_tokens * len(layout.block_B3)
    # Random directions leave few escapes and no low bits, so that symbols are all.
    code_bytes = {"steps": num_tokens * rank, "blocks": layout.num_bytes + metadata_bytes}
    for kernel, work in work_of(geometry, num_tokens, layout).items():
        seconds = seconds_of(work)
        yield Row(
            model=geometry.model,
            kernel=kernel,
            num_tokens=num_tokens,
            num_coefficients=rank,
            seconds=seconds,
            floor_s=floor_s(
                num_tokens=num_tokens,
                width=geometry.width,
                num_coefficients=rank,
                # Those of the entropy profile are products of 32-bit numbers.
                direction_bytes=4 if kernel.endswith("steps") else 2,
                code_bytes=code_bytes[kernel.split("_")[1]],
                limits=limits,
            ),
            row_bytes_per_s=2 * num_tokens * geometry.width / seconds,
        )


def even_classes() -> SymbolClasses:
    """Classes of 64 symbols each, which here only have to be looked up."""
    return SymbolClasses(
        models=SymbolModels(np.full((NUM_CLASSES, 64), TOTAL // 64)),
        offset_K=np.full(NUM_CLASSES, 0.4, np.float32),
        bias1_K=np.full(NUM_CLASSES, 0.1, np.float32),
        bias2_K=np.full(NUM_CLASSES, 0.05, np.float32),
    )


def work_of(
    geometry: Geometry, num_tokens: int, layout: BlockLayout
) -> dict[str, Callable[[], object]]:
    """Calls to measure, by name; keys in bfloat16, random directions."""
    # Not at the top: importing them decides how kernels run in the whole process.
    from codec.kernels import triton_decode, triton_encode, triton_rows  # noqa: PLC0415

    rank = layout.rank
    shape = (num_tokens, geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
    rows = torch.randn(shape, device="cuda").bfloat16()
    spec = RotarySpec.uniform(
        1e4 ** -torch.linspace(0, 1, geometry.head_dim // 2), num_layers=geometry.num_layers
    )
    positions_T = torch.arange(num_tokens, device="cuda")
    directions_WC = (torch.randn(geometry.width, rank, device="cuda") / 100).half()
    common: dict[str, Any] = {
        "mean_W": torch.zeros(geometry.width, device="cuda"),
        "rotary": triton_rows.RotaryTables.of(spec, positions_T),
    }
    level_C = np.full(rank, MAX_LEVEL, np.int32)
    tables = StepTables.of(
        Layout(level_C, np.zeros(rank, np.int32)), even_classes(), 1.0, device="cuda"
    )
    steps = (tables, tables.tokens(np.arange(num_tokens) % 5 - 2))
    forward = {"forward_WC": directions_WC.float(), **common}
    split = split_codes(triton_encode.encode_steps(rows, *steps, **forward), *steps)
    joined = join_codes(split, *steps)
    blocks = {"layout": layout, "forward_WC": directions_WC, **common}
    packed = triton_encode.encode_blocks(rows, **blocks)
    inverse = {"inverse_CW": directions_WC.T, "out_TLHD": torch.empty_like(rows), **common}
    backward = {**inverse, "inverse_CW": directions_WC.float().T.contiguous()}
    codes = (packed.packed, packed.shift_TB, packed.scale_TB)
    return {
        "encode_steps": lambda: triton_encode.encode_steps(rows, *steps, **forward),
        "decode_steps": lambda: triton_decode.decode_steps(joined, *steps, **backward),
        "encode_blocks": lambda: triton_encode.encode_blocks(rows, **blocks),
        "decode_blocks": lambda: triton_decode.decode_blocks(*codes, layout=layout, **inverse),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
