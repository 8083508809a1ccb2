"""When an idle extent is to be given back, and where a new one is to come from.

Two currencies meet here.  A verb costs microseconds, measured on the driver in use
(`UnitCosts`).  Memory that is held costs microseconds per byte and second, the work that
others lose for want of it (`MemoryPrice`); without a price, holding is free and nothing
is ever given back.

1. An idle extent whose next use is known is released if holding it until then would
   cost more than taking it anew.
2. If its next use is unknown, it is released once holding it *has* cost as much as
   taking it anew (ski rental).  No future makes that cost more than twice the optimum.
3. A new extent comes from a spare handle, else from the idle extent that is idle for
   the shortest time, else it is committed.  Nothing is unmapped because it died.

Every decision is a suggestion with the numbers that led to it.  There is no clock here:
times and rates are passed in, and are frozen per plan by whoever passes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """What each verb costs for one extent, on one driver."""

    kind: str
    """Kind of the driver, as in its caps."""

    extent_bytes: int
    create_us: float
    release_us: float
    map_us: float
    unmap_us: float
    access_us: float
    """For each device that gets access."""

    sync_us: float = 0.0
    """Waiting for work in flight before memory is taken away; nothing where there is none."""

    num_devices: int = 1
    """Devices that get access; 1 for ordinary memory."""

    def __post_init__(self) -> None:
        if self.extent_bytes < 1:
            raise ValueError(f"extent_bytes must be at least 1, got {self.extent_bytes}")
        if self.num_devices < 1:
            raise ValueError(f"num_devices must be at least 1, got {self.num_devices}")
        for field in fields(self):
            if field.name.endswith("_us"):
                need_amount(field.name, getattr(self, field.name))

    @property
    def enter_us(self) -> float:
        """Give addresses to memory that has none, and open it."""
        return self.map_us + self.num_devices * self.access_us

    @property
    def leave_us(self) -> float:
        """Take the addresses from memory that work may still be using."""
        return self.sync_us + self.unmap_us

    @property
    def steal_us(self) -> float:
        """Move memory from one extent to another."""
        return self.leave_us + self.enter_us

    @property
    def cycle_us(self) -> float:
        """Give memory back and take it anew."""
        return self.leave_us + self.release_us + self.create_us + self.enter_us

    def describe(self) -> str:
        """The figures as a small table: the evidence for what is decided by them."""
        title = f"unit costs of {self.kind} memory, extent {self.extent_bytes} bytes"
        rows = [
            ("create", self.create_us),
            ("release", self.release_us),
            ("map", self.map_us),
            ("unmap", self.unmap_us),
            (f"access (x{self.num_devices})", self.access_us),
            ("sync", self.sync_us),
            ("steal = sync + unmap + map + access", self.steal_us),
            ("cycle = steal + release + create", self.cycle_us),
        ]
        return "\n".join([title, *(f"  {name:<36}{us:>10.1f} us" for name, us in rows)])


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """What holding memory costs others."""

    us_per_byte_second: float

    def __post_init__(self) -> None:
        need_amount("us_per_byte_second", self.us_per_byte_second)

    @classmethod
    def of_waiters(
        cls, lost_us_per_s: float, waited_bytes: int, *, tenants_us_per_byte_second: float = 0.0
    ) -> MemoryPrice:
        """The price that waiting requests make, or other tenants if they would pay more.

        Parameters
        ----------
        lost_us_per_s
            Work that requests lose each second while they wait for memory.
        waited_bytes
            Memory that they wait for; 0 if none waits.
        tenants_us_per_byte_second
            What other tenants of the device would pay; 0 if there is none.

        Raises
        ------
        ValueError
            If an amount is negative or not finite, or work is lost for want of no bytes.
        """
        need_amount("lost_us_per_s", lost_us_per_s)
        need_amount("waited_bytes", waited_bytes)
        need_amount("tenants_us_per_byte_second", tenants_us_per_byte_second)
        if not waited_bytes and lost_us_per_s:
            raise ValueError(f"need waited_bytes for lost_us_per_s {lost_us_per_s}, got 0")
        waiters = lost_us_per_s / waited_bytes if waited_bytes else 0.0
        return cls(max(waiters, tenants_us_per_byte_second))


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAdvice:
    """Keep an idle extent or release it."""

    action: Literal["keep", "release"]
    keep_us: float
    """What keeping it costs up to its next use, or has cost so far if that is unknown."""

    release_us: float
    """What releasing it and taking it anew costs."""

    release_after_s: float
    """How long after its death it is to be released; infinite for never."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAdvice:
    """Where the memory of a new extent is to come from."""

    source: Literal["spare", "steal", "create"]
    extent: int | None
    """The idle extent to steal from, if that is the advice."""

    cost_us: float
    reason: str


