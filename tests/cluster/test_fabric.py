"""The whole path with real Ray and real UCX: store here, restore there, and what breaks on the way.

A tiny random model stands in for a real one, so that every token can be compared; the
real model is in test_demo.py.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
import torch

from actors.codecs import CodecOffer, Qualification
from actors.naming import ROUTER
from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.errors import ConfigError, IdentityMismatchError, UnqualifiedCodecError
from codec.identity import ComponentKey
from codec.quality import compare_logits
from fabric.cluster import Fabric
from fabric.config import FabricConfig
from fabric.demo import LOCAL_ENVIRONMENT
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.model import describe_model
from policies.planner import Reason
from tests.codec.quality_samples import receipt_of
from tests.fabric.engines.tiny import some_tokens, tiny_engine, tiny_model

pytestmark = pytest.mark.cluster

CHUNK, WINDOW = 16, 8
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    """One engine plays both: its caches are its callers'."""
    return tiny_engine("llama")


@pytest.fixture(scope="module")
def calibrations(engine: TransformersEngine) -> list[Calibration]:
    """Two pipeline stages, generous in bits: the model is random, and so is its cache."""
    calibrators = [
        Calibrator(
            stage,
            engine.geometry.of_stage(stage),
            engine.rotary.of_layers(range(stage.layer_start, stage.layer_stop)),
            CalibrationConfig(target=1.5, holdout_every=3),
        )
        for stage in engine.geometry.split_layers(2)
    ]
    for seed in range(12):
        tokens = some_tokens(48, seed=seed + 100)
        cache, _ = engine.prefill(tokens)
        keys, values = engine.capture(cache, 0, 48)
        for calibrator in calibrators:
            layers = slice(calibrator.stage.layer_start, calibrator.stage.layer_stop)
            calibrator.add(keys[:, layers], values[:, layers])
    namespace = engine.namespace().digest().hex()
    return [calibrator.fit({"namespace": namespace}) for calibrator in calibrators]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """One local Ray for the module."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def fabric(
    local_ray: None, engine: TransformersEngine, calibrations: list[Calibration]
) -> Iterator[Fabric]:
    """Router, two workers, one model."""
    config = FabricConfig(
        ray_namespace="test",
        tokens_per_chunk=CHUNK,
        window_tokens=WINDOW,
        arena_bytes=64 << 20,
        extent_bytes=2 << 20,
        heartbeat_s=0.2,
        lost_after_s=5.0,
    )
    fabric = Fabric.start(config, ["a", "b"], environment=LOCAL_ENVIRONMENT)
    fabric.add_model(engine, calibrations, name="tiny", allow_unqualified=True)
    yield fabric
    assert fabric.stop() == 3


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s in vain for: {what}"
        time.sleep(0.05)


def stored(fabric: Fabric, engine: TransformersEngine, seed: int, codec: str) -> list[int]:
    """A prompt of 83 tokens whose five whole chunks the worker ``a`` holds."""
    tokens = some_tokens(83, seed=seed)
    cache, _ = engine.prefill(tokens)
    placements = fabric.store(engine, cache, tokens, at="a", codecs=(codec,))
    assert len(placements) == 5 * 2
    return tokens


def test_raw_restores_token_for_token_on_the_other_worker(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """The bit-exact control: nothing but the codec may change a token."""
    tokens = stored(fabric, engine, 1, "raw")
    expected = engine.generate(tokens, None, 12)

    outcome = fabric.restore(engine, tokens, at="b", force="restore")

    assert outcome.tokens_restored == 5 * CHUNK - WINDOW
    assert engine.cached_tokens(outcome.cache) == outcome.tokens_restored
    assert outcome.bytes_moved == fabric.client.residency(tokens).stored_bytes
    assert outcome.transport.startswith("ucx:")
    assert "tcp" in outcome.transport
    assert {"connect", "transfer", "verify", "handoff"} <= set(outcome.steps)
    assert engine.generate(tokens, outcome.cache, 12) == expected


def test_kvtc_restores_close_to_the_full_precision_cache(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """Two stages, each with its own basis, put together again."""
    tokens = stored(fabric, engine, 2, "kvtc")
    live, _ = engine.prefill(tokens[:-1])
    continuation = engine.generate(tokens, None, 8)

    outcome = fabric.restore(engine, tokens, at="b", force="restore")

    keys, _ = engine.capture(live, 0, outcome.tokens_restored)
    ours, _ = engine.capture(outcome.cache, 0, outcome.tokens_restored)
    assert torch.equal(ours[:4], keys[:4])
    assert (ours - keys).square().mean() < 0.05 * keys.var()
    assert not torch.equal(ours, keys)
    full = engine.score(tokens, live, continuation)
    restored = engine.score(tokens, outcome.cache, continuation)
    assert 0 < compare_logits(full, restored).mean_kl < 0.1
    assert {"entropy", "dequantize", "project", "rope"} <= set(outcome.steps)


def test_what_was_restored_is_local_the_second_time(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """The pull left a copy, the router knows, and the plan prefers it."""
    tokens = stored(fabric, engine, 3, "kvtc")
    fabric.restore(engine, tokens, at="b", force="restore")

    again = fabric.restore(engine, tokens, at="b", force="restore")

    assert again.transport == "local"
    assert again.bytes_moved == 0
    assert {segment.node for segment in again.plan.segments} == {"b"}


def test_residency_is_answered_without_the_router(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """The answer says how far it had heard; a longer prompt shares the prefix."""
    tokens = stored(fabric, engine, 4, "kvtc")

    same = fabric.client.residency(tokens)
    longer = fabric.client.residency([*tokens, 1, 2, 3])
    other = fabric.client.residency([tokens[0] ^ 1, *tokens[1:]])

    assert same.ready
    assert not same.gap
    assert same.prefix_tokens == longer.prefix_tokens == 5 * CHUNK
    assert other.prefix_tokens == 0
    assert set(same.as_of.seqs) == {"a", "b"}


def test_a_prompt_nobody_has_seen_is_recomputed(fabric: Fabric, engine: TransformersEngine) -> None:
    """A miss is a value with a reason."""
    outcome = fabric.restore(engine, some_tokens(83, seed=5), at="b")

    assert outcome.cache is None
    assert outcome.reason == Reason.ABSENT.value
    assert outcome.tokens_restored == 0


def test_a_flipped_bit_is_detected_counted_and_recomputed(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """The target refuses the bytes, the source quarantines them, the index forgets them."""
    tokens = stored(fabric, engine, 6, "kvtc")
    profile = fabric.client.profile()
    component = ComponentKey(profile.prefix(tokens).keys[2], profile.stages[1])
    before = fabric.stats()
    ray.get(fabric.worker("a").damage.remote(component, profile.codec_set("kvtc").codecs[1]))

    outcome = fabric.restore(engine, tokens, at="b", force="restore")

    after = fabric.stats()
    assert outcome.cache is None
    assert outcome.reason == "IncompletePullError"
    assert "corrupt" in outcome.explanation
    assert after["b"].rejected_corrupt == before["b"].rejected_corrupt + 1
    assert after["a"].quarantined == before["a"].quarantined + 1
    fabric.client.refresh()
    assert fabric.client.residency(tokens).prefix_tokens == 2 * CHUNK


def test_a_calibration_of_another_model_is_refused(
    fabric: Fabric, calibrations: list[Calibration]
) -> None:
    """It would decode, and be wrong."""
    with pytest.raises(ConfigError, match="another model"):
        fabric.add_model(tiny_engine("llama", torch.bfloat16), calibrations, name="other")


def test_a_lossy_codec_needs_a_receipt_or_a_permission(
    fabric: Fabric,
    engine: TransformersEngine,
    calibrations: list[Calibration],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Refused, let in with the flag, qualified by a receipt; every worker says which."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, codecs = describe_model(engine, calibrations, name="tiny", tokens_per_chunk=CHUNK)
    kvtc, raw = ([codec.codec_id for codec in part] for part in (codecs[:2], codecs[2:]))
    receipt = receipt_of(*codecs[:2])

    with pytest.raises(UnqualifiedCodecError, match="kvfabric evaluate"):
        fabric.add_model(engine, calibrations, name="strict")
    assert set(fabric.client.models()) == {"tiny"}
    for node in ("a", "b"):
        assert fabric.qualification(kvtc, at=node) == Qualification(False, None)
        assert fabric.qualification(raw, at=node) == Qualification(True, None)

    fabric.add_model(engine, calibrations, name="tiny", receipts=[receipt])

    for node in ("a", "b"):
        assert fabric.qualification(kvtc, at=node) == Qualification(True, receipt.digest())


def test_a_worker_refuses_by_itself_and_serves_on(
    fabric: Fabric, engine: TransformersEngine, calibrations: list[Calibration]
) -> None:
    """Whoever registers past the check learns it from the worker, by the error's own type."""
    profile, codecs = describe_model(engine, calibrations, name="tiny", tokens_per_chunk=CHUNK)
    alone = CodecOffer(
        codec=codecs[0], together=(codecs[0].codec_id,), receipt=None, allow_unqualified=False
    )
    router = ray.get_actor(ROUTER, namespace="test")
    ray.get(router.add_model.remote(profile, [alone]))

    with pytest.raises(UnqualifiedCodecError, match="there is no receipt"):
        ray.get(fabric.worker("b").load_models.remote("tiny"))
    ray.get(fabric.worker("b").load_models.remote("another"))

    fabric.add_model(engine, calibrations, name="tiny", allow_unqualified=True)
    tokens = stored(fabric, engine, 11, "kvtc")
    assert fabric.restore(engine, tokens, at="b", force="restore").cache is not None


