"""`plan_restore`: the best restore there is, and whether it pays."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codec.identity import CodecId
from policies.latency import ANY_LABEL, Affine, LatencyModel, PrefillLaw, decode_label
from policies.planner import DECODE_STEPS, Choice, Reason, RestorePlan, plan_restore
from policies.residency.view import Coverage, Residency, Run
from policies.sourcing import clip
from tests.policies.pricing_samples import (
    CHUNK_TOKENS,
    LINKS,
    a_latency_model,
    an_answer,
    coverage,
    runs_of,
)
from tests.policies.residency.samples import KVTC, NODES, RAW, STAGES, component

Fetch = tuple[str, str, int, int]

EVERYONE = frozenset(NODES)


def plan(
    residency: Residency,
    *,
    prompt: int = 160,
    window: int = 16,
    alive: frozenset[str] = EVERYONE,
    latency: LatencyModel | None = None,
    force: Choice | None = None,
) -> RestorePlan:
    """A plan for ada."""
    return plan_restore(
        residency,
        node="ada",
        num_prompt_tokens=prompt,
        latency=latency or a_latency_model(),
        alive=alive,
        links=LINKS,
        window_tokens=window,
        force=force,
    )


HELD_AT_HOME = an_answer(coverage(runs_of((8, {"ada": 10}))))


# -- the boundary


@pytest.mark.parametrize(
    ("prompt", "window", "boundary"),
    [
        (160, 16, 112),
        (160, 0, 128),
        (129, 0, 128),
        (128, 0, 127),
        (128, 1, 127),
        (100, 0, 99),
        (100, 16, 84),
        (2, 0, 1),
        (160, 127, 1),
    ],
)
def test_the_boundary_leaves_the_window_and_one_token(
    prompt: int, window: int, boundary: int
) -> None:
    """128 tokens are restorable, or the whole prompt; the last one is always computed."""
    found = plan(HELD_AT_HOME, prompt=prompt, window=window, force="restore")

    assert found.boundary_tokens == boundary
    assert found.num_prompt_tokens == prompt


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 200), st.integers(0, 10))
def test_boundaries_are_never_out_of_the_prompt(prompt: int, window: int, chunks: int) -> None:
    """Not negative, at least one token left, and covered by what is fetched."""
    held = [coverage(runs_of((chunks, {"ada": 10})))] if chunks else []

    found = plan(an_answer(*held), prompt=prompt, window=window, force="restore")

    assert 0 <= found.boundary_tokens < prompt
    fetched = sum(len(segment.components) for segment in found.segments)
    assert fetched == -(-found.boundary_tokens // CHUNK_TOKENS)
    assert found.boundary_tokens <= max(0, chunks * CHUNK_TOKENS - window)
    assert found.is_restore == (found.boundary_tokens > 0)


def test_only_chunks_before_the_boundary_are_fetched() -> None:
    """The window's own chunk is not; one that the boundary cuts is, whole."""
    whole = plan(HELD_AT_HOME, window=16)
    cut = plan(HELD_AT_HOME, window=17)

    assert [len(p.segments[0].components) for p in (whole, cut)] == [7, 7]
    assert [p.boundary_tokens for p in (whole, cut)] == [112, 111]
    assert whole.segments[0].components == tuple(component(i) for i in range(7))


# -- prices


def test_steps_add_up_to_the_predicted_time() -> None:
    """Worked by hand: 7 chunks of 10 bytes, 160 decoded, from home."""
    found = plan(HELD_AT_HOME)

    assert found.steps == pytest.approx(
        {
            "connect": 0.0,
            "transfer": 0.5 + 70 / 1000,
            "verify": 0.01 + 70 / 1e3,
            "entropy": 0.02 + 1120 / 1e4,
            "dequantize": 0.01 + 1120 / 1e5,
            "project": 0.01 + 1120 / 1e5,
            "rope": 0.01 + 1120 / 1e5,
            "handoff": 0.01 + 1120 / 1e5,
            "prefill": 1.0 + 48 + 0.01 * (160**2 - 112**2) / 2,
        }
    )
    assert found.predicted_restore_s == pytest.approx(sum(found.steps.values()))
    assert found.predicted_recompute_s == pytest.approx(1.0 + 160 + 0.01 * 160**2 / 2)
    assert found.stored_bytes == 70
    assert sum(s.predicted_s for s in found.segments) == pytest.approx(
        found.steps["connect"] + found.steps["transfer"]
    )


