"""The Ray shell of an inference engine: a model in a process of its own, beside a worker.

It loads the model, runs prompts, stores their prefixes in the worker of its node, and
restores them from wherever the fabric has them.  What it does is in
`fabric.engines.transformers` and `fabric.cluster`; here it is only timed and reported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from codec.calibration import Calibration
from codec.quality import Agreement, compare_logits
from fabric.cluster import Fabric
from fabric.config import FabricConfig
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine
from policies.planner import Choice, RestorePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What an engine made of a prompt whose prefix was restored, or was not."""

    plan: RestorePlan
    tokens: tuple[int, ...]
    """New tokens, greedy."""

    tokens_restored: int
    reason: str
    explanation: str
    bytes_moved: int
    transport: str
    first_token_s: float
    """From asking for the restore until the logits of the first new token."""

    steps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The same prompt without the fabric, and how a continuation compares."""

    tokens: tuple[int, ...]
    prefill_s: float
    agreement: Agreement


class EngineShell:
    """One engine at one node; see the module."""

    def __init__(self, model: str | None, *, node: str, config: FabricConfig) -> None:
        self._loaded = load_model(model)
        self._engine = TransformersEngine(self._loaded, window_tokens=config.window_tokens)
        self._node = node
        self._config = config
        self._fabric: Fabric | None = None
        #: Of the last prompt, until `drop`.
        self._cache: Any = None

    def add_model(
        self, calibrations: Sequence[Calibration], name: str, *, allow_unqualified: bool = False
    ) -> None:
        """Register this engine's model with the fabric."""
        self._connected().add_model(
            self._engine, calibrations, name=name, allow_unqualified=allow_unqualified
        )

    def prefill_and_store(
        self, tokens: Sequence[int], model: str, codecs: Sequence[str]
    ) -> tuple[float, int]:
        """Compute a prompt and store its whole chunks; prefill seconds and bytes stored."""
        start = time.perf_counter()
        cache, _ = self._engine.prefill(tokens)
        prefill_s = time.perf_counter() - start
        fabric = self._connected()
        fabric.observe_prefill(self._node, 0, len(tokens), prefill_s)
        placements = fabric.store(
            self._engine, cache, tokens, at=self._node, model=model, codecs=codecs
        )
        self._cache = cache
        return prefill_s, sum(placement.stored_bytes for placement in placements)

    def drop(self) -> None:
        """Forget the last prompt's cache."""
        self._cache = None

    def has_cache(self) -> bool:
        """Whether a prompt's cache is still held."""
        return self._cache is not None

    def warm_up(self, num_tokens: int) -> float:
        """Prefill a made-up prompt, so that first-use costs do not count; seconds it took.

        It is reported to the latency model: until then it knows nothing of this engine.
        """
        tokens = [17 + number % 97 for number in range(num_tokens)]
        self._engine.prefill(tokens[:64])
        start = time.perf_counter()
        self._engine.prefill(tokens)
        prefill_s = time.perf_counter() - start
        self._connected().observe_prefill(self._node, 0, num_tokens, prefill_s)
        return prefill_s

    def continue_prompt(
        self, tokens: Sequence[int], model: str, max_new_tokens: int, force: Choice | None = None
    ) -> Continuation:
        """Restore what the fabric has of a prompt, compute the rest, and go on from there."""
        fabric = self._connected()
        start = time.perf_counter()
        outcome = fabric.restore(self._engine, tokens, at=self._node, model=model, force=force)
        prefilling = time.perf_counter()
        # All but the last token here, so that generation begins with the first new one.
        rest = len(tokens) - 1 - outcome.tokens_restored
        cache = outcome.cache
        if rest > 0:
            cache, _ = self._engine.prefill(tokens[:-1], cache)
        self._engine.score(tokens, cache, [0])
        end = time.perf_counter()
        fabric.observe_prefill(self._node, outcome.tokens_restored, len(tokens), end - prefilling)
        new_tokens = self._engine.generate(tokens, cache, max_new_tokens)
        self._cache = (outcome.tokens_restored, cache)
        return Continuation(
            plan=outcome.plan,
            tokens=tuple(new_tokens),
            tokens_restored=outcome.tokens_restored,
            reason=outcome.reason,
            explanation=outcome.explanation,
            bytes_moved=outcome.bytes_moved,
            transport=outcome.transport,
            first_token_s=end - start,
            steps={**outcome.steps, "prefill": end - prefilling},
        )

    def compare(self, tokens: Sequence[int], num_tokens: int) -> Reference:
        """Compute the last `continue_prompt` again without the fabric, and compare.

        The full-precision cache continues greedily; both caches then predict each of
        those tokens.
        """
        _, restored = self._cache
        start = time.perf_counter()
        reference, _ = self._engine.prefill(tokens)
        prefill_s = time.perf_counter() - start
        self._engine.crop(reference, len(tokens) - 1)
        new_tokens = self._engine.generate(tokens, reference, num_tokens)
        for cache in (reference, restored):
            self._engine.crop(cache, len(tokens) - 1)
        full = self._engine.score(tokens, reference, new_tokens)
        ours = self._engine.score(tokens, restored, new_tokens)
        return Reference(
            tokens=tuple(new_tokens), prefill_s=prefill_s, agreement=compare_logits(full, ours)
        )

    def _connected(self) -> Fabric:
        if self._fabric is None:
            self._fabric = Fabric(self._config)
        return self._fabric


EngineActor = ray.remote(EngineShell)
