"""Whether to map memory twice, and whether to use virtual memory at all.

A mirrored ring, and virtual memory altogether, pay if what they save each second is more
than what they cost each second.

The second choice is made once per plan, with the figures of that moment: asked again for
the same plan, the answer is the same, whatever the figures have become.  At a new plan,
the mode in use is left only if the other is better by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import Literal

from policies.vmm_gate import MemoryPrice, UnitCosts, need_amount

DEFAULT_MARGIN = 0.1
"""By how much, relatively, the other mode must be better before a mode is left."""

Mode = Literal["vmm", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorAdvice:
    """Whether a periodic region is to be mapped twice, so that each window is one piece."""

    use_mirror: bool
    gain_us_per_s: float
    pay_us_per_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeAdvice:
    """Virtual memory, or a static paged pool."""

    plan: str
    mode: Mode
    gain_us_per_s: float
    """What virtual memory saves."""

    pay_us_per_s: float
    """What it costs."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLoad:
    """What a plan is expected to do, each second."""

    steps_per_s: float
    saving_us_per_step: float
    """What contiguous views save the kernels of one step."""

    returned_bytes: float
    """Memory that a static pool would hold, and virtual memory would not, on average."""

    tokens_per_s: float
    bytes_per_token: float
    num_streams: int
    """Sequences that grow at once; each ends in a partly filled extent per plane."""

    num_planes: int
    overlap: float = 0.0
    """Share of the verbs' time that hides behind computation, from 0 to 1."""

    tlb_loss_us_per_s: float = 0.0
    """Measured loss of kernels to small mappings."""

    def __post_init__(self) -> None:
        for field in fields(self):
            need_amount(field.name, getattr(self, field.name))
        if self.overlap > 1:
            raise ValueError(f"need 0 <= overlap <= 1, got {self.overlap}")


def copy_saving_us(*, window_tokens: int, row_bytes: int, bytes_per_s: float) -> float:
    """What a mirror saves each step against copying the window: one read, one write.

    Raises
    ------
    ValueError
        If an amount is negative or not finite, or the bandwidth is 0.
    """
    need_amount("window_tokens", window_tokens)
    need_amount("row_bytes", row_bytes)
    need_amount("bytes_per_s", bytes_per_s)
    if not bytes_per_s:
        raise ValueError(f"bytes_per_s must be above 0, got {bytes_per_s}")
    return 2 * window_tokens * row_bytes / bytes_per_s * 1e6


def advise_mirror(
    price: MemoryPrice,
    *,
    saving_us_per_step: float,
    steps_per_s: float,
    ring_tokens: int,
    window_tokens: int,
    row_bytes: int,
) -> MirrorAdvice:
    """Whether a periodic region is worth the tokens that its ring has beyond its window.

    Raises
    ------
    ValueError
        If an amount is negative or not finite, or the ring is shorter than the window.
    """
    need_amount("saving_us_per_step", saving_us_per_step)
    need_amount("steps_per_s", steps_per_s)
    need_amount("window_tokens", window_tokens)
    need_amount("row_bytes", row_bytes)
    need_amount("ring_tokens", ring_tokens)
    if ring_tokens < window_tokens:
        raise ValueError(f"need ring_tokens >= window_tokens {window_tokens}, got {ring_tokens}")
    gain = saving_us_per_step * steps_per_s
    pay = price.us_per_byte_second * ((ring_tokens - window_tokens) * row_bytes)
    use = gain > pay
    return MirrorAdvice(
        use_mirror=use,
        gain_us_per_s=gain,
        pay_us_per_s=pay,
        reason=f"saves {gain:.1f} us/s {'>' if use else '<='} {pay:.1f} us/s for "
        f"{ring_tokens - window_tokens} more tokens",
    )


def gain_and_pay(costs: UnitCosts, price: MemoryPrice, load: PlanLoad) -> tuple[float, float]:
    """What virtual memory saves and costs against a static paged pool, in us per second.

    Raises
    ------
    ValueError
        If a sum is not finite.
    """
    gain = load.saving_us_per_step * load.steps_per_s
    gain += price.us_per_byte_second * load.returned_bytes
    steals_per_s = load.tokens_per_s * load.bytes_per_token / costs.extent_bytes
    # Half an extent is empty at the end of each stream in each plane, on average.
    fragmented_bytes = load.num_streams * load.num_planes * costs.extent_bytes / 2
    pay = (1 - load.overlap) * steals_per_s * costs.steal_us
    pay += price.us_per_byte_second * fragmented_bytes + load.tlb_loss_us_per_s
    need_amount("gain_us_per_s", gain)
    need_amount("pay_us_per_s", pay)
    return gain, pay


class ModeGate:
    """Remembers the mode in use and the plan that it was chosen for; nothing else.

    Parameters
    ----------
    margin
        By how much, relatively, the other mode must be better.
    mode
        What is in use before the first plan.
    """

    def __init__(self, *, margin: float = DEFAULT_MARGIN, mode: Mode = "static") -> None:
        if not 0 <= margin < inf:
            raise ValueError(f"margin must be finite and at least 0, got {margin}")
        self.margin = margin
        #: That of the last advice, if there is one.
        self._mode: Mode = mode
        self._last: ModeAdvice | None = None

    @property
    def mode(self) -> Mode:
        """The mode in use."""
        return self._mode

    def advise(self, plan: str, costs: UnitCosts, price: MemoryPrice, load: PlanLoad) -> ModeAdvice:
        """The mode for ``plan``; the figures count only if the last plan was another.

        Raises
        ------
        ValueError
            If what virtual memory saves or costs is not finite; the mode stays.
        """
        if self._last is not None and self._last.plan == plan:
            return self._last
        gain, pay = gain_and_pay(costs, price, load)
        better, worse = (pay, gain) if self._mode == "vmm" else (gain, pay)
        is_left = better > worse * (1 + self.margin)
        other: Mode = "static" if self._mode == "vmm" else "vmm"
        reason = (
            f"saves {gain:.1f} us/s, costs {pay:.1f} us/s: {other} is "
            f"{'' if is_left else 'not '}better by {self.margin:.0%} than {self._mode}"
        )
        self._mode = other if is_left else self._mode
        self._last = ModeAdvice(
            plan=plan, mode=self._mode, gain_us_per_s=gain, pay_us_per_s=pay, reason=reason
        )
        return self._last

    def check(self) -> None:
        """Assert every invariant."""
        assert self._last is None or self._last.mode == self._mode
