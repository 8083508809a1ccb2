"""The restore plan: what to fetch from where, how long it will take, and whether to.

1. For each codec, cut the answer's prefix to the chunks that some live node holds, for
   every stage.  The *boundary* lies a window before its end: what comes after the
   boundary, the recomputed window and the rest of the prompt, is prefilled.
2. Per stage, choose the cheapest sources (see `policies.sourcing`).
3. Add the decoding steps, once per stage, and prefill.  Steps are taken one after the
   other; overlapping them can only be faster.
4. The codec of least time is the restore; it is chosen if it is faster than computing
   the whole prompt.

A plan is a suggestion with a reason.  It reserves nothing, and is as old as its answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from codec.identity import CodecId
from policies.latency import (
    CONNECT,
    NOTHING,
    PREFILL,
    TRANSFER,
    LatencyModel,
    Prediction,
    decode_label,
)
from policies.residency.view import AsOf, Residency, Run
from policies.sourcing import Pricing, Segment, clip, live_runs, segments

DEFAULT_WINDOW_TOKENS = 128
DECODE_STEPS = ("verify", "entropy", "dequantize", "project", "rope", "handoff")
"""Steps that follow arrival, each once per stage; a codec may have fewer."""

STEPS_BY_STORED_BYTES = frozenset({"verify"})
"""Steps whose size is the stored bytes; that of other decoding steps is the decoded bytes."""

Choice = Literal["restore", "recompute"]


class Reason(StrEnum):
    """Why a plan chose as it did."""

    RESTORE_IS_FASTER = "restore_is_faster"
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    ABSENT = "absent"
    """Nobody holds the prefix's first chunk for every stage."""

    GAP = "gap"
    """The same, but not everything that nodes hold is known."""

    NO_LIVE_SOURCE = "no_live_source"
    WINDOW_COVERS_PREFIX = "window_covers_prefix"
    """All that could be restored would be recomputed anyway."""

    FORCED = "forced"


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore, the recomputation it competes with, and which of them to do.

    When recomputation is chosen, the segments are those of the best restore there was;
    they are there to be compared with, not to be fetched.
    """

    node: str
    choice: Choice
    reason: Reason
    sentence: str
    segments: tuple[Segment, ...]
    boundary_tokens: int
    """Tokens restored; prefill begins here.  At least one token of the prompt is left."""

    num_prompt_tokens: int
    steps: Mapping[str, float]
    """``{step: predicted seconds}`` of the restore; they sum to `predicted_restore_s`."""

    predicted_restore_s: float
    restore_interval_s: tuple[float, float]
    """All steps at their low ends, and at their high ends: what slows one slows all."""

    predicted_recompute_s: float
    as_of: AsOf

    @property
    def stored_bytes(self) -> int:
        """Bytes to fetch."""
        return sum(segment.stored_bytes for segment in self.segments)

    @property
    def is_restore(self) -> bool:
        """Whether the segments are to be fetched."""
        return self.choice == "restore"


def plan_restore(
    residency: Residency,
    *,
    node: str,
    num_prompt_tokens: int,
    latency: LatencyModel,
    alive: Collection[str],
    links: Mapping[str, str] = MappingProxyType({}),
    device: str = "",
    window_tokens: int = DEFAULT_WINDOW_TOKENS,
    steps_by_codec: Mapping[CodecId, Sequence[str]] = MappingProxyType({}),
    force: Choice | None = None,
) -> RestorePlan:
    """Plan the restore of a prompt's prefix on ``node``.

    Parameters
    ----------
    residency
        Where the prompt's chunks are; it names the stages that ``node`` needs.
    alive
        Nodes that can be fetched from; ``node`` itself only if it is among them.
    links
        ``{source node: link label}`` as seen from ``node``.
    device
        Label of the device that decodes and prefills.
    window_tokens
        Tokens at the end of the restorable prefix that are computed all the same.
    steps_by_codec
        Decoding steps of codecs that do not have all of `DECODE_STEPS`.
    force
        Choose this in any case; a restore only where there is something to restore.

    Raises
    ------
    ValueError
        If there is no token in the prompt, the window is negative, or the latency model
        has no prior for a step.
    """
    if num_prompt_tokens < 1:
        raise ValueError(f"num_prompt_tokens must be at least 1, got {num_prompt_tokens}")
    if window_tokens < 0:
        raise ValueError(f"window_tokens must not be negative, got {window_tokens}")
    pricing = Pricing(residency, node, latency, links)
    decoding = _Decoding(device, steps_by_codec)
    recompute = latency.predict_prefill(device, 0, num_prompt_tokens)
    drafts: list[_Draft] = []
    num_live_chunks = 0
    for coverage in residency.coverages:
        runs = live_runs(coverage, frozenset(alive))
        num_chunks = min(stage_runs[-1].stop if stage_runs else 0 for stage_runs in runs)
        num_live_chunks = max(num_live_chunks, num_chunks)
        prefix_tokens = min(num_chunks * residency.tokens_per_chunk, num_prompt_tokens)
        boundary_tokens = min(prefix_tokens - window_tokens, num_prompt_tokens - 1)
        if boundary_tokens > 0:
            draft = _Draft(boundary_tokens)
            _fetch(draft, coverage.codecs, runs, pricing, decoding)
            draft.add(PREFILL, latency.predict_prefill(device, boundary_tokens, num_prompt_tokens))
            drafts.append(draft)
    if drafts:
        draft = min(drafts, key=_Draft.rank)
        is_faster = draft.seconds < recompute.seconds
        reason = Reason.RESTORE_IS_FASTER if is_faster else Reason.SLOWER_THAN_RECOMPUTE
    else:
        draft = _Draft(0, {PREFILL: recompute})
        reason = _why_nothing(residency, num_live_chunks)
    choice: Choice = "restore" if reason is Reason.RESTORE_IS_FASTER else "recompute"
    if force == "recompute" or (force == "restore" and drafts):
        choice, reason = force, Reason.FORCED
    return RestorePlan(
        node=node,
        choice=choice,
        reason=reason,
        sentence=_sentence(reason, choice, draft, recompute.seconds),
        segments=tuple(draft.segments),
        boundary_tokens=draft.boundary_tokens,
        num_prompt_tokens=num_prompt_tokens,
        steps={step: cost.seconds for step, cost in draft.steps.items()},
        predicted_restore_s=draft.seconds,
        restore_interval_s=draft.interval_s,
        predicted_recompute_s=recompute.seconds,
        as_of=residency.as_of,
    )


@dataclass(frozen=True, slots=True)
class _Decoding:
    """What is done with bytes once they are here."""

    device: str
    steps_by_codec: Mapping[CodecId, Sequence[str]]


@dataclass(slots=True)
class _Draft:
    """A restore with one codec, as it is being priced."""

    boundary_tokens: int
    #: Everything that takes time, by step; parts of one step add up.
    steps: dict[str, Prediction] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Predicted time of all steps."""
        return sum(cost.seconds for cost in self.steps.values())

    @property
    def interval_s(self) -> tuple[float, float]:
        """All steps at their low ends, and at their high ends."""
        costs = self.steps.values()
        return sum(cost.low_s for cost in costs), sum(cost.high_s for cost in costs)

    def add(self, step: str, cost: Prediction) -> None:
        """Count ``cost`` under ``step``."""
        had = self.steps.get(step, NOTHING)
        self.steps[step] = Prediction(
            had.seconds + cost.seconds, had.low_s + cost.low_s, had.high_s + cost.high_s
        )

    def rank(self) -> tuple[float, int, tuple[CodecId, ...]]:
        """Time, then bytes, then a name: the same choice everywhere."""
        codecs = tuple(segment.codec for segment in self.segments)
        return self.seconds, sum(segment.stored_bytes for segment in self.segments), codecs


