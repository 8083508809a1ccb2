"""What an evaluation found: figures of samples, gathered by arm and set."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from codec.quality_receipt import Interval, SetResult
from fabric.evaluate.bootstrap import CONFIDENCE, NUM_RESAMPLES, mean_interval
from fabric.evaluate.config import EvaluationConfig
from fabric.evaluate.scoring import Figures

RESULT_FORMAT: Final = "kvfabric.evaluation.result.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm on every set."""

    arm: str
    target: float | None
    net_ratio: float
    """Raw 16-bit bytes over stored bytes of the same tokens, over all samples."""

    perplexity_full: Mapping[str, float]
    """By set: of the scored tokens, at full precision."""

    pooled: SetResult
    """The samples of the sets that are judged together."""

    sets: tuple[SetResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Every arm on every set, and what that was."""

    model: str
    namespace: str
    """Digest, hex."""

    evaluation_set: str
    """Digest, hex."""

    is_registered: bool
    """False for a corpus of the caller's, which qualifies no codec."""

    config: EvaluationConfig
    arms: tuple[ArmResult, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data, for `json`."""
        return {
            "format": RESULT_FORMAT,
            "confidence": CONFIDENCE,
            "num_resamples": NUM_RESAMPLES,
            **asdict(self),
        }


def arm_result(
    arm: str, target: float | None, figures: Sequence[Figures], pooled: Collection[str]
) -> ArmResult:
    """Gather one arm's figures; the sets keep the order in which they were run."""
    by_set: dict[str, list[Figures]] = {}
    for one in figures:
        by_set.setdefault(one.set_name, []).append(one)
    together = [one for name in by_set if name in pooled for one in by_set[name]]
    return ArmResult(
        arm=arm,
        target=target,
        net_ratio=sum(one.raw_bytes for one in figures) / sum(one.stored_bytes for one in figures),
        perplexity_full={
            name: math.exp(_mean([(one.nll_reference, one.num_tokens) for one in found]))
            for name, found in by_set.items()
        },
        pooled=set_result("+".join(name for name in by_set if name in pooled), together),
        sets=tuple(set_result(name, found) for name, found in by_set.items()),
    )


def set_result(name: str, figures: Sequence[Figures]) -> SetResult:
    """Means over the samples with their intervals; tokens weigh alike."""
    tokens = [one.num_tokens for one in figures]
    change = mean_interval([one.nll - one.nll_reference for one in figures], tokens)
    found, found_reference = (
        _share([getattr(one, field) for one in figures])
        for field in ("is_found", "is_found_reference")
    )
    return SetResult(
        name=name,
        num_samples=len(figures),
        num_tokens=sum(tokens),
        mean_kl=mean_interval([one.kl for one in figures], tokens),
        top1=mean_interval([one.top1 for one in figures], tokens),
        # exp keeps the order, so an end of the interval is an end of the change's.
        dppl_pct=Interval.spanning(
            *(100 * math.expm1(end) for end in (change.value, change.low, change.high))
        ),
        greedy_match=_share([one.greedy_match for one in figures]),
        retrieval=found,
        retrieval_reference=found_reference,
    )


def _share(values: Sequence[float | bool | None]) -> Interval | None:
    """Of the samples that have one."""
    measured = [float(value) for value in values if value is not None]
    return mean_interval(measured) if measured else None


def _mean(pairs: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
