"""Quality receipts for tests: a legal one, and what it is made of."""

from __future__ import annotations

from typing import Any

from codec.quality_receipt import Interval, QualityReceipt, SetResult, Verdict


def flat(value: float) -> Interval:
    """An interval without width."""
    return Interval(value, value, value)


def a_set(name: str, **changes: Any) -> SetResult:
    """A good result with 24 look-ups, unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "name": name,
        "num_samples": 24,
        "num_tokens": 1024,
        "mean_kl": Interval(0.01, 0.008, 0.013),
        "top1": Interval(0.97, 0.96, 0.98),
        "dppl_pct": Interval(0.3, -0.1, 0.7),
        "greedy_match": flat(0.875),
        "retrieval": Interval(0.5, 0.375, 0.625),
        "retrieval_reference": Interval(0.5, 0.375, 0.625),
    }
    return SetResult(**fields | changes)


def a_receipt(**changes: Any) -> QualityReceipt:
    """A receipt of two stages that passes, unless ``changes`` say otherwise."""
    fields: dict[str, Any] = {
        "codec_ids": ("0a" * 16, "0b" * 16),
        "calibrations": ("1a" * 16, "1b" * 16),
        "namespace": "2a" * 16,
        "stages": ("l0-1.h0-2", "l1-3.h0-2"),
        "profile": "kvtc",
        "target": 8.0,
        "net_ratio": 8.25,
        "evaluation_set": "3a" * 16,
        "sets": (
            a_set("prose", retrieval=None, retrieval_reference=None, greedy_match=None),
            a_set("lookup"),
        ),
        "pooled": a_set("pooled", retrieval=None, retrieval_reference=None),
        "tool_version": "0.1.0",
        "date": "2026-11-30",
        "limits": (("max_mean_kl", 0.02),),
        "verdict": Verdict(True),
    }
    return QualityReceipt(**fields | changes)


def receipt_of(*codecs: Any, **changes: Any) -> QualityReceipt:
    """A receipt that passes, of these codecs together."""
    namespace = codecs[0].namespace
    names: dict[str, Any] = {
        "codec_ids": tuple(codec.codec_id.hex() for codec in codecs),
        "calibrations": tuple("" for _ in codecs),
        "stages": tuple(str(codec.stage) for codec in codecs),
        "namespace": "2a" * 16 if namespace is None else namespace.hex(),
    }
    return a_receipt(**names | changes)
