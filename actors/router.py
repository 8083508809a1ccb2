"""The authority on residency: who the workers are, what they hold, and how steps take.

Workers register, publish numbered deltas, and send heartbeats that carry the number of
their last delta.  Every reply says whether a snapshot, or a registration, is wanted next;
the router asks for nothing by itself.  Replicas follow by feeds.

Plain and single-threaded: no clock (the caller says what time it is), no I/O, no Ray.
After a restart the router knows nothing, says so (``ready`` is false), and relearns from
its workers' heartbeats, which it answers with a wish for registration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from codec.errors import StaleIncarnationError
from codec.geometry import Stage
from codec.identity import UNBOUNDED, ChunkKey, CodecId, ComponentKey
from policies.latency import LatencyModel
from policies.residency.changes import Dropped, Feed, Joined, Lost, Outcome, Refuted
from policies.residency.events import Delta, Placement, Snapshot
from policies.residency.feedlog import FeedLog
from policies.residency.index import ResidencyIndex
from policies.residency.view import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """One start of one node's worker: where it listens and what it can do."""

    node: str
    host: str
    port: int
    incarnation: int
    codecs: tuple[CodecId, ...] = ()
    transports: tuple[str, ...] = ()
    last_heartbeat_s: float
    """On the caller's clock."""

    def __post_init__(self) -> None:
        if not self.node or not self.host:
            raise ValueError(f"need a node and a host, got {self.node!r} and {self.host!r}")
        if not 0 < self.port < 2**16:
            raise ValueError(f"port must be in 1..65535, got {self.port}")
        if self.incarnation < 1:
            raise ValueError(f"incarnation must be at least 1, got {self.incarnation}")
        if not math.isfinite(self.last_heartbeat_s):
            raise ValueError(f"last_heartbeat_s must be finite, got {self.last_heartbeat_s}")


@dataclass(frozen=True, slots=True)
class PublishResult:
    """What became of what a worker sent, and what it should send next."""

    outcome: Outcome
    needs_snapshot: bool = False
    needs_registration: bool = False
    """The router does not know this start of the worker; registering comes before all else."""


@dataclass(slots=True)
class RouterCounters:
    """What the router has done; only ever rises."""

    registrations: int = 0
    heartbeats: int = 0
    losses_noticed: int = 0
    """Heartbeats that showed a loss nothing else had shown."""

    workers_expired: int = 0
    feeds_of_changes: int = 0
    feeds_of_state: int = 0


