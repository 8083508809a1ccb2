"""Calibrate one profile in several ways, and say what each way costs beside a first one.

A way is a corpus, its size, or a split into stages.  All ways are run on the same samples;
what one costs is its ratio over the first's, read at the KL of each of the first's targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from codec.errors import ConfigError
from fabric.calibrate import CorpusConfig, Progress
from fabric.codec_bench.codecs import ENTROPY, Setting, load_codecs
from fabric.codec_bench.measure import Measured, compare, measure
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm, CodecArm
from fabric.evaluate.config import EvaluationConfig

POOLED = "pooled"
"""In place of a set's name: all samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to calibrate."""

    name: str
    corpus: tuple[Path, ...] = ()
    """The packaged texts by default."""

    corpus_config: CorpusConfig
    num_stages: int = 1


def measure_variants(
    engine: Engine[Any],
    loaded: LoadedModel,
    variants: Sequence[Variant],
    targets: Sequence[float],
    evaluation: EvaluationConfig,
    *,
    on_progress: Progress = lambda _what, _fraction: None,
) -> dict[str, list[Measured]]:
    """Every target of every way, by the way's name.

    Raises
    ------
    ConfigError
        If there is no way, or two have one name; else as `calibrate_all` and `measure`.
    """
    names = [variant.name for variant in variants]
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"need one or more ways of different names, got {names}")
    arms: list[Arm] = []
    for variant in variants:
        codecs = load_codecs(
            engine,
            loaded,
            [Setting(ENTROPY, target) for target in targets],
            corpus=variant.corpus,
            corpus_config=variant.corpus_config,
            num_stages=variant.num_stages,
            on_progress=_named(variant.name, on_progress),
        )
        arms += [
            CodecArm(f"{variant.name}@{setting.target:g}", stages, engine, target=setting.target)
            for setting, stages in codecs.items()
        ]
    measured = measure(engine, loaded, arms, evaluation, on_progress=on_progress)
    size = len(targets)
    return {
        name: measured[number * size : (number + 1) * size] for number, name in enumerate(names)
    }


def costs(
    measured: Mapping[str, Sequence[Measured]], first: str, targets: Sequence[float]
) -> list[dict[str, Any]]:
    """Every way's ratio over the first's at equal KL, on all samples and on each set.

    Parameters
    ----------
    targets
        Of the first way, at whose KL ratios are read.  One at the end of its range is often
        out of the others'.

    Returns
    -------
    rows
        Plain data; ``relative_ratio`` is under 1 where a way costs something, and ``None``,
        with a reason, where its curve does not reach the KL.
    """
    sets = dict.fromkeys(one.set_name for arm in measured[first] for one in arm.figures)
    rows = []
    for set_name in (POOLED, *sets):
        part = {
            name: [one if set_name == POOLED else one.within(set_name) for one in arms]
            for name, arms in measured.items()
        }
        points = [one for one in part[first] if one.target in targets]
        for name, curve in part.items():
            found = compare(points, curve)
            for gain, interval in zip(found.gains, found.intervals, strict=True):
                ends = None if interval is None else [interval.low, interval.high]
                row = {"set": set_name, "variant": name, "at_target_of": first, **asdict(gain)}
                rows.append(row | {"relative_ratio": gain.gain, "interval": ends})
    return rows


def curves(measured: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """Ratio and quality of every way and target, as plain data."""
    rows = []
    for name, arms in measured.items():
        for one in arms:
            result = one.result
            kl = result.pooled.mean_kl
            rows.append(
                {
                    "variant": name,
                    "target": one.target,
                    "net_ratio": result.net_ratio,
                    "kl": kl.value,
                    "kl_interval": [kl.low, kl.high],
                    "top1": result.pooled.top1.value,
                    "sets": {part.name: part.mean_kl.value for part in result.sets},
                }
            )
    return rows


def _named(name: str, on_progress: Progress) -> Progress:
    return lambda what, fraction: on_progress(f"{name}: {what}", fraction)
