"""What a step is expected to cost before anything was measured.

Deliberately cautious, so that a plan made blind recomputes rather than waits: figures of
a slow core and a 1 Gbit/s link.  Link probes, a codec's self-test and every restore
replace them within minutes.
"""

from __future__ import annotations

from policies.latency import ANY_LABEL, CONNECT, TRANSFER, Affine, LatencyModel, PrefillLaw

_PRIORS = {
    CONNECT: Affine(t0_s=0.02, per_s=1e12),
    TRANSFER: Affine(t0_s=0.005, per_s=1e8),
    "verify": Affine(t0_s=0.001, per_s=1e9),
    "entropy": Affine(t0_s=0.001, per_s=3e8),
    "dequantize": Affine(t0_s=0.001, per_s=3e8),
    "project": Affine(t0_s=0.001, per_s=3e7),
    "rope": Affine(t0_s=0.001, per_s=2e8),
    "handoff": Affine(t0_s=0.02, per_s=3e8),
}


def cold_latency_model() -> LatencyModel:
    """A latency model that has seen nothing yet."""
    return LatencyModel(
        {(step, ANY_LABEL): law for step, law in _PRIORS.items()},
        prefill={ANY_LABEL: PrefillLaw(t0_s=0.05, s_per_token=0.003, s_per_pair=0.0)},
    )
