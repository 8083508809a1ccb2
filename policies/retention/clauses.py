"""A relation as alternatives, each a list of bounds on the query for a given key.

1. Every comparison becomes ``form <= 0`` or ``form == 0`` (`Atom`).
2. The predicate becomes a disjunction of conjunctions of atoms.
3. In each conjunction (`Bounds`) an atom becomes one of: a *guard*, on the key alone; a
   *high* or *low*, ``q <= form(k)`` or ``q >= form(k)``; a *stride*, whose truth repeats
   with some period in both positions.  An atom with one floor around the query is undone
   (``t // m <= v`` is ``t <= m*v + m - 1``); one with several is split by residue, after
   which it has one.

Each step is an equivalence, unless it would exceed a limit.  Then an atom is left out,
which can only admit more reads, and the result is marked loose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from policies.retention.forms import (
    KEY,
    QUERY,
    Floor,
    Form,
    add,
    at,
    common_period,
    floor,
    growth,
    of_term,
    scale,
    shift,
)
from policies.retention.ir import And, AtMost, Equal, Less, Or, Relation, Truth

MAX_CLAUSES: Final = 256
"""Most conjunctions that a relation is multiplied out to."""

MAX_SPLITS: Final = 1024
"""Most conjunctions after splitting by residue."""


@dataclass(frozen=True, slots=True)
class Atom:
    """``form <= 0``, or ``form == 0``."""

    form: Form
    is_equality: bool = False

    def holds(self, query: int, key: int) -> bool:
        """Whether the pair satisfies the atom."""
        found = at(self.form, query, key)
        return found == 0 if self.is_equality else found <= 0


Clause = tuple[Atom, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """One alternative: a pair may be read if all of this admits it."""

    guards: tuple[Form, ...] = ()
    """Forms of the key that must not be positive."""

    highs: tuple[Form, ...] = ()
    """Forms of the key that the query must not exceed."""

    lows: tuple[Form, ...] = ()
    """Forms of the key that the query must reach."""

    strides: tuple[Atom, ...] = ()
    """Atoms that repeat with `common_period` in both positions."""

    residue: tuple[int, int] = (1, 0)
    """Modulus and remainder of the keys meant."""

    is_loose: bool = False
    """Whether something was left out."""


def multiply_out(relation: Relation) -> tuple[list[Clause], bool]:
    """Conjunctions whose union is the relation, and whether it may be larger."""
    match relation:
        case Truth(value):
            return ([()] if value else []), False
        case Less(left, right) | AtMost(left, right) | Equal(left, right):
            form = add(of_term(left), of_term(right), -1)
            if isinstance(relation, Less):
                form = shift(form, 1)
            return [(Atom(form, isinstance(relation, Equal)),)], False
        case Or(parts):
            clauses: list[Clause] = []
            is_loose = False
            for part in parts:
                more, part_is_loose = multiply_out(part)
                clauses += more
                is_loose |= part_is_loose
            return ([()], True) if len(clauses) > MAX_CLAUSES else (clauses, is_loose)
        case And(parts):
            clauses, is_loose = [()], False
            factors = sorted(map(multiply_out, parts), key=lambda found: len(found[0]))
            for more, part_is_loose in factors:
                if len(clauses) * len(more) > MAX_CLAUSES:
                    is_loose = True
                    continue
                clauses = [old + new for old in clauses for new in more]
                is_loose |= part_is_loose
            return clauses, is_loose


def bound(clause: Clause) -> list[Bounds]:
    """Alternatives that together admit the pairs of ``clause``, or a few more."""
    todo: list[tuple[Bounds, Clause]] = [(Bounds(), clause)]
    done: list[Bounds] = []
    while todo:
        bounds, atoms = todo.pop()
        if not atoms:
            done.append(bounds)
            continue
        truth = _plain_truth(atoms[0])
        if truth is None:
            room = MAX_SPLITS - len(todo) - len(done)
            todo += _consume(bounds, atoms[0], atoms[1:], room)
        elif truth:
            todo.append((bounds, atoms[1:]))
    return done


def _consume(bounds: Bounds, atom: Atom, rest: Clause, room: int) -> list[tuple[Bounds, Clause]]:
    """Take one atom into ``bounds``; it may leave simpler ones, or split the clause."""
    form = atom.form
    if not form.reads_query:
        forms = (form, scale(form, -1)) if atom.is_equality else (form,)
        return [(replace(bounds, guards=bounds.guards + forms), rest)]
    parts = _query_parts(form)
    rise = growth(form)
    if rise.query == rise.key == 0:
        return [(replace(bounds, strides=(*bounds.strides, atom)), rest)]
    if atom.is_equality:
        both = (Atom(form), Atom(scale(form, -1)))
        return [(bounds, both + rest)]
    if len(parts) == 1:
        return [_unwrap(bounds, form, parts[0], rest)]
    splits = _split(form, room)
    if splits is None:
        return [(replace(bounds, is_loose=True), rest)]
    return [(found, (extra, *rest)) for found, extra in _apply(bounds, splits)]


def _plain_truth(atom: Atom) -> bool | None:
    """Whether growth and spread alone decide the atom over ``0 <= k <= q``."""
    found = growth(atom.form)
    both = (found.query, found.query + found.key)  # with the distance, and with the key
    if max(both) <= 0 and found.high < (0 if atom.is_equality else 1):
        return not atom.is_equality
    return False if min(both) >= 0 and found.low > 0 else None


def _query_parts(form: Form) -> list[Floor | None]:
    """The floors that contain the query; nothing stands for the query itself."""
    found: list[Floor | None] = [None] if form.query else []
    return found + [inner for inner, _ in form.floors if inner.inner.reads_query]


def _unwrap(bounds: Bounds, form: Form, part: Floor | None, rest: Clause) -> tuple[Bounds, Clause]:
    """Solve ``form <= 0`` for the only place where the query occurs."""
    factor = form.query if part is None else dict(form.floors)[part]
    place = QUERY if part is None else Form(floors=((part, 1),))
    others = add(form, place, -factor)  # without the query
    if factor > 0:
        limit = floor(scale(others, -1), factor)  # place <= limit
    else:
        limit = scale(floor(scale(others, -1), -factor), -1)  # place >= limit
    if part is None:
        if factor > 0:
            return replace(bounds, highs=(*bounds.highs, limit)), rest
        return replace(bounds, lows=(*bounds.lows, limit)), rest
    edge = scale(limit, part.divisor)
    if factor > 0:  # inner // m <= limit
        inner = shift(add(part.inner, edge, -1), 1 - part.divisor)
    else:  # inner // m >= limit
        inner = add(edge, part.inner, -1)
    return bounds, (Atom(inner), *rest)


@dataclass(frozen=True, slots=True)
class _Split:
    """One residue class, and the atom restricted to it."""

    atom: Atom
    strides: tuple[Atom, ...]
    residue: tuple[int, int] = (1, 0)


def _apply(bounds: Bounds, splits: list[_Split]) -> Iterator[tuple[Bounds, Atom]]:
    modulus, remainder = bounds.residue
    # A class that was chosen before stays, as two guards.
    old = shift(add(KEY, floor(KEY, modulus), -modulus), -remainder)
    kept = (*bounds.guards, old, scale(old, -1)) if modulus > 1 else bounds.guards
    for split in splits:
        found = replace(bounds, strides=bounds.strides + split.strides)
        if split.residue[0] > 1:
            found = replace(found, guards=kept, residue=split.residue)
        yield found, split.atom


def _split(form: Form, room: int) -> list[_Split] | None:
    """Restrict ``form <= 0`` to residue classes on which one place reads the query."""
    floors = [(inner, times) for inner, times in form.floors if inner.inner.reads_query]
    period = common_period(Form(floors=tuple(floors)))
    rest = Form(form.query, form.key, form.constant, tuple(set(form.floors) - set(floors)))
    rest = add(Form(), rest)  # floors in order again
    if all(inner.inner.is_distance for inner, _ in floors):
        place, step = add(QUERY, KEY, -1), (period, 0)
        rest = add(add(rest, QUERY, -form.query), KEY, form.query)  # q is k + (q - k)
    elif not any(inner.inner.reads_key for inner, _ in floors):
        place, step = QUERY, (period, 0)
        rest = add(rest, QUERY, -form.query)
    else:
        place, step = QUERY, (period, period)
        rest = add(add(rest, QUERY, -form.query), KEY, -form.key)
    if period * max(1, step[1]) > room:
        return None
    moving = Form(form.query, 0 if step[1] == 0 else form.key, 0, tuple(floors))
    turns, key_turns = floor(place, period), floor(KEY, period)
    found = []
    origin = at(moving, 0, 0)
    slope, key_slope = at(moving, period, 0) - origin, at(moving, 0, period) - origin
    at_class = add(place, turns, -period)
    for remainder in range(period):
        stride = Atom(shift(at_class, -remainder), is_equality=True)
        for key_remainder in range(max(1, step[1])):
            here = at(moving, remainder, key_remainder)
            linear = add(shift(rest, here), turns, slope)
            if step[1]:
                linear = add(linear, key_turns, key_slope)
            residue = (period, key_remainder) if step[1] else (1, 0)
            found.append(_Split(Atom(linear), (stride,), residue))
    return found
