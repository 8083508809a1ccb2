"""Physical pages and who uses them: one record per slot in use, one generation per grant.

A page is *reserved* while the step that will fill it is prepared, *live* while a snapshot
leads to it, and *retiring* when none does any more.  A retiring page may be used again
when it is *reusable*: no reader has it pinned, no network has it registered, and it is not
in quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from actors.arena.table.page_tree import Leaf
from codec.errors import StaleNameError


class PageName(NamedTuple):
    """One grant of one slot; the same slot under another generation is another page."""

    class_index: int
    slot: int
    generation: int

    def __str__(self) -> str:
        return f"{self.class_index}/{self.slot}#{self.generation}"


class PageState(Enum):
    """How far a page's life has gone."""

    RESERVED = "reserved"
    LIVE = "live"
    RETIRING = "retiring"


@dataclass(slots=True, eq=False)
class Page(Leaf):
    """One slot in use."""

    name: PageName
    ordinal: int
    #: Only ever goes forward; `refs` is above 0 exactly while it is live.
    state: PageState = field(default=PageState.RESERVED, init=False)
    #: The request that may write behind what is there; nobody once it was shared.
    writer: int | None = field(default=None, init=False)
    #: Readers and registrations; never below 0.
    num_pins: int = field(default=0, init=False)
    num_registrations: int = field(default=0, init=False)
    is_quarantined: bool = field(default=False, init=False)
    #: The prepared step that will write behind what is there, if there is one.
    written_by: int | None = field(default=None, init=False)
    #: How it left a head or a snapshot; the first that slid on or was copied, if any did.
    why: str | None = field(default=None, init=False)

    @property
    def is_held(self) -> bool:
        """Whether something outside the snapshots keeps the page."""
        return self.num_pins + self.num_registrations > 0 or self.is_quarantined

    @property
    def is_reusable(self) -> bool:
        """Whether nothing keeps the slot from its next page."""
        return self.state is PageState.RETIRING and not self.is_held


class PageBook:
    """All pages, by slot."""

    def __init__(self) -> None:
        #: Of the last grant of each slot that was ever granted; only ever rises.
        self._generations: dict[tuple[int, int], int] = {}
        self._pages: dict[tuple[int, int], Page] = {}

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def __len__(self) -> int:
        return len(self._pages)

    def next_name(self, class_index: int, slot: int) -> PageName:
        """What the next page of a slot will be called."""
        return PageName(class_index, slot, self._generations.get((class_index, slot), 0) + 1)

    def add(self, name: PageName, ordinal: int) -> Page:
        """Begin a reserved page, whose name is the slot's next."""
        place = name[:2]
        assert place not in self._pages, f"{name} is granted while in use"
        assert name == self.next_name(*place), f"{name} is not the next name of its slot"
        self._generations[place] = name.generation
        page = self._pages[place] = Page(name, ordinal)
        return page

    def find(self, name: PageName) -> Page:
        """The page of that name.

        Raises
        ------
        StaleNameError
            If its slot holds another page by now, or none.
        """
        page = self._pages.get((name[0], name[1]))
        if page is None or page.name != name:
            raise StaleNameError("page", str(PageName(*name)), "is not in use")
        return page

    def remove(self, page: Page) -> None:
        """End a page; its slot may have another."""
        del self._pages[page.name[:2]]