def test_an_engine_of_another_model_neither_stores_nor_restores(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """Equal shapes, other weights: its KV would be fluent and wrong."""
    tokens = stored(fabric, engine, 9, "raw")
    other = TransformersEngine(
        LoadedModel(tiny_model("llama"), None, "llama", "other weights"), window_tokens=WINDOW
    )
    cache, _ = other.prefill(tokens)

    with pytest.raises(IdentityMismatchError, match="namespace"):
        fabric.store(other, cache, tokens, at="a")
    outcome = fabric.restore(other, tokens, at="b", force="restore")

    assert outcome.cache is None
    assert outcome.reason == "IdentityMismatchError"


def test_a_client_with_another_chunk_size_is_turned_away(fabric: Fabric) -> None:
    """Its chunks would be refused by the router, and its worker's with them."""
    with pytest.raises(ConfigError, match="tokens_per_chunk 16, not 8"):
        Fabric(dataclasses.replace(fabric.config, tokens_per_chunk=8))


def test_a_target_that_is_not_there_is_a_recompute(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """An engine whose worker was lost computes; only who plans by hand is told of a name."""
    tokens = stored(fabric, engine, 10, "kvtc")

    outcome = fabric.restore(engine, tokens, at="c", force="restore")

    assert outcome.cache is None
    assert outcome.reason == "ConfigError"
    assert "no worker 'c'" in outcome.explanation


def test_unknown_workers_and_models_are_named(fabric: Fabric, engine: TransformersEngine) -> None:
    """With what there is instead."""
    with pytest.raises(ConfigError, match="no worker 'c'; there are a, b"):
        fabric.client.plan([1, 2, 3], at="c")
    with pytest.raises(ConfigError, match="there are: tiny"):
        fabric.client.profile("huge")
    with pytest.raises(ConfigError, match="kvfabric up"):
        Fabric(FabricConfig(ray_namespace="elsewhere"))


def test_a_killed_source_ends_in_a_recompute_and_comes_back_empty(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """Kill -9 after the plan could be made; the restarted worker is another incarnation."""
    tokens = stored(fabric, engine, 8, "kvtc")
    incarnation = fabric.client.workers()["a"].incarnation
    expected = engine.generate(tokens, None, 6)

    os.kill(ray.get(fabric.worker("a").pid.remote()), signal.SIGKILL)
    outcome = fabric.restore(engine, tokens, at="b", force="restore")

    assert outcome.cache is None
    assert outcome.reason in {"PeerLostError", "TransferTimeoutError", "StaleIncarnationError"}
    assert engine.generate(tokens, outcome.cache, 6) == expected

    def is_back() -> bool:
        fabric.client.refresh()
        info = fabric.client.workers().get("a")
        return info is not None and info.incarnation > incarnation and bool(info.codecs)

    until(is_back, "the worker to restart and load its codecs")
    assert fabric.client.residency(tokens).prefix_tokens == 0
    assert stored(fabric, engine, 8, "kvtc") == tokens
    assert fabric.restore(engine, tokens, at="b", force="restore").cache is not None


def test_a_fabric_that_does_not_come_up_leaves_nothing(local_ray: None) -> None:
    """Its router would answer, and the next start would find half a fabric."""
    config = FabricConfig(ray_namespace="broken", arena_bytes=1 << 62, extent_bytes=2 << 20)

    with pytest.raises(ray.exceptions.RayError):
        Fabric.start(config, ["x"], environment=LOCAL_ENVIRONMENT)

    named = ray.util.list_named_actors(all_namespaces=True)
    assert [entry for entry in named if entry["namespace"] == "broken"] == []


def test_a_restarted_router_learns_again_from_the_workers(
    fabric: Fabric, engine: TransformersEngine
) -> None:
    """Residency, models and codecs: nobody has to store anything twice."""
    tokens = stored(fabric, engine, 7, "kvtc")
    router = ray.get_actor(ROUTER, namespace="test")

    ray.kill(router, no_restart=False)
    outcome = fabric.restore(engine, tokens, at="b", force="restore")
    assert outcome.cache is not None, "a restore waited for the router: " + outcome.explanation

    def relearned() -> bool:
        try:
            fabric.client.refresh()
            found = fabric.client.residency(tokens)
            return found.ready and found.prefix_tokens == 5 * CHUNK
        except (ray.exceptions.RayError, ConfigError):
            return False

    until(relearned, "the router to learn what the workers hold")
    assert fabric.restore(engine, tokens, at="b", force="restore").cache is not None
