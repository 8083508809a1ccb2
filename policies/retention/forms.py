"""Quasi-affine forms: linear in ``q`` and ``k``, plus multiples of floors of such forms.

Every term of the language is one: ``t % m`` is ``t - m * floor(t / m)``.  Equal functions
often get equal forms (floors of floors are joined, common factors and whole multiples are
pulled out), but not always; nothing here depends on it.

Facts used elsewhere, each exact:

* `growth`: the form stays within a band around a straight line.
* `common_period`: on residue classes of both positions modulo this, the form is linear.
* `key_period`: the least such modulus for a form of ``k`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm

from policies.retention.ir import (
    Constant,
    Difference,
    FloorDivision,
    Key,
    Modulo,
    Query,
    Sum,
    Term,
)


@dataclass(frozen=True, slots=True, order=True)
class Floor:
    """``inner // divisor``, rounded down."""

    inner: Form
    divisor: int


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """``query * q + key * k + constant + sum(factor * floor)``."""

    query: int = 0
    key: int = 0
    constant: int = 0
    floors: tuple[tuple[Floor, int], ...] = ()
    """Distinct floors in order, each with a factor that is not zero."""

    @property
    def is_linear(self) -> bool:
        """Whether there are no floors."""
        return not self.floors

    @property
    def reads_query(self) -> bool:
        """Whether ``q`` occurs."""
        return self.query != 0 or any(floor.inner.reads_query for floor, _ in self.floors)

    @property
    def reads_key(self) -> bool:
        """Whether ``k`` occurs."""
        return self.key != 0 or any(floor.inner.reads_key for floor, _ in self.floors)

    @property
    def is_distance(self) -> bool:
        """Whether the positions occur only as ``q - k``."""
        inner = all(floor.inner.is_distance for floor, _ in self.floors)
        return inner and self.query == -self.key

    def __str__(self) -> str:
        parts = [(self.query, "q"), (self.key, "k")]
        parts += [
            (factor, f"(({floor.inner}) // {floor.divisor})") for floor, factor in self.floors
        ]
        named = [name if n == 1 else f"{n}*{name}" for n, name in parts if n]
        return " + ".join([*named, str(self.constant)])


QUERY = Form(query=1)
KEY = Form(key=1)


def constant(value: int) -> Form:
    """The form that is always ``value``."""
    return Form(constant=value)


def add(a: Form, b: Form, factor: int = 1) -> Form:
    """``a + factor * b``."""
    return Form(
        a.query + factor * b.query,
        a.key + factor * b.key,
        a.constant + factor * b.constant,
        _add_floors(a.floors, b.floors, factor) if b.floors and factor else a.floors,
    )


def _add_floors(
    a: tuple[tuple[Floor, int], ...], b: tuple[tuple[Floor, int], ...], factor: int
) -> tuple[tuple[Floor, int], ...]:
    if not a:
        return tuple((floor, factor * times) for floor, times in b)
    floors = dict(a)
    for floor, times in b:
        floors[floor] = floors.get(floor, 0) + factor * times
    return tuple(sorted((floor, times) for floor, times in floors.items() if times))


def scale(a: Form, factor: int) -> Form:
    """``factor * a``."""
    return add(Form(), a, factor)


def shift(a: Form, by: int) -> Form:
    """``a + by``."""
    return Form(a.query, a.key, a.constant + by, a.floors)


def floor(a: Form, divisor: int) -> Form:
    """``a // divisor``, simplified."""
    if divisor == 1:
        return a
    whole = [n // divisor if n % divisor == 0 else 0 for n in (a.query, a.key)]
    pulled = Form(whole[0], whole[1], a.constant // divisor)
    kept = {}
    for inner, times in a.floors:
        if times % divisor == 0:
            pulled = add(pulled, Form(floors=((inner, times // divisor),)))
        else:
            kept[inner] = times
    rest = Form(
        a.query - whole[0] * divisor,
        a.key - whole[1] * divisor,
        a.constant % divisor,
        tuple(sorted(kept.items())),
    )
    return add(pulled, _floor_of_rest(rest, divisor))


def _floor_of_rest(rest: Form, divisor: int) -> Form:
    """Floor of a form from which whole multiples of ``divisor`` are gone."""
    factors = [rest.query, rest.key, *(times for _, times in rest.floors)]
    common = gcd(divisor, *factors)
    if common == divisor:  # nothing is left but a constant below the divisor
        return Form()
    if common > 1:
        floors = tuple((inner, times // common) for inner, times in rest.floors)
        smaller = Form(rest.query // common, rest.key // common, rest.constant // common, floors)
        return floor(smaller, divisor // common)
    if not rest.query and not rest.key and len(rest.floors) == 1 and rest.floors[0][1] == 1:
        inner = rest.floors[0][0]  # floor((floor(t / a) + c) / b) = floor((t + a*c) / (a*b))
        lifted = shift(inner.inner, inner.divisor * rest.constant)
        return floor(lifted, inner.divisor * divisor)
    return Form(floors=((Floor(rest, divisor), 1),))


def of_term(term: Term) -> Form:
    """The form equal to a term of the language."""
    match term:
        case Query() | Key():
            return QUERY if isinstance(term, Query) else KEY
        case Constant(value):
            return constant(value)
        case Sum(left, right):
            return add(of_term(left), of_term(right))
        case Difference(left, right):
            return add(of_term(left), of_term(right), -1)
        case FloorDivision(inner, divisor):
            return floor(of_term(inner), divisor)
        case Modulo(inner, divisor):
            whole = of_term(inner)
            return add(whole, floor(whole, divisor), -divisor)


def at(a: Form, query: int, key: int) -> int:
    """Value of the form at a pair of positions."""
    found = a.query * query + a.key * key + a.constant
    for inner, times in a.floors:
        found += times * (at(inner.inner, query, key) // inner.divisor)
    return found


@dataclass(frozen=True, slots=True)
class Growth:
    """Where a form stays: ``query * q + key * k + [low, high]``, all over ``scale``."""

    scale: int
    query: int
    key: int
    low: int
    high: int


@lru_cache(maxsize=4096)
def growth(a: Form) -> Growth:
    """Growth in the long run, and how far the form can be from it.

    The bounds hold for all integer positions, and each floor alone attains its own.
    """
    scale, query, key, low, high = 1, a.query, a.key, a.constant, a.constant
    for inner, times in a.floors:
        part = growth(inner.inner)
        below = part.low - part.scale * (inner.divisor - 1)  # of the numerator, times scale
        ends = (times * below, times * part.high)
        inner_scale = part.scale * inner.divisor
        common = lcm(scale, inner_scale)
        old, new = common // scale, common // inner_scale
        query = query * old + times * part.query * new
        key = key * old + times * part.key * new
        low, high = low * old + min(ends) * new, high * old + max(ends) * new
        scale = common
    return Growth(scale, query, key, low, high)


def common_period(a: Form) -> int:
    """A modulus for both positions on whose residue classes the form is linear."""
    return lcm(*(inner.divisor * common_period(inner.inner) for inner, _ in a.floors))


def key_period(a: Form) -> int:
    """The modulus of ``k`` on whose residue classes a form of ``k`` alone is linear."""
    found = 1
    for inner, _ in a.floors:
        period = key_period(inner.inner)
        rise = growth(inner.inner)
        step = rise.key * period // rise.scale
        found = lcm(found, period * (inner.divisor // gcd(inner.divisor, step)))
    return found
