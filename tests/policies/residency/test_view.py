"""`Residency` and its parts: what an answer amounts to."""

from __future__ import annotations

import pickle

from policies.residency.view import Coverage, Holding, Residency, Run
from tests.policies.residency.samples import (
    KEYS,
    KVTC,
    RAW,
    STAGE,
    STAGES,
    TOKENS,
    an_index,
    component,
    delta,
    placement,
)


def an_answer() -> Residency:
    """Two chunks of one stage: both on ada, the second smaller on bob; one also raw."""
    index = an_index("ada", "bob")
    rows = [placement(0, stored_bytes=10), placement(1, stored_bytes=20)]
    index.apply_delta(delta(1, [*rows, placement(0, codec=RAW, stored_bytes=99)]))
    index.apply_delta(delta(1, [placement(1, "bob", stored_bytes=15)], node="bob"))
    return index.residency(KEYS, [STAGE])


def test_a_run_counts_each_chunk_where_it_is_smallest() -> None:
    """That is the least that a restore can move."""
    holdings = (Holding("ada", "host", 9, (5, 7)), Holding("bob", "disk", 9, (6, 2)))

    assert Run(3, 5, holdings).stored_bytes == 5 + 2


def test_coverage_sums_over_stages_and_runs() -> None:
    """Bytes stored and bytes in 16 bits, of the same chunks."""
    runs = (
        (Run(0, 2, (Holding("ada", "host", 100, (5, 7)),)),),
        (
            Run(0, 1, (Holding("ada", "host", 60, (1,)),)),
            Run(1, 2, (Holding("b", "host", 60, (2,)),)),
        ),
    )
    coverage = Coverage((KVTC, KVTC), 2, runs)

    assert (coverage.stored_bytes, coverage.decoded_bytes) == (15, 320)


def test_an_answer_counts_the_longest_coverage() -> None:
    """Tokens, and the bytes that go with them."""
    answer = an_answer()

    assert (answer.num_chunks, answer.prefix_tokens) == (2, 2 * TOKENS)
    assert answer.stored_bytes == 10 + 15
    assert not answer.gap


def test_an_empty_answer_is_worth_nothing() -> None:
    """A miss is a value."""
    answer = an_index("ada").residency(KEYS, STAGES)

    assert (answer.num_chunks, answer.prefix_tokens, answer.stored_bytes) == (0, 0, 0)
    assert answer.placements() == []


def test_placements_spell_the_answer_out() -> None:
    """Chunk by chunk, of every codec, exactly what the nodes published."""
    first, second = an_answer().placements()

    assert set(first) == {
        placement(0, stored_bytes=10),
        placement(0, codec=RAW, stored_bytes=99),
    }
    assert set(second) == {
        placement(1, stored_bytes=20),
        placement(1, "bob", stored_bytes=15),
    }


def test_components_are_named_by_ordinals() -> None:
    """Chunk and stage of the question, in its retention class."""
    answer = an_index("ada").residency(KEYS, STAGES)

    assert answer.component(3, 1) == component(3, STAGES[1])


def test_an_answer_can_be_sent() -> None:
    """It crosses an actor call as the value it is."""
    answer = an_answer()

    assert pickle.loads(pickle.dumps(answer)) == answer
