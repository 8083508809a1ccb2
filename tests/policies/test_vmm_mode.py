"""Mirrors, and virtual memory at all: sums, margins, and not going back and forth."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.vmm_gate import MemoryPrice
from policies.vmm_mode import (
    Mode,
    ModeGate,
    PlanLoad,
    advise_mirror,
    copy_saving_us,
    gain_and_pay,
)
from tests.policies.vmm_samples import COSTS, MIB, rent
from tests.suites.quiet import QUIET

BAD_AMOUNTS = (-1.0, nan, inf)

LOAD = PlanLoad(
    steps_per_s=10,
    saving_us_per_step=50,
    returned_bytes=8 * MIB,
    tokens_per_s=64,
    bytes_per_token=MIB / 2,
    num_streams=4,
    num_planes=2,
    overlap=0.25,
    tlb_loss_us_per_s=7,
)
NOTHING = PlanLoad(
    steps_per_s=0,
    saving_us_per_step=0,
    returned_bytes=0,
    tokens_per_s=0,
    bytes_per_token=0,
    num_streams=0,
    num_planes=0,
)


def load(gain: float, pay: float) -> PlanLoad:
    """A load that saves and costs just that, each second."""
    return replace(NOTHING, steps_per_s=1, saving_us_per_step=gain, tlb_loss_us_per_s=pay)


# -- mirrors


def test_a_copy_reads_and_writes_the_window() -> None:
    """1024 rows of 2 KiB, twice, at 4 MiB a second: a second."""
    saving = copy_saving_us(window_tokens=1024, row_bytes=2048, bytes_per_s=4 * MIB)

    assert saving == 1e6


def test_a_copy_at_no_bandwidth_is_refused() -> None:
    """It would save for ever."""
    with pytest.raises(ValueError, match="bytes_per_s"):
        copy_saving_us(window_tokens=1, row_bytes=1, bytes_per_s=0)


@given(
    saving=st.integers(0, 20),
    steps_per_s=st.integers(0, 20),
    rent_us=st.integers(0, 20),
    more=st.integers(0, 20),
)
@QUIET
def test_a_mirror_is_used_iff_it_saves_more_than_its_tokens_cost(
    saving: int, steps_per_s: int, rent_us: int, more: int
) -> None:
    """Rows of a MiB, so that each token beyond the window costs the rent."""
    advice = advise_mirror(
        rent(rent_us),
        saving_us_per_step=saving,
        steps_per_s=steps_per_s,
        ring_tokens=100 + more,
        window_tokens=100,
        row_bytes=MIB,
    )

    assert advice.use_mirror == (saving * steps_per_s > rent_us * more)
    assert (advice.gain_us_per_s, advice.pay_us_per_s) == (saving * steps_per_s, rent_us * more)
    assert f"{more} more tokens" in advice.reason


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
@pytest.mark.parametrize(
    "name",
    ["saving_us_per_step", "steps_per_s", "ring_tokens", "window_tokens", "row_bytes"],
)
def test_a_mirror_of_no_amount_is_refused(name: str, bad: float) -> None:
    """By name, with the value."""
    figures: dict[str, float] = {
        "saving_us_per_step": 1,
        "steps_per_s": 1,
        "ring_tokens": 4,
        "window_tokens": 2,
        "row_bytes": 8,
    }
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got {bad}"):
        advise_mirror(rent(1), **(figures | {name: bad}))  # type: ignore[arg-type]


def test_a_ring_shorter_than_its_window_is_refused() -> None:
    """It would be paid for using it."""
    with pytest.raises(ValueError, match="need ring_tokens >= window_tokens 5, got 4"):
        advise_mirror(
            rent(1),
            saving_us_per_step=1,
            steps_per_s=1,
            ring_tokens=4,
            window_tokens=5,
            row_bytes=8,
        )


# -- virtual memory at all


def test_gain_and_pay_are_the_sums_of_their_parts() -> None:
    """Views and returned memory; unhidden steals, half-empty extents and small mappings."""
    gain, pay = gain_and_pay(COSTS, rent(2), LOAD)

    assert gain == 10 * 50 + 2 * 8
    assert pay == 0.75 * 32 * 43 + 2 * (4 * 2 / 2) + 7


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
@pytest.mark.parametrize("name", PlanLoad.__dataclass_fields__)
def test_a_load_that_is_no_amount_is_refused(name: str, bad: float) -> None:
    """By name, with the value."""
    with pytest.raises(ValueError, match=f"{name} must be finite and at least 0, got {bad}"):
        replace(LOAD, **{name: bad})  # type: ignore[arg-type]


def test_more_than_everything_cannot_be_hidden() -> None:
    """It would be a negative cost."""
    with pytest.raises(ValueError, match=r"need 0 <= overlap <= 1, got 1\.5"):
        replace(LOAD, overlap=1.5)


@pytest.mark.parametrize(
    ("mode", "gain", "pay", "expected"),
    [
        ("static", 110, 100, "static"),
        ("static", 111, 100, "vmm"),
        ("static", 90, 100, "static"),
        ("vmm", 100, 110, "vmm"),
        ("vmm", 100, 111, "static"),
        ("vmm", 110, 100, "vmm"),
        ("static", 0, 0, "static"),
        ("vmm", 0, 0, "vmm"),
    ],
)
def test_a_mode_is_left_only_for_one_better_by_the_margin(
    mode: Mode, gain: float, pay: float, expected: Mode
) -> None:
    """Ten percent, exclusive, both ways."""
    gate = ModeGate(mode=mode)

    advice = gate.advise("plan", COSTS, MemoryPrice(0), load(gain, pay))

    assert advice.mode == gate.mode == expected
    assert (advice.gain_us_per_s, advice.pay_us_per_s) == (gain, pay)
    assert f"saves {gain:.1f} us/s, costs {pay:.1f} us/s" in advice.reason
    gate.check()


@given(
    gains=st.lists(st.integers(0, 1000), min_size=2, max_size=20),
    margin=st.sampled_from([0.0, 0.1, 0.5]),
    mode=st.sampled_from(["static", "vmm"]),
)
@QUIET
def test_within_the_margin_the_mode_never_changes(
    gains: list[int], margin: float, mode: Mode
) -> None:
    """Each change is paid for by the margin, so going back takes twice of it."""
    gate = ModeGate(margin=margin, mode=mode)

    for plan, gain in enumerate(gains):
        before = gate.mode
        after = gate.advise(str(plan), COSTS, MemoryPrice(0), load(gain, 500)).mode
        gate.check()

        low, high = sorted([gain, 500])
        if high <= low * (1 + margin):
            assert after == before
        else:
            assert after == ("vmm" if gain > 500 else "static")


def test_a_plan_keeps_its_answer_whatever_the_figures_become() -> None:
    """Figures recomputed under a plan in use would pull memory from under it."""
    gate = ModeGate()
    first = gate.advise("plan", COSTS, MemoryPrice(0), load(200, 100))

    again = gate.advise("plan", replace(COSTS, map_us=1e6), rent(9), load(0, 1e6))
    other = gate.advise("next plan", COSTS, MemoryPrice(0), load(0, 1e6))

    assert again is first
    assert (first.mode, other.mode) == ("vmm", "static")


def test_sums_beyond_all_bounds_change_nothing() -> None:
    """Finite figures whose product is not; the next plan is decided as if never asked."""
    gate = ModeGate(mode="vmm")
    huge = replace(LOAD, steps_per_s=1e300, saving_us_per_step=1e300)

    with pytest.raises(ValueError, match="gain_us_per_s must be finite"):
        gate.advise("plan", COSTS, MemoryPrice(0), huge)

    assert gate.mode == "vmm"
    assert gate.advise("plan", COSTS, MemoryPrice(0), load(0, 1)).mode == "static"


@pytest.mark.parametrize("bad", BAD_AMOUNTS)
def test_a_margin_that_is_no_amount_is_refused(bad: float) -> None:
    """A negative one would change at every plan."""
    with pytest.raises(ValueError, match=f"margin must be finite and at least 0, got {bad}"):
        ModeGate(margin=bad)
