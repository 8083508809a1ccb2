"""Latency models and answers for tests of sourcing and planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codec.geometry import Stage
from codec.identity import UNBOUNDED, CodecId
from policies.latency import ANY_LABEL, Affine, LatencyModel, PrefillLaw
from policies.residency.view import AsOf, Coverage, Holding, Residency, Run
from tests.policies.residency.samples import KEYS, KVTC, STAGE

CHUNK_TOKENS = 16
LINKS = {"bob": "fast", "cyd": "slow"}


def a_latency_model(**transfers: Affine) -> LatencyModel:
    """Times in round numbers; ``transfers`` by link, all from host memory unless it says disk."""
    laws = {
        ("connect", ANY_LABEL): Affine(1.0, 1e18),
        ("transfer", ANY_LABEL): Affine(2.0, 10.0),
        ("transfer", "local/host"): Affine(0.5, 1000.0),
        ("transfer", "local/disk"): Affine(1.0, 1.0),
        ("verify", ANY_LABEL): Affine(0.01, 1e3),
        ("entropy", ANY_LABEL): Affine(0.02, 1e4),
        ("dequantize", ANY_LABEL): Affine(0.01, 1e5),
        ("project", ANY_LABEL): Affine(0.01, 1e5),
        ("rope", ANY_LABEL): Affine(0.01, 1e5),
        ("handoff", ANY_LABEL): Affine(0.01, 1e5),
    }
    own = {("transfer", f"{link}/host"): law for link, law in transfers.items()}
    return LatencyModel(laws | own, prefill={ANY_LABEL: PrefillLaw(1.0, 1.0, 0.01)})


def runs_of(*spans: tuple[int, Mapping[str, int]]) -> tuple[Run, ...]:
    """Runs from (chunks, {source: stored bytes of each chunk}); ``bob:disk`` is bob's disk."""
    runs: list[Run] = []
    start = 0
    for length, sources in spans:
        holdings = []
        for source, stored_bytes in sorted(sources.items()):
            node, _, tier = source.partition(":")
            holdings.append(Holding(node, tier or "host", 160, (stored_bytes,) * length))
        runs.append(Run(start, start + length, tuple(holdings)))
        start += length
    return tuple(runs)


def an_answer(
    *coverages: Coverage, stages: Sequence[Stage] = (STAGE,), gap: bool = False, ready: bool = True
) -> Residency:
    """An answer of three nodes."""
    return Residency(
        keys=KEYS,
        stages=tuple(stages),
        retention_class=UNBOUNDED,
        tokens_per_chunk=CHUNK_TOKENS,
        coverages=coverages,
        as_of=AsOf(9, {"ada": 1, "bob": 2, "cyd": 3}),
        incarnations={"ada": 11, "bob": 12, "cyd": 13},
        gapped=("bob",) if gap else (),
        ready=ready,
    )


def coverage(*runs: tuple[Run, ...], codec: CodecId = KVTC) -> Coverage:
    """A coverage with the same codec in every stage."""
    return Coverage((codec,) * len(runs), min(r[-1].stop for r in runs), runs)
