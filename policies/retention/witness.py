"""Check a lifetime by enumeration, without knowing how it was found.

A witness repeats the claims and states a bounded grid: some ranges of keys, and all queries
below a limit.  The checker evaluates the relation on every pair of the grid and accepts iff

1. every key of the grid is in exactly one claim;
2. no key is read after the claim's last reader;
3. if the claims are said to be exact, each finite last reader within the grid does read its
   key, and each key read forever is read within the last ``recurrence`` queries.

It needs the language and the meaning of a claim, and nothing else: no form, bound or rule of
inference.  Acceptance says that the claims are right on the grid, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.retention.claims import Claim
from policies.retention.evaluate import Bools, Ints, may_read_grid
from policies.retention.ir import Relation

MAX_PAIRS = 2**24
"""A grid with more pairs than this is refused."""

NO_LAST = np.iinfo(np.int64).max
"""Stands for a key that is read forever."""


@dataclass(frozen=True, slots=True)
class Witness:
    """Claims, and the grid on which they can be checked."""

    claims: tuple[Claim, ...]
    key_ranges: tuple[tuple[int, int], ...]
    """Half-open ranges of keys, rising, apart from each other."""

    num_queries: int
    """Queries ``0 .. num_queries - 1`` are tried."""

    recurrence: int
    """A key read forever is read in any run of so many late queries; 0 if not known."""

    is_exact: bool
    """Whether the claims are said to be attained."""

    @property
    def num_keys(self) -> int:
        """Keys of the grid."""
        return sum(stop - start for start, stop in self.key_ranges)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker found."""

    accepted: bool
    reason: str
    """``accepted``, or what is wrong with which key."""

    num_pairs: int
    """Pairs that were enumerated."""


def check_witness(relation: Relation, witness: Witness) -> Verdict:
    """Accept or reject ``witness`` for ``relation`` by trying every pair of its grid."""
    pairs = witness.num_keys * witness.num_queries
    if not 0 < pairs <= MAX_PAIRS:
        return Verdict(accepted=False, reason=f"a grid of {pairs} pairs", num_pairs=0)
    keys_K = np.concatenate([np.arange(*ends, dtype=np.int64) for ends in witness.key_ranges])
    if np.any(np.diff(keys_K) <= 0) or keys_K[0] < 0:
        return Verdict(accepted=False, reason="key ranges overlap", num_pairs=0)
    owners = [[claim for claim in witness.claims if int(key) in claim.keys] for key in keys_K]
    for key, found in zip(keys_K, owners, strict=True):
        if len(found) != 1:
            reason = f"key {key} is in {len(found)} claims"
            return Verdict(accepted=False, reason=reason, num_pairs=0)
    last_K = np.array([_last(found[0], int(k)) for found, k in zip(owners, keys_K, strict=True)])
    queries_Q = np.arange(witness.num_queries, dtype=np.int64)
    reads_QK = may_read_grid(relation, queries_Q, keys_K)
    reason = _first_fault(reads_QK, keys_K, last_K, witness) or "accepted"
    return Verdict(accepted=reason == "accepted", reason=reason, num_pairs=pairs)


def _last(claim: Claim, key: int) -> int:
    found = claim.last_read(key)
    return int(NO_LAST) if found is None else min(found, int(NO_LAST) - 1)


def _first_fault(reads_QK: Bools, keys_K: Ints, last_K: Ints, witness: Witness) -> str:
    """What is wrong with the first key that is wrong; nothing if none is."""
    limit = witness.num_queries
    is_read_K = reads_QK.any(axis=0)
    seen_K = np.where(is_read_K, limit - 1 - reads_QK[::-1].argmax(axis=0), -1)
    late_K = seen_K > last_K
    if late_K.any():
        at = int(late_K.argmax())
        return f"key {keys_K[at]} is read by query {seen_K[at]}, claimed last is {last_K[at]}"
    if not witness.is_exact:
        return ""
    idle_K = (last_K < limit) & (seen_K < last_K)
    if idle_K.any():
        at = int(idle_K.argmax())
        return f"key {keys_K[at]} is claimed until {last_K[at]}, last read is {seen_K[at]}"
    if not 0 < witness.recurrence <= limit:
        return ""
    silent_K = (last_K == NO_LAST) & (seen_K < limit - witness.recurrence)
    if silent_K.any():
        at = int(silent_K.argmax())
        return f"key {keys_K[at]} is claimed forever, last read is {seen_K[at]}"
    return ""
