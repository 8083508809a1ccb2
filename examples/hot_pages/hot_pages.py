"""A hybrid model's cache in an arena: what slides out of a window is used again, with proof.

    .venv/bin/python examples/hot_pages/hot_pages.py

It needs no model, no Ray and no GPU, and asserts what it says.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import plan_hot_layout
from actors.arena.table.certificates import CertificateLog
from actors.arena.table.steps import StepItem
from policies.certificates import verify
from policies.retention.hf_config import read_config
from policies.retention.plan import compile_program

EXTENT = 256 << 10
STREAM = "stream 0"

# 1. A model's config says what its attention can still read: compile that.
config = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_size": 256,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}
plan = compile_program(read_config(config).program, step_tokens=32)
window = next(i for i, found in enumerate(plan.classes) if found.address.cells is not None)

# 2. Lay its classes out in one range of addresses, beside a heap for compressed blobs.
layout = plan_hot_layout(plan, extent_bytes=EXTENT, num_requests=3, context_tokens=1024)
driver = HostVmmDriver(64 * EXTENT, EXTENT)
arena = Arena(driver, capacity_bytes=8 * EXTENT, extent_bytes=EXTENT, hot=layout)
for row in layout.table():
    print(f"{row.name:24} {row.kind:6} {row.reserved_bytes >> 10:6} KiB of addresses")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "certificates.jsonl"
    with path.open("ab") as file:
        hot = HotPages(arena, plan, CertificateLog(file))

        def step(request: int, num_tokens: int) -> None:
            """Store tokens as an engine would: prepare, commit, write, complete."""
            before = hot.table.boundary(request)
            item = StepItem(request=request, before=before, after=before + num_tokens)
            (prepared,) = hot.table.prepare([item])  # reserved, and nobody sees it
            (seq,) = hot.table.commit([hot.carry_out(prepared)], STREAM)
            for layer in range(6):
                states = torch.randn(2, num_tokens, 1, 64, dtype=torch.bfloat16)
                hot.store(prepared, layer, states[0], states[1])
            hot.table.complete({STREAM: [seq]})  # here the device would say so, later

        # 3. A prompt in steps of 32, then a fork, and both go on.
        first = hot.table.open()
        for _ in range(16):
            step(first, 32)
        alone = arena.stat().hot_bytes
        second = hot.table.fork(first)  # shares every page
        assert arena.stat().hot_bytes == alone
        for _ in range(8):
            step(first, 1)
            step(second, 1)

        # 4. A sliding layer's window is one contiguous tensor, at every step, without a copy.
        keys, values = hot.window(first, window, layer=0, num_tokens=127)
        assert keys.shape == values.shape == (127, 1, 64)
        assert len(hot.table.pages(first, window)) < len(hot.table.pages(first, 1 - window))

        # 5. Memory is what is live, not what was ever stored; the kernel counts the same.
        physical = driver.physical()
        assert physical.measured_bytes == physical.booked_bytes == arena.stat().committed_bytes
        print(f"520 tokens, twice: {physical.measured_bytes >> 10} KiB committed")

        # 6. A released request's pages stay while a tensor shows them.
        hot.table.release(first)
        hot.table.release(second)
        hot.table.reclaim()
        assert arena.stat().hot_bytes > 0
        del keys, values
        hot.table.reclaim()
        assert arena.stat().hot_bytes == 0

    # 7. Every reuse left a certificate; a checker that shares no code follows the log.
    with path.open("rb") as log:
        report = verify(log)
    assert report.is_at_rest
    assert report.reasons["window"] > 0
    print(f"{report.num_certified} certificates hold: {report.reasons}")

arena.close()
assert driver.physical().measured_bytes == 0
driver.close()
