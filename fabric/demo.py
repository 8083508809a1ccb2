"""The main job on a real model: prefill here, keep compressed, move, restore there, go on.

1. Two workers and two engines, each in a process of its own; only the first engine is
   shown the prompt.
2. The first prefills it, and its worker stores it compressed, and raw for one measurement.
3. The second worker pulls the raw copy once, to time it; then every raw copy and the
   first engine's cache are dropped.
4. The second engine asks the fabric, restores what the plan says, computes the rest and
   goes on writing.
5. Last, and only then, it computes the whole prompt itself: the reference to compare with.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ray

from actors.transport.report import PullReport
from codec.errors import ConfigError, PeerLostError
from codec.identity import CodecId, ComponentKey
from fabric.calibrate import CorpusConfig, Progress, calibrate, default_prompt
from fabric.calibrate.profiles import AnyCalibration, AnyConfig, config_of
from fabric.cluster import Fabric
from fabric.config import FabricConfig
from fabric.engine_actor import Continuation, EngineActor, Reference
from fabric.engines.loading import LoadedModel, load_model
from fabric.engines.transformers import TransformersEngine
from fabric.qualification import qualify_codecs
from fabric.receipt import Identity, Receipt

SOURCE, TARGET = "node-a.gpu0", "node-b.gpu0"

#: On one machine data has no need to look for other interfaces.
LOCAL_ENVIRONMENT = {
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}

Fault = Literal["none", "kill-source", "flip-byte"]
"""What to break between storing and restoring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo runs on."""

    model: str | None = None
    """Directory or GGUF file; ``None`` is the packaged SmolLM2-135M."""

    prompt: Path = field(default_factory=default_prompt)
    max_prompt_tokens: int = 2304
    new_tokens: int = 64
    num_stages: int = 1
    calibration: AnyConfig = field(default_factory=config_of)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    fault: Fault = "none"
    allow_unqualified: bool = False
    """Go on with a lossy codec that no quality receipt speaks for, and say so in the receipt."""

    def __post_init__(self) -> None:
        least = self.fabric.tokens_per_chunk + self.fabric.window_tokens
        if self.max_prompt_tokens <= least:
            raise ConfigError(
                f"max_prompt_tokens must be over {least}, got {self.max_prompt_tokens}"
            )
        if self.new_tokens < 1:
            raise ConfigError(f"new_tokens must be at least 1, got {self.new_tokens}")


def prepare(
    config: DemoConfig, on_progress: Progress, say: Callable[[str], None]
) -> tuple[LoadedModel, list[AnyCalibration], list[int]]:
    """Load the model, calibrate and measure it or find that done, and tokenize the prompt.

    Raises
    ------
    ConfigError
        If the model, the corpus or the prompt cannot be used.
    UnqualifiedCodecError
        If the codec was measured, does not pass, and that is not allowed.
    """
    loaded = load_model(config.model, progress=say)
    tokens = read_prompt(loaded, config)
    engine = TransformersEngine(loaded, window_tokens=config.fabric.window_tokens)
    calibrations = calibrate(
        engine,
        loaded,
        config=config.calibration,
        corpus_config=config.corpus,
        num_stages=config.num_stages,
        on_progress=on_progress,
    )
    qualify_codecs(
        engine,
        loaded,
        calibrations,
        tokens_per_chunk=config.fabric.tokens_per_chunk,
        allow_unqualified=config.allow_unqualified,
        on_progress=on_progress,
        say=say,
    )
    return loaded, calibrations, tokens


def run(
    config: DemoConfig,
    loaded: LoadedModel,
    calibrations: Sequence[AnyCalibration],
    tokens: Sequence[int],
    say: Callable[[str], None],
) -> Receipt:
    """Run the main job on the current Ray, which is left as it was, and account for it."""
    say("starting the router and two workers")
    fabric = Fabric.start(config.fabric, [SOURCE, TARGET], environment=LOCAL_ENVIRONMENT)
    try:
        return _Job(config, loaded, calibrations, tokens, fabric, say).run()
    finally:
        fabric.stop()


class _Job:
    """One run of the demo on a started fabric."""

    def __init__(  # noqa: PLR0917 - private, called once
        self,
        config: DemoConfig,
        loaded: LoadedModel,
        calibrations: Sequence[AnyCalibration],
        tokens: Sequence[int],
        fabric: Fabric,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._loaded = loaded
        self._calibrations = calibrations
        self._tokens = tuple(tokens)
        self._fabric = fabric
        self._say = say

    def run(self) -> Receipt:
        say, name, tokens = self._say, self._loaded.name, self._tokens
        source, target = self._engines()
        try:
            say(f"engine at {SOURCE} computes the prompt of {len(tokens)} tokens")
            ray.get(source.prefill_and_store.remote(tokens, name, self._code_names()))
            raw_transfer = self._time_raw()
            self._drop_raw()
            ray.get(source.drop.remote())
            assert not ray.get(source.has_cache.remote())
            self._fabric.client.refresh()
            residency = self._fabric.client.residency(tokens, model=name)
            say(f"stored: {residency.prefix_tokens} tokens in {residency.stored_bytes} bytes")
            stored, raw = residency.stored_bytes, _decoded_bytes(residency.coverages)
            self._break()
            say(f"engine at {TARGET}, which has not seen the prompt, goes on from there")
            continued: Continuation = ray.get(
                target.continue_prompt.remote(tokens, name, self._config.new_tokens)
            )
            say("computing the reference")
            reference: Reference = ray.get(target.compare.remote(tokens, self._config.new_tokens))
            return self._receipt(continued, reference, stored, raw, raw_transfer)
        finally:
            for engine in (source, target):
                ray.kill(engine)

    def _engines(self) -> tuple[Any, Any]:
        """Two engines that know the model, warm, with the links between workers measured."""
        config = self._config
        engines: list[Any] = [
            EngineActor.options(num_cpus=0).remote(config.model, node=node, config=config.fabric)
            for node in (SOURCE, TARGET)
        ]
        source, target = engines
        self._say("loading the model in two engines")
        ray.get(
            source.add_model.remote(
                list(self._calibrations),
                self._loaded.name,
                allow_unqualified=config.allow_unqualified,
            )
        )
        self._fabric.measure_links()
        ray.get([engine.warm_up.remote(512) for engine in (source, target)])
        return source, target

    def _code_names(self) -> tuple[str, ...]:
        """Every way to store the model, the lossy one first."""
        profile = self._fabric.client.profile(self._loaded.name)
        return tuple(kind.name for kind in profile.codec_sets)

    def _time_raw(self) -> PullReport:
        """Move the same tokens uncompressed, the same way, once."""
        workers = self._fabric.client.workers()
        call = self._fabric.worker(TARGET).pull.remote(workers[SOURCE], self._raw_components())
        report: PullReport = ray.get(call)
        if not report.is_complete:
            raise PeerLostError(SOURCE, f"raw copy incomplete: {report.outcomes}")
        return report

    def _drop_raw(self) -> None:
        """Evict every raw copy from both workers."""
        wants = self._raw_components()
        ray.get([self._fabric.worker(node).evict.remote(wants) for node in (SOURCE, TARGET)])

    def _raw_components(self) -> list[tuple[ComponentKey, CodecId]]:
        profile = self._fabric.client.profile(self._loaded.name)
        return [
            (ComponentKey(key, stage), codec)
            for key in profile.prefix(self._tokens).keys
            for stage, codec in zip(profile.stages, profile.codec_set("raw").codecs, strict=True)
        ]

    def _break(self) -> None:
        """Do the damage that was asked for."""
        worker = self._fabric.worker(SOURCE)
        if self._config.fault == "kill-source":
            self._say(f"killing the worker at {SOURCE}")
            pid = ray.get(worker.pid.remote())
            os.kill(pid, signal.SIGKILL)
        elif self._config.fault == "flip-byte":
            self._say(f"flipping a byte of a stored blob at {SOURCE}")
            profile = self._fabric.client.profile(self._loaded.name)
            key = profile.prefix(self._tokens).keys[1]
            codec = profile.codec_sets[0].codecs[0]
            ray.get(worker.damage.remote(ComponentKey(key, profile.stages[0]), codec))

    def _receipt(
        self,
        continued: Continuation,
        reference: Reference,
        stored_bytes: int,
        raw_bytes: int,
        raw_transfer: PullReport,
    ) -> Receipt:
        config, plan = self._config, continued.plan
        profile = self._fabric.client.profile(self._loaded.name)
        codecs = profile.codec_sets[0].codecs
        qualification = self._fabric.qualification(codecs, at=TARGET)
        decode = self._loaded.tokenizer.decode
        return Receipt(
            outcome="restored" if continued.tokens_restored else "recomputed",
            reason=continued.reason,
            explanation=continued.explanation,
            model=self._loaded.name,
            identity=Identity(
                namespace=profile.namespace.hex(),
                codec=tuple(codec.hex() for codec in codecs),
                calibration=tuple(c.digest.hex() for c in self._calibrations),
            ),
            qualified=qualification.is_qualified,
            quality_receipt=qualification.receipt,
            source=SOURCE,
            target=TARGET,
            target_compression=config.calibration.target,
            tokens_prompt=len(self._tokens),
            tokens_restored=continued.tokens_restored,
            bytes_raw=raw_bytes,
            bytes_stored=stored_bytes,
            net_ratio=raw_bytes / stored_bytes,
            bytes_calibration=sum(c.nbytes for c in self._calibrations),
            bytes_moved=continued.bytes_moved,
            transport=continued.transport,
            predicted_restore_s=plan.predicted_restore_s,
            predicted_recompute_s=plan.predicted_recompute_s,
            actual_restore_s=continued.first_token_s,
            recompute_s=reference.prefill_s,
            raw_transfer_s=raw_transfer.connect_s + raw_transfer.transfer_s,
            raw_transfer_bytes=raw_transfer.bytes_moved,
            steps=continued.steps,
            top1_agreement=reference.agreement.top1_agreement,
            mean_kl=reference.agreement.mean_kl,
            tokens_compared=reference.agreement.num_tokens,
            text_restored=decode(continued.tokens),
            text_reference=decode(reference.tokens),
            counters=self._counters(),
        )

    def _counters(self) -> dict[str, int]:
        self._fabric.client.refresh()
        stats = self._fabric.stats().values()
        names = ("rejected_corrupt", "quarantined", "misses")
        return {name: sum(getattr(stat, name) for stat in stats) for name in names}


def read_prompt(loaded: LoadedModel, config: DemoConfig) -> list[int]:
    """The prompt's first tokens, at most ``max_prompt_tokens``.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is too short for anything to be restored.
    """
    try:
        text = config.prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompt {config.prompt}: {error}") from error
    tokens = list(loaded.tokenizer(text, verbose=False)["input_ids"])[: config.max_prompt_tokens]
    least = config.fabric.tokens_per_chunk + config.fabric.window_tokens
    if len(tokens) <= least:
        raise ConfigError(
            f"the prompt {config.prompt} has {len(tokens)} tokens; over {least} are needed for a "
            "chunk to be restored and a window to be recomputed"
        )
    return tokens


def _decoded_bytes(coverages: Sequence[Any]) -> int:
    return int(coverages[0].decoded_bytes) if coverages else 0
