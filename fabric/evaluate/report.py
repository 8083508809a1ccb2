"""Tables of an evaluation for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from codec.quality_receipt import Interval, SetResult
from fabric.evaluate.results import ArmResult, Evaluation


def tables(found: Evaluation) -> Iterator[Table]:
    """All arms on the pooled sets, then on every set if there are several."""
    pooled = found.arms[0].pooled
    yield _table(
        f"{found.model}: {pooled.name}, {pooled.num_samples} windows, {pooled.num_tokens} tokens",
        [(arm, arm.pooled) for arm in found.arms],
        caption=_caption(found),
    )
    sets = found.arms[0].sets
    for number, first in enumerate(sets if len(sets) > 1 else ()):
        perplexity = found.arms[0].perplexity_full[first.name]
        yield _table(
            f"{first.name}: {first.num_samples} samples, {first.num_tokens} tokens, "
            f"perplexity {perplexity:.1f}",
            [(arm, arm.sets[number]) for arm in found.arms],
        )


def _table(
    title: str, rows: Sequence[tuple[ArmResult, SetResult]], *, caption: str | None = None
) -> Table:
    results = [result for _, result in rows]
    has_greedy = any(result.greedy_match is not None for result in results)
    has_lookups = any(result.retrieval is not None for result in results)
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        # Room for two ends of an interval in a terminal of 80 columns.
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("arm", no_wrap=True)
    columns = ["ratio", "KL", "top-1 %", "perplexity %"]
    columns += ["greedy %"] * has_greedy + ["found %", "full %"] * has_lookups
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for arm, result in rows:
        cells = [
            f"{arm.net_ratio:.2f}",
            _interval(result.mean_kl, 1, 4),
            _interval(result.top1, 100, 1),
            _interval(result.dppl_pct, 1, 2),
        ]
        cells += [_interval(result.greedy_match, 100, 0)] * has_greedy
        cells += [
            _interval(found, 100, 0)
            for found in (result.retrieval, result.retrieval_reference)
            if has_lookups
        ]
        table.add_row(arm.arm, *cells)
    return table


def _interval(interval: Interval | None, scale: float, digits: int) -> str:
    if interval is None:
        return ""
    value, low, high = (
        f"{scale * end:.{digits}f}" for end in (interval.value, interval.low, interval.high)
    )
    return f"{value}\n{low}..{high}"


def _caption(found: Evaluation) -> str:
    if found.is_registered:
        return f"evaluation set {found.evaluation_set}; intervals of 95 %"
    return (
        f"your text, {found.evaluation_set}: not the pre-registered set, so it qualifies "
        "no codec; intervals of 95 %"
    )
