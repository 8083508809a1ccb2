"""Check a certificate log: every reuse of memory follows from what the log itself says.

A page table writes down what it does before it does it (`actors.arena.table.certificates`).  This
reads the log from its first line, keeps plain books of who has which page, and refuses the
first line that does not follow from those before it.  Above all it refuses the reuse of a
page that a request, a snapshot, running work, a reader or a registration still has, and the
dropping of a page that a later query would read, which it finds out key by key from the
claims in the log.  It shares no code with what it checks.

The start of a log is a log, so a file that was cut between two lines holds: compare its
`Report.digest` where that matters.  That what the log says happened did happen, it cannot
know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from codec.errors import CertificateError
from policies.certificate_lines import Chain
from policies.certificate_rules import Rules
from policies.certificate_state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a log that holds says."""

    arena: str
    plan: str
    epoch: int
    """As of the last line."""

    num_lines: int
    digest: str
    """SHA-256 of the last line: two logs with the same digest are the same."""

    events: dict[str, int]
    """Lines per event."""

    num_certified: int
    """Pages whose reuse was certified."""

    reasons: dict[str, int]
    """Certified pages per reason."""

    num_steps: int
    """Steps that were committed."""

    completed_through: dict[str, int]
    """Per domain, the number up to which all work has ended."""

    held: dict[str, int]
    """What is still there at the end, by kind; all zero if everything was given back."""

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is held any more."""
        return not any(self.held.values())


def verify(lines: Iterable[bytes]) -> Report:
    """Check a log, line by line; memory is bounded by what is alive in it.

    Parameters
    ----------
    lines
        With their newlines, as a binary file gives them.

    Raises
    ------
    CertificateError
        At the first line that does not follow; lines count from 1.
    """
    checker = Checker()
    for line in lines:
        checker.follow(line)
    return checker.report()


class Checker:
    """Follows a log as far as it holds; after an error it is of no more use."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._state = State()
        self._rules = Rules(self._state)
        self._events: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def follow(self, line: bytes) -> None:
        """Check the next line, newline and all.

        Raises
        ------
        CertificateError
            If it does not follow.
        """
        event, fields = self._chain.follow(line)
        try:
            self._rules.apply(event, fields)
        except ValueError as error:
            raise CertificateError(self._chain.num_lines, f"{event}: {error}") from None
        self._events[event] += 1
        if event == "reuse":
            self._reasons[fields["why"]] += 1

    def report(self) -> Report:
        """What the lines so far say.

        Raises
        ------
        CertificateError
            If there were none.
        """
        if not self._events:
            raise CertificateError(1, "the log is empty")
        state = self._state
        return Report(
            arena=state.arena,
            plan=state.plan,
            epoch=state.epoch,
            num_lines=self._chain.num_lines,
            digest=self._chain.digest,
            events=dict(sorted(self._events.items())),
            num_certified=self._events["reuse"],
            reasons=dict(sorted(self._reasons.items())),
            num_steps=self._events["commit"],
            completed_through=state.through(),
            held=state.census(),
        )
