"""Compile a program into a plan: classes, addresses, deaths, and what a boundary holds.

A boundary ``b`` is the instant after tokens ``0 .. b-1`` are stored and before query ``b``
runs.  *Live* state can still be read; *held* state occupies cells, whole pages of it, dead
or alive.  A window of W tokens has W - 1 live tokens at a boundary, since the next query
brings its own key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.retention.claims import Claim, Forever, Keys
from policies.retention.lifetime import Lifetime
from policies.retention.normalize import Region, RetentionClass, normalize
from policies.retention.program import (
    AttentionState,
    CrossState,
    HeadRange,
    KvShape,
    Program,
    RecurrentState,
    check_count,
)
from policies.retention.synthesis import (
    Address,
    Append,
    ChunkEnd,
    Kept,
    LastRead,
    PageEnd,
    Pinned,
    Replaced,
    Retirement,
    Slot,
    death_of_page,
    synthesize,
)

Kind = Literal["attention", "recurrent", "cross"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedClass:
    """One retention class with its programs."""

    name: str
    kind: Kind
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    heads: HeadRange | None
    width_bytes: int
    """Bytes per token and layer; for recurrent state, per layer."""

    page_tokens: int
    """Tokens in a page; 1 for recurrent state, whose pages are versions."""

    region: Region
    address: Address
    retirement: Retirement
    shape: KvShape | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all its layers."""
        return self.page_tokens * self.width_bytes * len(self.layers)

    def check_ordinal(self, ordinal: int) -> None:
        """Refuse a page that this class does not have."""
        stop = self.region.stop_page
        if ordinal < self.region.first_page or (stop is not None and ordinal >= stop):
            span = f"[{self.region.first_page}, {'...' if stop is None else stop})"
            raise ValueError(f"class {self.name!r} has pages {span}, got {ordinal}")

    def locate(self, ordinal: int) -> tuple[int, int]:
        """Cell and cycle of a page.

        Raises
        ------
        ValueError
            If the class has no such page.
        """
        self.check_ordinal(ordinal)
        return self.address.locate(ordinal)

    def tokens_of(self, ordinal: int) -> tuple[int, int]:
        """Positions ``[start, stop)`` that a page spans; a ranked page also spans gaps."""
        self.check_ordinal(ordinal)
        start, stop = ordinal * self.page_tokens, (ordinal + 1) * self.page_tokens
        if not self.region.is_ranked:
            return start, stop
        keys = self.region.claims[0].keys
        return keys.select(start), keys.select(stop - 1) + 1

    def page_of(self, key: int) -> int | None:
        """Ordinal of the page that holds ``key``; nothing if this class does not hold it."""
        if not any(key in claim.keys for claim in self.region.claims):
            return None
        if self.region.is_ranked:
            return self.region.claims[0].keys.below(key) // self.page_tokens
        return key // self.page_tokens

    def death(self, ordinal: int) -> int | None:
        """Boundary from which nothing reads the page; nothing if only release ends it."""
        self.check_ordinal(ordinal)
        match self.retirement:
            case Kept():
                return None
            case PageEnd(tokens):
                return (ordinal + 1) * self.page_tokens + tokens
            case ChunkEnd(pages):
                return (ordinal // pages + 1) * pages * self.page_tokens
            case Replaced():
                return ordinal + 1
            case LastRead():
                return death_of_page(self.region.claims, self.tokens_of(ordinal))

    def pages_at(self, boundary: int) -> tuple[int, int]:
        """Ordinals ``[start, stop)`` of the pages written so far."""
        first, last = self.region.first_page, self.region.stop_page
        if self.kind == "recurrent":
            return (boundary, boundary + 1) if boundary else (0, 0)
        if self.kind == "cross":
            return (0, last or 0) if boundary else (0, 0)
        tokens = self.region.claims[0].keys.below(boundary) if self.region.is_ranked else boundary
        stop = -(-tokens // self.page_tokens)
        return first, max(first, stop if last is None else min(stop, last))

    def live_claims(self, boundary: int) -> tuple[Keys, ...]:
        """Sets of keys that a query at or after ``boundary`` may read, disjoint."""
        found = (claim.live_keys(boundary) for claim in self.region.claims)
        return tuple(keys for keys in found if keys is not None)

    def live_tokens(self, boundary: int) -> int:
        """Tokens that a query at or after ``boundary`` may read."""
        if self.kind == "recurrent":
            return 1 if boundary else 0
        if self.kind == "cross":
            return self.region.claims[0].keys.below(2**62) if boundary else 0
        return sum(keys.below(boundary) for keys in self.live_claims(boundary))

    def held_pages(self, boundary: int) -> int:
        """Cells in use at ``boundary``: pages that exist, as many as the address keeps."""
        start, stop = self.pages_at(boundary)
        cells = self.address.cells
        if isinstance(self.retirement, LastRead) and isinstance(self.address, Append | Pinned):
            start = self.first_live_page(boundary)
        return max(0, stop - start) if cells is None else min(max(0, stop - start), cells)

    def held_tokens(self, boundary: int) -> int:
        """Tokens that the held pages have room for."""
        return self.held_pages(boundary) * self.page_tokens

    def held_bytes(self, boundary: int) -> int:
        """Bytes of the held pages."""
        return self.held_pages(boundary) * self.page_bytes

    def live_bytes(self, boundary: int) -> int:
        """Bytes of the live tokens alone."""
        return self.live_tokens(boundary) * self.width_bytes * len(self.layers)

    def first_live_page(self, boundary: int) -> int:
        """First page that is needed at ``boundary``; the last, partly filled one always is.

        The next token is written there, even if every token in it is dead.
        """
        start, stop = self.pages_at(boundary)
        if self.kind != "attention" or isinstance(self.retirement, Kept):
            return start
        firsts = [keys.first_from(0) or 0 for keys in self.live_claims(boundary)]
        if self.region.is_ranked:
            ranked = self.region.claims[0].keys
            firsts = [ranked.below(key) for key in firsts]
        tail = boundary // self.page_tokens
        if boundary % self.page_tokens == 0 or tail >= stop:
            tail = stop  # the next token opens a page, or belongs to another class
        return max(start, min([tail, *(first // self.page_tokens for first in firsts)]))

    def continuation(self, boundary: int) -> tuple[int, int]:
        """Pages ``[start, stop)`` that the queries from ``boundary`` on need."""
        _, stop = self.pages_at(boundary)
        return min(self.first_live_page(boundary), stop), stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A compiled program."""

    program: Program
    step_tokens: int
    """Most tokens that one step stores before its queries run."""

    classes: tuple[PlannedClass, ...]
    lifetimes: Mapping[str, Lifetime]
    """Per attention state, by name."""

    def class_named(self, name: str) -> PlannedClass:
        """The class with that name.

        Raises
        ------
        KeyError
            If there is none.
        """
        for found in self.classes:
            if found.name == name:
                return found
        raise KeyError(name)

    def held_bytes(self, boundary: int) -> int:
        """Bytes that a request holds at ``boundary``."""
        return sum(found.held_bytes(boundary) for found in self.classes)

    def live_bytes(self, boundary: int) -> int:
        """Bytes that a request can still read at ``boundary``."""
        return sum(found.live_bytes(boundary) for found in self.classes)

    def all_full_bytes(self, boundary: int) -> int:
        """Bytes if every attention state were kept whole; the other states count as they are."""
        pages = -(-boundary // self.program.page_tokens)
        whole = sum(
            pages * self.program.page_tokens * state.bytes_per_token_layer * len(state.layers)
            for state in self.program.attention
        )
        others = (found for found in self.classes if found.kind != "attention")
        return whole + sum(found.held_bytes(boundary) for found in others)


def compile_program(program: Program, *, step_tokens: int = 1) -> Plan:
    """Compile ``program`` for steps of up to ``step_tokens`` tokens.

    Linear in the number of layers; each distinct relation is inferred once.

    Raises
    ------
    RetentionError
        If a relation has no reader, or a chunk is not a whole number of pages.
    """
    check_count("step_tokens", step_tokens, "bad-step")
    normal, lifetimes = normalize(program)
    attention = [_plan_attention(found, program.page_tokens, step_tokens) for found in normal]
    fixed = [
        _plan_fixed(state, program.page_tokens)
        for state in program.states
        if not isinstance(state, AttentionState)
    ]
    classes = (*attention, *fixed)
    return Plan(program=program, step_tokens=step_tokens, classes=classes, lifetimes=lifetimes)


def _plan_attention(found: RetentionClass, page_tokens: int, step_tokens: int) -> PlannedClass:
    address, retirement = synthesize(found.region, page_tokens, step_tokens)
    return PlannedClass(
        name=found.name,
        kind="attention",
        sources=found.sources,
        layers=found.layers,
        heads=found.heads,
        width_bytes=found.bytes_per_token_layer,
        page_tokens=page_tokens,
        region=found.region,
        address=address,
        retirement=retirement,
        shape=found.shape,
    )


def _plan_fixed(state: RecurrentState | CrossState, page_tokens: int) -> PlannedClass:
    if isinstance(state, RecurrentState):
        kind: Kind = "recurrent"
        tokens, width, region = 1, state.bytes_per_layer, Region(role="whole", claims=())
        address: Address = Slot()
        retirement: Retirement = Replaced()
    else:
        kind = "cross"
        tokens, width = page_tokens, state.bytes_per_token_layer
        pages = -(-state.source_tokens // page_tokens)
        claims = (Claim(Keys(0, state.source_tokens), Forever()),)
        region = Region(role="whole", claims=claims, stop_page=pages)
        address, retirement = Pinned(pages), Kept()
    return PlannedClass(
        name=state.name,
        kind=kind,
        sources=(state.name,),
        layers=state.layers,
        heads=None,
        width_bytes=width,
        page_tokens=tokens,
        region=region,
        address=address,
        retirement=retirement,
    )
