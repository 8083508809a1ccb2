"""The race: turns, medians, floors and memory; never how fast anything is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codec.errors import ConfigError
from fabric.codec_bench import speed
from fabric.codec_bench.floors import decode_work, encode_work
from fabric.codec_bench.speed import SpeedConfig, race
from tests.fabric.codec_bench.small import PAIR, RATES, SPEED, Made, entropy_codec

#: A tiny model has too few rows for its drift to be steady.
pytestmark = pytest.mark.filterwarnings("ignore::codec.drift.DriftWarning")


def test_every_codec_races_in_every_turn(made: Made) -> None:
    """All steps have their times and floors, and what was stored is counted."""
    codecs = {setting.name: entropy_codec(made.codecs, setting) for setting in PAIR}
    told: list[float] = []

    rates, found = race(made.engine, made.loaded, codecs, SPEED, lambda _, part: told.append(part))

    assert rates == RATES
    assert [one.name for one in found] == ["entropy@2", "entropy@8"]
    assert found[0].coded.stored_bytes > found[1].coded.stored_bytes > 0
    assert {one.coded.num_tokens for one in found} == {96}
    assert found[0].raw_bytes == 96 * 4 * 2 * 2 * 8 * 4
    assert told == [0.25, 0.5, 0.75, 1.0]
    for one, codec in zip(found, codecs.values(), strict=True):
        for steps, work in (
            (one.encode_steps, encode_work(codec, one.coded)),
            (one.decode_steps, decode_work(codec, one.coded)),
        ):
            assert set(steps) == set(work)
            assert all(step.seconds > 0 for step in steps.values())
            assert all(steps[name].floor_s == work[name].floor_s(RATES) for name in work)
        assert one.encode_s > sum(step.seconds for step in one.encode_steps.values()) / 4


def test_speed_ups_are_medians_of_the_turns_own_ratios(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn in which everything is slow must not change them."""
    # Warm-up, then three turns: prefill twice read, then encode, between, decode.
    turns = ((10.0, 1.0, 2.0), (100.0, 10.0, 20.0), (12.0, 1.0, 3.0))
    ticks = iter(ticking([(1.0,), *turns]))
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    codecs = {"entropy": entropy_codec(made.codecs)}

    _, (found,) = race(made.engine, made.loaded, codecs, replace(SPEED, num_turns=3))

    assert (found.prefill_s, found.encode_s, found.decode_s) == (12, 1, 3)
    assert (found.encode_speedup, found.decode_speedup) == (10, 5)


def ticking(turns: list[tuple[float, ...]]) -> Iterator[float]:
    """What a clock says that is read before and after prefill, and around the rest."""
    now = 0.0
    for prefill_s, *rest in turns:
        yield now
        now += prefill_s
        yield now
        if rest:
            yield now
        for seconds in rest:
            now += seconds
            yield now


def test_threads_are_those_asked_for_and_are_put_back(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the race fails."""
    before = torch.get_num_threads()
    seen: list[int] = []

    def fails(*_: Any) -> None:
        seen.append(torch.get_num_threads())
        raise RuntimeError("enough")

    monkeypatch.setattr(speed, "_prefilled", fails)
    config = replace(SPEED, num_threads=before + 1)
    with pytest.raises(RuntimeError, match="enough"):
        race(made.engine, made.loaded, {}, config)

    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_memory_is_over_what_it_is_of(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole prefix, and one chunk; nothing where the kernel is silent."""
    kept: list[int] = []

    def counted(action: Any) -> int | None:
        kept.append(len(action()))
        return [12_288, 49_152, 16_384, 32_768][len(kept) - 1] if len(kept) <= 4 else None

    monkeypatch.setattr(speed, "peak_bytes", counted)
    codecs = {setting.name: entropy_codec(made.codecs, setting) for setting in PAIR}

    _, (one, other) = race(made.engine, made.loaded, codecs, replace(SPEED, num_turns=1))

    assert (one.encode_peak_over_raw, one.decode_peak_over_raw) == (0.25, 1.0)
    assert (one.encode_chunk_peak_over_raw, one.decode_chunk_peak_over_raw) == (1.0, 2.0)
    assert other.decode_chunk_peak_over_raw is other.encode_peak_over_raw is None
    assert kept == [3, 3, 1, 1] * 2


@pytest.mark.parametrize(
    "wrong", [{"num_turns": 0}, {"num_threads": 0}, {"prefix_tokens": 255}, {"tokens_per_chunk": 0}]
)
def test_settings_that_make_no_race_are_refused(wrong: dict[str, int]) -> None:
    """With the name of the setting."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SpeedConfig(**wrong)
