"""How long the steps of a restore take: laws fitted online, with intervals.

* A *step* (``connect``, ``transfer``, ``verify``, ``entropy``, ``dequantize``, ``project``,
  ``rope``, ``handoff``, or any other name) of one *label* (a link and tier, a device
  and codec) costs ``t0_s + size / rate``.
* Prefill of the tokens from position ``a`` to ``b`` costs a fixed time, a time per token,
  and a time per pair of a token with one before it: ``(b*b - a*a) / 2`` of those.

Every pair of step and label is fitted by itself (see `policies.fitting`) from the times
that receipts report.  What a fit predicted just before each observation is compared with
what came; the quantiles of those quotients, over the last few, make the interval.
The model holds no clock and does no I/O; its state crosses a restart as a plain dict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codec.identity import CodecId
from policies.fitting import NonNegativeFit

CONNECT = "connect"
TRANSFER = "transfer"
PREFILL = "prefill"
ANY_LABEL = ""
"""Label of the prior for labels that have none of their own."""

UNTRIED_SPREAD = 3.0
"""Every interval reckons with one time this much longer, and one shorter, than predicted."""

STATE_FORMAT = 1
#: A prior of nothing at all could never be scaled to what is observed.
_LEAST_T0_S = 1e-7
_LEAST_S_PER_UNIT = 1e-14


@dataclass(frozen=True, slots=True)
class Affine:
    """``t0_s + size / per_s``: a fixed cost and a rate."""

    t0_s: float
    per_s: float
    """Units of size per second, mostly bytes; infinite where size costs nothing."""

    def __post_init__(self) -> None:
        if not (0 <= self.t0_s < math.inf and self.per_s > 0):
            raise ValueError(f"need t0_s >= 0 and a positive rate, got {self.t0_s}, {self.per_s}")

    def seconds(self, size: float) -> float:
        """Time for ``size`` units."""
        return self.t0_s + size / self.per_s


@dataclass(frozen=True, slots=True)
class PrefillLaw:
    """``t0_s + s_per_token * tokens + s_per_pair * pairs``."""

    t0_s: float
    s_per_token: float
    s_per_pair: float = 0.0

    def __post_init__(self) -> None:
        found = (self.t0_s, self.s_per_token, self.s_per_pair)
        if not all(0 <= value < math.inf for value in found):
            raise ValueError(f"costs must be finite and not negative, got {found}")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time and where it will lie, as often as the model's coverage says."""

    seconds: float
    low_s: float
    high_s: float


NOTHING = Prediction(0.0, 0.0, 0.0)
"""The time of a step that does not happen."""


def transfer_label(link: str, tier: str) -> str:
    """Label of a transfer step: the link, and the tier at its far end."""
    return f"{link}/{tier}"


def decode_label(device: str, codec: CodecId) -> str:
    """Label of a decoding step: where it runs, and on what."""
    return f"{device}/{codec.hex()}"


class _Cell:
    """The fit of one step and label, and how well it has done lately."""

    __slots__ = ("fit", "quotients")

    def __init__(self, fit: NonNegativeFit, quotients: Iterable[float], window: int) -> None:
        self.fit = fit
        #: Observed over predicted, the prediction made before; the first is left out,
        #: since it says more of the prior than of the fit.
        self.quotients = deque(quotients, maxlen=window)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Compare, then learn."""
        predicted = self.fit.predict(features)
        is_first = self.fit.count == 0
        self.fit.observe(features, seconds)
        if not is_first and predicted > 0:
            self.quotients.append(seconds / predicted)

    def predict(self, features: Sequence[float], coverage: float) -> Prediction:
        """The fit's time, and the quantiles around it."""
        seconds = self.fit.predict(features)
        # With few quotients the two imaginary ones are the ends.
        ranked = sorted([1 / UNTRIED_SPREAD, *self.quotients, UNTRIED_SPREAD])
        cut = math.floor((len(ranked) - 1) * (1 - coverage) / 2)
        low, high = ranked[cut], ranked[-1 - cut]
        return Prediction(seconds, seconds * min(low, 1.0), seconds * max(high, 1.0))


