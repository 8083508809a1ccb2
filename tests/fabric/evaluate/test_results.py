"""Figures gathered: every token weighs alike, and nothing measured is left out."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from codec.quality_receipt import Interval
from fabric.evaluate.config import FULL
from fabric.evaluate.results import Evaluation, arm_result, set_result
from fabric.evaluate.scoring import Figures


def figures(**options: Any) -> Figures:
    """One sample's, nothing changed unless said."""
    plain: dict[str, Any] = {
        "set_name": "prose",
        "num_tokens": 10,
        "kl": 0.0,
        "top1": 1.0,
        "nll": 2.0,
        "nll_reference": 2.0,
        "greedy_match": None,
        "is_found": None,
        "is_found_reference": None,
        "raw_bytes": 800,
        "stored_bytes": 100,
    }
    return Figures(**plain | options)


def test_means_are_over_tokens() -> None:
    """A window of 30 tokens counts three times one of 10."""
    found = set_result(
        "prose",
        [
            figures(kl=0.1, top1=0.5, nll=2.5),
            figures(num_tokens=30, kl=0.3, top1=0.9, nll=2.1),
        ],
    )

    assert (found.name, found.num_samples, found.num_tokens) == ("prose", 2, 40)
    assert found.mean_kl.value == pytest.approx(0.25)
    assert found.top1.value == pytest.approx(0.8)
    assert found.dppl_pct.value == pytest.approx(100 * (math.exp(0.2) - 1))
    assert (found.mean_kl.low, found.mean_kl.high) == pytest.approx((0.1, 0.3))
    assert (found.top1.low, found.top1.high) == pytest.approx((0.5, 0.9))
    assert found.dppl_pct.high == pytest.approx(100 * (math.exp(0.5) - 1))


def test_greedy_shares_are_of_the_samples_that_have_one() -> None:
    """A look-up beside its reference; nothing where nothing was asked."""
    found = set_result(
        "mixed",
        [
            figures(greedy_match=0.5, is_found=True, is_found_reference=True),
            figures(greedy_match=None, is_found=False, is_found_reference=True),
            figures(),
        ],
    )
    nothing = set_result("none", [figures()])

    assert found.greedy_match == Interval(0.5, 0.5, 0.5)
    assert found.retrieval == Interval(0.5, 0.0, 1.0)
    assert found.retrieval_reference == Interval(1.0, 1.0, 1.0)
    assert (nothing.greedy_match, nothing.retrieval, nothing.retrieval_reference) == (None,) * 3


def test_an_arm_is_gathered_by_set_and_pooled() -> None:
    """The ratio is over all samples; the pool is of the sets that are named for it."""
    found = arm_result(
        "paper@8",
        8.0,
        [
            figures(kl=0.1, stored_bytes=100),
            figures(set_name="random", kl=5.0, stored_bytes=300),
            figures(set_name="code", kl=0.2, nll_reference=0.0, nll=0.0),
            figures(kl=0.3),
        ],
        {"prose", "code"},
    )

    assert (found.arm, found.target) == ("paper@8", 8.0)
    assert found.net_ratio == pytest.approx(3200 / 600)
    assert [(one.name, one.num_samples) for one in found.sets] == [
        ("prose", 2),
        ("random", 1),
        ("code", 1),
    ]
    assert found.pooled.name == "prose+code"
    assert found.pooled.num_samples == 3
    assert found.pooled.mean_kl.value == pytest.approx(0.2)
    assert found.perplexity_full == pytest.approx(
        {"prose": math.exp(2), "random": math.exp(2), "code": 1.0}
    )


def test_an_evaluation_is_plain_data() -> None:
    """With the protocol, the digest and how intervals were made."""
    arm = arm_result("full", None, [figures()], {"prose"})
    evaluation = Evaluation(
        model="tiny",
        namespace="ab",
        evaluation_set="cd",
        is_registered=True,
        config=FULL,
        arms=(arm,),
    )

    read = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))

    assert read["format"] == "kvfabric.evaluation.result.1"
    assert (read["confidence"], read["evaluation_set"]) == (0.95, "cd")
    assert read["config"]["context_tokens"] == 1024
    (found,) = read["arms"]
    assert found["net_ratio"] == 8.0
    assert found["sets"][0]["mean_kl"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["pooled"]["retrieval"] is None
