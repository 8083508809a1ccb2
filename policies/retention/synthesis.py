"""Where each page of a class lives, and at which boundary it dies.

An address program maps a page's ordinal to ``(cell, cycle)``, a retirement program to the
boundary at which nothing will read it again.  Ordinals of dense classes are absolute: page
``o`` holds positions ``[o*P, (o+1)*P)``.  Two pages that are needed at the same time never
share a cell, for steps of up to ``step_tokens`` tokens that are stored before any of their
queries runs (chunked prefill): then up to ``step_tokens - 1`` further tokens are present
beside the reach of the earliest query, and a window needs
``1 + ceil((W - 1 + step_tokens - 1) / P)`` cells.

| region | address | cells | dies |
| --- | --- | --- | --- |
| nothing bounds it | `Append` | grows | never, or page by page |
| a prefix | `Pinned` | its pages | never, or page by page |
| a window, or any bounded reach | `Periodic` | as above, for W - 1 = reach | `PageEnd` or page by page |
| chunks of C, P divides C | `Arena` | C / P, reset with every chunk | `ChunkEnd` |
| recurrent state | `Slot` | one, versioned in place | `Replaced` |
"""

from __future__ import annotations

from dataclasses import dataclass

from codec.errors import RetentionError
from policies.retention.claims import Claim, Forever, Until
from policies.retention.normalize import Region


@dataclass(frozen=True, slots=True)
class Append:
    """One cell per page, without end."""

    @property
    def cells(self) -> int | None:
        """Cells that one request can need; nothing if there is no bound."""
        return None

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell and cycle of a page."""
        return ordinal, 0

    def __str__(self) -> str:
        return "append"


@dataclass(frozen=True, slots=True)
class Pinned:
    """One cell per page of a stretch that starts at page ``origin``."""

    num_pages: int
    origin: int = 0

    @property
    def cells(self) -> int | None:
        """The pages of the stretch."""
        return self.num_pages

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell and cycle of a page."""
        return ordinal - self.origin, 0

    def __str__(self) -> str:
        return f"pinned({self.num_pages})"


@dataclass(frozen=True, slots=True)
class Periodic:
    """``period`` cells, used round and round from page ``origin`` on."""

    period: int
    origin: int = 0

    @property
    def cells(self) -> int | None:
        """The period."""
        return self.period

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell and cycle of a page."""
        cycle, cell = divmod(ordinal - self.origin, self.period)
        return cell, cycle

    def __str__(self) -> str:
        return f"periodic({self.period})" + (f" from page {self.origin}" if self.origin else "")


@dataclass(frozen=True, slots=True)
class Arena:
    """The cells of one chunk, reset as a whole when the next chunk begins."""

    num_pages: int

    @property
    def cells(self) -> int | None:
        """Pages of a chunk."""
        return self.num_pages

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell and cycle of a page."""
        cycle, cell = divmod(ordinal, self.num_pages)
        return cell, cycle

    def __str__(self) -> str:
        return f"arena({self.num_pages})"


@dataclass(frozen=True, slots=True)
class Slot:
    """A state of fixed size, overwritten in place; the cycle is the boundary it is of."""

    @property
    def cells(self) -> int | None:
        """One."""
        return 1

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell, and the boundary as the version."""
        return 0, ordinal

    def __str__(self) -> str:
        return "slot"


Address = Append | Pinned | Periodic | Arena | Slot


@dataclass(frozen=True, slots=True)
class Kept:
    """Nothing dies before the request is released."""

    def __str__(self) -> str:
        return "at release"


@dataclass(frozen=True, slots=True)
class PageEnd:
    """A page dies ``tokens`` after its end: a window of one token more."""

    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens after its page"


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """A page dies with its chunk of ``num_pages`` pages."""

    num_pages: int

    def __str__(self) -> str:
        return f"with its {self.num_pages}-page chunk"


@dataclass(frozen=True, slots=True)
class LastRead:
    """A page dies when the claims say that its last key was read."""

    def __str__(self) -> str:
        return "after its last read"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A version dies at the next boundary."""

    def __str__(self) -> str:
        return "at the next boundary"


Retirement = Kept | PageEnd | ChunkEnd | LastRead | Replaced


def synthesize(region: Region, page_tokens: int, step_tokens: int) -> tuple[Address, Retirement]:
    """Address and retirement program of one region.

    Raises
    ------
    RetentionError
        ``chunk-not-page-aligned`` if a chunk is not a whole number of pages.
    """
    chunk = chunk_of(region)
    if chunk is not None:
        if chunk % page_tokens:
            raise RetentionError(
                "chunk-not-page-aligned",
                str(region.claims[0]),
                f"need a page size that divides {chunk}, got {page_tokens}",
            )
        pages = chunk // page_tokens
        extra = -(-(step_tokens - 1) // page_tokens)
        if extra == 0:
            return Arena(pages), ChunkEnd(pages)
        return Periodic(pages + extra, region.first_page), ChunkEnd(pages)
    reach = region.reach
    retirement = _retirement(region)
    period = None if reach is None else 1 + -(-(max(0, reach) + step_tokens - 1) // page_tokens)
    if region.stop_page is not None:
        pages = region.stop_page - region.first_page
        if period is None or pages <= period:
            return Pinned(pages, region.first_page), retirement
    if period is None:
        return Append(), retirement
    return Periodic(period, region.first_page), retirement


def chunk_of(region: Region) -> int | None:
    """C if every key of the region lives as long as its chunk of C tokens."""
    if len(region.claims) != 1 or region.claims[0].keys.stop is not None:
        return None
    rule = region.claims[0].rule
    is_plain = isinstance(rule, Until) and region.claims[0].keys.is_dense
    return rule.chunk_tokens if is_plain and isinstance(rule, Until) else None


def _retirement(region: Region) -> Retirement:
    if all(isinstance(claim.rule, Forever) for claim in region.claims):
        return Kept()
    rule = region.claims[0].rule
    if (
        len(region.claims) == 1
        and isinstance(rule, Until)
        and rule.window_tokens is not None
        and region.claims[0].keys.is_dense
        and region.stop_page is None
    ):
        return PageEnd(rule.window_tokens - 1)
    return LastRead()


def death_of_page(claims: tuple[Claim, ...], tokens: tuple[int, int]) -> int | None:
    """Boundary from which nothing reads the positions ``tokens``; nothing if never.

    A page that nothing ever reads is dead at boundary 0.
    """
    death = 0
    for claim in claims:
        part = claim.keys.clip(*tokens)
        if part is None:
            continue
        if isinstance(claim.rule, Forever):
            return None
        if not isinstance(claim.rule, Until):
            continue
        ends = (part.first_from(tokens[0]), part.last_before(tokens[1]))  # it rises, or falls
        death = max([death, *(1 + claim.rule.last_read(key) for key in ends if key is not None)])
    return death
