"""The books of the certificate checker: who has a page, and which work may touch it."""

from __future__ import annotations

import pytest

from policies.certificate_state import Domain, Head, Page, State


@pytest.fixture
def page() -> Page:
    """A page of class 0."""
    return Page((0, 5, 1), ordinal=3, step=None)


def test_a_copy_of_a_head_goes_its_own_way(page: Page) -> None:
    """Same pages and boundary, but no work, and changes are not shared."""
    head = Head([{3: (page, 1)}], boundary=8, running={1: ("a", 1)}, last_run={"a": 1})
    other = head.copy()

    head.let_go(0, 3, "window", until=1)

    assert not head.has(page)
    assert other.has(page)
    assert (other.boundary, other.running, other.last_run) == (8, {}, {})


def test_another_generation_at_the_same_place_is_another_page(page: Page) -> None:
    """A head has pages, not ordinals."""
    head = Head([{3: (Page((0, 5, 2), ordinal=3, step=None), 1)}])

    assert not head.has(page)


@pytest.mark.parametrize(
    ("order", "holds"), [(1, False), (2, True), (3, True), (4, True), (5, False)]
)
def test_work_holds_a_page_that_was_there_while_it_began(
    page: Page, order: int, holds: bool
) -> None:
    """From the commit that brought the page to the one that took it, and while it runs."""
    head = Head([{3: (page, 2)}], running={order: ("a", 7)})

    head.let_go(0, 3, "window", until=4)

    assert page.running() == (("a", 7) if holds else None)
    head.running.clear()
    assert page.running() is None


def test_a_page_remembers_how_and_where_it_was_used(page: Page) -> None:
    """Every way out of a head, and the domains of work since it came."""
    head = Head([{3: (page, 2)}], last_run={"early": 1, "late": 2})
    snapshot = head.copy()

    head.let_all_go("released", until=2)
    snapshot.let_all_go("dropped", until=2)

    assert page.let_go == {"released", "dropped"}
    assert page.domains == {"late"}
    assert head.pages == snapshot.pages == [{}]


def test_a_shared_page_does_not_gather_what_has_ended(page: Page) -> None:
    """A prefix that is resumed for ever costs no more than what runs."""
    for _ in range(3):
        head = Head([{3: (page, 0)}], running={1: ("a", 1)})
        head.let_all_go("released", until=1)
        head.running.clear()
    late = Head([{3: (page, 0)}], running={2: ("a", 2)})
    late.let_all_go("released", until=2)
    Head([{3: (page, 0)}]).let_all_go("released", until=2)

    assert [stay.head for stay in page.stays] == [late]


def test_a_domain_ends_in_any_order() -> None:
    """What ended beyond a gap counts when the gap is closed."""
    domain = Domain(submitted=3)
    seen = []
    for seq in (3, 1, 2):
        domain.end(seq)
        seen.append(domain.through)

    assert seen == [0, 1, 3]
    assert domain.beyond == set()


def test_holders_are_named(page: Page) -> None:
    """Requests and snapshots alike."""
    state = State()
    state.heads = {1: Head([{3: (page, 0)}]), 2: Head([{}])}
    state.snapshots = {1: state.heads[1].copy()}

    assert state.num_held() == 2
    assert list(state.holders(page)) == [
        ("request 1", state.heads[1]),
        ("snapshot 1", state.snapshots[1]),
    ]
