"""Run one published lifetime case through the compiler, in the words of the case file.

The file's format is that of ``tests/data/retention/lifetime_cases.json``.  `answer` gives
what this compiler says, under the names the file uses; nothing here compares or judges.
"""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections.abc import Callable
from typing import Any

from codec.errors import RetentionError
from policies.retention.capacity import stripe_saving
from policies.retention.claims import Claim, Forever, Unread, Until
from policies.retention.hf_config import read_config
from policies.retention.plan import Plan, PlannedClass, compile_program
from policies.retention.pools import (
    SplitRequest,
    choose_backing,
    choose_split,
    engine_cut,
    pool_gib,
    snapshot_pool_pages,
    uniform_window_pool,
    window_pool_tokens,
)
from policies.retention.program import AttentionState, HeadRange, Program
from policies.retention.serial import read_relation
from policies.retention.synthesis import (
    Append,
    Arena,
    ChunkEnd,
    Kept,
    PageEnd,
    Periodic,
    Pinned,
)

Json = dict[str, Any]

#: Refusals that this compiler makes under another name, because it checks another thing.
RENAMED_REFUSALS = {"zero-dtype": "unknown-dtype"}
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}


def program_of(case: Json) -> Program:
    """The program of a ``retention`` case."""
    states = []
    for state in case["states"]:
        heads = state.get("heads")
        states.append(
            AttentionState(
                name=state["name"],
                layers=tuple(state["layers"]),
                reads=read_relation(state["reads"]),
                bytes_per_token_layer=state["bytes_per_token_layer"],
                heads=HeadRange(*heads) if heads else None,
            )
        )
    return Program(page_tokens=case["page"], states=tuple(states))


def inferred(claims: tuple[Claim, ...]) -> Json:
    """The file's summary of a lifetime; ``mixed`` with the claims where it has no word."""
    rules = [claim.rule for claim in claims]
    whole = [claim.keys.is_dense for claim in claims]
    match rules:
        case [Forever()] if whole[0]:
            return {"kind": "unbounded"}
        case [Until() as rule] if rule.window_tokens is not None:
            return {"kind": "window", "tokens": rule.window_tokens}
        case [Until() as rule] if rule.chunk_tokens is not None:
            return {"kind": "chunk", "tokens": rule.chunk_tokens}
        case [Forever(), Until() as rule] if all(whole) and rule.window_tokens is not None:
            sink = claims[0].keys.stop
            return {"kind": "sink+window", "sink": sink, "tokens": rule.window_tokens}
        case [Forever(), Unread()] if all(whole):
            return {"kind": "prefix", "tokens": claims[0].keys.stop}
    return {"kind": "mixed", "claims": [str(claim) for claim in claims]}


def address_of(found: PlannedClass) -> Json:
    """An address program in the file's words."""
    match found.address:
        case Append():
            return {"kind": "append"}
        case Pinned():
            return {"kind": "pinned"}
        case Arena(pages):
            return {"kind": "arena", "blocks": pages}
        case Periodic(period, origin):
            return {"kind": "periodic", "period": period, "origin": origin}
    return {"kind": str(found.address)}


def retirement_of(found: PlannedClass) -> Json:
    """A retirement program in the file's words."""
    match found.retirement:
        case Kept():
            return {"kind": "never"}
        case PageEnd(tokens):
            return {"kind": "end_plus", "tokens": tokens}
        case ChunkEnd(pages):
            return {"kind": "epoch_end", "blocks": pages}
    return {"kind": "last_read"}


def class_of(found: PlannedClass) -> Json:
    """A class in the file's words."""
    return {
        "name": found.name,
        "address": address_of(found),
        "retire": retirement_of(found),
        "slots": found.address.cells,
        "blocks": [found.region.first_page, found.region.stop_page],
    }


def orbit_fingerprint(plan: Plan) -> str:
    """OrbitKV's own plan digest of our plan: equal iff both compiled to the same thing."""
    parts = [struct.pack("<QQ", plan.program.page_tokens, len(plan.classes))]
    for found in plan.classes:
        name = found.name.encode()
        parts += [struct.pack("<Q", len(name)), name]
        parts.append(struct.pack(f"<{1 + len(found.layers)}Q", len(found.layers), *found.layers))
        words: list[int] = [found.width_bytes]
        match found.retirement:
            case PageEnd(tokens):
                words += [1, tokens + 1]
            case ChunkEnd(pages):
                words += [2, 0, 1, pages * plan.program.page_tokens]
            case _:
                words += [0, 0]
        words.append(found.address.cells or 0)
        if found.heads:
            words += [1, found.heads.start, found.heads.stop]
        first, stop = found.region.first_page, found.region.stop_page
        if first or stop is not None:
            words += [1, first, 2**64 - 1 if stop is None else stop]
        parts.append(struct.pack(f"<{len(words)}Q", *words))
    return f"sha256:{hashlib.sha256(b''.join(parts)).hexdigest()}"