def rent_us_per_s(costs: UnitCosts, price: MemoryPrice) -> float:
    """What holding one extent costs each second."""
    return price.us_per_byte_second * costs.extent_bytes


def release_after_s(costs: UnitCosts, price: MemoryPrice, *, reuse_us: float = 0.0) -> float:
    """How long to hold an idle extent whose next use is unknown; infinite at no price.

    ``reuse_us`` is what the next use costs if the extent is still held then: nothing at
    the same addresses, `UnitCosts.steal_us` elsewhere.

    Raises
    ------
    ValueError
        If reuse would cost more than taking memory anew, or is no amount.
    """
    need_amount("reuse_us", reuse_us)
    if reuse_us > costs.cycle_us:
        raise ValueError(f"need reuse_us <= cycle_us {costs.cycle_us}, got {reuse_us}")
    rent = rent_us_per_s(costs, price)
    return (costs.cycle_us - reuse_us) / rent if rent else inf


def advise_known_idle(
    costs: UnitCosts, price: MemoryPrice, *, idle_s: float, reuse_us: float = 0.0
) -> IdleAdvice:
    """What to do with an extent that died now and is used again in ``idle_s``: the cheaper.

    Raises
    ------
    ValueError
        If ``idle_s`` is no amount, or as for `release_after_s`.
    """
    need_amount("idle_s", idle_s)
    release_after_s(costs, price, reuse_us=reuse_us)
    keep_us = rent_us_per_s(costs, price) * idle_s + reuse_us
    is_release = keep_us > costs.cycle_us
    sign = ">" if is_release else "<="
    return IdleAdvice(
        action="release" if is_release else "keep",
        keep_us=keep_us,
        release_us=costs.cycle_us,
        release_after_s=0.0 if is_release else inf,
        reason=f"idle for {idle_s:g} s: keep {keep_us:.1f} us {sign} cycle {costs.cycle_us:.1f} us",
    )


def advise_unknown_idle(
    costs: UnitCosts, price: MemoryPrice, *, idle_so_far_s: float, reuse_us: float = 0.0
) -> IdleAdvice:
    """What to do with an extent that died ``idle_so_far_s`` ago, whatever comes next.

    Every idle period that ends in a use costs at most twice the least that it could.

    Raises
    ------
    ValueError
        If ``idle_so_far_s`` is no amount, or as for `release_after_s`.

    Source
    ------
    Karlin et al., "Competitive snoopy caching", 1988: rent until the rent is the price.
    """
    need_amount("idle_so_far_s", idle_so_far_s)
    after_s = release_after_s(costs, price, reuse_us=reuse_us)
    is_release = idle_so_far_s >= after_s
    sign = ">=" if is_release else "<"
    return IdleAdvice(
        action="release" if is_release else "keep",
        keep_us=rent_us_per_s(costs, price) * idle_so_far_s + reuse_us,
        release_us=costs.cycle_us,
        release_after_s=after_s,
        reason=f"next use unknown: idle {idle_so_far_s:g} s {sign} {after_s:g} s, where rent "
        "equals a cycle",
    )


def advise_source(
    costs: UnitCosts, *, num_spare: int, idle_since_s: Mapping[int, float]
) -> SourceAdvice:
    """Where to take the memory of a new extent from.

    The youngest idle extent is the one to steal from: the older ones go on ageing, and
    come to be released.  Taking the oldest would keep all of them young, and held.

    Parameters
    ----------
    num_spare
        Committed handles that are mapped nowhere.
    idle_since_s
        ``{idle extent: when it died}``.

    Raises
    ------
    ValueError
        If ``num_spare`` is negative, or a time is not finite.
    """
    need_amount("num_spare", num_spare)
    for extent, since_s in idle_since_s.items():
        if not -inf < since_s < inf:
            raise ValueError(f"idle_since_s of extent {extent} must be finite, got {since_s}")
    if num_spare:
        reason = f"{num_spare} spare handles: map one"
        return SourceAdvice(source="spare", extent=None, cost_us=costs.enter_us, reason=reason)
    create_us = costs.create_us + costs.enter_us
    if idle_since_s:
        youngest = max(idle_since_s, key=lambda extent: (idle_since_s[extent], extent))
        reason = f"steal {costs.steal_us:.1f} us, and no new bytes; create {create_us:.1f} us"
        return SourceAdvice(source="steal", extent=youngest, cost_us=costs.steal_us, reason=reason)
    reason = "no spare handle and no idle extent"
    return SourceAdvice(source="create", extent=None, cost_us=create_us, reason=reason)


def need_amount(name: str, value: float) -> None:
    """Refuse what is negative, infinite or not a number."""
    if not 0 <= value < inf:
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
