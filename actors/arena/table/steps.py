"""Steps of requests through their boundaries: what is asked for, planned, and reported.

``prepare`` turns `StepItem`s into `Step`s: pages reserved that nobody sees.  A backend then
maps, copies and writes what a step lists, and says so in a `Receipt`; ``commit`` compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.arena.table.pages import PageName
from policies.retention.ir import MAX_POSITION


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """One request's wish to go on."""

    request: int
    before: int
    """Where the caller believes its head to be; another boundary is refused."""

    after: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if type(value := getattr(self, name)) is not int:
                raise TypeError(f"{name} must be an int, got {value!r}")
        if not 0 <= self.before < self.after <= MAX_POSITION:
            raise ValueError(
                f"need 0 <= before < after <= {MAX_POSITION}, got {self.before} and {self.after}"
            )


@dataclass(frozen=True, slots=True)
class StepPage:
    """A page that a step may write."""

    name: PageName
    ordinal: int
    source: PageName | None = None
    """The page whose copy it is; nothing if it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a prepared step will do."""

    number: int
    epoch: int
    request: int
    before: int
    after: int
    pages: tuple[StepPage, ...]
    """Reserved for it, by class and rising ordinals."""

    tails: tuple[StepPage, ...]
    """Pages of the head that it writes into, behind what they hold."""

    live_from: tuple[int, ...]
    """For each class: pages before this ordinal are dead after the step."""

    def written(self, class_index: int) -> dict[int, PageName]:
        """The pages of one class that it may write, by ordinal."""
        return {
            page.ordinal: page.name
            for page in (*self.tails, *self.pages)
            if page.name.class_index == class_index
        }

    @property
    def copies(self) -> tuple[tuple[PageName, PageName], ...]:
        """Sources and targets of the copies to be made before anything is written."""
        return tuple((page.source, page.name) for page in self.pages if page.source is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A backend's word of what it did for one step."""

    step: int
    epoch: int
    bound: frozenset[PageName]
    """Pages that are mapped and may be written."""

    copied: frozenset[tuple[PageName, PageName]]
    """Copies that were made, or are ordered before every write."""

    fault: str = ""
    """What went wrong on the way, if anything did."""

    @classmethod
    def of(cls, step: Step) -> Receipt:
        """The receipt of a backend that did all it was asked for."""
        bound = frozenset(page.name for page in step.pages)
        return cls(step=step.number, epoch=step.epoch, bound=bound, copied=frozenset(step.copies))


def need_complete(step: Step, receipt: Receipt) -> None:
    """Refuse a receipt that is still short of what the step asked for.

    Raises
    ------
    ValueError
        Naming the first page or copy that is missing; ask again when it is done.
    """
    if receipt.fault:
        return
    wanted = Receipt.of(step)
    for what, missing in (
        ("page", wanted.bound - receipt.bound),
        ("copy", wanted.copied - receipt.copied),
    ):
        if missing:
            first = min(missing)
            raise ValueError(f"step {step.number} needs {what} {first}, its receipt lacks it")


def wrongs(step: Step, receipt: Receipt) -> str:
    """What the receipt says was done that the step did not ask for; empty if nothing."""
    if receipt.fault:
        return receipt.fault
    wanted = Receipt.of(step)
    if stray := receipt.bound - wanted.bound:
        return f"page {min(stray)} is not of the step"
    if strays := receipt.copied - wanted.copied:
        source, target = min(strays)
        return f"a copy of {source} to {target} is not of the step"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Why a slot may hold another page."""

    page: PageName
    ordinal: int
    tokens: tuple[int, int]
    """Positions ``[start, stop)`` that the page spanned."""

    why: str
    """How it left the last snapshot: window, replaced, released, dropped or recovered."""

    done: tuple[tuple[str, int], ...]
    """Up to where all work of each domain had ended."""