def sizes_of(plan: Plan, boundary: int) -> Json:
    """Bytes at a boundary, in the file's words."""
    resident, whole = plan.held_bytes(boundary), plan.all_full_bytes(boundary)
    return {
        "resident_bytes": resident,
        "all_full_bytes": whole,
        "saved_milli_percent": (whole - resident) * 100_000 // whole,
        "fingerprint": orbit_fingerprint(plan),
    }


def _retention(case: Json) -> Json:
    plan = compile_program(program_of(case))
    at = case["at"]
    found = {
        **sizes_of(plan, at),
        "inferred": [inferred(life.claims) for life in plan.lifetimes.values()],
        "classes": [class_of(found) for found in plan.classes],
        "live_tokens": {found.name: found.live_tokens(at) for found in plan.classes},
        "held_tokens": {found.name: found.held_tokens(at) for found in plan.classes},
        "continuation": {found.name: list(found.continuation(at)) for found in plan.classes},
    }
    if any(found.heads for found in plan.classes):
        found["stripes"] = stripe_saving(plan, at)._asdict()
    return found


def _hf(case: Json) -> Json:
    dtype = DTYPES.get(case["elem_bytes"], "none")
    model = read_config(case["config"], page_tokens=case["page"], dtype=dtype)
    plan = compile_program(model.program)
    return {
        **sizes_of(plan, case.get("at", 1)),
        "inference": model.evidence,
        "bytes_per_token_layer": plan.classes[0].width_bytes,
        "classes": [[found.name, len(found.layers), address_of(found)] for found in plan.classes],
    }


def _sglang_split(case: Json) -> Json:
    request = SplitRequest(
        page_tokens=case["page"],
        window=case["window"],
        full_layers=case["full_layers"],
        window_layers=case["swa_layers"],
        width_bytes=case["width"],
        budget_bytes=case["budget_bytes"],
        running=case["running"],
        chunk=case["chunk"],
        requests=case["requests"],
        prompt=case["prompt"],
        decode=case["decode"],
        intervals=tuple(case["intervals"]),
        max_calls=case.get("max_calls"),
        min_admitted=case.get("min_admitted"),
        objective=case["objective"],
    )
    chosen, splits = choose_split(request)
    candidates = {
        str(interval): {
            "swa_slots": split.window_tokens,
            "full_slots": split.full_tokens,
            "admitted": split.admitted,
            "waves": split.waves,
            "calls": split.calls,
            "amplification_milli": split.amplification_milli,
            "allocated_bytes": split.allocated_bytes,
            "rejected_for": list(split.rejected_for),
        }
        for interval, split in splits.items()
    }
    return {"candidates": candidates, "chosen": chosen.interval}


def _sglang_swa(case: Json) -> Json:
    return {
        "swa_slots": window_pool_tokens(
            window=case["window"],
            page_tokens=case["page"],
            interval=case["interval"],
            running=case["running"],
            chunk=case["chunk"],
        )
    }


def _pool_gib(case: Json) -> Json:
    pools = [(pool["slots"], pool["bytes_per_slot"]) for pool in case["pools"]]
    return {"gib": round(pool_gib(pools, pad_tokens=case["pad_slots"]), case["digits"])}


def _uniform_swa(case: Json) -> Json:
    names = ("window", "interval", "headroom", "running", "chunk", "context")
    pool = uniform_window_pool(page_tokens=case["page"], **{name: case[name] for name in names})
    return {
        "per_request": pool.per_request_tokens,
        "staging": pool.staging_tokens,
        "pool": pool.pool_tokens,
        "index": pool.index_tokens,
    }


def _snapshot_pool(case: Json) -> Json:
    pages = snapshot_pool_pages(
        window=case["window"],
        page_tokens=case["page"],
        running=case["running"],
        chunk=case["chunk"],
    )
    return {"pages": pages, "tokens": pages * case["page"]}