class LatencyModel:
    """Predicts step times from what was observed, and from priors before that.

    Parameters
    ----------
    priors
        ``{(step, label): law}``; the label `ANY_LABEL` stands for all others.  A step that has
        neither a prior nor a state cannot be predicted: a silent zero would look fast.
    prefill
        ``{label: law}``, likewise.
    forgetting
        Weight that an observation keeps when the next of its kind comes.
    window
        Quotients kept per step and label.
    coverage
        How often the interval should hold what comes.
    max_cells
        Pairs of step and label that are remembered; the one unobserved for longest goes first.
    """

    def __init__(
        self,
        priors: Mapping[tuple[str, str], Affine],
        *,
        prefill: Mapping[str, PrefillLaw],
        forgetting: float = 0.98,
        window: int = 64,
        coverage: float = 0.9,
        max_cells: int = 4096,
    ) -> None:
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must be in (0, 1), got {coverage}")
        if min(window, max_cells) < 1:
            raise ValueError(f"window and max_cells must be at least 1, got {window}, {max_cells}")
        if any(step == PREFILL for step, _ in priors):
            raise ValueError("the prior of prefill is a PrefillLaw, got an Affine")
        self._priors = {where: _affine_terms(law) for where, law in priors.items()}
        self._priors |= {(PREFILL, label): _prefill_terms(law) for label, law in prefill.items()}
        self._forgetting = forgetting
        self._window = window
        self._coverage = coverage
        self._max_cells = max_cells
        #: ``{(step, label): cell}`` of what was observed; the latest observed last.
        self._cells: dict[tuple[str, str], _Cell] = {}
        NonNegativeFit([1.0], forgetting=forgetting)  # refuses a bad value now, not later

    def observe(self, step: str, label: str, size: float, seconds: float) -> None:
        """Learn that ``step`` took ``seconds`` for ``size`` units.

        Raises
        ------
        ValueError
            If a number is negative or not finite, there is no prior, or the step is
            prefill, which has positions instead of a size.  Nothing is learned then.
        """
        self._observe(step, label, _affine_features(step, size), seconds)

    def observe_prefill(self, label: str, start: int, stop: int, seconds: float) -> None:
        """Learn that computing tokens ``start`` to ``stop`` took ``seconds``."""
        self._observe(PREFILL, label, _prefill_features(start, stop), seconds)

    def predict(self, step: str, label: str, size: float) -> Prediction:
        """Time that ``step`` will take for ``size`` units.

        Raises
        ------
        ValueError
            If there is no prior for it, or the size is negative or not finite.
        """
        cell = self._cell(step, label)
        return cell.predict(_affine_features(step, size), self._coverage)

    def predict_prefill(self, label: str, start: int, stop: int) -> Prediction:
        """Time that computing tokens ``start`` to ``stop`` will take; none takes none."""
        features = _prefill_features(start, stop)
        if start == stop:
            return NOTHING
        return self._cell(PREFILL, label).predict(features, self._coverage)

    def law(self, step: str, label: str) -> Affine:
        """The law that `predict` goes by now."""
        _affine_features(step, 0)
        t0_s, s_per_unit = self._cell(step, label).fit.coefficients
        return Affine(t0_s, 1 / s_per_unit if s_per_unit > 0 else math.inf)

    def count(self, step: str, label: str) -> int:
        """Observations of a step and label that are remembered."""
        cell = self._cells.get((step, label))
        return 0 if cell is None else cell.fit.count

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers."""
        return {
            "format": STATE_FORMAT,
            "forgetting": self._forgetting,
            "window": self._window,
            "coverage": self._coverage,
            "max_cells": self._max_cells,
            "priors": [[*where, list(terms)] for where, terms in self._priors.items()],
            "cells": [
                [*where, cell.fit.to_dict(), list(cell.quotients)]
                for where, cell in self._cells.items()
            ],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LatencyModel:
        """The model that wrote ``state``.

        Raises
        ------
        ValueError
            If the format is unknown, something is missing, or what it says cannot be.
        """
        if state.get("format") != STATE_FORMAT:
            raise ValueError(f"need state of format {STATE_FORMAT}, got {state.get('format')!r}")
        options = ("forgetting", "window", "coverage", "max_cells")
        try:
            model = cls({}, prefill={}, **{name: state[name] for name in options})
            for step, label, terms in state["priors"]:
                NonNegativeFit(terms)
                model._priors[step, label] = tuple(terms)
            for step, label, fit, quotients in state["cells"]:
                cell = _Cell(NonNegativeFit.from_dict(fit), map(float, quotients), model._window)
                if not all(0 <= quotient < math.inf for quotient in cell.quotients):
                    raise ValueError(f"quotients of {step} {label!r} must be finite and >= 0")
                model._cells[step, label] = cell
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a latency model: {error!r}") from error
        return model

    def _observe(self, step: str, label: str, features: Sequence[float], seconds: float) -> None:
        """Learn, and keep the latest observed last."""
        cell = self._cell(step, label)
        cell.observe(features, seconds)
        self._cells.pop((step, label), None)
        self._cells[step, label] = cell
        if len(self._cells) > self._max_cells:
            del self._cells[next(iter(self._cells))]

    def _cell(self, step: str, label: str) -> _Cell:
        """What is known of a step and label; a new cell is not kept until it has learned."""
        cell = self._cells.get((step, label))
        if cell is not None:
            return cell
        prior = self._priors.get((step, label)) or self._priors.get((step, ANY_LABEL))
        if prior is None:
            raise ValueError(f"there is no prior for step {step!r} of label {label!r}")
        return _Cell(NonNegativeFit(prior, forgetting=self._forgetting), (), self._window)


def _affine_terms(law: Affine) -> tuple[float, ...]:
    """Coefficients of an affine law, none quite zero."""
    return max(law.t0_s, _LEAST_T0_S), max(1 / law.per_s, _LEAST_S_PER_UNIT)


def _prefill_terms(law: PrefillLaw) -> tuple[float, ...]:
    """Coefficients of a prefill law, none quite zero."""
    per_token = max(law.s_per_token, _LEAST_S_PER_UNIT)
    return max(law.t0_s, _LEAST_T0_S), per_token, max(law.s_per_pair, _LEAST_S_PER_UNIT)


def _affine_features(step: str, size: float) -> tuple[float, ...]:
    if step == PREFILL:
        raise ValueError("prefill goes by positions: use observe_prefill and predict_prefill")
    return 1.0, float(size)


def _prefill_features(start: int, stop: int) -> tuple[float, ...]:
    if not 0 <= start <= stop:
        raise ValueError(f"need 0 <= start <= stop, got [{start}, {stop})")
    return 1.0, float(stop - start), (stop * stop - start * start) / 2
