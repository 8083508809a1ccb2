"""Run arms on natural text, and keep every sample so that arms can be compared in pairs.

It is the protocol of `fabric.evaluate` on those sets alone that are judged together: what
is asked here is a rate at a quality, not whether a codec may be used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.errors import ConfigError
from codec.quality_receipt import Interval
from fabric.calibrate import Progress
from fabric.codec_bench.curve import Gain, Point, gain_at, smallest
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm
from fabric.evaluate.bootstrap import CONFIDENCE
from fabric.evaluate.config import EvaluationConfig
from fabric.evaluate.results import ArmResult, arm_result
from fabric.evaluate.run import choose_set
from fabric.evaluate.scoring import Figures, Scorer
from fabric.evaluate.vocabulary import Vocabulary

NUM_RESAMPLES = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One arm on all samples."""

    arm: str
    target: float | None
    figures: tuple[Figures, ...]
    """One per sample, in the same order for every arm of a run."""

    @property
    def result(self) -> ArmResult:
        """Means and intervals; all sets are pooled."""
        return arm_result(
            self.arm, self.target, self.figures, {one.set_name for one in self.figures}
        )

    def within(self, set_name: str) -> Measured:
        """The arm on the samples of one set alone."""
        return replace(self, figures=tuple(one for one in self.figures if one.set_name == set_name))

    def point(self, drawn_N: NDArray[np.intp] | None = None) -> Point | None:
        """Ratio and KL over the samples, or over some drawn from them; ``None`` if lossless."""
        drawn = range(len(self.figures)) if drawn_N is None else drawn_N.tolist()
        chosen = [self.figures[number] for number in drawn]
        kl = sum(one.kl * one.num_tokens for one in chosen) / sum(one.num_tokens for one in chosen)
        raw_bytes = sum(one.raw_bytes for one in chosen)
        return Point(raw_bytes / sum(one.stored_bytes for one in chosen), kl) if kl > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Gains of one family of arms over single arms of another."""

    gains: tuple[Gain, ...]
    intervals: tuple[Interval | None, ...]
    """Of each gain, samples drawn in pairs; ``None`` where most draws have no gain."""

    smallest_interval: Interval | None

    @property
    def smallest(self) -> float | None:
        """The least gain, if all were found."""
        return smallest(self.gains)


def measure(
    engine: Engine[Any],
    loaded: LoadedModel,
    arms: Sequence[Arm],
    config: EvaluationConfig,
    *,
    sets: Collection[str] | None = None,
    on_progress: Progress = lambda _what, _fraction: None,
) -> list[Measured]:
    """Score every arm on the natural samples, which share one reference pass.

    Parameters
    ----------
    sets
        Names of pooled sets; all of them by default.

    Raises
    ------
    ConfigError
        If samples are longer than the model takes, or no set has one of the names.
    """
    vocabulary = Vocabulary.of(engine, loaded)
    chosen = choose_set(vocabulary, loaded, config)
    wanted = chosen.pooled if sets is None else frozenset(sets)
    if not wanted or not wanted <= chosen.pooled:
        known = ", ".join(sorted(chosen.pooled))
        raise ConfigError(f"need sets out of {known}, got {sorted(wanted)}")
    samples = [sample for sample in chosen.samples if sample.set_name in wanted]
    scorer = Scorer(engine, vocabulary, config)
    figures: list[list[Figures]] = [[] for _ in arms]
    for number, sample in enumerate(samples):
        for place, found in enumerate(scorer.score(sample, arms)):
            figures[place].append(found)
            on_progress("evaluate", (number + (place + 1) / len(arms)) / len(samples))
    return [
        Measured(arm=arm.name, target=arm.target, figures=tuple(found))
        for arm, found in zip(arms, figures, strict=True)
    ]


def compare(
    points: Sequence[Measured],
    curve: Sequence[Measured],
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Comparison:
    """Gains of ``curve`` at the KL of each of ``points``, with percentile-bootstrap intervals.

    All arms are drawn together, window by window, as a hard window is hard for each.

    Raises
    ------
    ValueError
        If there is no point, or an arm lost nothing at all and cannot be one.
    """
    gains = _gains(points, curve, None)
    if not gains or any(one.target is None for one in points):
        raise ValueError("need one or more arms with targets to compare with")
    num_samples = len(points[0].figures)
    random = np.random.default_rng(seed)
    drawn: list[list[float | None]] = []
    for _ in range(num_resamples):
        again = _gains(points, curve, random.integers(num_samples, size=num_samples))
        drawn.append([*(one.gain for one in again), smallest(again)])
    columns = [[row[place] for row in drawn] for place in range(len(gains) + 1)]
    values = [*(one.gain for one in gains), smallest(gains)]
    intervals = [_interval(value, found) for value, found in zip(values, columns, strict=True)]
    return Comparison(gains=gains, intervals=tuple(intervals[:-1]), smallest_interval=intervals[-1])


def _gains(
    points: Sequence[Measured], curve: Sequence[Measured], drawn_N: NDArray[np.intp] | None
) -> tuple[Gain, ...]:
    on_curve = [point for one in curve if (point := one.point(drawn_N)) is not None]
    gains = []
    for one in points:
        point = one.point(drawn_N)
        if point is None:
            raise ValueError(f"{one.arm} loses nothing: there is no KL to compare at")
        gains.append(gain_at(one.target or point.ratio, point, on_curve))
    return tuple(gains)


def _interval(value: float | None, drawn: Sequence[float | None]) -> Interval | None:
    """Of the draws that have a gain, unless so many have none that the ends mean little."""
    known = [gain for gain in drawn if gain is not None]
    if value is None or len(known) < CONFIDENCE * len(drawn) or not known:
        return None
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval.spanning(value, float(low), float(high))
