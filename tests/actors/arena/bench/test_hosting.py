"""Memory of a hybrid's tokens, small enough to add up by hand."""

from __future__ import annotations

import pytest
import torch

from actors.arena.bench.hosting import host, keeping_everything
from policies.retention.program import AttentionState, KvShape, Program
from policies.retention.text import parse_relation

EXTENT = 4096
SHAPE = KvShape(num_kv_heads=1, key_dim=64, value_dim=64, dtype="float32")


def hybrid() -> Program:
    """One layer that reads everything, three that read a window of 32; 512 B a token."""
    states = tuple(
        AttentionState(
            name=name,
            layers=layers,
            reads=parse_relation(text),
            bytes_per_token_layer=SHAPE.bytes_per_token_layer,
            shape=SHAPE,
        )
        for name, layers, text in (("full", (0,), "true"), ("window", (1, 2, 3), "q - k < 32"))
    )
    return Program(page_tokens=8, states=states)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values."""
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(count, 4, 1, 64, generator=generator) for _ in range(2))
    return keys, values


def test_a_window_takes_the_memory_of_its_window() -> None:
    """However many tokens went by; a pool that keeps everything takes all of them."""
    keys, values = tokens(256)

    compiled = host(hybrid(), keys, values, num_requests=2, step_tokens=8, extent_bytes=EXTENT)
    pools = host(
        hybrid(), keys, values, num_requests=2, step_tokens=8, rings=False, extent_bytes=EXTENT
    )
    full = host(
        keeping_everything(hybrid()),
        keys,
        values,
        num_requests=2,
        step_tokens=8,
        extent_bytes=EXTENT,
    )

    assert compiled.num_compared == 2 * (256 + 3 * 31)
    assert full.num_compared == 2 * 4 * 256
    assert full.physical_bytes == 2 * 4 * 256 * 512
    # 256 tokens of the full layer; a ring of 56 tokens in three: 5 pages for the window and
    # the step, one for where in its page the window begins, one for work in flight.
    assert compiled.physical_bytes == 2 * (256 + 3 * 56) * 512
    # In a pool: 31 tokens span four pages, and all of both requests are side by side.
    assert pools.physical_bytes == 2 * (256 + 3 * 32) * 512
    assert pools.num_compared == compiled.num_compared
    assert compiled.live_bytes == 2 * (256 + 3 * 31) * 512


def store_nothing(*_: object) -> None:
    """In place of storing."""


def test_tokens_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is one."""
    keys, values = tokens(16)
    monkeypatch.setattr("actors.arena.bench.hosting.HotPages.store", store_nothing)

    with pytest.raises(AssertionError):
        host(hybrid(), keys, values, num_requests=1, step_tokens=8, extent_bytes=EXTENT)
