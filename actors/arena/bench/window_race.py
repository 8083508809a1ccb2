"""Appending to a sliding window, raced: a mirrored ring against ways that copy.

Every contender is given the same tokens and returns the last W of them.  They are compared
before they are timed.  Then they take turns within each round, so that what slows the
machine slows all of them; a ratio is taken within a round, and its median is the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from actors.arena.arena import Arena
from actors.arena.driver_host import HostVmmDriver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import RingSpec, plan_hot_layout
from actors.arena.ring_region import RingRegion
from actors.arena.table.steps import StepItem
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, KvShape, Program
from policies.retention.text import parse_relation

Append = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes tokens' keys and values, gives the window's; shapes ``(1, heads, tokens, dim)``."""

NUM_HEADS, HEAD_DIM = 8, 128
PAGE_TOKENS = 16
RING = "mirrored ring"
ROLL = "torch.roll"
TENANT = 1


def window_plan(window_tokens: int) -> Plan:
    """One layer that reads the last ``window_tokens``, bfloat16, 8 heads of 128."""
    shape = KvShape(num_kv_heads=NUM_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, dtype="bfloat16")
    state = AttentionState(
        name="window",
        layers=(0,),
        reads=parse_relation(f"q - k < {window_tokens}"),
        bytes_per_token_layer=shape.bytes_per_token_layer,
        shape=shape,
    )
    return compile_program(Program(page_tokens=PAGE_TOKENS, states=(state,)))


def ring_append(window_tokens: int) -> Append:
    """Append to a ring in an arena of its own."""
    layout = plan_hot_layout(
        window_plan(window_tokens),
        extent_bytes=2 << 20,
        num_requests=1,
        context_tokens=window_tokens,
        spare_rings=0,
    )
    (spec,) = layout.regions
    assert isinstance(spec, RingSpec)
    driver = HostVmmDriver(spec.full_bytes + (4 << 20))
    arena = Arena(driver, capacity_bytes=2 << 20, extent_bytes=2 << 20, hot=layout)
    region = arena.regions[0]
    assert isinstance(region, RingRegion)
    region.reserve(TENANT, [0], move=True)
    keys, values = (ring.heads_first() for ring in region.rings(TENANT, 0))

    def append(
        key_1H1D: torch.Tensor, value_1H1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys.append(key_1H1D)
        values.append(value_1H1D)
        count = min(window_tokens, keys.num_tokens)
        return keys.last(count), values.last(count)

    return append


def hot_window_us(
    window_tokens: int, *, num_windows: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median microseconds of `HotPages.window` over a full window, and of letting it go."""
    plan = window_plan(window_tokens)
    layout = plan_hot_layout(
        plan, extent_bytes=2 << 20, num_requests=1, context_tokens=window_tokens, spare_rings=0
    )
    driver = HostVmmDriver(sum(row.full_bytes for row in layout.table()) + (4 << 20))
    arena = Arena(driver, capacity_bytes=2 << 20, extent_bytes=2 << 20, hot=layout)
    hot = HotPages(arena, plan)
    request = hot.table.open()
    for before in range(window_tokens):
        item = StepItem(request=request, before=before, after=before + 1)
        (seq,) = hot.table.commit(map(hot.carry_out, hot.table.prepare([item])), "stream")
        hot.table.complete({"stream": [seq]})
    spent = []
    for _ in range(num_windows):
        start_s = clock()
        hot.window(request, 0, 0, window_tokens - 1)
        spent.append((clock() - start_s) * 1e6)
    hot.table.release(request)
    arena.close()
    driver.close()
    return median(spent)


def roll_append(window_tokens: int) -> Append:
    """Move every row, and write the last: a window that is always full."""
    held = [
        torch.zeros(1, NUM_HEADS, window_tokens, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)
    ]

    def append(
        key_1H1D: torch.Tensor, value_1H1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for i, new in enumerate((key_1H1D, value_1H1D)):
            count = new.shape[2]
            held[i] = held[i].roll(-count, dims=2)
            held[i][:, :, -count:] = new
        return held[0], held[1]

    return append


def race(
    window_tokens: int,
    others: Mapping[str, Callable[[int], Append]],
    *,
    num_rounds: int,
    steps_per_round: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Microseconds per append of each contender, and how many times the ring's that is.

    Parameters
    ----------
    others
        Contenders beside the ring and ``torch.roll``, by name.

    Returns
    -------
    figures
        ``{name}.us`` for each, and ``{name}.over_ring`` for each but the ring.

    Raises
    ------
    AssertionError
        If two contenders' windows differ.
    """
    makers = {RING: ring_append, ROLL: roll_append, **others}
    appends = {name: make(window_tokens) for name, make in makers.items()}
    for count in (window_tokens, *[1] * 2 * PAGE_TOKENS):
        key, value = _tokens(count), _tokens(count)
        windows = {name: append(key, value) for name, append in appends.items()}
    for name, window in windows.items():
        for found, wanted in zip(window, windows[RING], strict=True):
            # Some keep one row more or less than W around the newest ones.
            count = min(found.shape[2], wanted.shape[2])
            assert count >= window_tokens - 1, f"{name} has {count} tokens"
            assert torch.equal(found[:, :, -count:], wanted[:, :, -count:]), name
    spent: dict[str, list[float]] = {name: [] for name in appends}
    tokens = [(_tokens(1), _tokens(1)) for _ in range(steps_per_round)]
    names = list(appends)
    for nth in range(num_rounds):
        first = nth % len(names)
        for name in (*names[first:], *names[:first]):
            append = appends[name]
            start_s = clock()
            for key, value in tokens:
                append(key, value)
            spent[name].append((clock() - start_s) / steps_per_round * 1e6)
    figures = {f"{name}.us": median(times) for name, times in spent.items()}
    for name in names[1:]:
        ratios = [it / ring for it, ring in zip(spent[name], spent[RING], strict=True)]
        figures[f"{name}.over_ring"] = median(ratios)
    return figures


def _tokens(count: int) -> torch.Tensor:
    return torch.randn(1, NUM_HEADS, count, HEAD_DIM, dtype=torch.bfloat16)
