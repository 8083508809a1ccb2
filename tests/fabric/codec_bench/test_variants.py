"""Ways to calibrate beside each other: on the same samples, at the first one's KL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from codec.errors import ConfigError
from fabric.codec_bench.variants import POOLED, Variant, costs, curves, measure_variants
from tests.fabric.codec_bench.small import BENCH, CORPUS, Made, figures, measured

SIZES = replace(BENCH.evaluation, windows=1)


# One of the ways is fitted to a text that is nothing like the samples.
@pytest.mark.filterwarnings("ignore::codec.drift.DriftWarning")
def test_every_way_is_measured_at_every_target(
    made: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its own text and stages; progress says which way it is of."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "mine.txt"
    text.write_text("".join(f"Line {number} of a text of my own.\n" for number in range(200)))
    ways = [
        Variant(name="joint", corpus_config=CORPUS),
        Variant(name="split", corpus_config=CORPUS, num_stages=2),
        Variant(name="mine", corpus=(text,), corpus_config=CORPUS),
    ]
    told: set[str] = set()

    found = measure_variants(
        made.engine,
        made.loaded,
        ways,
        (2.0, 4.0),
        SIZES,
        on_progress=lambda what, _: told.add(what),
    )

    assert list(found) == ["joint", "split", "mine"]
    assert [one.arm for one in found["split"]] == ["split@2", "split@4"]
    assert {"joint: capture", "mine: fit", "evaluate"} <= told
    points = [one.point() for arms in found.values() for one in arms]
    assert len({(point.kl, point.ratio) for point in points if point}) == 6
    rows = curves(found)
    assert [(row["variant"], row["target"]) for row in rows[:3]] == [
        ("joint", 2),
        ("joint", 4),
        ("split", 2),
    ]
    assert set(rows[0]["sets"]) == {"prose", "law", "code"}


@pytest.mark.parametrize("names", [[], ["a", "a"]])
def test_ways_need_names_of_their_own(made: Made, names: list[str]) -> None:
    """As results are found by them."""
    ways = [Variant(name=name, corpus_config=CORPUS) for name in names]

    with pytest.raises(ConfigError, match="different names"):
        measure_variants(made.engine, made.loaded, ways, (2.0,), SIZES)


def test_a_way_that_needs_more_bytes_for_the_same_kl_costs_that_much() -> None:
    """The first costs nothing beside itself; sets are told apart."""
    kls = {4.0: 0.001, 8.0: 0.01, 16.0: 0.1}
    found = {
        name: [
            replace(
                measured(f"{name}@{target:g}", target, [], 1),
                figures=(
                    figures(kl, target * share),
                    figures(kl, target * share * other, set_name="code"),
                ),
            )
            for target, kl in kls.items()
        ]
        for name, share, other in (("whole", 1.0, 1.0), ("half", 0.5, 0.5))
    }

    rows = costs(found, "whole", [8.0])

    ratios = {(row["set"], row["variant"]): row["relative_ratio"] for row in rows}
    assert ratios["prose", "half"] == pytest.approx(0.5, rel=1e-4)
    assert ratios["code", "half"] == pytest.approx(0.25, rel=1e-4)
    assert ratios[POOLED, "half"] == pytest.approx(2 / (1 / 0.5 + 1 / 0.25), rel=1e-4)
    assert all(ratios[name, "whole"] == pytest.approx(1) for name in (POOLED, "prose", "code"))
    assert {row["target"] for row in rows} == {8.0}


def test_a_way_that_does_not_reach_the_kl_says_so() -> None:
    """With nothing in place of a number."""
    found = {
        "whole": [measured("whole@4", 4, [0.001], 4), measured("whole@64", 64, [0.5], 64)],
        "worse": [measured("worse@4", 4, [0.01], 4), measured("worse@64", 64, [0.2], 64)],
    }

    rows = costs(found, "whole", [4.0, 64.0])

    missing = [row for row in rows if row["variant"] == "worse" and row["set"] == POOLED]
    assert [row["relative_ratio"] for row in missing] == [None, None]
    assert "lower target" in missing[0]["why"]
    assert "higher target" in missing[1]["why"]
