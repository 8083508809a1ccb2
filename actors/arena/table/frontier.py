"""The execution frontier: which of the work that was submitted has ended.

Work goes to *completion domains*, such as one CUDA stream each, and is numbered 1, 2, ...
within its domain.  Its end may be reported in any order: a domain knows up to where all
has ended, and what has ended beyond.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from codec.errors import StaleNameError

MAX_DOMAINS = 64
"""Every certificate names all of them."""


@dataclass(slots=True)
class _Domain:
    #: Number of the last work submitted.
    submitted: int = 0
    #: All work up to here has ended; never falls, never above ``submitted``.
    through: int = 0
    #: Ended too: numbers in ``(through + 1, submitted]``.
    beyond: set[int] = field(default_factory=set)


class ExecutionFrontier:
    """Numbers work per domain and takes note of its end."""

    def __init__(self) -> None:
        self._domains: dict[str, _Domain] = {}

    def need_domain(self, domain: str) -> None:
        """Refuse what cannot be a domain, or one too many.

        Raises
        ------
        TypeError, ValueError
            If it is no string; or it is new, and there are as many as there may be.
        """
        if not isinstance(domain, str):
            raise TypeError(f"a domain is a string, got {domain!r}")
        if domain not in self._domains and len(self._domains) >= MAX_DOMAINS:
            raise ValueError(f"a domain is a queue of a device; there are {MAX_DOMAINS} already")

    def next_seq(self, domain: str) -> int:
        """The number that the next `submit` gives out."""
        return self._domains[domain].submitted + 1 if domain in self._domains else 1

    def submit(self, domain: str) -> int:
        """Number a piece of work in ``domain``, which is made if it is new."""
        found = self._domains.setdefault(domain, _Domain())
        found.submitted += 1
        return found.submitted

    def need_running(self, ended: Mapping[str, Iterable[int]]) -> None:
        """Refuse reports of work that was not submitted, has ended, or is named twice.

        Raises
        ------
        StaleNameError
            Naming the first such work; nothing has changed.
        """
        for name, seqs in ended.items():
            seen: set[int] = set()
            for seq in seqs:
                if not self._is_running(name, seq) or seq in seen:
                    raise StaleNameError("work", f"{name}/{seq}", "is not running")
                seen.add(seq)

    def complete(self, ended: Mapping[str, Iterable[int]]) -> None:
        """Take note that work has ended: all that is named, or nothing.

        Raises
        ------
        StaleNameError
            As `need_running` has it.
        """
        ended = {name: tuple(seqs) for name, seqs in ended.items()}
        self.need_running(ended)
        for name, seqs in ended.items():
            if not seqs:
                continue
            found = self._domains[name]
            found.beyond.update(seqs)
            while found.through + 1 in found.beyond:
                found.through += 1
                found.beyond.remove(found.through)

    def submitted(self) -> dict[str, int]:
        """Number of the last work submitted in each domain."""
        return {name: found.submitted for name, found in self._domains.items()}

    def through(self) -> dict[str, int]:
        """Up to where all work has ended, in each domain."""
        return {name: found.through for name, found in self._domains.items()}

    def has_passed(self, fences: Mapping[str, int]) -> bool:
        """Whether all work up to the number given for each domain has ended."""
        through = self.through()
        return all(through.get(name, 0) >= seq for name, seq in fences.items())

    def check(self) -> None:
        """Assert every invariant."""
        for found in self._domains.values():
            assert 0 <= found.through <= found.submitted
            assert all(found.through + 1 < seq <= found.submitted for seq in found.beyond)

    def _is_running(self, name: str, seq: int) -> bool:
        found = self._domains.get(name)
        if found is None or not 1 <= seq <= found.submitted:
            return False
        return seq > found.through and seq not in found.beyond
