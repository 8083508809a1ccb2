"""`LatencyModel`: laws per step and label, intervals that hold, and state that travels."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from codec.identity import CodecId
from policies.latency import (
    ANY_LABEL,
    PREFILL,
    UNTRIED_SPREAD,
    Affine,
    LatencyModel,
    Prediction,
    PrefillLaw,
    decode_label,
    transfer_label,
)

SLOW, FAST = Affine(0.010, 1e8), Affine(0.001, 1e10)


def a_model(**options: Any) -> LatencyModel:
    """Transfers with a general prior and one of their own; prefill."""
    return LatencyModel(
        {("transfer", ANY_LABEL): SLOW, ("transfer", "ib/host"): FAST, ("verify", "cpu"): FAST},
        prefill={ANY_LABEL: PrefillLaw(0.01, 1e-4, 1e-9)},
        **options,
    )


def train(model: LatencyModel, count: int, *, factor: float = 1.0, seed: int = 0) -> random.Random:
    """Show ``model`` transfers over a 1 GB/s link, 2 ms away, a tenth noisy."""
    rng = random.Random(seed)
    for _ in range(count):
        size = 2 ** rng.uniform(16, 26)
        seconds = factor * (0.002 + size / 1e9) * rng.lognormvariate(0, 0.1)
        model.observe("transfer", "tcp/host", size, seconds)
    return rng


def test_priors_speak_by_label_and_then_for_any() -> None:
    """A label's own prior goes before the general one."""
    model = a_model()

    assert model.predict("transfer", "ib/host", 1e8).seconds == pytest.approx(0.011)
    assert model.predict("transfer", "new", 1e8).seconds == pytest.approx(1.010)
    assert model.law("transfer", "new").per_s == pytest.approx(1e8)


@pytest.mark.parametrize(("step", "label"), [("unheard", ""), ("verify", "gpu")])
def test_a_step_without_prior_is_refused(step: str, label: str) -> None:
    """A silent zero would make it look free."""
    model = a_model()

    with pytest.raises(ValueError, match="no prior for step"):
        model.predict(step, label, 1)
    with pytest.raises(ValueError, match="no prior for step"):
        model.observe(step, label, 1, 1)
    assert model.count(step, label) == 0


def test_labels_learn_apart() -> None:
    """One slow link says nothing of another."""
    model = a_model()

    train(model, 50)

    assert model.count("transfer", "tcp/host") == 50
    assert model.law("transfer", "tcp/host").t0_s == pytest.approx(0.002, rel=0.2)
    assert model.law("transfer", "tcp/disk") == a_model().law("transfer", "tcp/disk")


def test_the_interval_holds_what_comes() -> None:
    """Nine times in ten, give or take chance, on times that it has not seen (DESIGN 9)."""
    model = a_model()
    rng = train(model, 200)
    errors, inside = [], 0

    for _ in range(500):
        size = 2 ** rng.uniform(16, 26)
        seconds = (0.002 + size / 1e9) * rng.lognormvariate(0, 0.1)
        found = model.predict("transfer", "tcp/host", size)
        errors.append(abs(found.seconds / seconds - 1))
        inside += found.low_s <= seconds <= found.high_s
        model.observe("transfer", "tcp/host", size, seconds)

    assert sorted(errors)[250] < 0.10
    assert 0.85 <= inside / 500 <= 0.97


def test_before_anything_was_seen_the_interval_is_wide() -> None:
    """A third of the time, and three times it."""
    seconds, low_s, high_s = 1.010, 1.010 / UNTRIED_SPREAD, 1.010 * UNTRIED_SPREAD

    found = a_model().predict("transfer", "new", 1e8)

    assert (found.seconds, found.low_s, found.high_s) == pytest.approx((seconds, low_s, high_s))


def test_the_interval_is_of_the_last_few() -> None:
    """Quotients beyond the window are forgotten: noise that has gone no longer widens it."""
    model = a_model(window=30)
    rng = random.Random(2)
    for _ in range(50):
        model.observe("transfer", "x", 1e6, 0.02 * rng.choice([0.5, 2.0]))
    noisy = model.predict("transfer", "x", 1e6)

    for _ in range(150):
        model.observe("transfer", "x", 1e6, 0.02)

    calm = model.predict("transfer", "x", 1e6)
    assert noisy.high_s / noisy.low_s > 3
    assert calm.high_s / calm.low_s < 1.2


