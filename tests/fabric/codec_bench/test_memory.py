"""Peak memory as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fabric.codec_bench import memory
from fabric.codec_bench.memory import peak_bytes

SIZE = 64 << 20
STEP = SIZE // 64
#: Interpreter and allocator move by this much on their own.
SLACK = 8 << 20


def needs_kernel(num_bytes: int | None) -> int:
    """The number, where the kernel tells it."""
    if num_bytes is None:
        pytest.skip("this kernel does not tell a process its peak")
    return num_bytes


def test_what_is_given_back_before_the_end_is_counted() -> None:
    """Torch's own memory, which Python's tracer does not see."""

    def action() -> Tensor:
        torch.ones(SIZE // 4)
        return torch.ones(SIZE // 8)

    found = needs_kernel(peak_bytes(action))

    assert abs(found - SIZE) < SLACK


def test_the_result_is_counted_and_what_was_there_is_not() -> None:
    """An array that was made before adds nothing."""
    before = torch.ones(SIZE // 4)

    small = needs_kernel(peak_bytes(before.max))
    kept = needs_kernel(peak_bytes(before.clone))

    assert small < SLACK
    assert abs(kept - SIZE) < SLACK


def hold_between_holes() -> list[Tensor]:
    """Between results that are kept lies what was given back, too small for what comes next."""
    kept = []
    for number in range(1, 17):
        given_back = torch.ones(number * STEP // 4)
        kept.append(torch.ones(STEP // 4))
        del given_back
    return kept


def test_holes_between_blocks_are_not_counted() -> None:
    """In a process of its own: a long one has holes already, and its kernel fills some."""
    finished = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import {__name__} as t; print(t.peak_bytes(t.hold_between_holes))",
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = finished.stdout.strip()

    found = needs_kernel(None if told == "None" else int(told))

    assert abs(found - 32 * STEP) < SLACK


def test_a_kernel_that_does_not_tell_gives_no_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rather than a wrong one; a status without the peak is the same."""
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "nowhere" / "clear")
    assert peak_bytes(list) is None

    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t  12 kB\n")
    assert peak_bytes(list) is None
    (tmp_path / "status").write_text("VmHWM:\t  15 kB\nVmRSS:\t  12 kB\n")
    assert peak_bytes(list) == 3 << 10
