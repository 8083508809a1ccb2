"""When a page is dead, by the claims that a certificate log carries as data.

It goes through the keys of a page one by one, and through the claims of each, and asks who
reads the key last.  That is slow and plain on purpose: it shares no code with the compiler
that found the claims and computed deaths from them in closed form.

A boundary ``b`` is the instant before query ``b`` runs.  A key is dead at ``b`` if no query
from ``b`` on reads it; a page is dead when all its keys are, be they stored yet or not.  So a
window of W tokens keeps W - 1 at a boundary, and its page ``o`` of P tokens is dead from
boundary ``(o + 1) * P + W - 1`` on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from policies.certificate_lines import is_count, is_name, shown

KINDS: Final = ("attention", "recurrent", "cross")
MAX_PAGE_TOKENS: Final = 2**16
MAX_POSITION: Final = 2**48
"""No boundary and no page lies behind it."""

_LIMIT: Final = 2**63
_CLASS_FIELDS: Final = {
    "name",
    "kind",
    "page_tokens",
    "first_page",
    "stop_page",
    "ranked",
    "claims",
}
_CLAIM_FIELDS: Final = {"start", "stop", "modulus", "residues", "rule"}
_RULE_FIELDS: Final = ("step", "slope", "offset", "shift")


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """Keys, and who reads them last."""

    start: int
    stop: int | None
    modulus: int
    residues: tuple[int, ...]
    rule: str | tuple[int, int, int, int]
    """``forever``, ``unread``, or step, slope, offset and shift of the last reader."""

    @classmethod
    def read(cls, record: object) -> ClaimRecord:
        """The claim that a record describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        if not isinstance(record, dict) or record.keys() != _CLAIM_FIELDS:
            raise ValueError(f"not a claim: {shown(record)}")
        start, stop, modulus = record["start"], record["stop"], record["modulus"]
        _need(is_count(start) and (stop is None or is_count(stop)), "a claim's range", record)
        _need(is_count(modulus), "a claim's modulus", record)
        residues = record["residues"]
        _need(isinstance(residues, list) and len(residues) > 0, "a claim's residues", record)
        _need(all(is_count(r) and r < modulus for r in residues), "a claim's residues", record)
        _need(all(a < b for a, b in pairwise(residues)), "a claim's residues", record)
        return cls(start, stop, modulus, tuple(residues), _read_rule(record["rule"]))

    def has(self, key: int) -> bool:
        """Whether the claim speaks of the key."""
        if key < self.start or (self.stop is not None and key >= self.stop):
            return False
        return self.modulus == len(self.residues) or key % self.modulus in self.residues

    def is_read_from(self, key: int, boundary: int) -> bool:
        """Whether a query at or after ``boundary`` reads the key, which is the claim's."""
        if isinstance(self.rule, str):
            return self.rule == "forever"
        step, slope, offset, shift = self.rule
        last = slope * ((key + shift) // step) + offset
        return last >= key and last >= boundary

    def num_below(self, key: int) -> int:
        """Members before ``key``, were there no start and no stop."""
        turns, rest = divmod(key, self.modulus)
        return turns * len(self.residues) + sum(residue < rest for residue in self.residues)

    def member(self, index: int) -> int:
        """The member with ``index`` others before it, were there no stop."""
        turns, place = divmod(index + self.num_below(self.start), len(self.residues))
        return turns * self.modulus + self.residues[place]


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """One retention class as the log describes it."""

    name: str
    kind: str
    page_tokens: int
    first_page: int
    stop_page: int | None
    is_ranked: bool
    claims: tuple[ClaimRecord, ...]

    @classmethod
    def read(cls, record: dict[str, Any]) -> ClassRecord:
        """The class that a record describes.

        Raises
        ------
        ValueError
            If it describes none.
        """
        if record.keys() != _CLASS_FIELDS:
            raise ValueError(f"a class has a field too many or too few: {shown(record)}")
        _need(is_name(record["name"]), "a class's name", record["name"])
        _need(record["kind"] in KINDS, "a class's kind", record["kind"])
        page_tokens, first, stop = (record[k] for k in ("page_tokens", "first_page", "stop_page"))
        _need(is_count(page_tokens) and 1 <= page_tokens <= MAX_PAGE_TOKENS, "page_tokens", record)
        _need(is_count(first) and (stop is None or is_count(stop)), "a class's pages", record)
        _need(type(record["ranked"]) is bool, "ranked", record["ranked"])
        _need(isinstance(record["claims"], list), "claims", record["claims"])
        claims = tuple(ClaimRecord.read(claim) for claim in record["claims"])
        _need(len(claims) == 1 or not record["ranked"], "the only claim of a ranked class", claims)
        name, kind = record["name"], record["kind"]
        if kind != "attention":
            is_one = kind == "cross" or (page_tokens, stop) == (1, 1)
            is_fixed = first == 0 and stop is not None and not record["ranked"] and is_one
            _need(is_fixed, f"pages of a {kind} class", record)
        return cls(name, kind, page_tokens, first, stop, record["ranked"], claims)

    def has_page(self, ordinal: int) -> bool:
        """Whether the class has such a page."""
        if ordinal < self.first_page or ordinal > MAX_POSITION:
            return False
        return self.stop_page is None or ordinal < self.stop_page

    def tokens_of(self, ordinal: int) -> tuple[int, int]:
        """Positions ``[start, stop)`` that a page spans; a ranked page also spans gaps."""
        start, stop = ordinal * self.page_tokens, (ordinal + 1) * self.page_tokens
        if not self.is_ranked:
            return start, stop
        return self.claims[0].member(start), self.claims[0].member(stop - 1) + 1

    def keys_of(self, ordinal: int) -> Iterator[int]:
        """Positions that a page holds, one by one."""
        places = range(ordinal * self.page_tokens, (ordinal + 1) * self.page_tokens)
        if not self.is_ranked:
            yield from places
            return
        only = self.claims[0]
        yield from (key for key in map(only.member, places) if only.has(key))

    def is_read_from(self, key: int, boundary: int) -> bool:
        """Whether a query at or after ``boundary`` reads the key, as far as the class holds it."""
        return any(c.is_read_from(key, boundary) for c in self.claims if c.has(key))

    def is_dead(self, ordinal: int, boundary: int) -> bool:
        """Whether no query at or after ``boundary`` reads any key of the page.

        State that is replaced and an encoder's output are never dead while a head has them.
        """
        if self.kind != "attention":
            return False
        return not any(self.is_read_from(key, boundary) for key in self.keys_of(ordinal))

    def written(self, before: int, after: int) -> range:
        """Pages that hold a position in ``[before, after)``, or would if the class had them."""
        if self.is_ranked:
            only = self.claims[0]
            skipped = only.num_below(only.start)
            end = after if only.stop is None else min(after, only.stop)
            before, after = only.num_below(before) - skipped, only.num_below(end) - skipped
        first, last = max(before, 0) // self.page_tokens, -(-after // self.page_tokens)
        return range(max(first, self.first_page), last) if before < after else range(0)

    def first_read(self, ordinal: int, before: int, after: int) -> int | None:
        """First key of the page in ``[before, after)`` that is still read at ``after``."""
        for key in self.keys_of(ordinal):
            if before <= key < after and self.is_read_from(key, after):
                return key
        return None


def _read_rule(rule: object) -> str | tuple[int, int, int, int]:
    if isinstance(rule, str):
        _need(rule in ("forever", "unread"), "a claim's rule", rule)
        return rule
    if not isinstance(rule, dict) or set(rule) != set(_RULE_FIELDS):
        raise ValueError(f"not a claim's rule: {shown(rule)}")
    found = [rule[name] for name in _RULE_FIELDS]
    _need(all(type(term) is int and abs(term) < _LIMIT for term in found), "a claim's rule", rule)
    step, slope, offset, shift = found
    _need(0 <= shift < step, "a claim's shift", rule)
    return step, slope, offset, shift


def _need(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise ValueError(f"not {what}: {shown(found)}")