def _fetch(
    draft: _Draft,
    codecs: Sequence[CodecId],
    runs: Sequence[Sequence[Run]],
    pricing: Pricing,
    decoding: _Decoding,
) -> None:
    """Choose sources up to the draft's boundary; price arrival and decoding."""
    num_chunks = -(-draft.boundary_tokens // pricing.residency.tokens_per_chunk)
    for stage, codec in enumerate(codecs):
        label = decode_label(decoding.device, codec)
        steps = decoding.steps_by_codec.get(codec, DECODE_STEPS)
        arrival_s_per_byte = sum(
            1 / pricing.latency.law(step, label).per_s
            for step in steps
            if step in STEPS_BY_STORED_BYTES
        )
        priced = replace(pricing, arrival_s_per_byte=arrival_s_per_byte)
        chosen = segments(clip(runs[stage], num_chunks), stage, codec, priced)
        for segment in chosen:
            draft.add(CONNECT, pricing.connect(segment.node))
            draft.add(TRANSFER, pricing.transfer(segment.node, segment.tier, segment.stored_bytes))
        stored_bytes = sum(segment.stored_bytes for segment in chosen)
        decoded_bytes = sum(segment.decoded_bytes for segment in chosen)
        for step in steps:
            size = stored_bytes if step in STEPS_BY_STORED_BYTES else decoded_bytes
            draft.add(step, pricing.latency.predict(step, label, size))
        draft.segments += chosen


def _why_nothing(residency: Residency, num_live_chunks: int) -> Reason:
    """Why there is nothing to restore."""
    if num_live_chunks:
        return Reason.WINDOW_COVERS_PREFIX
    if residency.coverages:
        return Reason.NO_LIVE_SOURCE
    return Reason.GAP if residency.gap or not residency.ready else Reason.ABSENT


def _sentence(reason: Reason, choice: Choice, draft: _Draft, recompute_s: float) -> str:
    """The reason, for people."""
    times = (
        f"restoring {draft.boundary_tokens} tokens and computing the rest takes "
        f"{draft.seconds:.6g} s, computing all {recompute_s:.6g} s"
    )
    return {
        Reason.RESTORE_IS_FASTER: f"restore: {times}",
        Reason.SLOWER_THAN_RECOMPUTE: f"recompute: {times}",
        Reason.ABSENT: "recompute: no node holds the start of the prefix for every stage",
        Reason.GAP: "recompute: no node is known to hold the start of the prefix, "
        "but not all that nodes hold is known",
        Reason.NO_LIVE_SOURCE: "recompute: no node that holds the start of the prefix is alive",
        Reason.WINDOW_COVERS_PREFIX: "recompute: the window to recompute covers all that "
        "could be restored",
        Reason.FORCED: f"{choice}, as forced: {times}",
    }[reason]
