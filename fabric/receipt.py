"""A receipt: what one restore promised and what it did, as JSON and as a table for people.

Everything printed or claimed about a restore is in it, so that it can be checked later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

Outcome = Literal["restored", "recomputed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Digests, hex: what was restored, and with what."""

    namespace: str
    codec: tuple[str, ...]
    """One per stage."""

    calibration: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One prompt's journey; times in seconds, sizes in bytes."""

    outcome: Outcome
    reason: str
    """Code: why the plan chose as it did, or what failed after that."""

    explanation: str
    """The same as a sentence."""

    model: str
    identity: Identity
    qualified: bool
    """Whether a quality receipt passes for the codecs together, or they lose nothing."""

    quality_receipt: str | None
    """Digest, hex, of the one that passes."""

    source: str
    target: str
    target_compression: float
    """What the calibration aimed for, before the entropy stage."""

    tokens_prompt: int
    tokens_restored: int
    bytes_raw: int
    """The stored tokens in 16 bits."""

    bytes_stored: int
    """The same tokens as stored: headers, checksums, scales, sinks, everything."""

    net_ratio: float
    bytes_calibration: int
    """Parameters that both sides hold once, and that ``net_ratio`` does not count."""

    bytes_moved: int
    transport: str
    predicted_restore_s: float
    predicted_recompute_s: float
    actual_restore_s: float
    """From asking for the restore until the first new token's logits."""

    recompute_s: float
    """Prefill of the whole prompt on the same target, measured."""

    raw_transfer_s: float
    """The same tokens moved by the same transport uncompressed, measured."""

    raw_transfer_bytes: int
    """What that moved: the engine's own dtype, so twice ``bytes_raw`` under float32."""

    steps: Mapping[str, float]
    top1_agreement: float
    mean_kl: float
    tokens_compared: int
    text_restored: str
    text_reference: str
    counters: Mapping[str, int]
    """What source and target counted of faults: corrupt, quarantined, misses."""

    def to_json(self) -> str:
        """One JSON object, keys in the order above."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Save as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")

    def render(self) -> Group:
        """A table and the two texts, for a terminal."""
        table = Table(title=f"kvfabric receipt: {self.outcome} ({self.reason})", title_style="bold")
        table.add_column("what")
        table.add_column("value", justify="right")
        for name, value in self._rows():
            table.add_row(name, value)
        return Group(
            table,
            Text(self.explanation, style="italic"),
            Panel(Text(self.text_restored), title=f"continued on {self.target}"),
            Panel(Text(self.text_reference), title="reference: full-precision cache"),
        )

    def _rows(self) -> list[tuple[str, str]]:
        steps = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in self.steps.items())
        return [
            ("model", self.model),
            ("from, to", f"{self.source} -> {self.target} over {self.transport}"),
            ("prompt, restored tokens", f"{self.tokens_prompt}, {self.tokens_restored}"),
            (
                "raw (16 bit), stored",
                f"{self.bytes_raw / 1e6:.2f} MB, {self.bytes_stored / 1e6:.2f} MB",
            ),
            ("net ratio", f"{self.net_ratio:.2f}x (target {self.target_compression:g}x)"),
            ("moved", f"{self.bytes_moved / 1e6:.2f} MB"),
            (
                "restore predicted, actual",
                f"{self.predicted_restore_s:.3f} s, {self.actual_restore_s:.3f} s",
            ),
            (
                "recompute predicted, actual",
                f"{self.predicted_recompute_s:.3f} s, {self.recompute_s:.3f} s",
            ),
            (
                "raw transfer",
                f"{self.raw_transfer_bytes / 1e6:.1f} MB in {self.raw_transfer_s:.3f} s",
            ),
            ("steps, ms", steps),
            ("quality receipt", self.quality_receipt or self._why_no_quality_receipt()),
            ("top-1 agreement", f"{100 * self.top1_agreement:.1f} % of {self.tokens_compared}"),
            ("mean KL", f"{self.mean_kl:.5f} nats"),
        ]

    def _why_no_quality_receipt(self) -> str:
        return "none needed" if self.qualified else "NONE: the codec is unqualified"
