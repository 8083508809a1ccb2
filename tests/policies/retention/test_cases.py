"""Every published lifetime case passes, or ours is shown to be the better answer.

``KVFABRIC_LIFETIME_CASES`` names another file of the same format to run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from policies.retention.evaluate import may_read
from policies.retention.plan import compile_program
from tests.policies.retention.orbit import ANSWERS, Json, answer, differences, program_of
from tests.policies.retention.verdicts import FINE, page_deaths, verdict

DATA = Path(__file__).parents[2] / "data" / "retention"
FILE = Path(os.environ.get("KVFABRIC_LIFETIME_CASES") or DATA / "lifetime_cases.json")
CASES: list[Json] = json.loads(FILE.read_text())
BETTER: dict[str, dict[str, str]] = json.loads((DATA / "better_answers.json").read_text())
OWN: list[Json] = json.loads((DATA / "lifetime_cases.json").read_text())


def named(name: str) -> Json:
    """One of the published cases."""
    return next(case for case in OWN if case["name"] == name)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case_passes_or_ours_is_better(case: Json) -> None:
    """A difference must be proven by brute force."""
    found = differences(case)

    if found:
        shown = verdict(case)
        said = f"{shown}; differs in {found}"
        assert shown in FINE, said


def test_the_list_of_better_answers_is_complete() -> None:
    """Each with its reason, and none that passes anyway."""
    differing = {case["name"]: verdict(case) for case in OWN if differences(case)}
    words = {"loose": "exact, theirs loose", "wrong": "exact, theirs wrong", "refused": "lifted"}

    assert differing == {name: words[entry["theirs"]] for name, entry in BETTER.items()}
    assert all(len(entry["reason"]) > 20 for entry in BETTER.values())


def test_every_kind_of_case_is_run() -> None:
    """None is skipped for want of a reader."""
    assert {case["kind"] for case in OWN} == set(ANSWERS)
    assert len(OWN) == 103


def test_the_defect_is_answered_as_the_case_says_is_correct() -> None:
    """Its own note of the right answer, and of the read that theirs misses."""
    case = named("DEFECT/sink-bound-with-floor-div")
    read = case["unsound_read"]["orbit_rule"]
    program = program_of(case["input"])

    assert answer(case)["inferred"] == case["correct"]["inferred"]
    assert may_read(program.attention[0].reads, read["query"], read["key"])
    assert page_deaths(program, read["page"] + 1)[read["page"]] is None


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("retention", {"resident_bytes": 1}),
        ("retention", {"inferred": [{"kind": "chunk", "tokens": 16}], "resident_bytes": 1}),
        ("pool_gib", {"gib": 0.5}),
        ("death", {"death": [16, 16, 33]}),
    ],
)
def test_a_wrong_expectation_is_noticed(kind: str, change: Json) -> None:
    """The comparison can fail, and the verdict does not excuse it."""
    case = next(case for case in OWN if case["kind"] == kind and not differences(case))
    spoiled = {**case, "expected": {**case["expected"], **change}}

    assert differences(spoiled)
    assert verdict(spoiled) not in FINE


def retention_case(reads: object, inferred: Json) -> Json:
    """A case as another file may have it."""
    state = {"name": "s", "layers": [0], "bytes_per_token_layer": 8, "reads": reads}
    case = {"page": 16, "states": [state], "at": 200}
    return {"kind": "retention", "input": case, "expected": {"inferred": [inferred]}}


DISTANCE = ["-", "q", "k"]
STRIDE = ["==", ["%", DISTANCE, 3], 3]


@pytest.mark.parametrize(
    ("reads", "inferred", "wanted"),
    [
        (["<", "k", 16], {"kind": "unbounded"}, "exact, theirs loose"),
        (["<", DISTANCE, 9000], {"kind": "unbounded"}, "exact, theirs loose"),
        (["<", DISTANCE, 9000], {"kind": "window", "tokens": 8999}, "exact, theirs wrong"),
        (
            ["and", ["<", DISTANCE, 9], STRIDE],
            {"kind": "window", "tokens": 9},
            "exact, theirs loose",
        ),
        (["<", DISTANCE, 9], {"kind": "window", "tokens": 9}, "the plans differ"),
        (["<", DISTANCE, 9], {"kind": "spiral"}, "unknown kind 'spiral'"),
        (["<", DISTANCE, 2**60], {"kind": "unbounded"}, "too large to try"),
    ],
)
def test_verdicts_rest_on_brute_force(reads: object, inferred: Json, wanted: str) -> None:
    """Ours must be exact, theirs later or wrong, at any size that can be tried."""
    assert verdict(retention_case(reads, inferred)) == wanted


def hf_case(architecture: str, expected: Json, **fields: object) -> Json:
    """A config case as another file may have it."""
    config = {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        **fields,
    }
    entry = {"config": config, "page": 16, "elem_bytes": 2}
    return {"kind": "hf", "input": entry, "expected": {"era": expected}}


REFUSED = {"refuse": "unproven-layers"}


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (hf_case("JambaForCausalLM", REFUSED), "lifted"),
        (hf_case("NoneSuchForCausalLM", {"inference": "explicit"}), "unproven"),
        (hf_case("JambaForCausalLM", {"inference": "explicit"}), "a model type that both know"),
        (hf_case("MistralForCausalLM", REFUSED), "a model type that both know"),
        (hf_case("Qwen2ForCausalLM", {"inference": "explicit"}), "a model type that both know"),
    ],
)
def test_configs_differ_only_where_the_other_frontend_knows_nothing(
    case: Json, wanted: str
) -> None:
    """More types are read here, and unknown ones are refused; the shared ones must agree."""
    assert verdict(case) == wanted


def test_a_missing_refusal_is_noticed() -> None:
    """Compiling what must be refused is not better."""
    case = {**named("example/gpt_oss_20b_retention@32768"), "expected": {"refuse": "overflow"}}

    assert differences(case)
    assert verdict(case) == "a refusal was expected"


def test_plans_of_the_published_models_are_theirs_bit_for_bit() -> None:
    """Their digest of our plan, for every case that has one."""
    with_digest = [case for case in OWN if "fingerprint" in json.dumps(case["expected"])]

    assert len(with_digest) == 16
    for case in with_digest:
        assert "fingerprint" not in differences(case)


def test_the_compiled_deaths_agree_with_the_claims() -> None:
    """The retirement programs say what the last readers say."""
    for case in OWN:
        if case["kind"] != "retention" or "refuse" in case["expected"]:
            continue
        program = program_of(case["input"])
        found = compile_program(program).classes[0]
        if len(compile_program(program).classes) > 1 or found.region.stop_page is not None:
            continue
        deaths = [found.death(ordinal) for ordinal in range(12)]
        assert deaths == page_deaths(program, 12)
