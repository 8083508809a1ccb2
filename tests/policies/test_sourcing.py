"""Choosing sources: as good as trying them all."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.latency import Affine
from policies.residency.view import Holding, Run
from policies.sourcing import Pricing, choose_sources, clip, live_runs, segments
from tests.policies.pricing_samples import (
    CHUNK_TOKENS,
    LINKS,
    a_latency_model,
    an_answer,
    coverage,
    runs_of,
)
from tests.policies.residency.samples import KVTC, STAGE, component

SOURCES = ("ada", "ada:disk", "bob", "cyd")


def a_pricing(**transfers: Affine) -> Pricing:
    """What things cost on ada."""
    return Pricing(an_answer(), "ada", a_latency_model(**transfers), LINKS)


def cost_of(chosen: tuple[Holding, ...], pricing: Pricing) -> float:
    """Price a choice from first principles: a segment opens wherever the source changes."""
    total, last = 0.0, None
    for holding in chosen:
        source = (holding.node, holding.tier)
        label = f"{pricing.link(holding.node)}/{holding.tier}"
        law = pricing.latency.law("transfer", label)
        if source != last:
            connect = pricing.latency.law("connect", pricing.link(holding.node))
            total += law.t0_s + (0 if holding.node == pricing.node else connect.t0_s)
        total += sum(holding.stored_bytes) / law.per_s
        last = source
    return total


spans = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.dictionaries(st.sampled_from(SOURCES), st.integers(1, 40), min_size=1),
    ),
    min_size=1,
    max_size=5,
)
laws = st.builds(Affine, st.floats(0.01, 5.0), st.floats(1.0, 100.0))


@settings(deadline=None)
@given(spans, laws, laws)
def test_no_other_choice_is_cheaper(
    drawn: list[tuple[int, dict[str, int]]], fast: Affine, slow: Affine
) -> None:
    """Brute force over every source of every run finds nothing better."""
    pricing = a_pricing(fast=fast, slow=slow)
    runs = runs_of(*drawn)

    chosen = choose_sources(runs, pricing)

    assert all(h in run.holdings for h, run in zip(chosen, runs, strict=True))
    least = min(cost_of(choice, pricing) for choice in product(*(r.holdings for r in runs)))
    assert math.isclose(cost_of(chosen, pricing), least, rel_tol=1e-9)


@settings(deadline=None)
@given(spans)
def test_segments_tile_the_runs_and_add_up(drawn: list[tuple[int, dict[str, int]]]) -> None:
    """Every chunk is fetched once, in order, and their times are those of the choice."""
    pricing = a_pricing()
    runs = runs_of(*drawn)

    found = segments(runs, 0, KVTC, pricing)

    fetched = [component for segment in found for component in segment.components]
    assert fetched == [component(i) for i in range(runs[-1].stop)]
    expected = cost_of(choose_sources(runs, pricing), pricing)
    assert math.isclose(sum(s.predicted_s for s in found), expected, rel_tol=1e-6)
    for before, after in pairwise(found):
        assert (before.node, before.tier) != (after.node, after.tier)
        end = before.start_token + len(before.components) * CHUNK_TOKENS
        assert after.start_token == end


def test_home_is_preferred_when_it_is_cheaper() -> None:
    """A local placement needs no connection."""
    (chosen,) = choose_sources(runs_of((4, {"ada": 10, "bob": 10})), a_pricing())

    assert chosen.node == "ada"


def test_home_is_left_when_it_is_dearer() -> None:
    """A fast neighbour beats our own slow disk."""
    pricing = a_pricing(fast=Affine(0.1, 1e6))

    (chosen,) = choose_sources(runs_of((4, {"ada:disk": 10, "bob": 10})), pricing)

    assert chosen.node == "bob"


def test_equal_costs_go_home_and_then_by_name() -> None:
    """The same plan everywhere, and home first."""
    same = Affine(0.5, 1000.0)
    pricing = Pricing(an_answer(), "ada", a_latency_model(remote=same), {})

    (among_peers,) = choose_sources(runs_of((1, {"cyd": 5, "bob": 5})), pricing)

    assert among_peers.node == "bob"
    model = a_latency_model(local=Affine(1.5, 1000.0), remote=same)
    (with_home,) = choose_sources(
        runs_of((1, {"cyd": 5, "bob": 5})), Pricing(an_answer(), "cyd", model, {})
    )
    assert with_home.node == "cyd"


def test_a_source_is_kept_on_with_where_a_change_costs_more() -> None:
    """Greedy choice per run would open three segments; one slower source takes one."""
    pricing = a_pricing(fast=Affine(2.0, 100.0), slow=Affine(2.0, 50.0))
    runs = runs_of((1, {"cyd": 10}), (1, {"bob": 10, "cyd": 10}), (1, {"cyd": 10}))

    found = segments(runs, 0, KVTC, pricing)

    assert [(s.node, s.stored_bytes) for s in found] == [("cyd", 30)]


def test_a_segment_says_all_that_a_fetch_needs() -> None:
    """Who, in which life, where there, what, how much, how long."""
    runs = runs_of((2, {"bob": 10}), (1, {"cyd:disk": 7}))

    first, second = segments(runs, 0, KVTC, a_pricing(fast=Affine(1.0, 10.0)))

    assert (first.stage, first.node, first.incarnation) == (STAGE, "bob", 12)
    assert (first.tier, first.codec, first.start_token) == ("host", KVTC, 0)
    assert (first.stored_bytes, first.decoded_bytes) == (20, 320)
    assert first.predicted_s == pytest.approx(1.0 + 1.0 + 2.0)
    assert (second.node, second.incarnation, second.tier) == ("cyd", 13, "disk")
    assert (second.start_token, second.components) == (2 * CHUNK_TOKENS, (component(2),))


def test_an_unnamed_link_is_remote() -> None:
    """Home is local, whatever the caller's table says of it."""
    pricing = Pricing(an_answer(), "ada", a_latency_model(), {"ada": "odd", "bob": "fast"})

    assert [pricing.link(node) for node in ("ada", "bob", "cyd")] == ["local", "fast", "remote"]


def test_dead_holders_end_the_prefix_where_nobody_else_is() -> None:
    """Per stage; what lies behind cannot be used."""
    first = runs_of((2, {"ada": 1, "bob": 1}), (1, {"bob": 1}), (1, {"ada": 1}))

    live = live_runs(coverage(first, first), frozenset({"ada"}))

    assert [[(r.start, r.stop, [h.node for h in r.holdings]) for r in runs] for runs in live] == [
        [(0, 2, ["ada"])]
    ] * 2
    assert live_runs(coverage(first), frozenset()) == [[]]


@settings(deadline=None)
@given(spans, st.integers(1, 15))
def test_clipping_keeps_the_leading_chunks(
    drawn: list[tuple[int, dict[str, int]]], num_chunks: int
) -> None:
    """Runs are cut, sizes with them, and nothing else changes."""
    runs = runs_of(*drawn)

    clipped = clip(runs, num_chunks)

    def sizes(some: tuple[Run, ...] | list[Run]) -> list[list[tuple[str, str, int]]]:
        return [
            [(h.node, h.tier, h.stored_bytes[i - r.start]) for h in r.holdings]
            for r in some
            for i in range(r.start, r.stop)
        ]

    assert sizes(clipped) == sizes(runs)[:num_chunks]
    assert all(run.start < run.stop for run in clipped)
    assert all(len(h.stored_bytes) == r.stop - r.start for r in clipped for h in r.holdings)