def _dense_slots(case: Json) -> Json:
    per_request = sum(
        case["blocks"] if period is None else min(period, case["blocks"])
        for period in case["periods"]
    )
    return {"slots": case["requests"] * per_request}


def _vmm(case: Json) -> Json:
    found = choose_backing(
        case["logical"],
        granule_bytes=case["granule"],
        is_supported=case["supported"],
        needs_stable_address=case["stable_va"],
        limit_milli=case["limit_milli"],
    )
    return {
        "backend": found.kind,
        "bytes": found.mapped_bytes,
        "amplification_milli": found.amplification_milli,
        "why": found.why,
    }


def _death(case: Json) -> Json:
    found = compile_program(program_of(case)).classes[case["class"]]
    return {
        "death": [found.death(ordinal) for ordinal in case["of_blocks"]],
        "cells": [list(found.locate(ordinal)) for ordinal in case["of_blocks"]],
    }


def _owner_cut(case: Json) -> Json:
    cut = engine_cut(case["frontier"], window=case["window"], page_tokens=case["page"])
    return {"end": cut}


def _swa_program(case: Json, layers: int = 1, width: int = 1) -> Plan:
    state = {
        "name": "swa",
        "layers": list(range(layers)),
        "bytes_per_token_layer": width,
        "reads": ["<", ["-", "q", "k"], case["window"]],
    }
    return compile_program(program_of({"page": case["page"], "states": [state]}))


def _capsule(case: Json) -> Json:
    page, prefix = case["page"], case["prefix"]
    found = _swa_program(case, case["swa_layers"], case["width"]).classes[0]
    tail = [page * end for end in found.continuation(prefix)]
    return {
        "full_range": [0, prefix] if case["full_layers"] else None,
        "tail_range": tail,
        "full_kv_bytes": prefix * case["width"] * case["full_layers"],
        "tail_kv_bytes": (tail[1] - tail[0]) * case["width"] * case["swa_layers"],
    }


def _swa_lifecycle(case: Json) -> Json:
    found = _swa_program(case).classes[0]
    end = case["prompt"] + case["decode"]
    _, stop = found.pages_at(end)
    retired = sum((found.death(ordinal) or 0) <= end for ordinal in range(stop))
    return {
        "retired_pages_per_request": retired,
        "wraps_per_request": found.locate(stop - 1)[1],
        "retired_total": retired * case["requests"],
    }


def _ratio(case: Json) -> Json:
    if "samples" in case:
        return {"median": statistics.median(case["samples"])}
    if "a" in case:
        return {"ratio": case["a"] / case["b"]}
    return {"percent": 100 * (case["to"] - case["from"]) / case["from"]}


ANSWERS: dict[str, Callable[[Json], Json]] = {
    "retention": _retention,
    "hf": _hf,
    "sglang_split": _sglang_split,
    "sglang_swa": _sglang_swa,
    "pool_gib": _pool_gib,
    "uniform_swa": _uniform_swa,
    "snapshot_pool": _snapshot_pool,
    "dense_slots": _dense_slots,
    "vmm": _vmm,
    "death": _death,
    "owner_cut": _owner_cut,
    "capsule": _capsule,
    "swa_lifecycle": _swa_lifecycle,
    "ratio": _ratio,
}


def answer(case: Json) -> Json:
    """What the compiler says of a case; a refusal is an answer too."""
    try:
        return ANSWERS[case["kind"]](case["input"])
    except RetentionError as error:
        return {"refuse": error.rule, "error": str(error)}


def expectation(case: Json) -> Json:
    """What the file expects: of the two frontends in ``hf`` cases, the later and stricter."""
    expected: Json = case["expected"]
    if case["kind"] == "hf":
        expected = expected.get("head", expected["era"])
    if "refuse" in expected:
        return {"refuse": RENAMED_REFUSALS.get(expected["refuse"], expected["refuse"])}
    return expected


def differences(case: Json) -> Json:
    """Fields of the expectation that our answer does not meet, with our value."""
    found = answer(case)
    return {
        name: found.get(name, found)
        for name, wanted in expectation(case).items()
        if not _agrees(wanted, found.get(name))
    }


def _agrees(wanted: Any, found: Any) -> bool:
    """Equal; of objects, in every field that is expected."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return all(_agrees(value, found.get(name)) for name, value in wanted.items())
    if isinstance(wanted, float) and isinstance(found, float):
        return abs(wanted - found) <= 1e-12 * abs(wanted)
    return bool(wanted == found)
