"""Pool sizes: the published predictions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codec.errors import RetentionError
from policies.retention.pools import (
    SplitRequest,
    choose_backing,
    choose_split,
    engine_cut,
    pool_gib,
    round_up,
    snapshot_pool_pages,
    split_pool,
    uniform_window_pool,
    window_pool_tokens,
)

GPT_OSS = SplitRequest(
    page_tokens=16,
    window=128,
    full_layers=12,
    window_layers=12,
    width_bytes=2048,
    budget_bytes=2_123_759_616,
    running=128,
    chunk=2048,
    requests=8,
    prompt=6000,
    decode=32,
    intervals=(16, 32, 64, 128),
    max_calls=4,
    min_admitted=8,
)


@pytest.mark.parametrize(
    ("interval", "full", "window"),
    [(128, 47_616, 38_800), (32, 59_904, 26_512), (16, 61_952, 24_464), (64, 55_808, 30_608)],
)
def test_the_four_published_predictions(interval: int, full: int, window: int) -> None:
    """Fresh engine processes reported exactly these pools."""
    split = split_pool(GPT_OSS, interval)

    assert (split.full_tokens, split.window_tokens) == (full, window)
    assert split.allocated_bytes == GPT_OSS.budget_bytes


def test_the_published_choice() -> None:
    """16 needs too many calls, 128 admits too few, 32 leaves the most full tokens."""
    chosen, splits = choose_split(GPT_OSS)

    assert chosen.interval == 32
    assert splits[16].rejected_for == ("calls",)
    assert splits[128].rejected_for == ("admission",)
    assert (splits[128].admitted, splits[128].waves) == (7, 2)


def test_the_other_objective_prefers_long_intervals() -> None:
    """Fewest calls, then fewest reclamations."""
    assert choose_split(replace(GPT_OSS, objective="reclamation"))[0].interval == 64


def test_a_budget_below_the_window_pool_is_rejected() -> None:
    """There is no full pool at all then."""
    split = split_pool(replace(GPT_OSS, budget_bytes=10**6), 32)

    assert (split.full_tokens, split.admitted, split.waves) == (0, 0, None)
    assert split.rejected_for == ("budget", "admission")
    with pytest.raises(RetentionError) as caught:
        choose_split(replace(GPT_OSS, budget_bytes=10**6))
    assert caught.value.rule == "no-feasible-interval"


@pytest.mark.parametrize(
    "change",
    [
        {"page_tokens": 0},
        {"window": -1},
        {"budget_bytes": 0},
        {"objective": "speed"},
        {"intervals": ()},
        {"running": True},
    ],
)
def test_impossible_requests_cannot_be_built(change: dict[str, object]) -> None:
    """Each count is positive."""
    with pytest.raises(RetentionError) as caught:
        replace(GPT_OSS, **change)
    assert caught.value.rule == "bad-pool"


def test_a_window_pool_needs_sizes() -> None:
    """None of them can be zero."""
    sizes = {"window": 128, "page_tokens": 16, "interval": 32, "running": 4, "chunk": 64}

    assert window_pool_tokens(**sizes) % 16 == 0
    for name in sizes:
        with pytest.raises(RetentionError):
            window_pool_tokens(**{**sizes, name: 0})


UNIFORM = {
    "window": 4096, "page_tokens": 16, "interval": 128, "headroom": 32, "running": 4,
    "chunk": 2048, "context": 8192,
}  # fmt: skip


def test_uniform_pools_of_both_page_sizes() -> None:
    """The published 19,152 and 19,077."""
    paged = uniform_window_pool(**UNIFORM)
    single = uniform_window_pool(**{**UNIFORM, "page_tokens": 1})

    assert (paged.pool_tokens, paged.index_tokens) == (19_152, 32_768)
    assert single.pool_tokens == single.index_tokens == 19_077


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("page_tokens", 8, "page-size"),
        ("interval", 127, "not-page-aligned"),
        ("window", 4095, "not-page-aligned"),
        ("chunk", 2047, "not-page-aligned"),
        ("headroom", 31, "not-page-aligned"),
        ("running", 0, "bad-pool"),
    ],
)
def test_uniform_pools_that_no_engine_lays_out(name: str, value: int, rule: str) -> None:
    """Refused by the name of the size."""
    with pytest.raises(RetentionError) as caught:
        uniform_window_pool(**{**UNIFORM, name: value})
    assert caught.value.rule == rule


def test_small_formulas() -> None:
    """Snapshot pools, reported GiB with its pad pages, and the engine's careful cut."""
    assert snapshot_pool_pages(window=4096, page_tokens=16, running=1, chunk=2048) == 385
    assert round(pool_gib([(59_904, 24_576), (26_512, 24_576)], pad_tokens=16), 3) == 1.979
    assert pool_gib([], pad_tokens=16) == 0
    assert [engine_cut(f, window=128, page_tokens=16) for f in (100, 128, 144, 513)] == [
        0, 0, 16, 384,
    ]  # fmt: skip
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({}, "vmm", "stable-address-needed"),
        ({"is_supported": False}, "paged", "not-supported"),
        ({"needs_stable_address": False}, "paged", "stable-address-not-needed"),
        ({"limit_milli": 1999}, "paged", "rounding-over-limit"),
        ({"limit_milli": 2000}, "vmm", "stable-address-needed"),
    ],
)
def test_backing_is_mapped_only_where_it_pays(
    fields: dict[str, object], kind: str, why: str
) -> None:
    """One MiB in granules of two: twice the bytes."""
    plain = {
        "granule_bytes": 2**21, "is_supported": True, "needs_stable_address": True,
        "limit_milli": 2500,
    }  # fmt: skip

    found = choose_backing(2**20, **{**plain, **fields})

    assert (found.kind, found.why, found.amplification_milli) == (kind, why, 2000)
    assert found.mapped_bytes == (2**21 if kind == "vmm" else 2**20)


@pytest.mark.parametrize(("nbytes", "granule"), [(0, 4096), (-1, 4096), (1, 0)])
def test_backing_of_nothing_is_refused(nbytes: int, granule: int) -> None:
    """Nothing to hold, or no granule."""
    with pytest.raises(RetentionError):
        choose_backing(
            nbytes,
            granule_bytes=granule,
            is_supported=True,
            needs_stable_address=True,
            limit_milli=1250,
        )