class Router:
    """Registry, index, feed log and latency model of one fabric.

    Parameters
    ----------
    epoch
        Names this start of the router; above those of all earlier ones.
    expected
        Nodes that must have registered and said what they hold before `ready`.
    max_log_rows
        Rows of past changes kept for replicas; one that lags further gets the whole state.
    """

    def __init__(
        self,
        *,
        epoch: int,
        tokens_per_chunk: int,
        latency: LatencyModel,
        expected: Iterable[str] = (),
        max_log_rows: int = 65_536,
    ) -> None:
        if epoch < 1:
            raise ValueError(f"epoch must be at least 1, got {epoch}")
        self.epoch = epoch
        self.latency = latency
        self.counters = RouterCounters()
        #: Followed exactly by the log: its last change made the index's version.
        self._index = ResidencyIndex(tokens_per_chunk=tokens_per_chunk)
        self._log = FeedLog(max_rows=max_log_rows)
        #: Every node here has joined the index in the same incarnation; the index has
        #: besides only those that are expected and have not come yet.
        self._workers: dict[str, WorkerInfo] = {}
        for node in expected:
            self._apply(Joined(node, 0))

    # -- workers

    @property
    def workers(self) -> Mapping[str, WorkerInfo]:
        """Registered workers by node; a view."""
        return MappingProxyType(self._workers)

    def alive(self) -> frozenset[str]:
        """Nodes that can be fetched from."""
        return frozenset(self._workers)

    def register(self, info: WorkerInfo) -> PublishResult:
        """Take up a worker; a new incarnation replaces the old with all that it held.

        Raises
        ------
        StaleIncarnationError
            If a later start of the worker is registered.
        """
        known = self._index.incarnation(info.node)
        if known is not None and known > info.incarnation:
            raise StaleIncarnationError(info.node, info.incarnation, known)
        outcome = self._apply(Joined(info.node, info.incarnation))
        self._workers[info.node] = info
        self.counters.registrations += 1
        return self._reply(info.node, outcome)

    def deregister(self, node: str, incarnation: int) -> Outcome:
        """Let a worker go that says goodbye; an earlier start's goodbye is ignored."""
        info = self._workers.get(node)
        if info is None:
            return Outcome.UNKNOWN
        if info.incarnation != incarnation:
            return Outcome.FENCED
        return self._drop(node)

    def heartbeat(self, node: str, incarnation: int, last_seq: int, now_s: float) -> PublishResult:
        """Note that a worker lives, and whether deltas up to ``last_seq`` have all come.

        Raises
        ------
        ValueError
            If ``now_s`` is not finite.
        """
        if not math.isfinite(now_s):
            raise ValueError(f"now_s must be finite, got {now_s}")
        stranger = self._stranger(node, incarnation)
        if stranger is not None:
            return stranger
        info = self._workers[node]
        latest_s = max(info.last_heartbeat_s, now_s)
        self._workers[node] = replace(info, last_heartbeat_s=latest_s)
        self.counters.heartbeats += 1
        outcome = self._apply(Lost(node, incarnation, last_seq))
        if outcome is Outcome.GAP:
            self.counters.losses_noticed += 1
        return self._reply(node, outcome)

    def expire(self, now_s: float, timeout_s: float) -> tuple[str, ...]:
        """Drop workers not heard for longer than ``timeout_s``; their names, in order.

        The caller should report them: an index that empties in silence looks like a cold one.
        """
        silent = sorted(
            node
            for node, info in self._workers.items()
            if now_s - info.last_heartbeat_s > timeout_s
        )
        for node in silent:
            self._drop(node)
        self.counters.workers_expired += len(silent)
        return tuple(silent)

    # -- residency

    @property
    def ready(self) -> bool:
        """Whether there are workers, and all that are expected have said what they hold."""
        return self._index.ready

    @property
    def version(self) -> int:
        """Effective changes since this start."""
        return self._index.version

    def publish(self, delta: Delta) -> PublishResult:
        """Apply a worker's numbered change.

        Raises
        ------
        ValueError
            If it breaks the contract of `ResidencyIndex.apply_delta`.
        """
        return self._hear(delta)

    def apply_snapshot(self, snapshot: Snapshot) -> PublishResult:
        """Replace all that is known of what a worker holds.

        Raises
        ------
        ValueError
            If it breaks the contract of `ResidencyIndex.apply_snapshot`.
        """
        return self._hear(snapshot)

    def report_stale_hit(
        self, node: str, incarnation: int, component: ComponentKey, codec: CodecId
    ) -> Outcome:
        """Stop listing what a worker was asked for and did not have."""
        return self._apply(Refuted(node, incarnation, component, codec))

    def residency(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        *,
        codecs: Iterable[Sequence[CodecId]] | None = None,
        retention_class: str = UNBOUNDED,
    ) -> Residency:
        """Answer as `ResidencyIndex.residency` does."""
        return self._index.residency(keys, stages, codecs=codecs, retention_class=retention_class)

    def lookup(
        self, keys: Sequence[ChunkKey], stages: Sequence[Stage]
    ) -> list[tuple[Placement, ...]]:
        """Answer as `ResidencyIndex.lookup` does."""
        return self._index.lookup(keys, stages)

    def feed(self, since_version: int, epoch: int | None = None) -> Feed:
        """What takes a replica at ``since_version`` to now.

        Parameters
        ----------
        epoch
            The router's start that ``since_version`` counts from; this one by default.

        Raises
        ------
        ValueError
            If the version is negative.
        """
        if since_version < 0:
            raise ValueError(f"since_version must not be negative, got {since_version}")
        is_ours = epoch is None or epoch == self.epoch
        changes = self._log.since(since_version) if is_ours else None
        if changes is None:
            self.counters.feeds_of_state += 1
            return Feed(self.epoch, since_version, self.version, nodes=self._index.dump())
        self.counters.feeds_of_changes += 1
        return Feed(self.epoch, since_version, self.version, changes)

    # -- the rest

    def observe(self, step: str, label: str, size: float, seconds: float) -> None:
        """Let the latency model learn from a receipt; see `LatencyModel.observe`."""
        self.latency.observe(step, label, size, seconds)

    def observe_prefill(self, label: str, start: int, stop: int, seconds: float) -> None:
        """Let the latency model learn how long tokens ``start`` to ``stop`` took."""
        self.latency.observe_prefill(label, start, stop, seconds)

    def stat(self) -> dict[str, int]:
        """Counters and gauges under one roof."""
        return {
            **asdict(self.counters),
            **asdict(self._index.counters),
            **self._index.gauges(),
            "workers": len(self._workers),
            "version": self.version,
            "log_rows": self._log.num_rows,
        }

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        self._index.check()
        self._log.check()
        assert self._log.version == self._index.version
        incarnations = self._index.residency((), (Stage(0, 1, 0, 1),)).incarnations
        registered = {node: info.incarnation for node, info in self._workers.items()}
        assert registered == {node: known for node, known in incarnations.items() if known}

    def _hear(self, event: Delta | Snapshot) -> PublishResult:
        """Apply what a worker says of itself, if this start of it is registered."""
        stranger = self._stranger(event.node, event.incarnation)
        return stranger or self._reply(event.node, self._apply(event))

    def _stranger(self, node: str, incarnation: int) -> PublishResult | None:
        """The reply to a start of a worker that is not registered; None for one that is.

        A later start is proof that the earlier one is gone, so what that held is dropped.
        """
        info = self._workers.get(node)
        if info is None:
            return PublishResult(Outcome.UNKNOWN, needs_registration=True)
        if incarnation > info.incarnation:
            self._drop(node)
            return PublishResult(Outcome.UNKNOWN, needs_registration=True)
        if incarnation < info.incarnation:
            return PublishResult(Outcome.FENCED)
        return None

    def _reply(self, node: str, outcome: Outcome) -> PublishResult:
        return PublishResult(outcome, needs_snapshot=self._index.needs_resync(node))

    def _drop(self, node: str) -> Outcome:
        self._workers.pop(node, None)
        return self._apply(Dropped(node))

    def _apply(self, change: Delta | Snapshot | Joined | Dropped | Lost | Refuted) -> Outcome:
        """The only way into the index: what is effective is logged, and nothing else."""
        outcome = self._index.apply(change)
        if outcome.is_effective:
            self._log.append(change)
        return outcome