def test_every_stage_is_fetched_and_decoded() -> None:
    """Each with its own sources; decoding pays its fixed time once per stage."""
    held = coverage(runs_of((8, {"ada": 10})), runs_of((8, {"bob": 10})))

    found = plan(an_answer(held, stages=STAGES))

    assert [(s.stage, s.node) for s in found.segments] == [(STAGES[0], "ada"), (STAGES[1], "bob")]
    assert found.steps["verify"] == pytest.approx(2 * (0.01 + 70 / 1e3))
    assert found.steps["connect"] == pytest.approx(1.0)
    assert found.segments[1].components[0] == component(0, STAGES[1])


def test_codecs_have_the_steps_that_the_caller_says() -> None:
    """Raw bytes are not projected; and each codec learns its own times."""
    latency = a_latency_model()
    latency.observe("verify", decode_label("gpu", RAW), 70, 5.0)

    found = plan_restore(
        an_answer(coverage(runs_of((8, {"ada": 10})), codec=RAW)),
        node="ada",
        num_prompt_tokens=160,
        latency=latency,
        alive=EVERYONE,
        device="gpu",
        window_tokens=16,
        steps_by_codec={RAW: ("verify", "handoff")},
    )

    assert set(found.steps) == {"connect", "transfer", "verify", "handoff", "prefill"}
    assert found.steps["verify"] == pytest.approx(5.0)


def test_the_interval_is_that_of_all_steps_together() -> None:
    """What slows one step slows the others, so their ends add up."""
    found = plan(HELD_AT_HOME)

    low_s, high_s = found.restore_interval_s
    assert low_s == pytest.approx(found.predicted_restore_s / 3)
    assert high_s == pytest.approx(found.predicted_restore_s * 3)


def test_a_step_without_a_prior_is_refused() -> None:
    """A plan that leaves a step out would be too good."""
    latency = LatencyModel({}, prefill={ANY_LABEL: PrefillLaw(1.0, 1.0)})

    with pytest.raises(ValueError, match="no prior for step"):
        plan(HELD_AT_HOME, latency=latency)


# -- the best of all


def brute_force(residency: Residency, *, prompt: int, window: int) -> float:
    """Least restore time over every codec and every choice of source for every run."""
    latency = a_latency_model()
    best = float("inf")
    for held in residency.coverages:
        boundary = min(min(held.num_chunks * CHUNK_TOKENS, prompt) - window, prompt - 1)
        if boundary <= 0:
            continue
        total = latency.predict_prefill("", boundary, prompt).seconds
        num_chunks = -(-boundary // CHUNK_TOKENS)
        for runs, codec in zip(held.runs, held.codecs, strict=True):
            total += cheapest_stage(runs_until(runs, num_chunks), codec, latency)
        best = min(best, total)
    return best


def runs_until(runs: tuple[Run, ...], num_chunks: int) -> list[list[Fetch]]:
    """Per run, its possible fetches: (node, tier, stored bytes, decoded bytes)."""
    options = []
    for run in runs:
        length = min(run.stop, num_chunks) - run.start
        if length > 0:
            options.append(
                [
                    (h.node, h.tier, sum(h.stored_bytes[:length]), h.decoded_bytes * length)
                    for h in run.holdings
                ]
            )
    return options


def cheapest_stage(options: list[list[Fetch]], codec: CodecId, latency: LatencyModel) -> float:
    """Try every combination of sources."""
    best = float("inf")
    for chosen in product(*options):
        total, last = 0.0, None
        for node, tier, stored_bytes, _ in chosen:
            link = "local" if node == "ada" else LINKS[node]
            law = latency.law("transfer", f"{link}/{tier}")
            total += stored_bytes / law.per_s
            if (node, tier) != last:
                total += law.t0_s + (node != "ada") * latency.law("connect", link).t0_s
            last = (node, tier)
        stored, decoded = sum(c[2] for c in chosen), sum(c[3] for c in chosen)
        for step in DECODE_STEPS:
            size = stored if step == "verify" else decoded
            total += latency.predict(step, decode_label("", codec), size).seconds
        best = min(best, total)
    return best


some_runs = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.dictionaries(
            st.sampled_from(("ada", "ada:disk", "bob", "cyd")), st.integers(1, 60), min_size=1
        ),
    ),
    min_size=1,
    max_size=3,
).map(lambda spans: runs_of(*spans))


