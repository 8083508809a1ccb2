"""Decide whether an answer that differs from a published one is the better one.

Ours may differ only where brute force shows ours exact and theirs later at some key, or
theirs earlier than a read that happens.  Nothing here looks at how an answer was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.retention.evaluate import Ints
from policies.retention.fuzz import brute_last_reads
from policies.retention.plan import compile_program
from policies.retention.program import Program
from policies.retention.synthesis import death_of_page
from tests.policies.retention.orbit import Json, program_of

NUM_KEYS = 160
NUM_QUERIES = 1600
FOREVER = 2**62

#: Refusals that were lifted on purpose.
LIFTED = {"sink-not-page-aligned"}


def published_last(answer: Json) -> Ints | None:
    """Last readers that a published answer means; nothing if its kind is not known."""
    keys_K = np.arange(NUM_KEYS, dtype=np.int64)
    tokens = answer.get("tokens", 0)
    match answer["kind"]:
        case "unbounded":
            return np.full(NUM_KEYS, FOREVER)
        case "window":
            return keys_K + min(tokens, FOREVER) - 1
        case "chunk":
            return keys_K // tokens * tokens + tokens - 1
        case "sink+window":
            return np.where(keys_K < answer["sink"], FOREVER, keys_K + tokens - 1)
        case "prefix":
            return np.where(keys_K < tokens, FOREVER, -1)
    return None


def our_last(program: Program, index: int) -> Ints:
    """Last readers that we claim for a state."""
    state = program.attention[index]
    lifetime = compile_program(program).lifetimes[state.name]
    found = [lifetime.last_read(key) for key in range(NUM_KEYS)]
    return np.array([FOREVER if last is None else last for last in found], dtype=np.int64)


def seen_last(program: Program, index: int) -> Ints:
    """Last readers by brute force; those that go on to the grid's end count as forever."""
    seen_K = brute_last_reads(program.attention[index].all_reads, NUM_KEYS, NUM_QUERIES)
    return np.where(seen_K >= NUM_QUERIES - 128, FOREVER, seen_K)


def verdict(case: Json) -> str:
    """``exact, theirs loose``, ``exact, theirs wrong``, ``lifted``, or what is against it."""
    expected: dict[str, Any] = case["expected"]
    if case["kind"] != "retention":
        return "only lifetimes may differ"
    if "refuse" in expected:
        return "lifted" if expected["refuse"] in LIFTED else "a refusal was expected"
    program = program_of(case["input"])
    verdicts = set()
    for index, answer in enumerate(expected.get("inferred", [])):
        ours_K, seen_K = our_last(program, index), seen_last(program, index)
        if not np.array_equal(ours_K, seen_K):
            return "ours is not exact"
        theirs_K = published_last(answer)
        if theirs_K is None:
            return f"unknown kind {answer['kind']!r}"
        if np.any(theirs_K < seen_K):
            verdicts.add("exact, theirs wrong")
        elif np.any(theirs_K > seen_K):
            verdicts.add("exact, theirs loose")
    return max(verdicts, default="ours and theirs mean the same, the plans differ")


def page_deaths(program: Program, num_pages: int) -> list[int | None]:
    """Boundary at which each page of the first state dies, from the claims alone."""
    claims = compile_program(program).lifetimes[program.attention[0].name].claims
    page = program.page_tokens
    return [death_of_page(claims, (o * page, (o + 1) * page)) for o in range(num_pages)]
