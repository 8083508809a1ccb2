"""Cut the key axis where a form of the key changes sign, exactly.

On a residue class modulo the form's period it is a straight line, so it changes sign once.
Cutting by residue costs one step per class; a `Budget` bounds the sum of such steps over one
relation.  When it is spent, `TooFineError` is raised and the caller answers something
looser that is still sound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from policies.retention.claims import Keys
from policies.retention.forms import Form, at, growth, key_period


class TooFineError(Exception):
    """Cutting exactly would cost more steps than are left."""


@dataclass(slots=True)
class Budget:
    """Steps left for one relation."""

    #: Never negative.
    steps: int

    def spend(self, steps: int) -> None:
        """Take ``steps``, or raise `TooFineError` and take nothing."""
        if steps > self.steps:
            raise TooFineError
        self.steps -= steps


ALL_KEYS = Keys()


def split_classes(keys: Keys, modulus: int, budget: Budget) -> list[int]:
    """Residues modulo a multiple of the keys' own modulus that make up ``keys``."""
    turns = modulus // keys.modulus
    budget.spend(turns * len(keys.residues))
    return [turn * keys.modulus + r for turn in range(turns) for r in keys.residues]


def of_class(keys: Keys, modulus: int, residue: int) -> Keys | None:
    """The members of ``keys`` in one residue class of a multiple of their modulus."""
    return Keys(keys.start, keys.stop, modulus, (residue,)).clip(0, None)


def always_sign(form: Form, keys: Keys) -> bool | None:
    """Whether ``form <= 0`` on all of ``keys`` (or on none); nothing if not plain to see."""
    found = growth(form)
    rate, low, high = found.key, found.low, found.high  # times a scale, which has no sign
    first = rate * keys.start
    last = None if keys.stop is None else rate * (keys.stop - 1)
    if last is None and rate > 0:
        return False if first + low > 0 else None
    if last is None and rate < 0:
        return True if first + high <= 0 else None
    ends = [first, first if last is None else last]
    if max(ends) + high <= 0:
        return True
    return False if min(ends) + low > 0 else None


def cut(keys: Keys, form: Form, budget: Budget) -> tuple[list[Keys], list[Keys]]:
    """Part ``keys`` into those where ``form <= 0`` and those where it is not.

    Raises
    ------
    TooFineError
        If there are more residue classes than the budget allows.
    """
    sign = always_sign(form, keys)
    if sign is not None:
        return ([keys], []) if sign else ([], [keys])
    if form.is_linear:
        return _cut_line(keys, form)
    modulus = lcm(keys.modulus, key_period(form))
    groups: dict[tuple[bool, int, int | None], list[int]] = {}
    slope = at(form, 0, modulus) - at(form, 0, 0)
    for residue in split_classes(keys, modulus, budget):
        for holds, first, last in _sides(slope, at(form, 0, residue)):
            groups.setdefault((holds, first, last), []).append(residue)
    parts: tuple[list[Keys], list[Keys]] = ([], [])
    for (holds, first, last), residues in groups.items():
        stop = None if last is None else modulus * last
        whole = simplify(Keys(keys.start, keys.stop, modulus, tuple(sorted(residues))))
        if part := whole.clip(modulus * first, stop):
            parts[0 if holds else 1].append(part)
    return parts


def _sides(slope: int, here: int) -> list[tuple[bool, int, int | None]]:
    """Where ``slope * y + here <= 0`` over ``y >= 0``: truth, first ``y``, one past the last."""
    if slope == 0:
        return [(here <= 0, 0, None)]
    if slope > 0:
        edge = max(0, -here // slope + 1)  # holds below the edge
        sides: list[tuple[bool, int, int | None]] = [(True, 0, edge), (False, edge, None)]
    else:
        edge = max(0, -(-here // -slope))  # holds from the edge on
        sides = [(False, 0, edge), (True, edge, None)]
    return [side for side in sides if side[2] is None or side[1] < side[2]]


def _cut_line(keys: Keys, form: Form) -> tuple[list[Keys], list[Keys]]:
    parts: tuple[list[Keys], list[Keys]] = ([], [])
    for holds, first, last in _sides(form.key, form.constant):
        if part := keys.clip(first, last):
            parts[0 if holds else 1].append(part)
    return parts


def simplify(keys: Keys) -> Keys:
    """The same set with the least modulus that describes it."""
    modulus, residues = keys.modulus, keys.residues
    for prime in _primes(modulus):
        while modulus % prime == 0:
            smaller = modulus // prime
            folded = tuple(sorted({r % smaller for r in residues}))
            if len(folded) * prime != len(residues):
                break
            modulus, residues = smaller, folded
    return Keys(keys.start, keys.stop, modulus, residues)


def _primes(number: int) -> list[int]:
    found, prime = [], 2
    while prime * prime <= number:
        if number % prime == 0:
            found.append(prime)
            while number % prime == 0:
                number //= prime
        prime += 1
    return [*found, number] if number > 1 else found