@settings(deadline=None)
@given(st.lists(some_runs, min_size=1, max_size=2), some_runs, st.integers(20, 110))
@example(  # a smaller copy elsewhere also saves verifying the difference
    first=[
        runs_of((1, {"ada": 1}), (1, {"ada": 51, "ada:disk": 1, "bob": 1}), (1, {"bob": 1})),
    ],
    second=runs_of((1, {"ada": 1})),
    prompt=41,
)
def test_no_codec_and_no_sources_are_faster(
    first: list[tuple[Run, ...]], second: tuple[Run, ...], prompt: int
) -> None:
    """The oracle enumerates everything; the plan is as fast as its best."""
    stages = STAGES[: len(first)]
    shortest = min(runs[-1].stop for runs in first)
    trimmed = tuple(tuple(clip(runs, shortest)) for runs in first)
    answer = an_answer(
        Coverage((KVTC,) * len(stages), shortest, trimmed),
        Coverage((RAW,) * len(stages), second[-1].stop, (second,) * len(stages)),
        stages=stages,
    )

    found = plan(answer, prompt=prompt, window=8)

    least = brute_force(answer, prompt=prompt, window=8)
    if found.segments:
        assert found.predicted_restore_s == pytest.approx(least, rel=1e-6)
        faster = found.predicted_restore_s < found.predicted_recompute_s
        assert found.choice == ("restore" if faster else "recompute")
    else:
        assert least == float("inf")


def test_a_shorter_codec_may_be_the_faster_one() -> None:
    """A few tokens more are not worth a slow disk."""
    long = coverage(runs_of((8, {"ada:disk": 500})), codec=RAW)
    short = coverage(runs_of((7, {"ada": 10})))

    found = plan(an_answer(long, short))

    assert {s.codec for s in found.segments} == {KVTC}
    assert found.boundary_tokens == 6 * CHUNK_TOKENS


def test_one_codec_serves_the_whole_prefix() -> None:
    """Even where each would be faster for a part."""
    raw = coverage(runs_of((4, {"ada": 1}), (4, {"cyd": 900})), codec=RAW)
    kvtc = coverage(runs_of((4, {"cyd": 300}), (4, {"ada": 1})))

    found = plan(an_answer(raw, kvtc))

    assert {s.codec for s in found.segments} == {KVTC}
    assert [(s.node, s.start_token) for s in found.segments] == [("cyd", 0), ("ada", 64)]


# -- choice and reason


def test_a_faster_restore_is_chosen() -> None:
    """And the sentence says by how much."""
    found = plan(HELD_AT_HOME)

    assert (found.choice, found.reason) == ("restore", Reason.RESTORE_IS_FASTER)
    assert found.sentence.startswith("restore: restoring 112 tokens")
    assert f"{found.predicted_recompute_s:.6g} s" in found.sentence


def test_a_slower_restore_is_not() -> None:
    """Its segments stay for comparison."""
    found = plan(an_answer(coverage(runs_of((8, {"ada:disk": 500})))))

    assert (found.choice, found.reason) == ("recompute", Reason.SLOWER_THAN_RECOMPUTE)
    assert found.predicted_restore_s > found.predicted_recompute_s
    assert found.segments
    assert not found.is_restore


def test_a_tie_is_recomputed() -> None:
    """Nothing is gained by moving bytes for the same time."""
    found = plan(HELD_AT_HOME)
    slack = found.predicted_recompute_s - found.predicted_restore_s
    transfer = Affine(0.5 + slack, 1000.0)

    tied = plan(HELD_AT_HOME, latency=a_latency_model(local=transfer))

    assert tied.predicted_restore_s == pytest.approx(tied.predicted_recompute_s)
    assert tied.is_restore == (tied.predicted_restore_s < tied.predicted_recompute_s)


