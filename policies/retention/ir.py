"""The retention language: which query may read which key, as immutable terms.

A relation is a predicate over two positions, the query ``q`` and the key ``k``, within
the causal domain ``0 <= k <= q``; outside it nothing is read, whatever the predicate says.
Terms are integers: ``q``, ``k``, constants, sums, differences, floor-division and modulo by
positive constants (both round down, so a remainder is never negative).  There are no
products of positions and there is no negation.

Positions go up to `MAX_POSITION`.  Every term knows the least and greatest value it can take
there, and a term that could leave 64-bit integers cannot be built.  So a relation that
exists never overflows on a position that exists; asked about a later position, it answers
"may read", which is the safe side for a question about liveness.

This module does not parse (`policies.retention.text`), evaluate
(`policies.retention.evaluate`) or draw conclusions (`policies.retention.lifetime`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from codec.errors import RetentionError

MAX_POSITION: Final = 2**48 - 1
"""Last position of any sequence; no term may overflow up to here."""

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**63 - 1
MAX_DEPTH: Final = 48
MAX_NODES: Final = 2048


@dataclass(frozen=True, slots=True)
class _Shape:
    """Size of an expression, and the values it can take."""

    low: int
    high: int
    nodes: int = 1
    depth: int = 1


def _grow(owner: object, low: int, high: int, *parts: _Shape) -> _Shape:
    """Shape of an expression with the given values over ``parts``; refuse what is too big."""
    nodes = 1 + sum(part.nodes for part in parts)
    depth = 1 + max((part.depth for part in parts), default=0)
    if depth > MAX_DEPTH or nodes > MAX_NODES:
        raise RetentionError(
            "too-large",
            f"{type(owner).__name__} of {nodes} nodes",
            f"a relation has at most {MAX_NODES} nodes, {MAX_DEPTH} deep",
        )
    if not INT_MIN <= low <= high <= INT_MAX:
        raise RetentionError("overflow", str(owner), "the term can leave 64-bit integers")
    return _Shape(low, high, nodes, depth)


def _set_shape(owner: object, low: int, high: int, *parts: _Shape) -> None:
    object.__setattr__(owner, "shape", _grow(owner, low, high, *parts))


def _wrap(term: Term) -> str:
    """Text of an operand that must bind tighter than a sum."""
    text = str(term)
    return f"({text})" if isinstance(term, Sum | Difference) or text[0] == "-" else text


@dataclass(frozen=True, slots=True)
class Query:
    """The position of the token that reads."""

    shape: _Shape = field(default=_Shape(0, MAX_POSITION), init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return "q"


@dataclass(frozen=True, slots=True)
class Key:
    """The position of the token that is read."""

    shape: _Shape = field(default=_Shape(0, MAX_POSITION), init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return "k"


@dataclass(frozen=True, slots=True)
class Constant:
    """A 64-bit integer."""

    value: int
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.value) is not int:
            raise RetentionError("not-an-integer", repr(self.value), "need an integer constant")
        _set_shape(self, self.value, self.value)

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Sum:
    """``left + right``."""

    left: Term
    right: Term
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        a, b = self.left.shape, self.right.shape
        _set_shape(self, a.low + b.low, a.high + b.high, a, b)

    def __str__(self) -> str:
        return f"{self.left} + {_wrap(self.right)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """``left - right``."""

    left: Term
    right: Term
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        a, b = self.left.shape, self.right.shape
        _set_shape(self, a.low - b.high, a.high - b.low, a, b)

    def __str__(self) -> str:
        return f"{self.left} - {_wrap(self.right)}"


def _check_divisor(owner: FloorDivision | Modulo, rule: str) -> None:
    if type(owner.divisor) is not int or not 1 <= owner.divisor <= INT_MAX:
        raise RetentionError(rule, str(owner), f"need a positive divisor, got {owner.divisor!r}")


@dataclass(frozen=True, slots=True)
class FloorDivision:
    """``term // divisor``, rounded down."""

    term: Term
    divisor: int
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_divisor(self, "bad-divisor")
        inner = self.term.shape
        _set_shape(self, inner.low // self.divisor, inner.high // self.divisor, inner)

    def __str__(self) -> str:
        return f"{_wrap(self.term)} // {self.divisor}"


@dataclass(frozen=True, slots=True)
class Modulo:
    """``term % divisor``, in ``0 .. divisor - 1``."""

    term: Term
    divisor: int
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_divisor(self, "bad-modulus")
        _set_shape(self, 0, self.divisor - 1, self.term.shape)

    def __str__(self) -> str:
        return f"{_wrap(self.term)} % {self.divisor}"


Term: TypeAlias = Query | Key | Constant | Sum | Difference | FloorDivision | Modulo


@dataclass(frozen=True, slots=True)
class Truth:
    """A predicate that holds always, or never."""

    value: bool
    shape: _Shape = field(default=_Shape(0, 1), init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return "true" if self.value else "false"


@dataclass(frozen=True, slots=True)
class Less:
    """``left < right``."""

    left: Term
    right: Term
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set_shape(self, 0, 1, self.left.shape, self.right.shape)

    def __str__(self) -> str:
        return f"{self.left} < {self.right}"


@dataclass(frozen=True, slots=True)
class AtMost:
    """``left <= right``."""

    left: Term
    right: Term
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set_shape(self, 0, 1, self.left.shape, self.right.shape)

    def __str__(self) -> str:
        return f"{self.left} <= {self.right}"


@dataclass(frozen=True, slots=True)
class Equal:
    """``left == right``."""

    left: Term
    right: Term
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _set_shape(self, 0, 1, self.left.shape, self.right.shape)

    def __str__(self) -> str:
        return f"{self.left} == {self.right}"


@dataclass(frozen=True, slots=True)
class And:
    """All of two or more predicates hold."""

    parts: tuple[Relation, ...]
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_parts(self)

    def __str__(self) -> str:
        return " and ".join(f"({p})" if isinstance(p, And | Or) else str(p) for p in self.parts)


@dataclass(frozen=True, slots=True)
class Or:
    """At least one of two or more predicates holds."""

    parts: tuple[Relation, ...]
    shape: _Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_parts(self)

    def __str__(self) -> str:
        return " or ".join(f"({p})" if isinstance(p, Or) else str(p) for p in self.parts)


def _check_parts(owner: And | Or) -> None:
    if len(owner.parts) < 2:
        raise ValueError(f"need two or more parts, got {len(owner.parts)}")
    _set_shape(owner, 0, 1, *(part.shape for part in owner.parts))


Relation: TypeAlias = Truth | Less | AtMost | Equal | And | Or


def all_of(*parts: Relation) -> Relation:
    """Conjunction of any number of predicates; of none, truth."""
    if len(parts) == 1:
        return parts[0]
    return And(parts) if parts else Truth(value=True)


def any_of(*parts: Relation) -> Relation:
    """Disjunction of any number of predicates; of none, falsity."""
    if len(parts) == 1:
        return parts[0]
    return Or(parts) if parts else Truth(value=False)
