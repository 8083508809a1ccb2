"""Answers of a residency index: values, true as of a stated version.

An answer says, for each codec that covers the prefix, which nodes hold its chunks.
Chunks that follow each other and are held by the same nodes form a *run*, so an answer
about a long prefix is small and a plan is made run by run; `Residency.placements`
spells it out chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from codec.geometry import Stage
from codec.identity import ChunkKey, CodecId, ComponentKey
from policies.residency.events import Placement


@dataclass(frozen=True, slots=True)
class AsOf:
    """How far an answer had heard."""

    version: int
    """Changes that the index had applied; the same on a replica."""

    seqs: Mapping[str, int]
    """``{node: last delta applied}``."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one node holds of a run of chunks, in one tier."""

    node: str
    tier: str
    decoded_bytes: int
    """Of each chunk."""

    stored_bytes: tuple[int, ...]
    """One per chunk of the run."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of one stage that the same nodes hold."""

    start: int
    """Ordinal of the first chunk in the prefix."""

    stop: int
    holdings: tuple[Holding, ...]
    """At least one; by node name."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the run's chunks, each where it is smallest."""
        return sum(map(min, zip(*(h.stored_bytes for h in self.holdings), strict=True)))


@dataclass(frozen=True, slots=True)
class Coverage:
    """The prefix that one codec restores: every chunk of it is there for every stage."""

    codecs: tuple[CodecId, ...]
    """One per stage; all the same for a codec whose identity does not name its stage."""

    num_chunks: int
    runs: tuple[tuple[Run, ...], ...]
    """Per stage, the runs that tile ``[0, num_chunks)``."""

    @property
    def stored_bytes(self) -> int:
        """Least bytes that a restore of the whole prefix moves."""
        return sum(run.stored_bytes for runs in self.runs for run in runs)

    @property
    def decoded_bytes(self) -> int:
        """The same prefix in 16 bits."""
        return sum(
            run.holdings[0].decoded_bytes * (run.stop - run.start)
            for runs in self.runs
            for run in runs
        )


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the chunks of one prompt are, and how much that is worth."""

    keys: tuple[ChunkKey, ...]
    """As asked; the answer covers a prefix of them."""

    stages: tuple[Stage, ...]
    retention_class: str
    tokens_per_chunk: int
    coverages: tuple[Coverage, ...]
    """One per codec that restores at least one chunk; the longest first."""

    as_of: AsOf
    incarnations: Mapping[str, int]
    """``{node: incarnation}``: a transfer must find the same one, or look again."""

    gapped: tuple[str, ...]
    """Nodes of whose changes some were lost and not made good yet."""

    ready: bool
    """Whether every node that joined has said what it holds."""

    @property
    def gap(self) -> bool:
        """Whether something may be missing here, or listed and gone, that was announced."""
        return bool(self.gapped)

    @property
    def num_chunks(self) -> int:
        """Chunks that the codec with the longest reach restores."""
        return self.coverages[0].num_chunks if self.coverages else 0

    @property
    def prefix_tokens(self) -> int:
        """Tokens restorable from the prompt's start, by one codec over all stages."""
        return self.num_chunks * self.tokens_per_chunk

    @property
    def stored_bytes(self) -> int:
        """Least bytes that a restore of `prefix_tokens` moves."""
        return self.coverages[0].stored_bytes if self.coverages else 0

    def component(self, chunk: int, stage: int) -> ComponentKey:
        """Name of chunk ``chunk`` for stage ``stage``, both by ordinal in this answer."""
        return ComponentKey(self.keys[chunk], self.stages[stage], self.retention_class)

    def placements(self) -> list[tuple[Placement, ...]]:
        """Every placement that the coverages rest on, chunk by chunk of the longest."""
        found: list[list[Placement]] = [[] for _ in range(self.num_chunks)]
        for coverage in self.coverages:
            for stage, (codec, runs) in enumerate(zip(coverage.codecs, coverage.runs, strict=True)):
                for run in runs:
                    for chunk in range(run.start, run.stop):
                        found[chunk] += self._at(run, chunk, stage, codec)
        return [tuple(placements) for placements in found]

    def _at(self, run: Run, chunk: int, stage: int, codec: CodecId) -> list[Placement]:
        """The placements of one chunk in ``run``."""
        return [
            Placement(
                self.component(chunk, stage),
                codec,
                holding.node,
                holding.tier,
                holding.stored_bytes[chunk - run.start],
                holding.decoded_bytes,
                self.tokens_per_chunk,
            )
            for holding in run.holdings
        ]
