"""Receipts: every field the issue and DESIGN name, readable by machine and by people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fabric.receipt import Identity, Receipt


def a_receipt(**changes: Any) -> Receipt:
    """A restored prompt."""
    fields: dict[str, Any] = {
        "outcome": "restored",
        "reason": "restore_is_faster",
        "explanation": "restore: it is faster",
        "model": "m",
        "identity": Identity(namespace="00", codec=("01",), calibration=("02",)),
        "qualified": True,
        "quality_receipt": "03",
        "source": "a",
        "target": "b",
        "target_compression": 8.0,
        "tokens_prompt": 300,
        "tokens_restored": 128,
        "bytes_raw": 1000,
        "bytes_stored": 125,
        "net_ratio": 8.0,
        "bytes_calibration": 50,
        "bytes_moved": 125,
        "transport": "ucx:tcp",
        "predicted_restore_s": 0.5,
        "predicted_recompute_s": 1.5,
        "actual_restore_s": 0.6,
        "recompute_s": 1.4,
        "raw_transfer_s": 0.1,
        "raw_transfer_bytes": 2000,
        "steps": {"transfer": 0.02},
        "top1_agreement": 1.0,
        "mean_kl": 0.001,
        "tokens_compared": 64,
        "text_restored": "so [bold]it[/bold] goes",
        "text_reference": "so it goes",
        "counters": {"quarantined": 0},
    }
    return Receipt(**fields | changes)


#: What the receipt must have at least; more may be added.
PROMISED = {
    "outcome",
    "model",
    "identity",
    "qualified",
    "quality_receipt",
    "tokens_prompt",
    "tokens_restored",
    "bytes_raw",
    "bytes_stored",
    "net_ratio",
    "bytes_moved",
    "transport",
    "predicted_restore_s",
    "actual_restore_s",
    "recompute_s",
    "raw_transfer_s",
    "steps",
    "top1_agreement",
    "mean_kl",
    "text_restored",
    "text_reference",
}


def test_json_has_every_promised_field(tmp_path: Path) -> None:
    """Written whole, in UTF-8, folders made."""
    path = tmp_path / "deep" / "r.json"

    a_receipt(text_restored="caf\u00e9").write(path)

    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) >= PROMISED
    assert found["identity"] == {"namespace": "00", "codec": ["01"], "calibration": ["02"]}
    assert found["text_restored"] == "caf\u00e9"


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_shows_what_people_ask_for(width: int) -> None:
    """And the model's text as text: its square brackets are not markup."""
    console = Console(width=width, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(a_receipt().render())

    shown = captured.get()
    for what in ("8.00x", "restored", "0.600 s", "1.400 s", "100.0 % of 64"):
        assert what in shown
    assert "[bold]it[/bold]" in shown


@pytest.mark.parametrize(
    ("qualified", "quality_receipt", "shown"),
    [
        (True, "0123456789abcdef" * 2, "0123456789abcdef" * 2),
        (True, None, "none needed"),
        (False, None, "NONE: the codec is unqualified"),
    ],
)
def test_a_receipt_says_what_speaks_for_the_codec(
    qualified: bool, quality_receipt: str | None, shown: str
) -> None:
    """To programs by a field, to people by a line that cannot be missed."""
    receipt = a_receipt(qualified=qualified, quality_receipt=quality_receipt)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(receipt.render())

    found = json.loads(receipt.to_json())
    assert found["qualified"] is qualified
    assert found["quality_receipt"] == quality_receipt
    assert shown in captured.get()
