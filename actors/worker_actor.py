"""The Ray shell of one GPU's `Worker`: wiring only.

It owns an arena, a bank of codecs and a UCX listener, answers calls, and tells the router
what changed: at once after a store, a pull or an eviction, and with every heartbeat.
Coding runs in threads, so that the event loop keeps serving transfers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from actors.arena.arena import Arena
from actors.arena.costs import measure
from actors.arena.driver_host import HostVmmDriver
from actors.arena.keeper import Keeper
from actors.codecs import CodecBank, Qualification
from actors.coding import Prefix, assemble, store_chunks, time_decoding
from actors.handoff import KvArrays
from actors.profile import ModelProfile
from actors.router import PublishResult, WorkerInfo
from actors.router_actor import ModelCodecs
from actors.transport.deadlines import Deadlines
from actors.transport.link_ucx import UcxLink, UcxListener, active_transports, shutdown
from actors.transport.report import LinkProbe, Outcome, PullReport
from actors.worker import Worker, WorkerStat
from codec.blob import verify_blob
from codec.errors import CodecError, IncompletePullError, UnknownComponentError, VmmError
from codec.identity import CodecId, ComponentKey
from codec.timing import StepTimes
from policies.residency.events import Placement
from policies.sourcing import Segment
from policies.vmm_gate import MemoryPrice, UnitCosts

_log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
#: What a call of the router raises when it is down, slow, or not named any more.
_ROUTER_AWAY = (ray.exceptions.RayError, TimeoutError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a worker actor is started with."""

    node: str
    arena_bytes: int
    extent_bytes: int
    memory_price_us_per_gib_s: float
    heartbeat_s: float
    deadline_s: float
    router_name: str
    ray_namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """A plan, as the worker that carries it out needs it."""

    prefix: Prefix
    codecs: tuple[CodecId, ...]
    """One per stage."""

    boundary_tokens: int
    segments: tuple[Segment, ...]
    sources: Mapping[str, WorkerInfo]
    """Of every node in the segments but this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The cache of the first tokens, and what it took."""

    arrays: KvArrays
    steps: dict[str, float]
    """Seconds per step, connect and transfer included."""

    bytes_moved: int
    wire_bytes: int
    transport: str