def test_the_interval_cuts_as_much_from_either_end() -> None:
    """Its ends are the quantiles at the same distance from the median."""
    model = a_model(window=21, coverage=0.8)
    quotients = [1 + i / 100 for i in range(-10, 11)]
    state = model.to_dict()
    model.observe("transfer", "x", 1e6, 0.02)
    cell = model.to_dict()["cells"][0]
    cell[3] = quotients
    model = LatencyModel.from_dict(state | {"cells": [cell]})

    found = model.predict("transfer", "x", 1e6)

    # Of 21 quotients and the two imaginary ones, two are cut at each end.
    assert found.low_s / found.seconds == pytest.approx(quotients[1])
    assert found.high_s / found.seconds == pytest.approx(quotients[-2])


def test_the_prediction_lies_in_its_interval() -> None:
    """Also while every recent time was longer than predicted."""
    model = a_model(forgetting=1.0)
    train(model, 300)
    train(model, 70, factor=1.6, seed=1)

    slower = model.predict("transfer", "tcp/host", 1e6)
    train(model, 70, factor=0.5, seed=1)
    faster = model.predict("transfer", "tcp/host", 1e6)

    assert slower.low_s == slower.seconds < slower.high_s
    assert faster.low_s < faster.seconds == faster.high_s


def test_the_first_surprise_is_the_priors() -> None:
    """How wrong a guess was says nothing of how well the fit will do."""
    model = a_model()

    model.observe("transfer", "x", 1e6, 50.0)
    model.observe("transfer", "x", 1e6, 50.0)

    ((_, _, _, quotients),) = model.to_dict()["cells"]
    assert quotients == pytest.approx([1.0])


def test_prefill_grows_with_its_context() -> None:
    """The same number of tokens costs more later in the prompt, by pairs to attend to."""
    model = a_model()
    rng = random.Random(3)
    for _ in range(300):
        start = rng.randrange(8000)
        stop = start + rng.randrange(1, 4000)
        pairs = (stop**2 - start**2) / 2
        model.observe_prefill("gpu", start, stop, 0.03 + 3e-5 * (stop - start) + 2e-9 * pairs)

    early = model.predict_prefill("gpu", 0, 1000).seconds
    late = model.predict_prefill("gpu", 30_000, 31_000).seconds

    assert early == pytest.approx(0.03 + 0.03 + 0.001, rel=0.02)
    assert late == pytest.approx(0.03 + 0.03 + 0.061, rel=0.05)


def test_no_token_takes_no_time() -> None:
    """Not even the fixed time of a call, which is not made."""
    assert a_model().predict_prefill("gpu", 7, 7) == Prediction(0.0, 0.0, 0.0)


def test_published_pull_and_recompute_times_are_reproduced() -> None:
    """The two lines through llm-d's numbers (router.md 2.5), learned from the numbers.

    gpt-oss-120b on H200, P2P pull, thousands of tokens against milliseconds.
    """
    published = [(2, 78, 35), (8, 250, 57), (16, 510, 86), (32, 1173, 165), (48, 1988, 235)]
    model = a_model(forgetting=1.0)
    for _ in range(20):
        for thousands, recompute_ms, pull_ms in published:
            model.observe("transfer", "p2p", thousands * 1024 * 73_700, pull_ms / 1e3)
            model.observe_prefill("h200", 0, thousands * 1024, recompute_ms / 1e3)

    for thousands, recompute_ms, pull_ms in published:
        pull = model.predict("transfer", "p2p", thousands * 1024 * 73_700)
        recompute = model.predict_prefill("h200", 0, thousands * 1024)
        assert pull.seconds == pytest.approx(pull_ms / 1e3, rel=0.1)
        assert recompute.seconds == pytest.approx(recompute_ms / 1e3, rel=0.1)


