"""`Ledger`: the corners of its interval arithmetic; drivers' suites do the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.arena.driver import Access, Handle, Span
from actors.arena.ledger import OWN_DEVICE, Ledger, Loan
from codec.errors import (
    VmmAlreadyMapped,
    VmmBadHandle,
    VmmBusy,
    VmmNotMapped,
    VmmNotReserved,
    VmmNotShared,
)


@pytest.fixture
def book() -> Iterator[Ledger]:
    """Reservations ``[100, 200)`` and ``[200, 300)``, with granules of 10."""
    book = Ledger(10)
    book.add_reservation(200, 100)
    book.add_reservation(100, 100)
    yield book
    book.check()


def mapped(book: Ledger, va: int, nbytes: int) -> Handle:
    """A new handle, mapped at ``va``."""
    handle = book.add_block(nbytes, backing=0)
    book.add_mapping(va, book.need_mappable(va, handle))
    return handle


@pytest.mark.parametrize(("va", "nbytes"), [(90, 20), (99, 1), (190, 20), (290, 20), (300, 1)])
def test_a_range_lies_in_one_reservation(book: Ledger, va: int, nbytes: int) -> None:
    """Two reservations that touch are still two."""
    with pytest.raises(VmmNotReserved):
        book.need_reserved(va, nbytes)


def test_the_ends_of_a_reservation_are_in_it(book: Ledger) -> None:
    """Its first and last byte, and all of it."""
    for va, nbytes in ((100, 1), (199, 1), (100, 100), (200, 100), (299, 1)):
        book.need_reserved(va, nbytes)


def test_mappings_may_touch_but_not_overlap(book: Ledger) -> None:
    """Half-open: the stop of one is the start of the next."""
    mapped(book, 110, 20)
    handle = book.add_block(20, backing=1)
    for va in (100, 110, 120):
        with pytest.raises(VmmAlreadyMapped):
            book.need_mappable(va, handle)

    book.add_mapping(130, book.need_mappable(130, handle))

    assert [mapping.va for mapping in book.mapped] == [110, 130]
    assert book.whole_mappings(Span(110, 40)) == book.mapped


@pytest.mark.parametrize("span", [(110, 10), (120, 30), (110, 50), (100, 30), (150, 20), (110, 30)])
def test_a_span_is_whole_mappings(book: Ledger, span: tuple[int, int]) -> None:
    """No part of one at either end, no hole at either end or between."""
    mapped(book, 110, 20)
    mapped(book, 130, 20)
    mapped(book, 160, 10)

    with pytest.raises(VmmNotMapped):
        book.whole_mappings(Span(*span))
    with pytest.raises(VmmNotMapped):
        book.whole_mappings(Span(110, 60))


def test_bytes_are_open_only_where_every_mapping_is(book: Ledger) -> None:
    """One closed mapping in the middle is enough to refuse."""
    for va in (110, 120, 130):
        mapped(book, va, 10)
    for mapping in book.mapped:
        mapping.access = Access.READ_WRITE
    book.need_open(115, 20, writing=True)

    book.mapped[1].access = Access.READ

    book.need_open(115, 20, writing=False)
    with pytest.raises(VmmNotMapped, match="open for writing"):
        book.need_open(115, 20, writing=True)
    with pytest.raises(VmmNotMapped, match="mapped"):
        book.need_open(135, 6, writing=False)
    book.drop_mapping(book.mapping(120))
    with pytest.raises(VmmNotMapped, match="mapped"):
        book.need_open(115, 20, writing=False)


def test_a_reservation_is_bare_only_without_mappings(book: Ledger) -> None:
    """The neighbour's mappings do not count."""
    mapped(book, 200, 10)

    book.need_bare(100, 100)
    with pytest.raises(VmmBusy):
        book.need_bare(200, 100)
    with pytest.raises(VmmNotReserved):
        book.need_bare(100, 200)


def test_a_released_block_is_garbage_after_its_last_map(book: Ledger) -> None:
    """And its handle is not good for anything from the moment of its release."""
    handle = mapped(book, 100, 10)
    block = book.block(handle)
    book.add_mapping(110, book.need_mappable(110, handle))

    assert book.release(handle) is block
    book.drop_mapping(book.mapping(100))
    assert book.garbage == []
    book.drop_mapping(book.mapping(110))

    assert book.garbage == [block]
    for call in (book.block, lambda h: book.need_mappable(100, h)):
        with pytest.raises(VmmBadHandle):
            call(handle)


def test_what_is_lent_for_reading_is_not_opened_for_writing(book: Ledger) -> None:
    """One such mapping among others is enough; reading and closing it is fine."""
    mapped(book, 100, 10)
    for va, is_writable in ((110, True), (120, False)):
        handle = book.add_block(10, 0, Loan(-1, is_writable))
        book.add_mapping(va, book.need_mappable(va, handle))

    book.need_grantable(book.mapped[:2], Access.READ_WRITE)
    book.need_grantable(book.mapped, Access.READ)
    book.need_grantable(book.mapped, Access.NONE)
    with pytest.raises(VmmNotShared, match="0x78"):
        book.need_grantable(book.mapped, Access.READ_WRITE)


def test_only_what_was_committed_here_is_ones_own(book: Ledger) -> None:
    """A loan is somebody's, a released handle nobody's."""
    own, lent = book.add_block(10, 0), book.add_block(10, 0, Loan(-1, is_writable=True))

    assert book.own_block(own) is book.block(own)
    with pytest.raises(VmmNotShared):
        book.own_block(lent)
    book.release(own)
    with pytest.raises(VmmBadHandle):
        book.own_block(own)


def test_every_block_is_held_once_until_it_is_given_back(book: Ledger) -> None:
    """Live, mapped twice, released while mapped, or garbage."""
    live = book.block(book.add_block(10, 0))
    handle = mapped(book, 100, 10)
    kept = book.block(handle)
    book.add_mapping(110, book.need_mappable(110, handle))
    gone = mapped(book, 120, 10)
    garbage = book.release(gone)
    book.drop_mapping(book.mapping(120))
    book.release(handle)

    assert set(book.held) == {live, kept, garbage}
    assert len(book.held) == 3


def test_each_device_has_an_access_of_its_own(book: Ledger) -> None:
    """Only the memory's own device counts for reading and writing here."""
    mapped(book, 100, 10)
    (mapping,) = book.mapped

    mapping.grant([3, 4], Access.READ_WRITE)

    assert [mapping.access_of(d) for d in (OWN_DEVICE, 3, 4, 5)] == [
        Access.NONE,
        Access.READ_WRITE,
        Access.READ_WRITE,
        Access.NONE,
    ]
    with pytest.raises(VmmNotMapped):
        book.need_open(100, 1, writing=False)
    mapping.grant([OWN_DEVICE], Access.READ)
    book.need_open(100, 1, writing=False)
