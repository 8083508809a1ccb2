"""The quality gate: what passes, what does not and why, from the figures that were measured."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.identity import CodecId
from codec.quality_receipt import NOT_JUDGED, Interval, QualityReceipt, Verdict
from policies.quality_gate import QualityLimits, judge, judged, qualifies
from tests.codec.quality_samples import a_receipt, a_set, flat

LIMITS = QualityLimits()
CODECS = (CodecId(b"\x0a" * 16), CodecId(b"\x0b" * 16))


def measured(
    mean_kl: float, top1_pct: float, dppl_pct: float, keys_pct: float = 45.8
) -> QualityReceipt:
    """An arm of shared/reference/codec-measured.md: 48 look-ups, 45.8 % uncompressed."""
    half = 1.96 * math.sqrt(keys_pct * (100 - keys_pct) / 48)
    keys = Interval.spanning(keys_pct / 100, (keys_pct - half) / 100, (keys_pct + half) / 100)
    return a_receipt(
        sets=(a_set("lookup", num_samples=48, retrieval=keys, retrieval_reference=flat(0.458)),),
        pooled=a_set(
            "pooled",
            mean_kl=flat(mean_kl),
            top1=flat(top1_pct / 100),
            dppl_pct=flat(dppl_pct),
            retrieval=None,
            retrieval_reference=None,
        ),
    )


@pytest.mark.parametrize(
    ("arm", "figures", "passes"),
    [
        ("SmolLM2, paper 8x", (0.0045, 96.4, 0.37), True),
        ("SmolLM2, paper 16x", (0.0150, 93.6, 0.71), False),
        ("SmolLM2, paper 32x", (0.0415, 89.1, 2.2), False),
        ("SmolLM2, Fisher 16x", (0.0028, 97.5, 0.32), True),
        ("SmolLM2, Fisher 32x", (0.0087, 94.8, 0.45), True),
        ("SmolLM2, Fisher 64x", (0.0251, 90.8, 2.1), False),
        ("SmolLM2, fp8", (0.0020, 98.0, 0.27), True),
        ("SmolLM2, int2", (0.197, 77.7, 22), False),
        ("Gemma, paper 8x", (0.0051, 97.3, -0.08, 43.8), True),
        ("Gemma, paper 16x", (0.0184, 94.3, -0.18, 29.2), False),
        ("Gemma, Fisher 8x", (0.0014, 98.5, -0.10, 41.7), True),
        ("Gemma, Fisher 16x", (0.0066, 96.3, 0.19, 39.6), True),
        ("Gemma, Fisher 32x", (0.0212, 93.5, 0.58, 29.2), False),
        ("Gemma, int4", (0.0021, 97.6, -0.28, 43.8), True),
        ("Gemma, int2", (0.0885, 84.4, 6.9, 39.6), False),
    ],
)
def test_arms_that_were_measured_are_told_apart(
    arm: str, figures: tuple[float, ...], passes: bool
) -> None:
    """Casts, four bits and moderate transform codes pass; two bits and strong ones do not."""
    assert judge(measured(*figures), LIMITS).passes is passes, arm


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mean_kl": flat(0.0201)}, "mean KL 0.0201 is over 0.02"),
        ({"top1": flat(0.9399)}, "top-1 agreement 0.9399 is under 0.94"),
        ({"dppl_pct": flat(2.01)}, "perplexity changes by +2.01 %, over 2 %"),
        ({"dppl_pct": flat(-2.01)}, "perplexity changes by -2.01 %"),
        ({"num_tokens": 255}, "255 tokens were scored, 256 are needed"),
    ],
)
def test_every_limit_is_one(changes: dict[str, Any], why: str) -> None:
    """Each alone refuses, and says by how much."""
    pooled = {"retrieval": None, "retrieval_reference": None, **changes}

    verdict = judge(a_receipt(pooled=a_set("pooled", **pooled)), LIMITS)

    assert len(verdict.reasons) == 1
    assert why in verdict.reasons[0]


def test_what_is_at_the_limit_passes() -> None:
    """Limits are the most that may be, not the first that may not."""
    at = a_set("pooled", mean_kl=flat(0.02), top1=flat(0.94), dppl_pct=flat(-2.0), num_tokens=256)

    assert judge(a_receipt(pooled=at), LIMITS) == Verdict(True)


def test_all_reasons_are_given_at_once() -> None:
    """Nobody has to fix one to learn of the next."""
    bad = a_set("pooled", mean_kl=flat(1), top1=flat(0.1), dppl_pct=flat(50), num_tokens=1)
    no_keys = (a_set("prose", retrieval=None, retrieval_reference=None),)

    assert len(judge(a_receipt(pooled=bad, sets=no_keys), LIMITS).reasons) == 5


@pytest.mark.parametrize(
    ("found", "uncompressed", "num_lookups", "passes"),
    [
        (flat(0.5), 0.5, 24, True),
        (Interval(0.3, 0.2, 0.5), 0.5, 24, True),
        (Interval(0.2, 0.1, 0.3), 0.5, 24, False),
        (flat(1.0), 0.5, 24, True),
        # No width, as all ended alike: two of eight keys are no evidence, four are.
        (flat(0.0), 0.25, 8, True),
        (flat(0.0), 0.5, 8, False),
        (flat(0.0), 0.25, 24, False),
        (flat(0.0), 0.0, 24, True),
        (flat(0.5), 0.5, 7, False),
    ],
)
def test_keys_must_be_found_as_before_within_the_interval(
    found: Interval, uncompressed: float, num_lookups: int, passes: bool
) -> None:
    """Perplexity would not notice."""
    keys = a_set(
        "lookup",
        num_samples=num_lookups,
        retrieval=found,
        retrieval_reference=flat(uncompressed),
    )

    assert judge(a_receipt(sets=(keys,)), LIMITS).passes is passes


def test_each_set_of_look_ups_is_judged() -> None:
    """One that lost its keys is not outvoted by one that did not."""
    lost = a_set("far", retrieval=flat(0.1), retrieval_reference=flat(0.9))

    verdict = judge(a_receipt(sets=(a_set("near"), lost)), LIMITS)

    assert [reason.split(":")[0] for reason in verdict.reasons] == ["far"]


def test_the_verdict_in_a_receipt_is_not_asked() -> None:
    """Somebody else's limits, or somebody else's pen."""
    flattering = dataclasses.replace(measured(0.5, 50, 50), verdict=Verdict(True))
    harsh = a_receipt(verdict=Verdict(False, ("not good enough for us",)))

    assert not judge(flattering, LIMITS).passes
    assert judge(harsh, LIMITS).passes


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_better_codec_never_fares_worse(kl: float, better: float, top1: float) -> None:
    """The gate is monotone in what it limits."""
    worse_kl, better_kl = max(kl, better), min(kl, better)

    if judge(measured(worse_kl, 100 * top1, 0), LIMITS).passes:
        assert judge(measured(better_kl, 100 * top1, 0), LIMITS).passes
        assert judge(measured(better_kl, 100 * max(top1, better), 0), LIMITS).passes


def test_a_judged_receipt_says_by_what() -> None:
    """The limits lie beside the verdict, every one of them."""
    receipt = judged(a_receipt(limits=(), verdict=NOT_JUDGED), LIMITS)

    assert receipt.verdict == Verdict(True)
    assert dict(receipt.limits) == dataclasses.asdict(LIMITS)
    assert QualityReceipt.from_json(receipt.to_json()) == receipt
    assert not judged(receipt, QualityLimits(max_mean_kl=0.001)).verdict.passes


def test_a_receipt_speaks_for_its_codecs_together_and_for_no_others() -> None:
    """Neither for one of them alone, nor in another order, nor beside another."""
    receipt = a_receipt()
    other = CodecId(b"\x0c" * 16)

    assert qualifies(receipt, LIMITS, codecs=CODECS).passes
    for codecs in (CODECS[:1], CODECS[::-1], (CODECS[0], other), (*CODECS, other), ()):
        verdict = qualifies(receipt, LIMITS, codecs=codecs)
        assert not verdict.passes
        assert "the receipt is of 0a0a" in verdict.reasons[0]


def test_a_receipt_of_another_model_speaks_for_none() -> None:
    """Even where the codecs have the same names."""
    assert qualifies(a_receipt(), LIMITS, codecs=CODECS, namespace=b"\x2a" * 16).passes

    verdict = qualifies(a_receipt(), LIMITS, codecs=CODECS, namespace=b"\x2b" * 16)

    assert "of model 2a2a" in verdict.reasons[0]


def test_no_receipt_and_a_bad_one_do_not_qualify() -> None:
    """With the reason."""
    bad = measured(0.5, 50, 50)

    assert qualifies(None, LIMITS, codecs=CODECS).reasons == ("there is no receipt for it",)
    assert qualifies(bad, LIMITS, codecs=CODECS) == judge(bad, LIMITS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_mean_kl": -0.1},
        {"max_mean_kl": math.nan},
        {"max_abs_dppl_pct": math.inf},
        {"min_top1": 1.1},
        {"min_top1": math.nan},
        {"min_tokens": 0},
        {"min_lookups": 0},
    ],
    ids=str,
)
def test_limits_that_limit_nothing_are_refused(wrong: dict[str, Any]) -> None:
    """A gate that is off is not made by a typing error."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QualityLimits(**wrong)
