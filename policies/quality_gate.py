"""The quality gate: whether a receipt speaks for a codec.

A lossy codec passes if, on the pooled evaluation set, the distributions stay close, the most
likely token mostly the same and the perplexity where it was, and if it still finds keys.  Keys
are judged apart: from a compression of 32 on retrieval falls for every way of coding that was
measured, long before perplexity moves.  Codecs that change nothing need no receipt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from codec.identity import CodecId
from codec.quality_receipt import QualityReceipt, SetResult, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLimits:
    """The most that a codec may change.

    The defaults take what casts and four-bit codes cost on two small models (KL 0.002 to
    0.003, top-1 97 to 98 %) with room for a 16-fold transform code, and leave no room for
    two-bit codes or a 32-fold one of the paper (KL 0.04, top-1 89 %).
    """

    max_mean_kl: float = 0.02
    """Nats."""

    min_top1: float = 0.94
    max_abs_dppl_pct: float = 2.0
    """A perplexity that falls this far is as much a sign of another model as one that rises."""

    min_tokens: int = 256
    """With fewer the share of equal tokens is not known to 3 points (two standard errors)."""

    min_lookups: int = 8

    def __post_init__(self) -> None:
        for name in ("max_mean_kl", "max_abs_dppl_pct"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.min_top1 <= 1:
            raise ValueError(f"min_top1 must be in [0, 1], got {self.min_top1}")
        for name in ("min_tokens", "min_lookups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def judge(receipt: QualityReceipt, limits: QualityLimits) -> Verdict:
    """Whether the figures of ``receipt`` are within ``limits``; its own verdict is not asked."""
    reasons = (*_over_limits(receipt.pooled, limits), *_lost_keys(receipt, limits))
    return Verdict(not reasons, reasons)


def judged(receipt: QualityReceipt, limits: QualityLimits) -> QualityReceipt:
    """The receipt with the verdict by ``limits``, and with those beside it."""
    by = tuple((name, float(value)) for name, value in asdict(limits).items())
    return replace(receipt, limits=by, verdict=judge(receipt, limits))


def qualifies(
    receipt: QualityReceipt | None,
    limits: QualityLimits,
    *,
    codecs: Sequence[CodecId],
    namespace: bytes | None = None,
) -> Verdict:
    """Whether ``receipt`` speaks for ``codecs``, one per stage, when used together.

    Parameters
    ----------
    namespace
        Of the cache that they are to code; ``None`` does not compare.
    """
    if receipt is None:
        return Verdict(False, ("there is no receipt for it",))
    wanted = tuple(codec.hex() for codec in codecs)
    if receipt.codec_ids != wanted:
        why = f"the receipt is of {_listed(receipt.codec_ids)}, not of {_listed(wanted)}"
        return Verdict(False, (why,))
    if namespace is not None and receipt.namespace != namespace.hex():
        why = f"the receipt is of model {receipt.namespace}, not of {namespace.hex()}"
        return Verdict(False, (why,))
    return judge(receipt, limits)


def _over_limits(pooled: SetResult, limits: QualityLimits) -> Iterator[str]:
    if pooled.num_tokens < limits.min_tokens:
        yield f"{pooled.num_tokens} tokens were scored, {limits.min_tokens} are needed"
    if pooled.mean_kl.value > limits.max_mean_kl:
        yield f"mean KL {pooled.mean_kl.value:.4f} is over {limits.max_mean_kl:g}"
    if pooled.top1.value < limits.min_top1:
        yield f"top-1 agreement {pooled.top1.value:.4f} is under {limits.min_top1:g}"
    if abs(pooled.dppl_pct.value) > limits.max_abs_dppl_pct:
        yield (
            f"perplexity changes by {pooled.dppl_pct.value:+.2f} %, "
            f"over {limits.max_abs_dppl_pct:g} %"
        )


def _lost_keys(receipt: QualityReceipt, limits: QualityLimits) -> Iterator[str]:
    """Every set of look-ups is judged: the uncompressed share must lie within the interval.

    Not overlap of both intervals, which at 48 look-ups lets 46 % fall to 23 %.  Nor the
    resampled interval alone: it has no width where every look-up ended alike, and then one key
    of eight would decide.
    """
    num_lookups = 0
    for result in receipt.sets:
        if result.retrieval is None or result.retrieval_reference is None:
            continue
        num_lookups += result.num_samples
        most = max(result.retrieval.high, _wilson_upper(result.retrieval.value, result.num_samples))
        if most < result.retrieval_reference.value:
            yield (
                f"{result.name}: {result.retrieval.value:.3f} of keys are found "
                f"(at most {most:.3f}), uncompressed {result.retrieval_reference.value:.3f}"
            )
    if num_lookups < limits.min_lookups:
        yield f"{num_lookups} keys were looked up, {limits.min_lookups} are needed"


def _wilson_upper(share: float, num_samples: int) -> float:
    """Upper end of the 95 % score interval of a share.

    Source
    ------
    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    z = 1.96
    center = share + z * z / (2 * num_samples)
    spread = share * (1 - share) / num_samples + (z / (2 * num_samples)) ** 2
    return (center + z * math.sqrt(spread)) / (1 + z * z / num_samples)


def _listed(codecs: Sequence[str]) -> str:
    return " + ".join(codecs)