@pytest.mark.parametrize(
    ("residency", "alive", "window", "reason"),
    [
        (an_answer(), EVERYONE, 16, Reason.ABSENT),
        (an_answer(gap=True), EVERYONE, 16, Reason.GAP),
        (an_answer(ready=False), EVERYONE, 16, Reason.GAP),
        (HELD_AT_HOME, frozenset({"bob"}), 16, Reason.NO_LIVE_SOURCE),
        (HELD_AT_HOME, frozenset(), 16, Reason.NO_LIVE_SOURCE),
        (HELD_AT_HOME, EVERYONE, 128, Reason.WINDOW_COVERS_PREFIX),
        (HELD_AT_HOME, EVERYONE, 999, Reason.WINDOW_COVERS_PREFIX),
    ],
    ids=["absent", "gap", "not ready", "dead", "all dead", "just", "amply"],
)
@pytest.mark.parametrize("force", [None, "restore"])
def test_what_cannot_be_restored_is_recomputed_and_why(
    residency: Residency,
    alive: frozenset[str],
    window: int,
    reason: Reason,
    force: Choice | None,
) -> None:
    """Each cause has its own code, and force cannot make something of nothing."""
    found = plan(residency, alive=alive, window=window, force=force)

    assert (found.choice, found.reason) == ("recompute", reason)
    assert (found.segments, found.boundary_tokens) == ((), 0)
    assert found.steps == {"prefill": found.predicted_recompute_s}
    assert found.predicted_restore_s == found.predicted_recompute_s
    assert found.sentence.startswith("recompute: ")


def test_a_prompt_of_one_token_is_computed() -> None:
    """There is nothing before its last token."""
    assert plan(HELD_AT_HOME, prompt=1, window=0).reason is Reason.WINDOW_COVERS_PREFIX


def test_a_gap_elsewhere_does_not_forbid_a_restore() -> None:
    """Known placements stay usable; the plan is as of the answer."""
    answer = an_answer(coverage(runs_of((8, {"ada": 10}))), gap=True)

    found = plan(answer)

    assert found.is_restore
    assert found.as_of == answer.as_of


def test_dead_nodes_shorten_the_prefix() -> None:
    """Only what a live node holds counts, in every stage."""
    first = runs_of((6, {"ada": 10, "bob": 10}), (2, {"bob": 10}))
    held = coverage(first, runs_of((8, {"cyd": 10})))

    found = plan(an_answer(held, stages=STAGES), alive=frozenset({"ada", "cyd"}), force="restore")

    assert found.boundary_tokens == 6 * CHUNK_TOKENS - 16
    assert {s.node for s in found.segments} == {"ada", "cyd"}


@pytest.mark.parametrize("force", ["restore", "recompute"])
def test_force_decides_and_says_so(force: Choice) -> None:
    """For control arms of benchmarks; the predicted times stay what they are."""
    free = plan(HELD_AT_HOME)

    found = plan(HELD_AT_HOME, force=force)

    assert (found.choice, found.reason) == (force, Reason.FORCED)
    assert found.sentence.startswith(f"{force}, as forced")
    assert found.predicted_restore_s == free.predicted_restore_s


def test_forced_recomputation_needs_nothing_to_restore() -> None:
    """It was asked for, and that is the reason."""
    assert plan(an_answer(), force="recompute").reason is Reason.FORCED


@pytest.mark.parametrize(
    ("prompt", "window", "message"), [(0, 1, "at least 1, got 0"), (1, -1, "negative, got -1")]
)
def test_impossible_prompts_are_refused(prompt: int, window: int, message: str) -> None:
    """Nothing is planned for nothing."""
    with pytest.raises(ValueError, match=message):
        plan(HELD_AT_HOME, prompt=prompt, window=window)


def test_the_default_window_is_128() -> None:
    """As the codec's calibration assumes."""
    found = plan_restore(
        an_answer(coverage(runs_of((16, {"ada": 10})))),
        node="ada",
        num_prompt_tokens=400,
        latency=a_latency_model(),
        alive=EVERYONE,
    )

    assert found.boundary_tokens == 16 * CHUNK_TOKENS - 128


def test_a_plan_can_be_sent() -> None:
    """It crosses an actor call as the value it is."""
    found = plan(HELD_AT_HOME)

    assert pickle.loads(pickle.dumps(found)) == found
