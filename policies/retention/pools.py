"""Pool sizes of engines that part a byte budget between full and window layers.

The formulas are those by which the published predictions were made (docs/retention.md has
the figures).  Symbols: R running requests, W window, P page, I eviction interval,
C chunked-prefill tokens, H decode headroom.  A pool that is smaller because it holds fewer
tokens is not compression: it is what the window allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from codec.errors import RetentionError
from policies.retention.program import check_count

GIB: Final = 2**30


def round_up(tokens: int, page_tokens: int) -> int:
    """Least multiple of the page that is not less."""
    return -(-tokens // page_tokens) * page_tokens


def window_pool_tokens(
    *, window: int, page_tokens: int, interval: int, running: int, chunk: int
) -> int:
    """Tokens of a window pool that is evicted every ``interval`` steps.

    ``align_P(R * ((W - 1) + I + 2P) + C + P)``: the history, what gathers between two
    evictions, a partly filled page at either end, and one chunk being prefilled.
    """
    for name, value in (("window", window), ("page_tokens", page_tokens), ("chunk", chunk)):
        check_count(name, value, "bad-pool")
    check_count("interval", interval, "bad-pool")
    check_count("running", running, "bad-pool")
    per_request = (window - 1) + interval + 2 * page_tokens
    return round_up(running * per_request + chunk + page_tokens, page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """A budget to be parted between the full and the window layers of one model."""

    page_tokens: int
    window: int
    full_layers: int
    window_layers: int
    width_bytes: int
    """Bytes per token and layer."""

    budget_bytes: int
    running: int
    chunk: int
    requests: int
    prompt: int
    decode: int
    intervals: tuple[int, ...]
    max_calls: int | None = None
    min_admitted: int | None = None
    objective: str = "capacity"
    """``capacity``: most full tokens; ``reclamation``: fewest calls, then longest interval."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int):
                check_count(name, value, "bad-pool")
        if self.objective not in ("capacity", "reclamation") or not self.intervals:
            found = f"objective={self.objective!r}, intervals={self.intervals}"
            raise RetentionError("bad-pool", found, "need a known objective and an interval")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSplit:
    """One way to part the budget, and what it admits."""

    interval: int
    window_tokens: int
    full_tokens: int
    admitted: int
    waves: int | None
    """Rounds of admission until all requests ran; nothing if none is ever admitted."""

    calls: int
    allocated_bytes: int
    rejected_for: tuple[str, ...]
    """Hard constraints that it breaks: ``budget``, ``calls``, ``admission``."""

    amplification_milli: int
    """Thousandths of the window pool over what the periodic addresses would need."""


