"""`FabricClient`: residency and plans, answered in this process.

A question does not cost an actor call.  The client holds a replica of the router's index,
fed in the background, with the latency model and the list of workers; every answer says
how far it had heard (`Residency.as_of`, `gap`, `ready`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import ray

from actors.profile import ModelProfile
from actors.router import WorkerInfo
from actors.router_actor import RouterUpdate
from codec.errors import ConfigError
from fabric.config import FabricConfig
from policies.latency import LatencyModel
from policies.planner import Choice, RestorePlan, plan_restore
from policies.residency.replica import ReplicaIndex
from policies.residency.view import Residency

_log = logging.getLogger(__name__)


class FabricClient:
    """Answers where prompts live and what a restore would cost.  Thread-safe.

    Parameters
    ----------
    router
        Handle of the router actor.
    config
        The fabric's settings.
    """

    def __init__(self, router: Any, config: FabricConfig) -> None:  # noqa: ANN401 - Ray's handle
        self._router = router
        self._config = config
        self._lock = threading.Lock()
        self._replica = ReplicaIndex(tokens_per_chunk=config.tokens_per_chunk)
        #: Replaced whole with each update; never changed in place.
        self._latest: RouterUpdate | None = None
        self._latency: LatencyModel | None = None
        self._stop = threading.Event()
        self.refresh()
        self._feeder = threading.Thread(target=self._feed, name="kvfabric-feed", daemon=True)
        self._feeder.start()

    def refresh(self) -> None:
        """Catch up with the router now.

        Raises
        ------
        RayError, TimeoutError
            If the router does not answer; the replica stays as it was.
        ConfigError
            If the fabric was started with another ``tokens_per_chunk``.
        """
        while True:
            with self._lock:
                position = self._replica.position
            update: RouterUpdate = ray.get(
                self._router.update.remote(position), timeout=self._config.deadline_s
            )
            if update.tokens_per_chunk != self._config.tokens_per_chunk:
                raise ConfigError(
                    f"this fabric was started with tokens_per_chunk {update.tokens_per_chunk}, "
                    f"not {self._config.tokens_per_chunk}: give every process the same settings"
                )
            with self._lock:
                if self._replica.apply(update.feed):
                    self._latest = update
                    self._latency = LatencyModel.from_dict(update.latency)
                    return

    def residency(self, tokens: Sequence[int], *, model: str | None = None) -> Residency:
        """Where the prompt's whole chunks are, with what codecs and in how many bytes.

        Raises
        ------
        ConfigError
            If the model is not registered, or not named where there are several.
        ValueError
            If a token id is not one.
        """
        profile = self.profile(model)
        keys = profile.prefix(tokens).keys
        codecs = [codec_set.codecs for codec_set in profile.codec_sets]
        with self._lock:
            return self._replica.residency(keys, profile.stages, codecs=codecs)

    def plan(
        self,
        tokens: Sequence[int],
        *,
        at: str,
        model: str | None = None,
        window_tokens: int | None = None,
        force: Choice | None = None,
        must_know: bool = True,
    ) -> RestorePlan:
        """Whether to restore the prompt's prefix at node ``at``, from where, in how long.

        Parameters
        ----------
        window_tokens
            Tokens at the end of the stored prefix to compute again; the setting by default.
        force
            Choose this whatever the times, where it is possible.
        must_know
            Refuse a node that has no live worker; without that the plan is made all the same,
            for a caller that will notice.

        Raises
        ------
        ConfigError
            If the model or the node is not part of the fabric.
        ValueError
            If there is no token.
        """
        profile = self.profile(model)
        residency = self.residency(tokens, model=model)
        workers = self.workers()
        # A router that is still learning may not have heard of it yet.
        if must_know and at not in workers and residency.ready:
            raise ConfigError(f"no worker {at!r}; there are {', '.join(sorted(workers)) or 'none'}")
        with self._lock:
            latency = self._latency
        assert latency is not None
        return plan_restore(
            residency,
            node=at,
            num_prompt_tokens=len(tokens),
            latency=latency,
            alive=frozenset(workers),
            links={source: link_label(source, at) for source in workers},
            device=at,
            window_tokens=self._config.window_tokens if window_tokens is None else window_tokens,
            steps_by_codec={
                codec: codec_set.steps
                for codec_set in profile.codec_sets
                for codec in codec_set.codecs
            },
            force=force,
        )

    def profile(self, model: str | None = None) -> ModelProfile:
        """The registered model of that name, or the only one.

        Raises
        ------
        ConfigError
            If there is none of that name, or several and no name.
        """
        profiles = self.models()
        if model is None and len(profiles) == 1:
            return next(iter(profiles.values()))
        if model is None or model not in profiles:
            known = ", ".join(sorted(profiles)) or "none; run `kvfabric up --model ...`"
            raise ConfigError(f"no model {model!r} is registered; there are: {known}")
        return profiles[model]

    def models(self) -> Mapping[str, ModelProfile]:
        """Registered models by name, as of the last update."""
        return self._update().models

    def workers(self) -> Mapping[str, WorkerInfo]:
        """Live workers by node, as of the last update."""
        return self._update().workers

    def close(self) -> None:
        """Stop feeding; answers stay as they are."""
        self._stop.set()
        self._feeder.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _update(self) -> RouterUpdate:
        with self._lock:
            latest = self._latest
        assert latest is not None, "the constructor refreshes"
        return latest

    def _feed(self) -> None:
        while not self._stop.wait(self._config.heartbeat_s):
            try:
                self.refresh()
            except (ray.exceptions.RayError, TimeoutError, ConfigError) as error:
                _log.warning("cannot reach the router: %s", error)


def link_label(source: str, target: str) -> str:
    """How the latency model calls the way between two nodes."""
    return f"{source}->{target}"
