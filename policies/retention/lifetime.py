"""Infer, for every key, the last query that may read it.

1. The relation is multiplied out into alternatives with bounds on the query
   (`policies.retention.clauses`).
2. For each alternative the last admitted query is a form of the key: the least of its
   highs, rounded down to its strides, where its guards and lows allow.
3. The key axis starts as one part that nothing reads; each alternative cuts it where it
   applies and raises the last reader there.
4. The parts become claims, and a witness for the independent checker.

Every step is exact for every relation of the language, within limits on size
(`clauses.MAX_CLAUSES`, `clauses.MAX_SPLITS`, `axis.Budget`).  Where a limit is met the
answer is later than need be, never earlier, and ``is_exact`` is false.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from codec.errors import RetentionError
from policies.retention.axis import (
    ALL_KEYS,
    Budget,
    TooFineError,
    cut,
    of_class,
    simplify,
    split_classes,
)
from policies.retention.claims import Claim, Forever, Keys, Rule, Unread, Until, last_read
from policies.retention.clauses import Bounds, bound, multiply_out
from policies.retention.forms import KEY, Form, add, growth, key_period
from policies.retention.ir import Relation
from policies.retention.strides import Ending, Part, Strides, Value, class_line
from policies.retention.witness import Witness
from policies.retention.witness_grid import build_witness

DEFAULT_STEPS = 40_000
"""Steps that one inference may spend (`axis.Budget`): a fraction of a second at most."""

MAX_MERGED_MODULUS = 4096
"""Parts are not joined into one with a larger modulus than this."""

STEPS_PER_PART = 8
"""What looking at a further part of the axis costs of the budget."""

STEPS_PER_LINE = 32
"""What a claim of its own for one residue class costs."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """When each key of a relation was last read."""

    relation: Relation
    claims: tuple[Claim, ...]
    """Each key is in exactly one; sorted by key."""

    is_exact: bool
    """Whether each claim is attained; if not, some are later than need be."""

    witness: Witness
    """What `policies.retention.witness` needs to check the claims."""

    def last_read(self, key: int) -> int | None:
        """Last reader of ``key``; -1 for none at all, nothing for no last one."""
        return last_read(self.claims, key)


def infer(relation: Relation, *, steps: int = DEFAULT_STEPS) -> Lifetime:
    """Find the lifetime of every key under ``relation``, spending at most ``steps``.

    Raises
    ------
    RetentionError
        ``unsatisfiable`` if no query reads any key.

    Examples
    --------
    >>> from policies.retention.text import parse_relation
    >>> for claim in infer(parse_relation("q - k < 8 or k < 4")).claims:
    ...     print(claim)
    k in [0, 4): forever
    k in [4, ...): window 8
    """
    clauses, is_loose = multiply_out(relation)
    alternatives = [found for clause in clauses for found in bound(clause)]
    is_loose = is_loose or any(found.is_loose for found in alternatives)
    search = _Search(Budget(steps), is_loose)
    claims = search.claims(search.raise_all(alternatives))
    if all(isinstance(claim.rule, Unread) for claim in claims):
        raise RetentionError("unsatisfiable", str(relation), "no query ever reads a key")
    witness = build_witness(claims, alternatives, is_exact=not search.is_loose)
    return Lifetime(relation, claims, not search.is_loose, witness)


@dataclass(slots=True)
class _Search:
    """One inference: what it may still spend, and whether it had to give way."""

    budget: Budget
    #: Only ever rises.
    is_loose: bool

    def raise_all(self, alternatives: list[Bounds]) -> list[Part]:
        """Last readers once every alternative is admitted; those without an end come first."""
        parts: list[Part] = [(ALL_KEYS, Ending.NEVER)]
        ordered = sorted(alternatives, key=lambda found: bool(found.highs))
        for index, alternative in enumerate(ordered):
            try:
                self.budget.spend(STEPS_PER_PART * (len(parts) - 1))
            except TooFineError:
                self.is_loose = True
                return self._raise_bluntly(parts, ordered[index:])
            parts = coalesce(self.raise_to(parts, alternative))
        return parts

    def _raise_bluntly(self, parts: list[Part], alternatives: list[Bounds]) -> list[Part]:
        """Last readers once all of ``alternatives`` are, as if each spoke of every key."""
        if not all(found.highs for found in alternatives):
            return [(ALL_KEYS, Ending.FOREVER)]
        highest = ceiling(*(min(found.highs, key=_steepness) for found in alternatives))
        raised: list[Part] = []
        for keys, value in parts:
            if value is Ending.FOREVER:
                raised.append((keys, value))
            else:
                new = ceiling(value, highest) if isinstance(value, Form) else highest
                raised.append((keys, new))
        return coalesce(raised)

    def raise_to(self, parts: list[Part], bounds: Bounds) -> list[Part]:
        """Last readers once ``bounds`` is admitted too."""
        found: list[Part] = []
        strides = Strides.of(bounds.strides) if bounds.strides else None
        for keys, value in parts:
            if value is Ending.FOREVER:
                found.append((keys, value))
                continue
            inside, outside = self._where(keys, bounds)
            found += [(other, value) for other in outside]
            for part in inside:
                for here, new in self._last_of(part, bounds, strides):
                    found += self._later(here, value, new)
        return found

    def _where(self, keys: Keys, bounds: Bounds) -> tuple[list[Keys], list[Keys]]:
        """The keys that the guards admit, and the others."""
        inside: list[Keys] = [keys]
        outside: list[Keys] = []
        if bounds.residue[0] > 1:
            inside, outside = self._where_class(keys, *bounds.residue)
        for guard in bounds.guards:
            try:
                cuts = [cut(part, guard, self.budget) for part in inside]
            except TooFineError:
                self.is_loose = True
                continue
            inside = [part for kept, _ in cuts for part in kept]
            outside += [part for _, refused in cuts for part in refused]
        return inside, outside

    def _where_class(self, keys: Keys, modulus: int, residue: int) -> tuple[list[Keys], list[Keys]]:
        common = lcm(keys.modulus, modulus)
        try:
            classes = split_classes(keys, common, self.budget)
        except TooFineError:
            self.is_loose = True
            return [keys], []
        sides: tuple[list[Keys], list[Keys]] = ([], [])
        for side, is_inside in zip(sides, (True, False), strict=True):
            chosen = tuple(sorted(r for r in classes if (r % modulus == residue) == is_inside))
            whole = Keys(keys.start, keys.stop, common, chosen) if chosen else None
            if part := whole and simplify(whole).clip(0, None):
                side.append(part)
        return sides

    def _last_of(self, keys: Keys, bounds: Bounds, strides: Strides | None) -> list[Part]:
        """Last query of one alternative; the parts make up ``keys``."""
        if not bounds.highs:
            return self._unbounded(keys, strides)
        parts: list[Part] = [(keys, bounds.highs[0])]
        for high in bounds.highs[1:]:
            parts = [new for old in parts for new in self._earlier(*old, high)]
        if strides:
            parts = [new for old in parts for new in self._rounded(*old, strides)]
        for low in bounds.lows:
            parts = [new for old in parts for new in self._at_least(*old, low)]
        return parts

    def _unbounded(self, keys: Keys, strides: Strides | None) -> list[Part]:
        if strides is None:
            return [(keys, Ending.FOREVER)]
        try:
            return strides.last_forever(keys, self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, Ending.FOREVER)]

    def _earlier(self, keys: Keys, value: Value, high: Form) -> list[Part]:
        """The lesser of two bounds; either one alone is sound."""
        assert isinstance(value, Form)
        try:
            lower, higher = cut(keys, add(high, value, -1), self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, min(value, high, key=_steepness))]
        parts: list[Part] = [(part, high) for part in lower]
        return parts + [(part, value) for part in higher]

    def _rounded(self, keys: Keys, value: Value, strides: Strides) -> list[Part]:
        assert isinstance(value, Form)
        try:
            return strides.round_down(keys, value, self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, value)]

    def _at_least(self, keys: Keys, value: Value, low: Form) -> list[Part]:
        """Never, where the last query would be before ``low``."""
        if not isinstance(value, Form):
            return [(keys, value)]
        try:
            kept, dropped = cut(keys, add(low, value, -1), self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, value)]
        parts: list[Part] = [(part, value) for part in kept]
        return parts + [(part, Ending.NEVER) for part in dropped]

    def _later(self, keys: Keys, a: Value, b: Value) -> list[Part]:
        """The greater of two last readers."""
        if a is Ending.NEVER or b is Ending.FOREVER or a == b:
            return [(keys, b)]
        if not isinstance(a, Form) or not isinstance(b, Form):
            return [(keys, a)]
        try:
            lower, higher = cut(keys, add(b, a, -1), self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, ceiling(a, b))]
        if lower and higher and self._is_never_above(keys, a, b):
            return [(keys, b)]  # equal where it is not later: one plain answer for all
        parts: list[Part] = [(part, a) for part in lower]
        return parts + [(part, b) for part in higher]

    def _is_never_above(self, keys: Keys, a: Form, b: Form) -> bool:
        """Whether ``a <= b`` on all of ``keys``, as far as the budget lets one see."""
        try:
            return not cut(keys, add(a, b, -1), self.budget)[1]
        except TooFineError:
            return False

    def claims(self, parts: list[Part]) -> tuple[Claim, ...]:
        """The parts as claims, sorted by key."""
        read = coalesce([new for old in parts for new in self._if_read(*old)])
        lines = coalesce([new for old in read for new in self._as_lines(*old)])
        found = [Claim(keys, _rule(value)) for keys, value in lines]
        return tuple(sorted(found, key=lambda claim: claim.keys.first_from(0) or 0))

    def _if_read(self, keys: Keys, value: Value) -> list[Part]:
        """Never, where the last query would be before the key itself."""
        if not isinstance(value, Form):
            return [(keys, value)]
        try:
            kept, dropped = cut(keys, add(KEY, value, -1), self.budget)
        except TooFineError:
            return [(keys, value)]  # says the same, less plainly
        parts: list[Part] = [(part, value) for part in kept]
        return parts + [(part, Ending.NEVER) for part in dropped]

    def _as_lines(self, keys: Keys, value: Value) -> list[Part]:
        """Split until each value fits `Until`."""
        if not isinstance(value, Form) or _fits(value):
            return [(keys, value)]
        modulus = lcm(keys.modulus, key_period(value))
        try:
            self.budget.spend(STEPS_PER_LINE * len(keys.residues) * (modulus // keys.modulus))
            residues = split_classes(keys, modulus, self.budget)
        except TooFineError:
            self.is_loose = True
            return [(keys, ceiling(value))]
        split = [(of_class(keys, modulus, r), class_line(value, modulus, r)) for r in residues]
        return [(part, line) for part, line in split if part is not None]


def _steepness(form: Form) -> tuple[Fraction, Fraction]:
    """Orders forms by growth, then by height."""
    found = growth(form)
    return Fraction(found.key, found.scale), Fraction(found.high, found.scale)


def ceiling(*forms: Form) -> Form:
    """A straight line that is nowhere below any of ``forms``."""
    found = [growth(form) for form in forms]
    slope = max(-(-rise.key // rise.scale) for rise in found)
    return Form(key=slope, constant=max(rise.high // rise.scale for rise in found))


def _fits(form: Form) -> bool:
    """Whether the form is ``slope * ((k + shift) // step) + offset``."""
    if form.is_linear:
        return True
    inner = form.floors[0][0].inner
    return form.key == 0 and len(form.floors) == 1 and inner.is_linear and inner.key == 1


def _rule(value: Value) -> Rule:
    if isinstance(value, Ending):
        return Forever() if value is Ending.FOREVER else Unread()
    if value.is_linear:
        return Until(1, value.key, value.constant)
    inner, times = value.floors[0]
    return Until(inner.divisor, times, value.constant, inner.inner.constant)


def coalesce(parts: Iterable[Part]) -> list[Part]:
    """Join parts of equal value: residues over one range, then ranges that meet."""
    by_range: dict[tuple[int, int | None, Value], list[Keys]] = {}
    for keys, value in parts:
        by_range.setdefault((keys.start, keys.stop, value), []).append(keys)
    by_class: dict[tuple[int, tuple[int, ...], Value], list[Keys]] = {}
    for (_, _, value), group in by_range.items():
        for keys in _join_classes(group):
            by_class.setdefault((keys.modulus, keys.residues, value), []).append(keys)
    return [
        (keys, value) for (_, _, value), group in by_class.items() for keys in _join_ranges(group)
    ]


def _join_classes(group: list[Keys]) -> list[Keys]:
    modulus = lcm(*(keys.modulus for keys in group))
    if len(group) == 1 or modulus > MAX_MERGED_MODULUS:
        return group
    residues = {
        turn * keys.modulus + residue
        for keys in group
        for turn in range(modulus // keys.modulus)
        for residue in keys.residues
    }
    return [simplify(Keys(group[0].start, group[0].stop, modulus, tuple(sorted(residues))))]


def _join_ranges(group: list[Keys]) -> list[Keys]:
    joined: list[Keys] = []
    for keys in sorted(group):
        if joined and joined[-1].stop == keys.start:
            old = joined.pop()
            joined.append(Keys(old.start, keys.stop, keys.modulus, keys.residues))
        else:
            joined.append(keys)
    return joined
