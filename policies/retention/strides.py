"""Round a bound on the query down to a query that the strides admit.

A stride repeats with some period in both positions, so on a residue class of the key the
admitted queries are residue classes too, and rounding down subtracts less than a period.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import gcd, lcm

from policies.retention.axis import Budget, of_class, simplify, split_classes
from policies.retention.claims import Keys
from policies.retention.clauses import Atom
from policies.retention.forms import KEY, Floor, Form, at, common_period, key_period, shift


class Ending(Enum):
    """A last reader that no form describes."""

    NEVER = "never"
    """No query reads the key."""

    FOREVER = "forever"
    """Arbitrarily late queries do."""


Value = Form | Ending
"""Last reader as a function of the key; a value before the key means that nothing reads it."""

Part = tuple[Keys, Value]


@dataclass(frozen=True, slots=True)
class Strides:
    """Atoms that repeat with ``period`` in both positions, all to be satisfied."""

    atoms: tuple[Atom, ...]
    period: int
    is_distance: bool
    """Whether only ``q - k`` matters."""

    reads_key: bool

    @classmethod
    def of(cls, atoms: tuple[Atom, ...]) -> Strides:
        """Join ``atoms``."""
        return cls(
            atoms,
            lcm(*(common_period(atom.form) for atom in atoms)),
            all(atom.form.is_distance for atom in atoms),
            any(atom.form.reads_key for atom in atoms),
        )

    def admitted(self, key: int, budget: Budget) -> list[int]:
        """Residues of the queries that may read a key, given the key's residue."""
        budget.spend(self.period)
        return [
            query
            for query in range(self.period)
            if all(atom.holds(query, key) for atom in self.atoms)
        ]

    def last_forever(self, keys: Keys, budget: Budget) -> list[Part]:
        """Last readers where nothing else bounds the query."""
        if self.is_distance or not self.reads_key:
            found = self.admitted(0, budget)
            return [(keys, Ending.FOREVER if found else Ending.NEVER)]
        modulus = lcm(keys.modulus, self.period)
        groups: dict[bool, list[int]] = {}
        for residue in split_classes(keys, modulus, budget):
            found = self.admitted(residue % self.period, budget)
            groups.setdefault(bool(found), []).append(residue)
        parts: list[Part] = []
        for is_read, residues in groups.items():
            whole = Keys(keys.start, keys.stop, modulus, tuple(sorted(residues)))
            if part := simplify(whole).clip(0, None):
                parts.append((part, Ending.FOREVER if is_read else Ending.NEVER))
        return parts

    def round_down(self, keys: Keys, high: Form, budget: Budget) -> list[Part]:
        """Last admitted query that is at most ``high``, on each part of ``keys``."""
        follows_key = high.is_linear and high.key == 1 and self.is_distance
        stands_still = high.is_linear and high.key == 0 and not self.reads_key
        if follows_key or stands_still:
            found = self.admitted(0, budget)
            return [(keys, _lowered(high, high.constant, found, self.period))]
        base = lcm(keys.modulus, key_period(high), self.period)
        slope = at(high, 0, base) - at(high, 0, 0)
        modulus = base * (self.period // gcd(self.period, slope))
        parts: list[Part] = []
        known: dict[int, list[int]] = {}
        for residue in split_classes(keys, modulus, budget):
            part = of_class(keys, modulus, residue)
            if part is None:
                continue
            admitted = known.get(residue % self.period)
            if admitted is None:
                admitted = self.admitted(residue % self.period, budget)
                known[residue % self.period] = admitted
            limit = at(high, 0, residue)
            line = class_line(high, modulus, residue)
            parts.append((part, _lowered(line, limit, admitted, self.period)))
        return parts


def _lowered(high: Form, limit: int, admitted: list[int], period: int) -> Value:
    """``high`` less the distance from ``limit`` down to an admitted residue."""
    if not admitted:
        return Ending.NEVER
    return shift(high, -min((limit - residue) % period for residue in admitted))


def class_line(form: Form, modulus: int, residue: int) -> Form:
    """The form, restricted to a residue class on which it is a straight line."""
    here = at(form, 0, residue)
    slope = at(form, 0, residue + modulus) - here
    if slope % modulus == 0:
        factor = slope // modulus
        return Form(key=factor, constant=here - factor * residue)
    return Form(constant=here, floors=((Floor(KEY, modulus), slope),))
