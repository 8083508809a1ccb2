"""The execution frontier against a set of numbers, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.arena.table.frontier import ExecutionFrontier
from codec.errors import StaleNameError
from tests.suites.quiet import QUIET


def submitted(count: int, domain: str = "stream 0") -> ExecutionFrontier:
    """A frontier with so much work in one domain."""
    frontier = ExecutionFrontier()
    assert [frontier.submit(domain) for _ in range(count)] == list(range(1, count + 1))
    return frontier


@given(st.permutations(range(1, 9)), st.integers(0, 8))
@QUIET
def test_work_may_end_in_any_order(order: list[int], count: int) -> None:
    """The frontier is the longest prefix without a gap."""
    frontier = submitted(8)

    for seq in order[:count]:
        frontier.complete({"stream 0": [seq]})
        frontier.check()

    done = set(order[:count])
    through = next(n for n in range(9) if n + 1 not in done)
    assert frontier.through() == {"stream 0": through}
    for fence in range(9):
        assert frontier.has_passed({"stream 0": fence}) == (fence <= through)


@pytest.mark.parametrize(
    "ended",
    [
        {"stream 0": [3, 9]},
        {"stream 0": [3, 1]},
        {"stream 0": [3, 4]},
        {"stream 0": [3, 3]},
        {"stream 0": [3, 0]},
        {"stream 0": [3], "stream 1": [1]},
    ],
    ids=["not submitted", "ended in order", "ended out of order", "twice", "zero", "no domain"],
)
def test_a_batch_with_one_bad_number_changes_nothing(ended: dict[str, list[int]]) -> None:
    """Also not for the good ones in it."""
    frontier = submitted(5)
    frontier.complete({"stream 0": [1, 4]})

    with pytest.raises(StaleNameError, match="is not running"):
        frontier.complete(ended)

    assert frontier.through() == {"stream 0": 1}
    frontier.complete({"stream 0": [2, 3]})
    assert frontier.through() == {"stream 0": 4}


def test_domains_are_numbered_apart() -> None:
    """Each from 1, and one that has nothing to wait for is passed."""
    frontier = submitted(2)
    assert frontier.next_seq("copies") == 1
    frontier.submit("copies")

    frontier.complete({"copies": [1], "stream 0": []})

    assert frontier.submitted() == {"stream 0": 2, "copies": 1}
    assert frontier.through() == {"stream 0": 0, "copies": 1}
    assert frontier.has_passed({"copies": 1, "never used": 0})
    assert not frontier.has_passed({"copies": 1, "stream 0": 1})
    assert not frontier.has_passed({"never used": 1})