def test_state_crosses_a_restart() -> None:
    """What is read back, through JSON, predicts and learns as what was written."""
    model = a_model(window=20, max_cells=7)
    train(model, 40)
    model.observe_prefill("gpu", 0, 100, 0.5)

    copy = LatencyModel.from_dict(json.loads(json.dumps(model.to_dict())))

    assert copy.to_dict() == model.to_dict()
    for each in (model, copy):
        each.observe("transfer", "tcp/host", 1e6, 0.004)
    assert copy.predict("transfer", "tcp/host", 5e6) == model.predict("transfer", "tcp/host", 5e6)
    assert copy.predict_prefill("gpu", 5, 50) == model.predict_prefill("gpu", 5, 50)
    assert copy.predict("transfer", "new", 5.0) == model.predict("transfer", "new", 5.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"format": 2}, "format 1, got 2"),
        ({"window": 0}, "at least 1"),
        ({"coverage": 1.0}, r"in \(0, 1\)"),
        ({"forgetting": 1.5}, r"in \(0, 1\]"),
        ({"priors": [["transfer", "", [0.0, 1.0]]]}, "positive and finite"),
        ({"priors": [["transfer"]]}, "unpack"),
        ({"cells": [["transfer", "x", {}, []]]}, "not the state of a fit"),
        ({"cells": None}, "not the state of a latency model"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(damage: dict[str, Any], message: str) -> None:
    """A router then starts from its priors, knowingly."""
    state = a_model().to_dict()

    with pytest.raises(ValueError, match=message):
        LatencyModel.from_dict(state | damage)


def test_a_damaged_interval_is_refused() -> None:
    """A quotient is a positive number, or there is no interval."""
    model = a_model()
    model.observe("transfer", "x", 1, 1)
    state = model.to_dict()
    state["cells"][0][3] = [math.inf]

    with pytest.raises(ValueError, match="finite and >= 0"):
        LatencyModel.from_dict(state)


def test_the_longest_unobserved_is_forgotten_first() -> None:
    """Labels come and go with nodes; memory is bounded all the same."""
    model = a_model(max_cells=2)
    for label in ("a", "b", "a", "c"):
        model.observe("transfer", label, 1e6, 0.5)

    assert [model.count("transfer", label) for label in "abc"] == [2, 0, 1]


@pytest.mark.parametrize(("size", "seconds"), [(-1, 1), (math.nan, 1), (1, -1), (1, math.inf)])
def test_a_bad_observation_changes_nothing(size: float, seconds: float) -> None:
    """Not the fit, not the interval, not the order of forgetting."""
    model = a_model()
    train(model, 3)
    before = model.to_dict()

    for label in ("tcp/host", "new"):
        with pytest.raises(ValueError, match=r"^need "):
            model.observe("transfer", label, size, seconds)

    assert model.to_dict() == before


def test_prefill_goes_by_positions() -> None:
    """A size alone does not say how much there is to attend to."""
    model = a_model()

    for call in (model.predict, model.law):
        with pytest.raises(ValueError, match="by positions"):
            call(PREFILL, "gpu", *([1] if call == model.predict else []))
    with pytest.raises(ValueError, match="by positions"):
        model.observe(PREFILL, "gpu", 1, 1)
    with pytest.raises(ValueError, match=r"got \[5, 4\)"):
        model.predict_prefill("gpu", 5, 4)
    with pytest.raises(ValueError, match=r"got \[-1, 4\)"):
        model.observe_prefill("gpu", -1, 4, 1)
    with pytest.raises(ValueError, match="is a PrefillLaw"):
        LatencyModel({(PREFILL, ""): SLOW}, prefill={})


@pytest.mark.parametrize(("t0_s", "per_s"), [(-1, 1), (math.inf, 1), (0, 0), (0, -1)])
def test_a_law_that_cannot_be_is_refused(t0_s: float, per_s: float) -> None:
    """No step takes less than nothing."""
    with pytest.raises(ValueError, match=r"need t0_s >= 0"):
        Affine(t0_s, per_s)
    with pytest.raises(ValueError, match="not negative"):
        PrefillLaw(0.0, -1.0)


def test_a_free_size_is_an_infinite_rate() -> None:
    """A step may cost the same for any size; its law says so again."""
    model = LatencyModel({("connect", ANY_LABEL): Affine(0.02, math.inf)}, prefill={})
    for _ in range(20):
        model.observe("connect", "tcp", 0, 0.01)

    assert model.predict("connect", "tcp", 0).seconds == pytest.approx(0.01)
    assert Affine(0.02, math.inf).seconds(1e9) == 0.02


def test_labels_say_what_they_are_of() -> None:
    """Whoever observes must name things as the planner does."""
    assert transfer_label("tcp", "disk") == "tcp/disk"
    assert decode_label("gpu", CodecId(bytes(15) + b"\1")) == "gpu/" + "00" * 15 + "01"
