"""The Ray shell of the `Router`: the clock, the expiry timer, and what replicas are fed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.codecs import CodecOffer
from actors.priors import cold_latency_model
from actors.profile import ModelProfile
from actors.router import PublishResult, Router, WorkerInfo
from codec.identity import CodecId, ComponentKey
from policies.residency.changes import Feed, Outcome
from policies.residency.events import Delta, Snapshot

_log = logging.getLogger(__name__)

Observation = tuple[str, str, float, float]
"""Step, label, size, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterUpdate:
    """All that a client needs to answer by itself."""

    tokens_per_chunk: int
    """What the fabric was started with: a client with another could name no chunk."""

    feed: Feed
    workers: Mapping[str, WorkerInfo]
    models: Mapping[str, ModelProfile]
    latency: Mapping[str, Any]
    """State of the latency model."""


@dataclass(frozen=True, slots=True)
class ModelCodecs:
    """A model and its codecs, as references that a worker can await."""

    profile: ModelProfile
    codecs: tuple[Any, ...]
    """Ray object references of `actors.codecs.CodecOffer`, owned by the router."""


class RouterShell:
    """The router's actor; see the module.  An async actor: calls do not overlap."""

    def __init__(
        self, *, tokens_per_chunk: int, lost_after_s: float, expected_nodes: Sequence[str]
    ) -> None:
        self._router = Router(
            epoch=time.time_ns(),
            tokens_per_chunk=tokens_per_chunk,
            latency=cold_latency_model(),
            expected=expected_nodes,
        )
        self._tokens_per_chunk = tokens_per_chunk
        self._lost_after_s = lost_after_s
        #: By name.  After a restart workers bring back the profiles, but only whoever
        #: registers a model again brings back its codecs.
        self._models: dict[str, ModelCodecs] = {}
        self._expiry: asyncio.Task[None] | None = None

    async def ping(self) -> bool:
        """Begin to watch for silent workers, and say that the router is there."""
        if self._expiry is None:
            self._expiry = asyncio.ensure_future(self._expire())
        return True

    async def register(self, info: WorkerInfo, models: Sequence[ModelProfile]) -> PublishResult:
        """See `Router.register`; the worker's models are taken up with it."""
        await self.ping()
        for model in models:
            self._models.setdefault(model.name, ModelCodecs(model, ()))
        return self._router.register(replace(info, last_heartbeat_s=time.monotonic()))

    async def deregister(self, node: str, incarnation: int) -> Outcome:
        """See `Router.deregister`."""
        return self._router.deregister(node, incarnation)

    async def publish(self, deltas: Sequence[Delta]) -> PublishResult:
        """Apply a worker's deltas in order; the last reply counts for all."""
        replies = [self._router.publish(delta) for delta in deltas]
        return replies[-1] if replies else PublishResult(Outcome.DUPLICATE)

    async def apply_snapshot(self, snapshot: Snapshot) -> PublishResult:
        """See `Router.apply_snapshot`."""
        return self._router.apply_snapshot(snapshot)

    async def heartbeat(self, node: str, incarnation: int, last_seq: int) -> PublishResult:
        """See `Router.heartbeat`."""
        return self._router.heartbeat(node, incarnation, last_seq, time.monotonic())

    async def report_stale_hit(
        self, node: str, incarnation: int, component: ComponentKey, codec: CodecId
    ) -> Outcome:
        """See `Router.report_stale_hit`."""
        return self._router.report_stale_hit(node, incarnation, component, codec)

    async def add_model(self, profile: ModelProfile, offers: Sequence[CodecOffer]) -> None:
        """Register a model, in place of one of the same name, with the codecs it needs."""
        # Put again here: what the caller put is lost with the caller.
        self._models[profile.name] = ModelCodecs(profile, tuple(ray.put(offer) for offer in offers))

    async def models(self) -> dict[str, ModelCodecs]:
        """Every model and its codecs."""
        return dict(self._models)

    async def update(self, position: tuple[int, int]) -> RouterUpdate:
        """What takes a client whose replica is at ``position``, a version and epoch, to now."""
        return RouterUpdate(
            tokens_per_chunk=self._tokens_per_chunk,
            feed=self._router.feed(*position),
            workers=dict(self._router.workers),
            models={name: model.profile for name, model in self._models.items()},
            latency=self._router.latency.to_dict(),
        )

    async def observe(self, observations: Sequence[Observation]) -> None:
        """Let the latency model learn from a receipt's steps."""
        for step, label, size, seconds in observations:
            self._router.observe(step, label, size, seconds)

    async def observe_prefill(self, label: str, start: int, stop: int, seconds: float) -> None:
        """Let the latency model learn how long a prefill took."""
        self._router.observe_prefill(label, start, stop, seconds)

    async def stat(self) -> dict[str, int]:
        """See `Router.stat`."""
        return self._router.stat()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self._lost_after_s / 4)
            for node in self._router.expire(time.monotonic(), self._lost_after_s):
                _log.warning("worker %s is silent for over %g s: dropped", node, self._lost_after_s)


RouterActor = ray.remote(RouterShell)
