"""How far a text's cache lies outside what a calibration has seen.

The measure is the energy of a token outside the kept directions, in squares of
its step, over that of the calibration's own held-out text.  That one has some, since
directions are dropped on purpose; text of another kind has more, and is coded worse than
the codec's receipt says.
"""

from __future__ import annotations

from torch import Tensor

DRIFT_BOUND = 3.0
"""Times the held-out energy at which a text counts as drifting."""


class DriftWarning(UserWarning):
    """Cache that was coded lies further outside the calibration's basis than it should."""

    def __str__(self) -> str:
        """Say how far, and what to do."""
        return (
            f"this text has {self.args[0]} times the calibration's energy outside the basis: it is "
            "coded worse than the codec's receipt says; calibrate with text like it "
            "(`kvfabric calibrate --corpus`)"
        )


def drift_of(outside_T: Tensor, held_out_energy: float) -> float:
    """Mean energy outside the basis over the held-out mean; 0 without tokens."""
    if not len(outside_T):
        return 0.0
    return float(outside_T.mean()) / max(held_out_energy, 1e-30)
