"""The text of ``kvfabric plan``: classes, bytes, admission, and what a codec would add."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from codec.errors import RetentionError
from policies.retention.capacity import Admission, Usage, admit, pools, stored_bytes, usage_at
from policies.retention.digest import plan_digest
from policies.retention.hf_config import ModelProgram, read_config
from policies.retention.plan import Plan, compile_program
from policies.retention.program import check_count

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_COLUMNS: Final = (
    "class",
    "layers",
    "address",
    "dies",
    "live",
    "held",
    "live-bytes",
    "held-bytes",
    "pool",
)
_SIZE: Final = re.compile(r"\s*(\d{1,15})(?:\.(\d{1,9}))?\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size such as ``20GiB`` or ``512 MB``; a bare number is bytes.

    Raises
    ------
    RetentionError
        ``bad-size`` if it is not a size of at least one byte.

    Examples
    --------
    >>> parse_bytes("1.5 GiB")
    1610612736
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[3].lower() not in _UNITS:
        raise RetentionError("bad-size", repr(text), "need a size such as 20GiB")
    decimals = found[2] or ""
    value = int(found[1] + decimals) * _UNITS[found[3].lower()] // int(10 ** len(decimals))
    if value < 1:
        raise RetentionError("bad-size", repr(text), "need at least one byte")
    return value


def format_bytes(nbytes: int) -> str:
    """A size in the largest binary unit in which it is at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        size = _UNITS[unit.lower()]
        if nbytes >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What ``kvfabric plan`` is asked."""

    context_tokens: int
    budget_bytes: int
    page_tokens: int = 16
    step_tokens: int = 1
    requests: int = 1
    dtype: str | None = None
    codec_target: float | None = None
    """Compression ratio a codec is to reach; nothing for figures without a codec."""

    def __post_init__(self) -> None:
        for name in ("context_tokens", "page_tokens", "step_tokens", "requests"):
            check_count(name, getattr(self, name), "bad-option")
        if type(self.budget_bytes) is not int or self.budget_bytes < 1:
            raise RetentionError("bad-budget", f"budget_bytes={self.budget_bytes!r}", "need bytes")
        target = self.codec_target
        if target is not None and not 1 <= target < float("inf"):
            raise RetentionError("bad-target", f"codec_target={target}", "need at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A compiled model, its use at the context's end, and what the budget admits."""

    model: ModelProgram
    plan: Plan
    options: PlanOptions
    usage: Usage
    admission: Admission
    full_admission: Admission
    """The same budget if every attention layer kept everything."""

    def text(self) -> str:
        """The report as printed."""
        return "\n".join([*self._head(), "", *self._classes(), "", *self._totals(), ""])

    def _head(self) -> list[str]:
        model, options = self.model, self.options
        shown = f"{model.model_type}, {len(model.layer_types)} layers, cache in {model.dtype}"
        steps = f"page {options.page_tokens}, steps of up to {options.step_tokens}"
        return [
            f"model      {shown}, layer types {model.evidence}",
            f"plan       {steps}, digest {plan_digest(self.plan).hex()}",
            f"boundary   {options.context_tokens:,} tokens",
        ]

    def _classes(self) -> list[str]:
        sizes = pools(self.plan, self.options.context_tokens, self.admission.admitted)
        rows = [
            [
                found.name,
                str(found.num_layers),
                found.address,
                found.dies,
                f"{found.live_tokens:,}",
                f"{found.held_tokens:,}",
                format_bytes(found.live_bytes),
                format_bytes(found.held_bytes),
                format_bytes(pool.pool_bytes),
            ]
            for found, pool in zip(self.usage.classes, sizes, strict=True)
        ]
        return table([_COLUMNS, *rows], left={0, 2, 3})

    def _totals(self) -> list[str]:
        usage, budget = self.usage, self.options.budget_bytes
        shown = [
            ["all full", format_bytes(usage.all_full_bytes), "if every layer kept every token"],
            ["by lifetime", format_bytes(usage.held_bytes), _kept(usage)],
            ["still readable", format_bytes(usage.live_bytes), "without page rounding"],
            ["budget", format_bytes(budget), self._admitted(self.admission)],
            ["", "all full:", self._admitted(self.full_admission)],
        ]
        if self.options.codec_target is not None:
            stored = stored_bytes(usage, self.options.codec_target)
            ratio = usage.live_bytes / stored if stored else 1.0
            said = f"at a codec target of {self.options.codec_target:g}x ({ratio:.2f}x over all)"
            shown.append(
                ["stored form", format_bytes(stored), f"{said}: compression, decoded before use"]
            )
        return table(shown, left={0, 2})

    def _admitted(self, admission: Admission) -> str:
        each = format_bytes(admission.per_request_bytes)
        if admission.waves is None:
            return f"does not fit one request of {each}"
        return (
            f"admits {admission.admitted} of {self.options.requests} requests of {each} "
            f"at a time, {admission.waves} wave{'s' if admission.waves > 1 else ''}"
        )


def _kept(usage: Usage) -> str:
    if usage.held_bytes >= usage.all_full_bytes:
        return "nothing dies before the end"
    return f"{usage.kept_ratio:.2f}x less, by keeping fewer tokens: a smaller pool, not compression"


def table(rows: Sequence[Sequence[str]], *, left: set[int]) -> list[str]:
    """Rows with their columns aligned; those not in ``left`` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def parse_config(text: str) -> Mapping[str, object]:
    """Parse a ``config.json``.

    Raises
    ------
    RetentionError
        ``syntax`` if it is not a JSON object, or gives a field twice.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique)
    except RetentionError:
        raise
    except (ValueError, RecursionError) as error:
        raise RetentionError("syntax", "config", f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise RetentionError("syntax", f"config of type {type(found).__name__}", "need an object")
    return found


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RetentionError("syntax", f"field {twice!r}", "given twice")
    return found


def plan_report(config: Mapping[str, object], options: PlanOptions) -> PlanReport:
    """Compile the model of a parsed ``config.json`` and measure it at the context's end.

    Raises
    ------
    RetentionError
        Naming the field of the config, or the option, that is refused.
    """
    model = read_config(config, page_tokens=options.page_tokens, dtype=options.dtype)
    plan = compile_program(model.program, step_tokens=options.step_tokens)
    usage = usage_at(plan, options.context_tokens)
    budget, requests = options.budget_bytes, options.requests
    return PlanReport(
        model=model,
        plan=plan,
        options=options,
        usage=usage,
        admission=admit(usage.reserved_bytes, budget_bytes=budget, requests=requests),
        full_admission=admit(usage.all_full_bytes, budget_bytes=budget, requests=requests),
    )
