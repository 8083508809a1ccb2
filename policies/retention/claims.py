"""What a lifetime says: of these keys, the last query that may read them.

A `Claim` joins a set of keys with a rule.  A lifetime is a list of claims that parts the
key axis: every key is in exactly one.  This is the language between inference, the
independent checker and synthesis; it knows nothing of how a claim was found.

A key ``k`` whose last reader is ``r`` is *live* at every boundary ``b`` with ``k < b <= r``,
and dies at boundary ``r + 1``.  A rule may answer a last reader before ``k`` itself: then
nothing reads the key, not even its own query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from policies.retention.ir import MAX_POSITION


@dataclass(frozen=True, slots=True, order=True)
class Keys:
    """Positions in ``[start, stop)`` whose remainder modulo ``modulus`` is listed."""

    start: int = 0
    stop: int | None = None
    """One past the last; nothing if the set has no end."""

    modulus: int = 1
    residues: tuple[int, ...] = (0,)
    """Rising, each below ``modulus``."""

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(f"need 0 <= start < stop, got [{self.start}, {self.stop})")
        listed = list(self.residues)
        if not listed or listed != sorted(set(listed)):
            raise ValueError(f"need rising residues, got {self.residues}")
        if not 0 <= listed[0] <= listed[-1] < self.modulus:
            raise ValueError(f"need residues below {self.modulus}, got {self.residues}")

    @property
    def is_dense(self) -> bool:
        """Whether every position of the range belongs."""
        return len(self.residues) == self.modulus

    def __contains__(self, key: int) -> bool:
        if key < self.start or (self.stop is not None and key >= self.stop):
            return False
        residue = key % self.modulus
        index = bisect_left(self.residues, residue)
        return index < len(self.residues) and self.residues[index] == residue

    def __str__(self) -> str:
        span = f"k in [{self.start}, {'...' if self.stop is None else self.stop})"
        if self.is_dense:
            return span
        shown = ",".join(map(str, self.residues[:6])) + (",..." if len(self.residues) > 6 else "")
        return f"{span}, k % {self.modulus} in {{{shown}}}"

    def below(self, key: int) -> int:
        """How many of the set are before ``key``."""
        end = key if self.stop is None else min(key, self.stop)
        return max(0, self._rank(end) - self._rank(self.start))

    def between(self, start: int, stop: int) -> int:
        """How many of the set are in ``[start, stop)``."""
        return max(0, self.below(stop) - self.below(start))

    def _rank(self, key: int) -> int:
        if self.modulus == 1:
            return key
        turns, residue = divmod(key, self.modulus)
        return turns * len(self.residues) + bisect_left(self.residues, residue)

    def select(self, index: int) -> int:
        """The member with ``index`` members before it, if there is one."""
        turns, offset = divmod(index + self._rank(self.start), len(self.residues))
        return turns * self.modulus + self.residues[offset]

    def first_from(self, key: int) -> int | None:
        """Least member at or after ``key``; nothing if there is none."""
        found = max(key, self.start) if self.is_dense else self.select(self.below(key))
        return None if self.stop is not None and found >= self.stop else found

    def last_before(self, key: int) -> int | None:
        """Greatest member before ``key``; nothing if there is none."""
        count = self.below(key)
        return self.select(count - 1) if count else None

    def clip(self, start: int, stop: int | None) -> Keys | None:
        """The members within ``[start, stop)``; nothing if there are none."""
        low = max(start, self.start)
        ends = [end for end in (stop, self.stop) if end is not None]
        high = min(ends) if ends else None
        if high is not None and not self._reaches(low, high):
            return None
        return Keys(low, high, self.modulus, self.residues)

    def _reaches(self, low: int, high: int) -> bool:
        """Whether there is a member in ``[low, high)``, which lies within the range."""
        return low < high and self._rank(low) < self._rank(high)

    def walk(self, start: int, stop: int) -> Iterator[int]:
        """Members in ``[start, stop)``, rising."""
        first = max(start, self.start)
        last = stop if self.stop is None else min(stop, self.stop)
        chosen = None if self.is_dense else set(self.residues)
        for key in range(first, last):
            if chosen is None or key % self.modulus in chosen:
                yield key


@dataclass(frozen=True, slots=True)
class Forever:
    """Read by arbitrarily late queries."""

    def __str__(self) -> str:
        return "forever"


@dataclass(frozen=True, slots=True)
class Unread:
    """Read by no query at all."""

    def __str__(self) -> str:
        return "never read"


@dataclass(frozen=True, slots=True)
class Until:
    """Last read by ``slope * ((k + shift) // step) + offset``.

    A window of W tokens is ``Until(1, 1, W - 1)``, a partition into chunks of C tokens
    ``Until(C, C, C - 1)``; with slope 0, ``offset`` is the last query that reads any.
    """

    step: int
    slope: int
    offset: int
    shift: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.shift < self.step:
            raise ValueError(f"need 0 <= shift < step, got {self.shift} and {self.step}")

    @property
    def window_tokens(self) -> int | None:
        """W if this is a window of W tokens."""
        return self.offset + 1 if self.step == self.slope == 1 else None

    @property
    def chunk_tokens(self) -> int | None:
        """C if this is a partition into chunks of C tokens."""
        plain = self.step == self.slope == self.offset + 1
        return self.step if plain and self.step > 1 and not self.shift else None

    def last_read(self, key: int) -> int:
        """The last query that reads ``key``."""
        return self.slope * ((key + self.shift) // self.step) + self.offset

    def __str__(self) -> str:
        if (window := self.window_tokens) is not None:
            return f"window {window}"
        if (chunk := self.chunk_tokens) is not None:
            return f"chunk {chunk}"
        if self.slope == 0:
            return f"until query {self.offset}"
        key = f"(k + {self.shift})" if self.shift else "k"
        blocks = "k" if self.step == 1 else f"({key} // {self.step})"
        return f"until query {self.slope}*{blocks} + {self.offset}"


Rule = Forever | Unread | Until


@dataclass(frozen=True, slots=True)
class Claim:
    """A rule, and the keys it speaks of."""

    keys: Keys
    rule: Rule

    def __str__(self) -> str:
        return f"{self.keys}: {self.rule}"

    def last_read(self, key: int) -> int | None:
        """Last reader of a key of this claim; -1 for none at all, nothing for no last one."""
        match self.rule:
            case Forever():
                return None
            case Unread():
                return -1
            case Until():
                found = self.rule.last_read(key)
                return found if found >= key else -1

    def live_keys(self, boundary: int) -> Keys | None:
        """The claim's keys before ``boundary`` that a query at or after it may read."""
        match self.rule:
            case Forever():
                return self.keys.clip(0, boundary)
            case Unread():
                return None
            case Until(step, slope, offset, shift):
                if slope > 0:
                    first = -step * ((offset - boundary) // slope) - shift
                    return self.keys.clip(max(0, first), boundary)
                if slope == 0:
                    return self.keys.clip(0, boundary) if offset >= boundary else None
                stop = step * ((offset - boundary) // -slope + 1) - shift
                return self.keys.clip(0, min(stop, boundary))


def last_read(claims: tuple[Claim, ...], key: int) -> int | None:
    """Last reader of ``key``; -1 for none at all, nothing for no last one."""
    if not 0 <= key <= MAX_POSITION:
        raise ValueError(f"need a position in 0..{MAX_POSITION}, got {key}")
    return next(claim for claim in claims if key in claim.keys).last_read(key)