class WorkerShell:
    """One worker's actor; see the module."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        driver = HostVmmDriver(options.arena_bytes)
        costs = measure(driver, options.extent_bytes)
        _log.info("%s: %s", options.node, costs.describe())
        self._arena = Arena(
            driver, capacity_bytes=options.arena_bytes, extent_bytes=options.extent_bytes
        )
        price = MemoryPrice(options.memory_price_us_per_gib_s / 2**30)
        self._keeper = Keeper(self._arena, costs, price)
        self._incarnation = time.time_ns()
        self._worker = Worker(node=options.node, incarnation=self._incarnation, arena=self._arena)
        self._bank = CodecBank(options.node)
        self._link = UcxLink(node=options.node)
        self._listener = UcxListener(
            self._worker,
            node=options.node,
            incarnation=self._incarnation,
            deadlines=_deadlines(options),
        )
        self._starting = asyncio.Lock()
        self._publishing = asyncio.Lock()
        self._heart: asyncio.Task[None] | None = None
        self._router: Any = None
        #: By name.
        self._models: dict[str, ModelProfile] = {}
        # Ray runs only this after a crash, so the actor asks itself to come up.
        ray.get_runtime_context().current_actor.start.remote()

    async def start(self) -> WorkerInfo:
        """Listen, join the router, and keep publishing; a second call changes nothing."""
        async with self._starting:
            if self._heart is None:
                await self._listener.start()
                # First the heart: where the router is away now, it joins later.
                self._heart = asyncio.ensure_future(self._beat())
                await self._join()
        return self.info()

    def info(self) -> WorkerInfo:
        """How others reach this worker."""
        return WorkerInfo(
            node=self._options.node,
            host=_own_host(),
            port=self._listener.port,
            incarnation=self._incarnation,
            codecs=self._bank.loaded(),
            transports=tuple(sorted(active_transports())),
            last_heartbeat_s=0.0,
        )

    async def load_models(self, name: str) -> None:
        """Load the codecs of every model that the router knows, and say that they are here.

        Raises `UnqualifiedCodecError` if one of model ``name`` was refused; all others are here.
        """
        for refusal in (await self._join()).get(name, ()):
            raise refusal

    def qualification(self, codecs: Sequence[CodecId]) -> Qualification:
        """See `CodecBank.qualification`."""
        return self._bank.qualification(codecs)

    async def try_codec(
        self, codec_id: CodecId, dtype: str, num_tokens: int
    ) -> list[tuple[str, float, float]]:
        """See `actors.coding.time_decoding`."""
        return await asyncio.to_thread(
            time_decoding, self._bank.find(codec_id), dtype=dtype, num_tokens=num_tokens
        )

    async def store(
        self, prefix: Prefix, arrays: KvArrays, codecs: Sequence[CodecId], first_chunk: int = 0
    ) -> list[Placement]:
        """See `actors.coding.store_chunks`; published before it returns."""
        keys, values = arrays.tensors()
        try:
            return await asyncio.to_thread(
                store_chunks,
                self._worker,
                self._bank,
                prefix,
                keys_TLHD=keys,
                values_TLHD=values,
                codecs=codecs,
                first_chunk=first_chunk,
            )
        finally:
            await self._publish()

    async def restore(self, request: RestoreRequest) -> Restored:
        """Pull what is elsewhere, then put the prefix together.

        Raises
        ------
        FabricError
            If anything went wrong on the way; the caller recomputes.
        """
        steps = StepTimes()
        reports = await self._pull_segments(request)
        for report in reports:
            steps.add("connect", report.connect_s)
            steps.add("transfer", report.transfer_s)
        try:
            keys, values = await asyncio.to_thread(
                assemble,
                self._worker,
                self._bank,
                request.prefix,
                codecs=request.codecs,
                boundary_tokens=request.boundary_tokens,
                steps=steps,
            )
        finally:
            await self._publish()
        return Restored(
            arrays=KvArrays.of(keys, values),
            steps=steps.seconds,
            bytes_moved=sum(report.bytes_moved for report in reports),
            wire_bytes=sum(report.wire_bytes for report in reports),
            transport=self._transport() if reports else "local",
        )

    async def pull(
        self, source: WorkerInfo, wants: Sequence[tuple[ComponentKey, CodecId]]
    ) -> PullReport:
        """Bring components of another worker into this one's arena; published on return."""
        try:
            return await self._link.pull(
                self._host_of(source),
                source.port,
                wants,
                self._worker,
                _deadlines(self._options),
                node=source.node,
                incarnation=source.incarnation,
            )
        finally:
            await self._publish()

    async def measure_link(self, source: WorkerInfo) -> LinkProbe:
        """Time small and large transfers from another worker."""
        return await self._link.measure_link(
            self._host_of(source), source.port, node=source.node, incarnation=source.incarnation
        )

    async def evict(self, components: Sequence[tuple[ComponentKey, CodecId]]) -> int:
        """Forget components; how many of them were here."""
        num_evicted = 0
        for component, codec in components:
            with contextlib.suppress(UnknownComponentError):
                self._worker.evict(component, codec)
                num_evicted += 1
        await self._publish()
        return num_evicted

    async def scrub(self, components: Sequence[tuple[ComponentKey, CodecId]]) -> int:
        """Verify components where they lie and quarantine the damaged; how many those were."""
        num_bad = 0
        for component, codec in components:
            with (
                contextlib.suppress(UnknownComponentError),
                self._worker.get(component, codec) as pin,
            ):
                try:
                    await asyncio.to_thread(verify_blob, pin.view)
                except CodecError as error:
                    self._worker.quarantine(component, codec, str(error))
                    num_bad += 1
        await self._publish()
        return num_bad

    def pid(self) -> int:
        """Process id on this worker's host, to find it by."""
        return os.getpid()

    def damage(self, component: ComponentKey, codec: CodecId) -> None:
        """Flip one bit of a stored blob, for drills: what follows must be a recompute."""
        self._worker.damage(component, codec)

    def stat(self) -> WorkerStat:
        """See `Worker.stat`."""
        return self._worker.stat()

    def unit_costs(self) -> UnitCosts:
        """What the verbs of this worker's memory driver were measured to cost at its start."""
        return self._keeper.costs

    async def stop(self) -> None:
        """Stop serving and give all memory back; the actor is of no use afterwards."""
        if self._heart is not None:
            self._heart.cancel()
        await self._listener.close()
        await shutdown()
        self._arena.close()

    async def _pull_segments(self, request: RestoreRequest) -> list[PullReport]:
        wants: dict[str, list[tuple[ComponentKey, CodecId]]] = defaultdict(list)
        for segment in request.segments:
            if segment.node != self._options.node:
                wants[segment.node] += [(part, segment.codec) for part in segment.components]
        reports = await asyncio.gather(
            *(self.pull(request.sources[node], wanted) for node, wanted in wants.items())
        )
        for node, report in zip(wants, reports, strict=True):
            for line in report.outcomes:
                if line.outcome is not Outcome.DELIVERED:
                    raise IncompletePullError(node, str(line.component), line.outcome.value)
        return list(reports)

    def _host_of(self, source: WorkerInfo) -> str:
        """The source's address as seen from here: loopback where it is this host's own."""
        return LOOPBACK if source.host == _own_host() else source.host

    def _transport(self) -> str:
        return "ucx:" + ",".join(sorted(active_transports()))

    async def _join(self) -> Mapping[str, Sequence[Exception]]:
        """Tell the router who and where this worker is, then everything that it holds."""
        async with self._publishing:
            return await self._tell_all()

    async def _publish(self) -> None:
        """Send the router what changed since the last time, and more if it asks for it.

        No caller's work fails because the router is away: it notices what it missed, and
        asks for all of it, when it is back.
        """
        async with self._publishing:
            if deltas := self._worker.take_deltas():
                try:
                    await self._follow(await self._ask_router("publish", deltas))
                except _ROUTER_AWAY as error:
                    self._note_away(error)

    def _note_away(self, error: Exception) -> None:
        self._router = None
        _log.warning("%s: cannot reach the router: %s", self._options.node, error)

    async def _beat(self) -> None:
        """Publish and say that the worker is there, for ever."""
        while True:
            await asyncio.sleep(self._options.heartbeat_s)
            await asyncio.to_thread(self._tidy)
            await self._publish()
            try:
                async with self._publishing:
                    last_seq = self._worker.snapshot().seq
                    reply = await self._ask_router(
                        "heartbeat", self._options.node, self._incarnation, last_seq
                    )
                    await self._follow(reply)
            except _ROUTER_AWAY as error:
                self._note_away(error)

    def _tidy(self) -> None:
        """Give memory back that was idle for too long; what is refused is tried again."""
        try:
            self._keeper.tidy()
        except VmmError as error:
            _log.warning("%s: cannot give memory back: %s", self._options.node, error)

    async def _follow(self, reply: PublishResult) -> None:
        """Do what the router's reply asks for."""
        if reply.needs_registration:
            await self._tell_all()
        elif reply.needs_snapshot:
            await self._ask_router("apply_snapshot", self._worker.snapshot())

    async def _tell_all(self) -> Mapping[str, Sequence[Exception]]:
        """Load what the router offers and say what is here; what was refused, by model."""
        known: Mapping[str, ModelCodecs] = await self._call_router("models")
        refused: dict[str, Sequence[Exception]] = {}
        for name, model in known.items():
            loading = asyncio.gather(*model.codecs)
            offers = await asyncio.wait_for(loading, self._options.deadline_s)
            refused[name] = self._bank.take(offers)
            self._models[name] = model.profile
        await self._ask_router("register", self.info(), tuple(self._models.values()))
        await self._ask_router("apply_snapshot", self._worker.snapshot())
        return refused

    async def _ask_router(self, method: str, *arguments: object) -> PublishResult:
        reply: PublishResult = await self._call_router(method, *arguments)
        return reply

    async def _call_router(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - any reply
        if self._router is None:
            self._router = ray.get_actor(
                self._options.router_name, namespace=self._options.ray_namespace
            )
        call = getattr(self._router, method).remote(*arguments)
        return await asyncio.wait_for(call, self._options.deadline_s)


def _own_host() -> str:
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return host


def _deadlines(options: WorkerOptions) -> Deadlines:
    return Deadlines(payload_s=options.deadline_s, total_s=4 * options.deadline_s)


WorkerActor = ray.remote(WorkerShell)
