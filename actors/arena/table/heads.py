"""Heads: the pages that a request or a snapshot has, one tree for each class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from actors.arena.table.page_tree import Forest, Root, Work
from actors.arena.table.pages import Page, PageName

Heads: TypeAlias = tuple[Root, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step makes of a head."""

    full: Heads
    """With the step's pages, and before any has left."""

    head: Heads
    left: tuple[Page, ...]
    """Pages that are dead after the step."""

    replaced: tuple[Page, ...]
    """Pages that copies took the place of."""


class TreeView(Mapping[int, Page]):
    """One class of a head, by ordinal."""

    def __init__(self, forest: Forest, root: Root) -> None:
        self._forest = forest
        self._root = root

    def __getitem__(self, ordinal: int) -> Page:
        found = self._forest.get(self._root, ordinal)
        if found is None:
            raise KeyError(ordinal)
        return cast("Page", found)

    def __iter__(self) -> Iterator[int]:
        return (ordinal for ordinal, _ in self._forest.items(self._root))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def upto(self, stop: int) -> list[Page]:
        """Pages before ``stop``; costs what they are, not what comes behind."""
        found = []
        for ordinal, page in self._forest.items(self._root):
            if ordinal >= stop:
                break
            found.append(cast("Page", page))
        return found


class HeadStore:
    """Makes, shares and drops heads."""

    def __init__(self, num_classes: int) -> None:
        self._forest = Forest()
        self.empty: Heads = (None,) * num_classes

    @property
    def work(self) -> Work:
        """What all this has cost so far."""
        return self._forest.work

    def views(self, heads: Heads) -> list[TreeView]:
        """Each class by ordinal."""
        return [TreeView(self._forest, root) for root in heads]

    def names(self, heads: Heads, class_index: int) -> dict[int, PageName]:
        """Pages of one class by rising ordinal."""
        view = TreeView(self._forest, heads[class_index])
        return {ordinal: page.name for ordinal, page in view.items()}

    def hold(self, heads: Heads) -> None:
        """Keep ``heads`` until `drop`."""
        for root in heads:
            self._forest.hold(root)

    def drop(self, heads: Heads) -> list[Page]:
        """Undo one `hold`; the pages that nothing leads to any more."""
        return [cast("Page", leaf) for root in heads for leaf in self._forest.drop(root)]

    def share(self, heads: Heads, stops: Sequence[int]) -> None:
        """Hold ``heads`` for somebody else: from now on nobody may write behind its ends.

        Parameters
        ----------
        stops
            For each class, one past its last ordinal.
        """
        self.hold(heads)
        for root, stop in zip(heads, stops, strict=True):
            if (last := self._forest.get(root, stop - 1)) is not None:
                cast("Page", last).writer = None

    def advance(self, heads: Heads, pages: Iterable[Page], live_from: Sequence[int]) -> Advance:
        """What a step makes of ``heads``; the results are held.

        Parameters
        ----------
        pages
            The step's own.
        live_from
            For each class, the first ordinal that is not dead after it.
        """
        added: list[dict[int, Page]] = [{} for _ in heads]
        for page in pages:
            added[page.name.class_index][page.ordinal] = page
        before = self.views(heads)
        replaced = [
            view[ordinal]
            for view, new in zip(before, added, strict=True)
            for ordinal in new
            if ordinal in view
        ]
        full = tuple(map(self._forest.update, heads, added))
        self.hold(full)
        left = [view.upto(start) for view, start in zip(self.views(full), live_from, strict=True)]
        head = tuple(
            self._forest.update(root, {page.ordinal: None for page in gone})
            for root, gone in zip(full, left, strict=True)
        )
        self.hold(head)
        return Advance(full, head, tuple(page for gone in left for page in gone), tuple(replaced))
