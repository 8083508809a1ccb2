"""Evaluate a retention relation: for one pair of positions, or for a whole grid.

What cannot be computed counts as "may read".  Below `MAX_POSITION` that never happens
(`policies.retention.ir`); beyond it a value may leave 64-bit integers.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from policies.retention.ir import (
    INT_MAX,
    INT_MIN,
    MAX_POSITION,
    And,
    AtMost,
    Constant,
    Difference,
    Equal,
    FloorDivision,
    Key,
    Less,
    Modulo,
    Or,
    Query,
    Relation,
    Sum,
    Term,
    Truth,
)

Bools: TypeAlias = npt.NDArray[np.bool_]
Ints: TypeAlias = npt.NDArray[np.int64]


class _OverflowError(ArithmeticError):
    """A value left 64-bit integers, at a position after `MAX_POSITION`."""


def _term_value(term: Term, query: int, key: int) -> int:
    match term:
        case Query():
            return query
        case Key():
            return key
        case Constant(value):
            return value
        case Sum(left, right):
            found = _term_value(left, query, key) + _term_value(right, query, key)
        case Difference(left, right):
            found = _term_value(left, query, key) - _term_value(right, query, key)
        case FloorDivision(inner, divisor):
            found = _term_value(inner, query, key) // divisor
        case Modulo(inner, divisor):
            found = _term_value(inner, query, key) % divisor
    if not INT_MIN <= found <= INT_MAX:
        raise _OverflowError
    return found


def _holds(relation: Relation, query: int, key: int) -> bool:
    match relation:
        case Truth(value):
            return value
        case Less(left, right):
            return _term_value(left, query, key) < _term_value(right, query, key)
        case AtMost(left, right):
            return _term_value(left, query, key) <= _term_value(right, query, key)
        case Equal(left, right):
            return _term_value(left, query, key) == _term_value(right, query, key)
        case And(parts):
            return all(_holds(part, query, key) for part in parts)
        case Or(parts):
            return any(_holds(part, query, key) for part in parts)


def may_read(relation: Relation, query: int, key: int) -> bool:
    """Whether ``query`` may read ``key``; what cannot be computed counts as "may"."""
    if not 0 <= key <= query:
        return False
    try:
        return _holds(relation, query, key)
    except _OverflowError:
        return True


def _term_grid(term: Term, queries_Q1: Ints, keys_K: Ints) -> Ints:
    match term:
        case Query() | Key():
            return queries_Q1 if isinstance(term, Query) else keys_K
        case Constant(value):
            return np.asarray(value, dtype=np.int64)
        case Sum(left, right):
            return _term_grid(left, queries_Q1, keys_K) + _term_grid(right, queries_Q1, keys_K)
        case Difference(left, right):
            return _term_grid(left, queries_Q1, keys_K) - _term_grid(right, queries_Q1, keys_K)
        case FloorDivision(inner, divisor):
            return _term_grid(inner, queries_Q1, keys_K) // divisor
        case Modulo(inner, divisor):
            return _term_grid(inner, queries_Q1, keys_K) % divisor


def _holds_grid(relation: Relation, queries_Q1: Ints, keys_K: Ints) -> Bools:
    match relation:
        case Truth(value):
            return np.asarray(value)
        case And(parts) | Or(parts):
            found = [_holds_grid(part, queries_Q1, keys_K) for part in parts]
            combine = np.logical_and if isinstance(relation, And) else np.logical_or
            return np.asarray(combine.reduce(np.broadcast_arrays(*found)))
        case Less(left, right) | AtMost(left, right) | Equal(left, right):
            a = _term_grid(left, queries_Q1, keys_K)
            b = _term_grid(right, queries_Q1, keys_K)
            if isinstance(relation, Equal):
                return np.asarray(a == b)
            return np.asarray(a < b if isinstance(relation, Less) else a <= b)


def may_read_grid(relation: Relation, queries_Q: Ints, keys_K: Ints) -> Bools:
    """`may_read` for every pair, shape ``(Q, K)``; positions up to `MAX_POSITION` only."""
    for positions in (queries_Q, keys_K):
        if positions.size and not 0 <= positions.min() <= positions.max() <= MAX_POSITION:
            raise ValueError(f"need positions in 0..{MAX_POSITION}")
    queries_Q1 = queries_Q[:, None].astype(np.int64)
    holds = _holds_grid(relation, queries_Q1, keys_K.astype(np.int64))
    return np.asarray(holds & (keys_K <= queries_Q1))
