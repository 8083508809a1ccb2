"""The record and the tables of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from codec.quality_receipt import Interval
from fabric.codec_bench import report
from fabric.codec_bench.curve import Gain
from fabric.codec_bench.measure import Comparison
from fabric.codec_bench.report import figures, machine, record, tables, versions
from tests.fabric.codec_bench.small import Made

PROMISED = {
    "entropy_gain_at_equal_kl",
    "entropy16_top1",
    "entropy16_dppl_pct",
    "entropy16_rank",
    "decode_vs_prefill_speedup",
    "encode_vs_prefill_speedup",
    "decode8_vs_prefill_speedup",
    "encode8_vs_prefill_speedup",
    "arms",
}


def comparison(*gains: float | None) -> Comparison:
    """Gains that are known, at points of 10 each."""
    return Comparison(
        gains=tuple(
            Gain(
                target=8.0 * 2**number,
                kl=0.01,
                ratio=10.0,
                ratio_at_kl=None if gain is None else 10 * gain,
                why="measure more" if gain is None else "",
            )
            for number, gain in enumerate(gains)
        ),
        intervals=tuple(None if gain is None else Interval(gain, 1, 3) for gain in gains),
        smallest_interval=None if None in gains else Interval(1.5, 1.25, 1.75),
    )


def shown(made: Made, given: Comparison | None = None) -> str:
    """All tables as text."""
    found = made.found if given is None else replace(made.found, comparison=given)
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as capture:
        for table in tables(found):
            console.print(table)
    return capture.get()


def test_every_promised_figure_is_there(made: Made) -> None:
    """Of the arm, and of the race, that its name says."""
    found = figures(replace(made.found, comparison=comparison(2.0, 1.5, 1.75)))

    assert set(found) >= PROMISED
    assert found["entropy_gain_at_equal_kl"] == 1.5
    assert found["entropy_gain_interval"] == [1.25, 1.75]
    assert found["entropy_gain_at_paper32"] == 1.75
    arms = {arm["arm"]: arm for arm in found["arms"]}
    for target in (8, 16):
        arm = arms[f"entropy@{target}"]
        assert found[f"entropy{target}_top1"] == arm["top1"]
        assert found[f"entropy{target}_dppl_pct"] == arm["dppl_pct"]
        assert found[f"entropy{target}_rank"] == arm["rank"]
    assert found["entropy16_rank"] == sum(made.found.ranks["entropy@16"])
    races = made.found.races
    assert found["decode_vs_prefill_speedup"] == races[16.0].decode_speedup
    assert found["encode_vs_prefill_speedup"] == races[16.0].encode_speedup
    assert found["decode8_vs_prefill_speedup"] == races[8.0].decode_speedup
    assert found["encode8_s"] == races[8.0].encode_s


def test_a_gain_that_was_not_measured_is_nothing_and_not_a_number(made: Made) -> None:
    """And the table says what to measure."""
    given = comparison(2.0, None, 1.75)

    found = figures(replace(made.found, comparison=given))

    assert found["entropy_gain_at_equal_kl"] is None
    assert found["entropy_gain_at_paper16"] is None
    assert found["entropy_gain_at_paper8"] == 2.0
    text = shown(made, given)
    assert "measure more" in text
    assert "smallest" not in text


def test_arms_say_what_they_stored_and_lost(made: Made) -> None:
    """With intervals; comparators have neither target nor rank."""
    arms = {arm["arm"]: arm for arm in figures(made.found)["arms"]}

    one, rival = arms["paper@8"], arms["fp8"]
    assert (one["profile"], one["target"]) == ("paper", 8)
    assert one["net_ratio"] > 1
    assert one["kl_interval"][0] <= one["kl"] <= one["kl_interval"][1]
    assert one["top1_interval"][0] <= one["top1"] <= one["top1_interval"][1]
    assert set(one["sets"]) == {"prose", "law", "code"}
    assert (rival["target"], rival["rank"], rival["profile"]) == (None, None, "fp8")
    assert rival["net_ratio"] == pytest.approx(2)


def test_a_record_is_plain_data_and_says_how_it_came(made: Made) -> None:
    """It survives a file, and holds no path."""
    found = record(made.found, is_quick=True)

    again = json.loads(json.dumps(found))
    assert again["quick"] is True
    assert again["model"] == "tiny"
    assert again["config"]["evaluation"]["context_tokens"] == 48
    assert again["speed"]["prefix_tokens"] == 96
    assert again["speed"]["rates"] == {"flops_per_s": 1e9, "bytes_per_s": 2e9}
    assert set(again["speed"]["races"]) == {"16", "8"}
    assert len(again["gains"]) == 3
    assert len(again["date"]) == 10
    assert "/" not in json.dumps(again["machine"])


def test_machine_and_versions_are_known_where_the_system_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package that is not installed is left out."""
    monkeypatch.setattr(report, "_PACKAGES", ("torch", "no-such-package"))

    assert set(versions()) == {"python", "torch"}
    assert machine()["cores"] >= 1


def test_tables_have_every_arm_gain_and_step(made: Made) -> None:
    """Steps with their floors."""
    text = shown(made, comparison(2.0, 1.5, 1.75))

    for arm in made.found.arms:
        assert arm.arm in text
    for word in ("smallest", "rope", "project", "quantize", "dequantize", "verify", "over floor"):
        assert word in text
    assert "1.25..1.75" in text
    assert "entropy@8, 96 tokens" in text
