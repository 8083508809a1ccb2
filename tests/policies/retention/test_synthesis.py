"""Addresses: exhaustively, no two pages that are needed together share a cell."""

from __future__ import annotations

import numpy as np
import pytest

from codec.errors import RetentionError
from policies.retention.claims import Claim, Forever, Keys, Until
from policies.retention.normalize import Region, part_regions
from policies.retention.synthesis import (
    Append,
    Arena,
    ChunkEnd,
    Kept,
    LastRead,
    PageEnd,
    Periodic,
    Pinned,
    Replaced,
    Slot,
    death_of_page,
    synthesize,
)
from tests.policies.retention.samples import claims_of

PAGES = (1, 2, 4, 8, 16)


def window_region(window: int) -> Region:
    """Every key in a window."""
    return Region(role="whole", claims=(Claim(Keys(), Until(1, 1, window - 1)),))


def most_pages_together(window: int, page: int, step: int) -> int:
    """Most pages that one step needs at once, over every phase of its boundary.

    A step stores ``step`` tokens and then runs their queries, the first of which reads back
    ``window - 1`` tokens.  The pages are consecutive, so they share no cell of ``n`` iff
    there are at most ``n`` of them.
    """
    boundaries = np.arange(window + 3 * page)
    first = np.maximum(0, boundaries - (window - 1)) // page
    last = (boundaries + step - 1) // page
    return int((last - first + 1).max())


@pytest.mark.parametrize("page", PAGES)
def test_no_two_live_pages_share_a_cell(page: int) -> None:
    """Windows to 130, steps to 65, every phase; and one cell fewer would not do."""
    for window in range(1, 131):
        region = window_region(window)
        for step in range(1, 66):
            address, _ = synthesize(region, page, step)
            assert isinstance(address, Periodic)
            assert address.period == 1 + -(-(window - 1 + step - 1) // page)
            assert address.period == most_pages_together(window, page, step)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("step", [1, 2, 3, 17, 65])
def test_cells_are_apart_when_replayed(page: int, step: int) -> None:
    """The same without the argument that pages are consecutive: addresses one by one."""
    for window in (1, 2, 5, 16, 17, 33, 130):
        address, _ = synthesize(window_region(window), page, step)
        for boundary in range(0, window + 3 * page, 1 + step // 4):
            keys = range(max(0, boundary - window + 1), boundary + step)
            pages = {key // page for key in keys}
            cells = {address.locate(ordinal)[0] for ordinal in pages}
            assert len(cells) == len(pages)
            assert max(cells) < (address.cells or 0)


@pytest.mark.parametrize("page", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [1, 2, 7, 16])
def test_chunks_do_not_overlap_their_successors(page: int, step: int) -> None:
    """A step that crosses the edge of a chunk needs both for a while."""
    chunk = 16
    region = Region(role="whole", claims=(Claim(Keys(), Until(chunk, chunk, chunk - 1)),))
    address, retirement = synthesize(region, page, step)

    assert retirement == ChunkEnd(chunk // page)
    assert isinstance(address, Arena) is (step == 1)
    for boundary in range(5 * chunk):
        keys = range(boundary // chunk * chunk, boundary + step)
        pages = {key // page for key in keys}
        assert len({address.locate(ordinal)[0] for ordinal in pages}) == len(pages)


@pytest.mark.parametrize(
    ("text", "page", "address", "retirement"),
    [
        ("true", 16, Append(), Kept()),
        ("q - k < 1024", 16, Periodic(65), PageEnd(1023)),
        ("q - k < 1", 16, Periodic(1), PageEnd(0)),
        ("q // 64 == k // 64", 16, Arena(4), ChunkEnd(4)),
        ("q // 16 - k // 16 <= 1", 16, Periodic(3), LastRead()),
        ("(q + 3) // 16 == (k + 3) // 16", 16, Periodic(2), LastRead()),
        ("q + k < 128", 4, Pinned(16), LastRead()),
        ("k < 16", 4, Pinned(4), Kept()),
        ("q // 16 == k // 8", 16, Append(), LastRead()),
        ("k % 64 == 0", 16, Append(), Kept()),
        ("k % 64 == 0 and k < 6400", 16, Pinned(7), Kept()),
        ("q - k < 8 and q < 10000", 4, Periodic(3), LastRead()),
    ],
)
def test_programs_of_known_shapes(
    text: str, page: int, address: object, retirement: object
) -> None:
    """Address and retirement, for steps of one token."""
    (region,) = part_regions(claims_of(text), page)

    assert synthesize(region, page, 1) == (address, retirement)


@pytest.mark.parametrize(("chunk", "page"), [(10, 4), (16, 32), (24, 16)])
def test_chunk_must_be_whole_pages(chunk: int, page: int) -> None:
    """The claim is quoted, with the page sizes that would do."""
    (region,) = part_regions(claims_of(f"q // {chunk} == k // {chunk}"), page)

    with pytest.raises(RetentionError, match=f"divides {chunk}") as caught:
        synthesize(region, page, 1)
    assert caught.value.rule == "chunk-not-page-aligned"


@pytest.mark.parametrize(
    ("address", "places"),
    [
        (Append(), [(131, (131, 0)), (0, (0, 0))]),
        (Pinned(4, 2), [(2, (0, 0)), (5, (3, 0))]),
        (Periodic(65), [(131, (1, 2)), (64, (64, 0)), (65, (0, 1))]),
        (Periodic(3, 4), [(4, (0, 0)), (7, (0, 1)), (9, (2, 1))]),
        (Arena(4), [(3, (3, 0)), (4, (0, 1))]),
        (Slot(), [(9, (0, 9))]),
    ],
)
def test_pages_have_cells_and_cycles(
    address: Append | Pinned | Periodic | Arena | Slot, places: list[tuple[int, tuple[int, int]]]
) -> None:
    """Page 131 of a window of 1,024 sits in cell 1, cycle 2."""
    assert [address.locate(ordinal) for ordinal, _ in places] == [place for _, place in places]


def test_the_death_of_a_page_is_that_of_its_last_key() -> None:
    """Also where later keys die earlier; a page that nothing reads is dead from the start."""
    claims = (Claim(Keys(0, 64), Until(1, -1, 127)), Claim(Keys(100), Forever()))

    assert death_of_page(claims, (0, 4)) == 128
    assert death_of_page(claims, (60, 64)) == 68
    assert death_of_page(claims, (64, 68)) == 0
    assert death_of_page(claims, (96, 100)) == 0
    assert death_of_page(claims, (96, 101)) is None


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (Append(), "append"),
        (Pinned(4), "pinned(4)"),
        (Periodic(65), "periodic(65)"),
        (Periodic(3, 4), "periodic(3) from page 4"),
        (Arena(4), "arena(4)"),
        (Slot(), "slot"),
        (Kept(), "at release"),
        (PageEnd(127), "127 tokens after its page"),
        (ChunkEnd(4), "with its 4-page chunk"),
        (LastRead(), "after its last read"),
        (Replaced(), "at the next boundary"),
    ],
)
def test_programs_read_as_words(program: object, text: str) -> None:
    """In the table of ``kvfabric plan``."""
    assert str(program) == text
