"""A sum of non-negative terms, fitted online to noisy times.

The law is ``seconds = sum(coefficient[i] * feature[i])``; a prior gives every coefficient.
An observation is first divided by what the prior expected, which leaves a *ratio* and the
*share* that each term had in the expectation.  Then:

1. Least squares of ratio on shares, with exponential forgetting, in information form: two
   sums that each observation updates.  Ratios make a millisecond and a second count alike.
2. A weak pull towards the solution so far, scaled to the level of all observations, and at
   first towards the prior so scaled.  So the first observation sets the level, and later
   ones the shape, as far as they tell the terms apart; where they do not (all of one
   size, say) the shape stays.  Since the pull follows the solution, it leaves no bias.
3. The solution is the best one with no negative coefficient.
4. An observation far from what was predicted enters as if it were less far.  One stall
   moves little; a link that has really slowed down is followed all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

#: Weight of the pull towards the solution so far, relative to the observations'.
SHAPE_WEIGHT = 1e-2
#: An observation counts as at most this many times what was predicted, or its inverse ...
MAX_SURPRISE = 3.0
#: ... once this many have been seen.
MIN_TRUSTED = 5
#: The pull on a term that never occurred, which so goes with the others.
_EPSILON = 1e-12


class NonNegativeFit:
    """One law's coefficients, and the two sums they come from.

    Parameters
    ----------
    prior
        One positive coefficient per term.
    forgetting
        What weight an observation keeps when the next one comes, in (0, 1].

    Examples
    --------
    >>> fit = NonNegativeFit([1.0, 1.0])
    >>> for x in range(1, 20):
    ...     fit.observe([1.0, x], 3.0 + 2.0 * x)
    >>> round(fit.predict([1.0, 100.0]))
    203
    """

    def __init__(self, prior: Sequence[float], *, forgetting: float = 0.98) -> None:
        if not prior or not all(0 < c < math.inf for c in prior):
            raise ValueError(f"a prior must be positive and finite, got {list(prior)}")
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must be in (0, 1], got {forgetting}")
        self._prior = np.array(prior, dtype=np.float64)
        self._forgetting = forgetting
        num_terms = len(self._prior)
        #: Sum of share times share; positive semidefinite.
        self._information = np.zeros((num_terms, num_terms))
        #: Sum of ratio times share.
        self._moment = np.zeros(num_terms)
        #: Sum of ratios, and of weights.
        self._level = 0.0
        self._weight = 0.0
        #: Observations ever.
        self._count = 0
        #: Coefficients over prior: the solution so far; never negative.
        self._multiples = np.ones(num_terms)

    @property
    def count(self) -> int:
        """Observations so far."""
        return self._count

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The law as it is fitted now; none is negative."""
        return tuple(float(c) for c in self._prior * self._multiples)

    def predict(self, features: Sequence[float]) -> float:
        """What the law says for ``features``, none of which may be negative."""
        return float(self._terms(features) @ self._multiples)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn that ``features`` took ``seconds``.

        Raises
        ------
        ValueError
            If a number is negative or not finite, or no feature is positive.
        """
        terms = self._terms(features)
        expected = float(terms.sum())
        if not (0 <= seconds < math.inf and expected > 0):
            raise ValueError(f"need a time and something that took it, got {seconds} s")
        shares = terms / expected
        ratio = self._tempered(seconds / expected, float(shares @ self._multiples))
        keep = self._forgetting
        self._information = keep * self._information + np.outer(shares, shares)
        self._moment = keep * self._moment + ratio * shares
        self._level = keep * self._level + ratio
        self._weight = keep * self._weight + 1.0
        self._count += 1
        self._solve()

    def to_dict(self) -> dict[str, Any]:
        """State as plain numbers and lists."""
        return {
            "prior": self._prior.tolist(),
            "forgetting": self._forgetting,
            "information": self._information.tolist(),
            "moment": self._moment.tolist(),
            "level": self._level,
            "weight": self._weight,
            "count": self._count,
            "multiples": self._multiples.tolist(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> NonNegativeFit:
        """The fit that wrote ``state``.

        Raises
        ------
        ValueError
            If ``state`` lacks something, or what it says cannot be.
        """
        try:
            fit = cls(state["prior"], forgetting=state["forgetting"])
            information = np.array(state["information"], dtype=np.float64)
            moment, multiples = (
                np.array(state[name], dtype=np.float64) for name in ("moment", "multiples")
            )
            totals = [float(state[name]) for name in ("level", "weight")]
            count = int(state["count"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of a fit: {error!r}") from error
        num_terms = len(fit._prior)
        shapes = [array.shape for array in (information, moment, multiples)]
        if shapes != [(num_terms, num_terms), (num_terms,), (num_terms,)]:
            raise ValueError(f"need sums over {num_terms} terms, got shapes {shapes}")
        sums = np.concatenate([information.ravel(), moment, multiples, totals])
        if not np.all(np.isfinite(sums) & (sums >= 0)) or (totals[1] > 0) != (count > 0):
            raise ValueError(f"sums of {count} observations cannot be {sums.tolist()}")
        fit._information, fit._moment, fit._multiples = information, moment, multiples
        fit._level, fit._weight = totals
        fit._count = count
        return fit

    def _terms(self, features: Sequence[float]) -> npt.NDArray[np.float64]:
        """Seconds that the prior expects of each term."""
        found = np.asarray(features, dtype=np.float64)
        if found.shape != self._prior.shape or not np.all(np.isfinite(found) & (found >= 0)):
            raise ValueError(f"need {len(self._prior)} finite sizes >= 0, got {list(features)}")
        return self._prior * found

    def _tempered(self, ratio: float, predicted: float) -> float:
        """``ratio``, no further from ``predicted`` than surprises count."""
        if self._count < MIN_TRUSTED or predicted <= 0:
            return ratio
        return min(max(ratio, predicted / MAX_SURPRISE), predicted * MAX_SURPRISE)

    def _solve(self) -> None:
        """Minimize the squared error, with the pull, over non-negative multiples."""
        # What the present solution says of the observations so far, in sum.
        explained = float(self._information.sum(axis=0) @ self._multiples)
        if explained > 0:
            anchor = self._multiples * (self._level / explained)
        else:
            anchor = np.full_like(self._multiples, self._level / self._weight)
        pull = SHAPE_WEIGHT * np.diag(self._information) + _EPSILON
        matrix = self._information + np.diag(pull)
        target = self._moment + pull * anchor
        num_terms = len(target)
        best, best_cost = np.zeros(num_terms), 0.0
        # The optimum is free on some set of terms and zero elsewhere.  There are few
        # terms; and if it is free on all of them, no other can be better.
        for size in range(num_terms, 0, -1):
            for chosen in combinations(range(num_terms), size):
                free = list(chosen)
                solution = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
                cost = -float(target[free] @ solution)
                if np.all(solution >= 0) and cost < best_cost:
                    best, best_cost = np.zeros(num_terms), cost
                    best[free] = solution
            if size == num_terms and best_cost < 0:
                break
        self._multiples = best
