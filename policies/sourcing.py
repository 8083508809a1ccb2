"""Where a restore gets its chunks: the cheapest sources, stage by stage.

A *segment* is a stretch of chunks fetched from one node and tier; it costs a connection
(none at home), a transfer's fixed time, and its bytes.  The costs of a stretch add up
chunk by chunk, so dynamic programming over the runs of the answer finds the cheapest
choice exactly: a source a little slower per byte is kept on with where a change would
cost more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from codec.geometry import Stage
from codec.identity import CodecId, ComponentKey
from policies.latency import CONNECT, NOTHING, TRANSFER, LatencyModel, Prediction, transfer_label
from policies.residency.view import Coverage, Holding, Residency, Run

LOCAL_LINK = "local"
UNKNOWN_LINK = "remote"
"""Link label of a source that the caller gives none for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive chunks of one stage, fetched from one node and tier."""

    stage: Stage
    node: str
    incarnation: int
    """The source must be found in it: a restarted node holds something else."""

    tier: str
    codec: CodecId
    start_token: int
    components: tuple[ComponentKey, ...]
    stored_bytes: int
    decoded_bytes: int
    predicted_s: float
    """Connection and transfer."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """What things cost on one node."""

    residency: Residency
    node: str
    latency: LatencyModel
    links: Mapping[str, str]
    arrival_s_per_byte: float = 0.0
    """What every stored byte costs after it has arrived, wherever from: a smaller copy of a
    chunk saves that too."""

    def link(self, source: str) -> str:
        """Label of the way from ``source``."""
        return LOCAL_LINK if source == self.node else self.links.get(source, UNKNOWN_LINK)

    def connect(self, source: str) -> Prediction:
        """Time until the first byte can be asked for."""
        if source == self.node:
            return NOTHING
        return self.latency.predict(CONNECT, self.link(source), 0)

    def transfer(self, source: str, tier: str, stored_bytes: int) -> Prediction:
        """Time to move that many bytes in one segment."""
        return self.latency.predict(TRANSFER, transfer_label(self.link(source), tier), stored_bytes)

    def opening_s(self, source: str, tier: str) -> float:
        """What a segment costs before its bytes."""
        return self.connect(source).seconds + self.transfer(source, tier, 0).seconds

    def bytes_s(self, source: str, tier: str, stored_bytes: int) -> float:
        """What bytes add to a segment that is open."""
        law = self.latency.law(TRANSFER, transfer_label(self.link(source), tier))
        return stored_bytes * (1 / law.per_s + self.arrival_s_per_byte)


def live_runs(coverage: Coverage, alive: frozenset[str]) -> list[list[Run]]:
    """Per stage, the leading runs that a live node holds, without the dead ones' holdings."""
    live: list[list[Run]] = []
    for runs in coverage.runs:
        kept: list[Run] = []
        for run in runs:
            holdings = tuple(holding for holding in run.holdings if holding.node in alive)
            if not holdings:
                break
            kept.append(Run(run.start, run.stop, holdings))
        live.append(kept)
    return live


def clip(runs: Sequence[Run], num_chunks: int) -> list[Run]:
    """The part of ``runs`` that lies in the first ``num_chunks`` chunks."""
    clipped: list[Run] = []
    for run in runs:
        stop = min(run.stop, num_chunks)
        if run.start < stop:
            length = stop - run.start
            holdings = tuple(
                Holding(h.node, h.tier, h.decoded_bytes, h.stored_bytes[:length])
                for h in run.holdings
            )
            clipped.append(Run(run.start, stop, holdings))
    return clipped


@dataclass(frozen=True, slots=True)
class _Path:
    """The cheapest way to fetch the runs so far that ends at one source."""

    cost_s: float
    sources: tuple[Holding, ...]
    """One per run."""

    def rank(self, home: str) -> tuple[float, bool, str, str]:
        """Cost; at equal cost home goes first, then the lower name."""
        last = self.sources[-1]
        return self.cost_s, last.node != home, last.node, last.tier


def choose_sources(runs: Sequence[Run], pricing: Pricing) -> tuple[Holding, ...]:
    """One holding per run, so that opening segments and moving bytes takes least in all.

    Work grows with the runs times the holders of one.
    """
    paths: dict[tuple[str, str], _Path] = {}
    for run in runs:
        best = min(paths.values(), key=lambda path: path.rank(pricing.node), default=None)
        longer: dict[tuple[str, str], _Path] = {}
        for holding in run.holdings:
            source = (holding.node, holding.tier)
            moved_s = pricing.bytes_s(*source, sum(holding.stored_bytes))
            opened_s = pricing.opening_s(*source) + moved_s
            had = best if best is not None else _Path(0.0, ())
            path = _Path(had.cost_s + opened_s, (*had.sources, holding))
            stay = paths.get(source)
            if stay is not None and stay.cost_s + moved_s <= path.cost_s:
                path = _Path(stay.cost_s + moved_s, (*stay.sources, holding))
            longer[source] = path
        paths = longer
    return min(paths.values(), key=lambda path: path.rank(pricing.node)).sources


def segments(runs: Sequence[Run], stage: int, codec: CodecId, pricing: Pricing) -> list[Segment]:
    """Join runs in a row that come from one source."""
    residency = pricing.residency
    chosen = zip(runs, choose_sources(runs, pricing), strict=True)
    segments: list[Segment] = []
    for (node, tier), group in groupby(chosen, key=lambda pair: (pair[1].node, pair[1].tier)):
        parts = list(group)
        start, stop = parts[0][0].start, parts[-1][0].stop
        stored_bytes = sum(sum(holding.stored_bytes) for _, holding in parts)
        segments.append(
            Segment(
                stage=residency.stages[stage],
                node=node,
                incarnation=residency.incarnations[node],
                tier=tier,
                codec=codec,
                start_token=start * residency.tokens_per_chunk,
                components=tuple(residency.component(i, stage) for i in range(start, stop)),
                stored_bytes=stored_bytes,
                decoded_bytes=sum(h.decoded_bytes * len(h.stored_bytes) for _, h in parts),
                predicted_s=pricing.connect(node).seconds
                + pricing.transfer(node, tier, stored_bytes).seconds,
            )
        )
    return segments
