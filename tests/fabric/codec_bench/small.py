"""A tiny model's codecs, fitted to a little text, and figures made up for curves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from codec.entropy_codec import EntropyCodec
from fabric.calibrate import CorpusConfig
from fabric.codec_bench.codecs import ENTROPY, Codecs, Setting, load_codecs
from fabric.codec_bench.floors import MachineRates
from fabric.codec_bench.measure import Measured
from fabric.codec_bench.run import BenchConfig, BenchResult
from fabric.codec_bench.speed import SpeedConfig
from fabric.engines.loading import LoadedModel
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate.scoring import Figures
from tests.fabric.evaluate.small import SMALL

CORPUS = CorpusConfig(
    num_tokens=2048,
    window_tokens=64,
    gradient_windows=4,
    context_tokens=96,
    following_tokens=16,
)
PAIR = (Setting(ENTROPY, 2.0), Setting(ENTROPY, 8.0))
SPEED = SpeedConfig(prefix_tokens=96, num_turns=2, tokens_per_chunk=32)
BENCH = BenchConfig(
    paper_targets=(8.0, 16.0, 32.0),
    entropy_targets=(8.0, 16.0, 32.0),
    rivals=("fp8",),
    evaluation=replace(SMALL, lookups=0, greedy_windows=0),
    speed=SPEED,
)

RATES = MachineRates(flops_per_s=1e9, bytes_per_s=2e9)


@dataclass(frozen=True)
class Made:
    """What tests share; none of it changes."""

    engine: TransformersEngine
    loaded: LoadedModel
    codecs: Codecs
    found: BenchResult


def small_codecs(engine: TransformersEngine, loaded: LoadedModel) -> Codecs:
    """Two targets of the entropy profile."""
    return load_codecs(engine, loaded, PAIR, corpus_config=CORPUS)


def entropy_codec(codecs: Codecs, setting: Setting = PAIR[0]) -> EntropyCodec:
    """The only stage's."""
    (codec,) = codecs[setting]
    assert isinstance(codec, EntropyCodec)
    return codec


def figures(
    kl: float, ratio: float, *, set_name: str = "prose", num_tokens: int = 10, top1: float = 0.9
) -> Figures:
    """One sample with this KL and ratio."""
    return Figures(
        set_name=set_name,
        num_tokens=num_tokens,
        kl=kl,
        top1=top1,
        nll=2.0 + kl,
        nll_reference=2.0,
        greedy_match=None,
        is_found=None,
        is_found_reference=None,
        raw_bytes=1 << 20,
        stored_bytes=round((1 << 20) / ratio),
    )


def measured(arm: str, target: float | None, kls: list[float], ratio: float) -> Measured:
    """An arm with a sample for each KL, all stored alike."""
    return Measured(arm=arm, target=target, figures=tuple(figures(kl, ratio) for kl in kls))
