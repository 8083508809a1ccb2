"""What a page table needs of the memory under one retention class: slots, one page each.

Generations are not kept here: whoever hands slots out to requests counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class SlotSource(Protocol):
    """The slots of one class, numbered ``[0, num_slots)``."""

    @property
    def num_slots(self) -> int:
        """Slots there are addresses for."""
        ...

    def needs_move(self, tenant: int, ordinals: Sequence[int]) -> bool:
        """Whether ``tenant`` can have these new pages only by moving all of its live ones.

        Never so where any page may lie anywhere.  So in a ring that the tenant does not
        have, or of which a cell that it needs is still taken.
        """
        ...

    def reserve(self, tenant: int, ordinals: Sequence[int], *, move: bool) -> list[int]:
        """Slots for the pages with these ordinals, with memory; all of them or none.

        Parameters
        ----------
        move
            Put them into memory of the tenant's own that is new to it.

        Raises
        ------
        ArenaFullError
            If there are no slots, or no memory for them; nothing has changed then.
        """
        ...

    def free(self, slots: Iterable[int]) -> None:
        """Take note that nobody uses these slots any more."""
        ...

    def leave(self, tenant: int) -> None:
        """Take note that ``tenant`` asks for no more slots; those it has stay until freed."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copy the whole page in slot ``source`` to slot ``target``."""
        ...
