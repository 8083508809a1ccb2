"""Use an arena for a long time and compare, after every operation, what it says with what is.

Requests of a hybrid model come, step, fork, are kept and go, blobs come and go beside
them, and memory is taken back in between.  After each operation the bytes that the system
counts must be those that the driver has booked; now and then every invariant is checked.
Nothing is stored in the pages: this is about memory and books, not about contents.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from actors.arena.arena import Arena, Lease
from actors.arena.driver import Driver
from actors.arena.hot_pages import HotPages
from actors.arena.layout import plan_hot_layout
from actors.arena.table.journal import Journal
from actors.arena.table.steps import StepItem
from codec.errors import ArenaFullError
from policies.retention.plan import Plan, compile_program
from policies.retention.program import AttentionState, Program, RecurrentState
from policies.retention.text import parse_relation

_T = TypeVar("_T")

DOMAIN = "soak"
CONTEXT_TOKENS = 512
MAX_REQUESTS = 8
STEP_TOKENS = 32
CHECK_EVERY = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """What a soak found."""

    num_ops: int
    num_mismatches: int
    """Operations after which measured and booked bytes differed."""

    num_refused: int
    """Operations that found no room, which is as it should be."""

    ops_per_s: float
    """Operations over the time that they took themselves, without the comparisons."""

    peak_bytes: int
    final_bytes: int
    """Measured after everything was closed."""

    num_certified: int
    """Slots that were given back for their next page."""

    ops: dict[str, int]


def soak_plan() -> Plan:
    """A hybrid: one layer in five reads everything, the others a window; and a state."""
    full, window = (
        AttentionState(
            name=name, layers=layers, reads=parse_relation(text), bytes_per_token_layer=512
        )
        for name, layers, text in (("full", (4,), "true"), ("window", (0, 1, 2, 3), "q - k < 64"))
    )
    state = RecurrentState(name="state", layers=(5,), bytes_per_layer=4096)
    return compile_program(
        Program(page_tokens=16, states=(full, window, state)), step_tokens=STEP_TOKENS
    )


def soak(
    driver: Driver,
    *,
    num_ops: int,
    seed: int = 0,
    journal: Journal | None = None,
    progress: Callable[[int], object] | None = None,
) -> SoakResult:
    """Run ``num_ops`` random operations on a new arena over ``driver``, and close it.

    Parameters
    ----------
    driver
        With room for at least 64 of its granules; others may not use it meanwhile.
    progress
        Told the number of operations done, now and then.

    Raises
    ------
    AssertionError
        If an invariant does not hold.
    """
    granule_bytes = driver.caps().granule_min_bytes
    layout = plan_hot_layout(
        soak_plan(),
        extent_bytes=granule_bytes,
        num_requests=MAX_REQUESTS,
        context_tokens=CONTEXT_TOKENS,
    )
    arena = Arena(driver, capacity_bytes=64 * granule_bytes, extent_bytes=granule_bytes, hot=layout)
    user = _User(arena, HotPages(arena, soak_plan(), journal), Random(seed))
    mismatches, spent_s = 0, 0.0
    for done in range(1, num_ops + 1):
        start_s = time.perf_counter()
        user.act()
        spent_s += time.perf_counter() - start_s
        physical = driver.physical()
        mismatches += physical.measured_bytes != physical.booked_bytes
        if done % CHECK_EVERY == 0:
            arena.check()
            user.hot.table.check()
            assert physical.booked_bytes == arena.stat().committed_bytes
            if progress is not None:
                progress(done)
    peak_bytes = arena.stat().peak_committed_bytes
    user.leave()
    arena.close()
    return SoakResult(
        num_ops=num_ops,
        num_mismatches=mismatches,
        num_refused=user.num_refused,
        ops_per_s=num_ops / spent_s if spent_s else 0.0,
        peak_bytes=peak_bytes,
        final_bytes=driver.physical().measured_bytes,
        num_certified=user.hot.table.stat().num_certified,
        ops=dict(user.ops),
    )


class _User:
    """Does one thing after the other, as the dice fall."""

    def __init__(self, arena: Arena, hot: HotPages, dice: Random) -> None:
        self.hot = hot
        self.ops: Counter[str] = Counter()
        self.num_refused = 0
        self._arena = arena
        self._dice = dice
        self._requests: list[int] = []
        self._snapshots: list[int] = []
        self._leases: list[Lease] = []
        self._in_flight: list[int] = []

    def act(self) -> None:
        """One operation; where there is no room, the refusal of one."""
        (verb,) = self._dice.choices(
            (self._step, self._open, self._fork, self._release, self._put, self._drop, self._tidy),
            (50, 8, 4, 9, 14, 13, 2),
        )
        self.ops[verb.__name__.removeprefix("_")] += 1
        try:
            verb()
        except ArenaFullError:
            self.num_refused += 1

    def leave(self) -> None:
        """Give everything back."""
        self._end_work(len(self._in_flight))
        for request in self._requests:
            self.hot.table.release(request)
        for snapshot in self._snapshots:
            self.hot.table.drop(snapshot)
        for lease in self._leases:
            self._arena.release(lease)
        self._reclaim()

    def _step(self) -> None:
        if not self._requests:
            return
        items = []
        for request in self._dice.sample(self._requests, min(2, len(self._requests))):
            before = self.hot.table.boundary(request)
            after = before + self._dice.choice((1, 1, 1, STEP_TOKENS))
            if after <= CONTEXT_TOKENS:
                items.append(StepItem(request=request, before=before, after=after))
        if len(self._in_flight) > 4:
            self._end_work(2)
        steps = self.hot.table.prepare(items)
        self._in_flight += self.hot.table.commit(map(self.hot.carry_out, steps), DOMAIN)
        self._reclaim()

    def _open(self) -> None:
        if len(self._requests) < MAX_REQUESTS:
            self._requests.append(self.hot.table.open())

    def _fork(self) -> None:
        if not self._requests:
            return
        request = self._dice.choice(self._requests)
        if len(self._requests) < MAX_REQUESTS:
            self._requests.append(self.hot.table.fork(request))
        elif len(self._snapshots) < 2:
            self._snapshots.append(self.hot.table.keep(request))

    def _release(self) -> None:
        if self._snapshots:
            self.hot.table.drop(self._snapshots.pop())
        elif self._requests:
            self.hot.table.release(self._pick(self._requests))

    def _put(self) -> None:
        self._leases.append(self._arena.reserve(self._dice.randint(1, 200_000)))

    def _drop(self) -> None:
        if self._leases:
            self._arena.release(self._pick(self._leases))

    def _tidy(self) -> None:
        self._end_work(len(self._in_flight))
        self._reclaim()
        self._arena.trim(keep_bytes=self._dice.randrange(1 << 20))

    def _end_work(self, count: int) -> None:
        """End some work, in any order."""
        ended = [self._pick(self._in_flight) for _ in range(min(count, len(self._in_flight)))]
        self.hot.table.complete({DOMAIN: ended})

    def _reclaim(self) -> None:
        self.hot.table.reclaim()

    def _pick(self, numbers: list[_T]) -> _T:
        return numbers.pop(self._dice.randrange(len(numbers)))
