"""Decide whether an answer that differs from a published one is the better one.

Ours may differ only where brute force shows ours exact and theirs later at some key, or
theirs earlier than a read that happens.  Nothing here looks at how an answer was found.
"""

from __future__ import annotations

import numpy as np

from codec.errors import RetentionError
from policies.retention.evaluate import Ints
from policies.retention.fuzz import brute_last_reads
from policies.retention.ir import Relation
from policies.retention.lifetime import infer
from policies.retention.plan import compile_program
from policies.retention.program import Program
from policies.retention.synthesis import death_of_page
from tests.policies.retention.orbit import Json, answer, program_of

FOREVER = 2**62
#: Queries past the last claimed reader that must be quiet for it to be the last one.
QUIET = 700

#: Refusals that were lifted on purpose.
LIFTED = {"sink-not-page-aligned"}
#: Model types that the published frontend knows; of others it refuses, and we read many.
KNOWN_THERE = {"GptOssForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"}
FINE = ("exact, theirs loose", "exact, theirs wrong", "lifted", "unproven")


def published_last(answer: Json, keys_K: Ints) -> Ints | None:
    """Last readers that a published answer means; nothing if its kind is not known."""
    tokens = min(answer.get("tokens", 0), FOREVER // 2)
    match answer["kind"]:
        case "unbounded":
            return np.full(len(keys_K), FOREVER)
        case "window":
            return keys_K + tokens - 1
        case "chunk":
            return keys_K // tokens * tokens + tokens - 1
        case "sink+window":
            return np.where(keys_K < answer["sink"], FOREVER, keys_K + tokens - 1)
        case "prefix":
            return np.where(keys_K < tokens, FOREVER, -1)
    return None


def our_last(relation: Relation, keys_K: Ints) -> Ints:
    """Last readers that we claim; none at all where the relation is refused as empty."""
    try:
        lifetime = infer(relation)
    except RetentionError:
        return np.full(len(keys_K), -1)
    found = [lifetime.last_read(int(key)) for key in keys_K]
    return np.array([FOREVER if last is None else last for last in found], dtype=np.int64)


def seen_last(relation: Relation, num_keys: int, num_queries: int) -> Ints:
    """Last readers by brute force; those that go on to the grid's end count as forever."""
    seen_K = brute_last_reads(relation, num_keys, num_queries)
    return np.where(seen_K >= num_queries - QUIET // 2, FOREVER, seen_K)


def of_state(relation: Relation, answer: Json) -> str:
    """Whose lifetime is the better one."""
    for num_keys in (160, 16):  # few keys where readers are late
        keys_K = np.arange(num_keys, dtype=np.int64)
        ours_K, theirs_K = our_last(relation, keys_K), published_last(answer, keys_K)
        if theirs_K is None:
            return f"unknown kind {answer['kind']!r}"
        ends = np.concatenate([ours_K[ours_K < FOREVER], theirs_K[theirs_K < FOREVER], [0]])
        num_queries = int(ends.max()) + num_keys + QUIET
        if num_keys * num_queries <= 2**22:
            break
    else:
        return "too large to try"
    seen_K = seen_last(relation, num_keys, num_queries)
    if not np.array_equal(ours_K, seen_K):
        return "ours is not exact"
    if np.any(theirs_K < seen_K):
        return "exact, theirs wrong"
    return "exact, theirs loose" if np.any(theirs_K > seen_K) else "the same"


def verdict(case: Json) -> str:
    """One of `FINE`, or what is against our answer."""
    expected: Json = case["expected"]
    found = answer(case)
    if case["kind"] == "hf":
        known = KNOWN_THERE.issuperset(case["input"]["config"].get("architectures", []))
        was_refused = "refuse" in expected.get("head", expected["era"])
        if was_refused and not known and "refuse" not in found:
            return "lifted"  # a row of the table, tried against Transformers' own cache
        is_unproven = not known and found.get("refuse") == "unproven-layers"
        return "unproven" if is_unproven else "a model type that both know"
    if case["kind"] != "retention":
        return "only lifetimes may differ"
    if "refuse" in expected:
        return "lifted" if expected["refuse"] in LIFTED else "a refusal was expected"
    if found.get("refuse") not in (None, "unsatisfiable"):
        return "only an empty relation may be refused"
    states = program_of(case["input"]).attention
    pairs = zip(states, expected.get("inferred", []), strict=False)
    verdicts = {of_state(state.all_reads, theirs) for state, theirs in pairs}
    against = verdicts - {"the same", *FINE}
    return max(against) if against else max(verdicts & set(FINE), default="the plans differ")


def page_deaths(program: Program, num_pages: int) -> list[int | None]:
    """Boundary at which each page of the first state dies, from the claims alone."""
    claims = compile_program(program).lifetimes[program.attention[0].name].claims
    page = program.page_tokens
    return [death_of_page(claims, (o * page, (o + 1) * page)) for o in range(num_pages)]
