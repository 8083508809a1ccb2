"""`Fabric`: start the actors on a Ray cluster, register models, store and restore prefixes.

`Fabric.start` makes the router and one worker per name, detached, so that they outlive their
maker.  A restore that fails ends in a `RestoreOutcome` that says why: never in wrong bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

import ray

from actors.codecs import Qualification
from actors.handoff import KvArrays
from actors.naming import ROUTER, worker_actor_name
from actors.profile import ModelProfile
from actors.router import WorkerInfo
from actors.worker import WorkerStat
from actors.worker_actor import Restored, RestoreRequest
from codec.codec import Codec
from codec.errors import ConfigError, FabricError, IncompletePullError, PeerLostError
from codec.identity import CodecId
from codec.quality_receipt import QualityReceipt
from fabric.calibrate.profiles import AnyCalibration
from fabric.client import FabricClient, link_label
from fabric.config import FabricConfig
from fabric.engines.protocol import Engine
from fabric.launch import start_actors, stop_actors
from fabric.model import check_engine, describe_model, offer_codecs
from fabric.outcome import RestoreOutcome, error_name, first_line
from policies.latency import decode_label, transfer_label
from policies.planner import Choice, RestorePlan
from policies.residency.events import Placement
from policies.vmm_gate import UnitCosts

_log = logging.getLogger(__name__)


class Fabric:
    """A running fabric, seen from one process."""

    def __init__(self, config: FabricConfig) -> None:
        """Connect to the fabric of ``config.ray_namespace`` on the current Ray.

        Raises
        ------
        ConfigError
            If there is none.
        """
        self.config = config
        try:
            self._router: Any = ray.get_actor(ROUTER, namespace=config.ray_namespace)
        except ValueError:
            raise ConfigError(
                f"no fabric runs in Ray namespace {config.ray_namespace!r}; "
                "start one with `kvfabric up`"
            ) from None
        self.client = FabricClient(self._router, config)

    @classmethod
    def start(
        cls,
        config: FabricConfig,
        nodes: Mapping[str, Mapping[str, Any]] | Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Fabric:
        """Start router and workers; what runs already is kept.

        Parameters
        ----------
        nodes
            Names of the workers, one per GPU (or logical GPU); as a mapping, with Ray
            actor options that place each, such as resources or a scheduling strategy.
        environment
            Variables for the workers' processes, such as ``UCX_NET_DEVICES``.

        Raises
        ------
        FabricError, RayError
            If a worker does not come up.
        """
        start_actors(config, nodes, environment or {})
        return cls(config)

    def stop(self) -> int:
        """End the fabric's actors on the whole cluster; how many there were."""
        self.client.close()
        return stop_actors(self.config)

    def close(self) -> None:
        """Leave the fabric running and forget it here."""
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add_model(
        self,
        engine: Engine[Any],
        calibrations: Sequence[AnyCalibration],
        *,
        name: str,
        receipts: Sequence[QualityReceipt] = (),
        allow_unqualified: bool = False,
    ) -> ModelProfile:
        """Register a model and load its codecs, lossy and raw, on every worker.

        Every worker decodes a chunk of noise with each: predictions do not start from nothing.

        Parameters
        ----------
        receipts
            What speaks for the lossy codecs; by default what `kvfabric evaluate` kept.
        allow_unqualified
            Load lossy codecs even if nothing does, with a warning.

        Raises
        ------
        ConfigError
            If the calibrations are of another model, or do not tile this one's layers.
        UnqualifiedCodecError, CodecError
            If no receipt passes for a lossy codec, or it was changed; nothing is registered.
        """
        profile, codecs = describe_model(
            engine, calibrations, name=name, tokens_per_chunk=self.config.tokens_per_chunk
        )
        offers = offer_codecs(profile, codecs, receipts, allow_unqualified=allow_unqualified)
        call = self._router.add_model.remote(profile, offers)
        ray.get(call, timeout=4 * self.config.deadline_s)
        nodes = sorted(self.client.workers())
        loading = [self.worker(node).load_models.remote(name) for node in nodes]
        ray.get(loading, timeout=4 * self.config.deadline_s)
        for node in nodes:
            self._try_codecs(node, codecs, profile)
        self.client.refresh()
        return profile

    def store(
        self,
        engine: Engine[Any],
        cache: Any,  # noqa: ANN401 - the engine's own type
        tokens: Sequence[int],
        *,
        at: str,
        model: str | None = None,
        codecs: Sequence[str] | None = None,
    ) -> list[Placement]:
        """Store the whole chunks of a prefilled prompt in the worker at ``at``.

        Parameters
        ----------
        cache
            Holds the KV of at least the whole chunks of ``tokens``.
        codecs
            Names of the ways to store them; by default the first that the model has.

        Raises
        ------
        ArenaFullError
            If the worker has no room; chunks stored before that stay.
        ConfigError
            If the model or worker is not registered.
        PeerLostError
            If the worker goes away meanwhile, or does not answer.
        """
        profile = self.client.profile(model)
        check_engine(engine, profile)
        prefix = profile.prefix(tokens)
        if not prefix.keys:
            return []
        arrays = KvArrays.of(*engine.capture(cache, 0, len(prefix.keys) * profile.tokens_per_chunk))
        names = [profile.codec_sets[0].name] if codecs is None else codecs
        wanted = [codec for name in names for codec in profile.codec_set(name).codecs]
        call = self.worker(at).store.remote(prefix, arrays, wanted)
        try:
            placements: list[Placement] = ray.get(call, timeout=8 * self.config.deadline_s)
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            raise PeerLostError(at, first_line(error)) from error
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            self.client.refresh()
        return placements

    def restore(
        self,
        engine: Engine[Any],
        tokens: Sequence[int],
        *,
        at: str,
        model: str | None = None,
        force: Choice | None = None,
    ) -> RestoreOutcome:
        """Restore a prompt's prefix into ``engine`` at node ``at``, if the plan says so.

        Nothing that goes wrong in the fabric is raised, a worker at ``at`` that was lost
        included: the outcome then has no cache and says why.  The client catches up first: a
        plan is worth the millisecond that takes.

        Raises
        ------
        ConfigError
            If the model is not registered, or not named where there are several.
        ValueError
            If there is no token, or a token id is not one.
        """
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            self.client.refresh()
        plan = self.client.plan(
            tokens,
            at=at,
            model=model,
            window_tokens=max(self.config.window_tokens, engine.window_tokens),
            force=force,
            must_know=False,
        )
        if not plan.is_restore:
            return RestoreOutcome(
                plan=plan,
                cache=None,
                tokens_restored=0,
                reason=plan.reason.value,
                explanation=plan.sentence,
            )
        try:
            return self._carry_out(engine, tokens, plan, at=at, model=model)
        except (FabricError, ray.exceptions.RayError, TimeoutError) as error:
            self._after_failure(plan, error)
            return RestoreOutcome(
                plan=plan,
                cache=None,
                tokens_restored=0,
                reason=error_name(error),
                explanation=f"restore failed, recomputing: {first_line(error)}",
            )

    def worker(self, node: str) -> Any:  # noqa: ANN401 - Ray's handle
        """Handle of the worker at ``node``.

        Raises
        ------
        ConfigError
            If there is none.
        """
        try:
            return ray.get_actor(worker_actor_name(node), namespace=self.config.ray_namespace)
        except ValueError:
            raise ConfigError(f"no worker {node!r} runs in this fabric") from None

    def qualification(self, codecs: Sequence[CodecId], *, at: str) -> Qualification:
        """What speaks for ``codecs``, one per stage, at node ``at``: for receipts."""
        call = self.worker(at).qualification.remote(tuple(codecs))
        return cast("Qualification", ray.get(call, timeout=self.config.deadline_s))

    def stats(self) -> dict[str, WorkerStat]:
        """How full every live worker is, and what it has counted."""
        nodes = sorted(self.client.workers())
        calls = [self.worker(node).stat.remote() for node in nodes]
        return dict(zip(nodes, ray.get(calls, timeout=self.config.deadline_s), strict=True))

    def unit_costs(self) -> dict[str, UnitCosts]:
        """What the verbs of every live worker's memory driver cost, measured at its start."""
        nodes = sorted(self.client.workers())
        calls = [self.worker(node).unit_costs.remote() for node in nodes]
        return dict(zip(nodes, ray.get(calls, timeout=self.config.deadline_s), strict=True))

    def observe(self, observations: Sequence[tuple[str, str, float, float]]) -> None:
        """Report (step, label, size, seconds) to the latency model, if the router is there."""
        self._tell_router("observe", list(observations))

    def observe_prefill(self, node: str, start: int, stop: int, seconds: float) -> None:
        """Report a prefill of tokens ``[start, stop)`` at ``node``, likewise."""
        self._tell_router("observe_prefill", node, start, stop, seconds)

    def measure_links(self) -> None:
        """Probe the way between every pair of workers, for the latency model."""
        workers = self.client.workers()
        for target in workers:
            for source, info in workers.items():
                if source == target:
                    continue
                call = self.worker(target).measure_link.remote(info)
                probe = ray.get(call, timeout=4 * self.config.deadline_s)
                label = transfer_label(link_label(source, target), "host")
                self.observe(
                    [
                        ("transfer", label, size, probe.t0_s + size / probe.bytes_per_s)
                        for size in (1 << 16, 1 << 23)
                    ]
                )

    def _tell_router(self, method: str, *arguments: object) -> None:
        """Tell the router something that it can do without: no engine waits or fails for it."""
        try:
            call = getattr(self._router, method).remote(*arguments)
            ray.get(call, timeout=self.config.deadline_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            _log.warning("the router did not take an observation: %s", error)

    def _carry_out(
        self,
        engine: Engine[Any],
        tokens: Sequence[int],
        plan: RestorePlan,
        *,
        at: str,
        model: str | None,
    ) -> RestoreOutcome:
        profile = self.client.profile(model)
        check_engine(engine, profile)
        stages = {segment.stage: segment.codec for segment in plan.segments}
        workers = self.client.workers()
        sources = {s.node: _source(workers, s.node) for s in plan.segments if s.node != at}
        request = RestoreRequest(
            prefix=profile.prefix(tokens),
            codecs=tuple(stages[stage] for stage in profile.stages),
            boundary_tokens=plan.boundary_tokens,
            segments=plan.segments,
            sources=sources,
        )
        asked = time.perf_counter()
        restored: Restored = ray.get(
            self.worker(at).restore.remote(request), timeout=8 * self.config.deadline_s
        )
        answered = time.perf_counter()
        cache = engine.restore(*restored.arrays.tensors())
        handed = time.perf_counter()
        in_worker = sum(restored.steps.values())
        steps = {
            **restored.steps,
            "handoff": (handed - answered) + max(0.0, answered - asked - in_worker),
        }
        self._observe_restore(plan, steps, at)
        return RestoreOutcome(
            plan=plan,
            cache=cache,
            tokens_restored=plan.boundary_tokens,
            reason=plan.reason.value,
            explanation=plan.sentence,
            bytes_moved=restored.bytes_moved,
            transport=restored.transport,
            steps=steps,
        )

    def _observe_restore(self, plan: RestorePlan, steps: Mapping[str, float], at: str) -> None:
        """Tell the latency model, where one source and codec make the times attributable."""
        if len({(s.node, s.tier, s.codec) for s in plan.segments}) != 1:
            return
        segment = plan.segments[0]
        stored = sum(s.stored_bytes for s in plan.segments)
        decoded = sum(s.decoded_bytes for s in plan.segments)
        link = link_label(segment.node, at)
        observations = []
        for step, seconds in steps.items():
            if step == "connect":
                observations.append((step, link, 0.0, seconds))
            elif step == "transfer":
                observations.append((step, transfer_label(link, segment.tier), stored, seconds))
            else:
                size = stored if step == "verify" else decoded
                observations.append((step, decode_label(at, segment.codec), size, seconds))
        self.observe(observations)

    def _after_failure(self, plan: RestorePlan, error: Exception) -> None:
        """Have sources look at what they hold where bytes arrived that were not sound."""
        if not isinstance(error, IncompletePullError):
            return
        for segment in plan.segments:
            with contextlib.suppress(FabricError, ray.exceptions.RayError, TimeoutError):
                wants = [(component, segment.codec) for component in segment.components]
                call = self.worker(segment.node).scrub.remote(wants)
                ray.get(call, timeout=self.config.deadline_s)

    def _try_codecs(self, node: str, codecs: Sequence[Codec], profile: ModelProfile) -> None:
        """Have a worker time each codec on an example chunk, for the latency model."""
        for codec in codecs:
            call = self.worker(node).try_codec.remote(
                codec.codec_id, profile.dtype, profile.tokens_per_chunk
            )
            label = decode_label(node, codec.codec_id)
            times = ray.get(call, timeout=4 * self.config.deadline_s)
            self.observe([(step, label, size, seconds) for step, size, seconds in times])


def _source(workers: Mapping[str, WorkerInfo], node: str) -> WorkerInfo:
    if node not in workers:
        raise ConfigError(f"worker {node!r} left the fabric after the plan was made")
    return workers[node]