def split_pool(request: SplitRequest, interval: int) -> PoolSplit:
    """Part the budget for one eviction interval."""
    window_tokens = window_pool_tokens(
        window=request.window,
        page_tokens=request.page_tokens,
        interval=interval,
        running=request.running,
        chunk=request.chunk,
    )
    window_bytes = window_tokens * request.width_bytes * request.window_layers
    full_width = request.width_bytes * request.full_layers
    left = max(0, request.budget_bytes - window_bytes)
    full_tokens = left // full_width // request.page_tokens * request.page_tokens
    per_request = round_up(request.prompt + request.decode, request.page_tokens)
    admitted = min(full_tokens // per_request, request.running, request.requests)
    calls = -(-request.prompt // request.chunk) + -(-request.decode // interval)
    cells = 1 + -(-(request.window - 1) // request.page_tokens)
    staging = request.chunk + request.page_tokens
    least = request.running * cells * request.page_tokens + staging
    rejected = []
    if window_bytes > request.budget_bytes:
        rejected.append("budget")
    if request.max_calls is not None and calls > request.max_calls:
        rejected.append("calls")
    if admitted == 0 or (request.min_admitted is not None and admitted < request.min_admitted):
        rejected.append("admission")
    return PoolSplit(
        interval=interval,
        window_tokens=window_tokens,
        full_tokens=full_tokens,
        admitted=admitted,
        waves=-(-request.requests // admitted) if admitted else None,
        calls=calls,
        allocated_bytes=window_bytes + full_tokens * full_width,
        rejected_for=tuple(rejected),
        amplification_milli=1000 * window_tokens // least,
    )


def choose_split(request: SplitRequest) -> tuple[PoolSplit, Mapping[int, PoolSplit]]:
    """The best split that breaks no constraint, and all splits by interval.

    Fewest waves first, then the objective.

    Raises
    ------
    RetentionError
        ``no-feasible-interval`` if every interval breaks a constraint.
    """
    splits = {interval: split_pool(request, interval) for interval in request.intervals}
    feasible = [split for split in splits.values() if not split.rejected_for]
    if not feasible:
        why = {interval: split.rejected_for for interval, split in splits.items()}
        raise RetentionError("no-feasible-interval", str(why), "every interval is rejected")
    return min(feasible, key=lambda split: _order(split, request.objective)), splits


def _order(split: PoolSplit, objective: str) -> tuple[int, int, int]:
    waves = split.waves or 0
    if objective == "capacity":
        return waves, -split.full_tokens, -split.interval
    return waves, split.calls, -split.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformPool:
    """Pool of a model whose every layer has the same window."""

    per_request_tokens: int
    staging_tokens: int
    pool_tokens: int
    index_tokens: int
    """Positions that the engine's index must cover."""


def uniform_window_pool(
    *,
    window: int,
    page_tokens: int,
    interval: int,
    headroom: int,
    running: int,
    chunk: int,
    context: int,
) -> UniformPool:
    """``R * (W + I + P + H) + C + P`` tokens, with P of 1 or 16.

    Raises
    ------
    RetentionError
        ``page-size`` for other pages; ``not-page-aligned`` if W, C, I or H is no multiple.
    """
    sizes = {"window": window, "interval": interval, "headroom": headroom, "chunk": chunk}
    for name, value in {**sizes, "running": running, "context": context}.items():
        check_count(name, value, "bad-pool")
    if page_tokens not in (1, 16):
        raise RetentionError("page-size", f"page_tokens={page_tokens}", "need pages of 1 or 16")
    for name, value in sizes.items():
        if value % page_tokens:
            why = f"need a multiple of {page_tokens}"
            raise RetentionError("not-page-aligned", f"{name}={value}", why)
    per_request = window + interval + page_tokens + headroom
    staging = chunk + page_tokens
    pool = running * per_request + staging
    index = pool if page_tokens == 1 else round_up(context, page_tokens) * running
    return UniformPool(
        per_request_tokens=per_request,
        staging_tokens=staging,
        pool_tokens=pool,
        index_tokens=index,
    )


def snapshot_pool_pages(*, window: int, page_tokens: int, running: int, chunk: int) -> int:
    """Pages of a pool managed by snapshots: ``period * R + ceil(C / P) + (R - 1)``."""
    period = 1 + -(-(window - 1) // page_tokens)
    return period * running + -(-chunk // page_tokens) + running - 1


def pool_gib(pools: Sequence[tuple[int, int]], *, pad_tokens: int) -> float:
    """GiB that an engine reports for ``(tokens, bytes per token)`` pools, padding included.

    One pad page is added to every pool.
    """
    return sum((tokens + pad_tokens) * width for tokens, width in pools) / GIB


def engine_cut(frontier: int, *, window: int, page_tokens: int) -> int:
    """Where an engine frees window pages up to: one token more careful than W - 1."""
    return max(0, frontier - window) // page_tokens * page_tokens


@dataclass(frozen=True, slots=True)
class Backing:
    """How to hold some memory, and what rounding to granules costs."""

    kind: str
    """``vmm`` or ``paged``."""

    mapped_bytes: int
    amplification_milli: int
    why: str


def choose_backing(
    logical_bytes: int,
    *,
    granule_bytes: int,
    is_supported: bool,
    needs_stable_address: bool,
    limit_milli: int,
) -> Backing:
    """Mapped granules if a stable address is needed and rounding stays within the limit.

    This weighs rounding only; the price of map and unmap calls is another gate's matter.
    """
    if logical_bytes <= 0:
        raise RetentionError("zero-bytes", f"logical_bytes={logical_bytes}", "nothing to hold")
    if granule_bytes <= 0:
        raise RetentionError("zero-granule", f"granule_bytes={granule_bytes}", "need a granule")
    mapped = round_up(logical_bytes, granule_bytes)
    amplification = mapped * 1000 // logical_bytes
    reasons = [
        (not is_supported, "not-supported"),
        (not needs_stable_address, "stable-address-not-needed"),
        (amplification > limit_milli, "rounding-over-limit"),
    ]
    why = next((reason for applies, reason in reasons if applies), "stable-address-needed")
    kind = "vmm" if why == "stable-address-needed" else "paged"
    return Backing(kind, mapped if kind == "vmm" else logical_bytes, amplification, why)
