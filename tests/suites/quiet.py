"""Settings for Hypothesis on shared machines, where no time means anything."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
"""For properties of values."""

QUIET_STATEFUL = settings(QUIET, max_examples=30, stateful_step_count=40)
"""For state machines."""
