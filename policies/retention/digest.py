"""The plan digest: one name for a program and everything that was decided from it.

Covered: relation text, geometry, data type, page and step size, claims, classes, addresses
and retirement.  Every field is tagged with its name and length-prefixed, so no two plans
share an encoding; two relations that compile to the same classes still differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from codec.identity import Digest, digest
from policies.retention.plan import Plan, PlannedClass
from policies.retention.program import AttentionState, CrossState, RecurrentState, State

DOMAIN = "kvfabric.retention.plan.1"


def plan_digest(plan: Plan) -> Digest:
    """Name of ``plan``, the same on every node and in every run."""
    return digest(DOMAIN, *(part.encode() for part in canonical_fields(plan)))


def canonical_fields(plan: Plan) -> Iterator[str]:
    """What the digest covers, as ``name=value`` in a fixed order."""
    yield f"page_tokens={plan.program.page_tokens}"
    yield f"step_tokens={plan.step_tokens}"
    yield f"states={len(plan.program.states)}"
    for state in plan.program.states:
        yield from _state_fields(state)
        if isinstance(state, AttentionState):
            claims = plan.lifetimes[state.name].claims
            yield f"claims={len(claims)}"
            yield from (f"claim={claim.keys!r} {claim.rule!r}" for claim in claims)
    yield f"classes={len(plan.classes)}"
    for found in plan.classes:
        yield from _class_fields(found)


def _state_fields(state: State) -> Iterator[str]:
    yield f"kind={type(state).__name__}"
    yield f"name={state.name}"
    yield f"layers={_listed(state.layers)}"
    match state:
        case RecurrentState():
            yield f"bytes_per_layer={state.bytes_per_layer}"
        case CrossState():
            yield f"bytes_per_token_layer={state.bytes_per_token_layer}"
            yield f"source_tokens={state.source_tokens}"
        case AttentionState():
            yield f"bytes_per_token_layer={state.bytes_per_token_layer}"
            yield f"heads={state.heads!r}"
            yield f"shape={state.shape!r}"
            yield f"reads={state.reads}"
            yield f"readers={len(state.readers)}"
            yield from (f"reader={reader.layer} {reader.reads}" for reader in state.readers)


def _class_fields(found: PlannedClass) -> Iterator[str]:
    yield f"class={found.name}"
    yield f"sources={len(found.sources)}"
    yield from (f"source={source}" for source in found.sources)
    yield f"layers={_listed(found.layers)}"
    yield f"heads={found.heads!r}"
    yield f"width_bytes={found.width_bytes}"
    yield f"role={found.region.role} ranked={found.region.is_ranked}"
    yield f"pages={found.region.first_page}..{found.region.stop_page}"
    yield f"address={found.address!r}"
    yield f"retirement={found.retirement!r}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
