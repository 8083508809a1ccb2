"""`allocate`: equal to brute force where brute force can go, and within budget always."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codec import allocation
from codec.allocation import Allocation, Block, allocate, budget_bits
from codec.calibration import quantized
from codec.quantizer import CODED_TYPES, BlockType, dequantize, quantize


def plans(num_coefficients: int, sizes: tuple[int, ...], start: int = 0) -> Iterator[list[Block]]:
    """Every way to cut coefficients into blocks of ``sizes`` and dropped ones."""
    if start == num_coefficients:
        yield []
        return
    for rest in plans(num_coefficients, sizes, start + 1):
        yield rest
    for size in sizes:
        if start + size <= num_coefficients:
            for rest in plans(num_coefficients, sizes, start + size):
                for kind in CODED_TYPES:
                    yield [Block(start, size, kind), *rest]


def error(coefficients: Tensor, allocation: Allocation) -> float:
    """Summed squared error that a reader would see."""
    left = coefficients.clone()
    left[:, : allocation.rank] -= quantized(coefficients, allocation)
    return float(left.double().square().sum())


def rows(num_rows: int, num_coefficients: int, seed: int) -> Tensor:
    """Coefficients of falling variance."""
    draw = torch.Generator().manual_seed(seed)
    spread = torch.linspace(2, -2, num_coefficients).exp()
    return torch.randn(num_rows, num_coefficients, generator=draw) * spread


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 130))
def test_no_other_plan_has_less_error(seed: int, budget: int) -> None:
    """Every cut of five coefficients into blocks of 1, 2 and 3 and every type is tried."""
    coefficients = rows(4, 5, seed)

    found = allocate(coefficients, budget=budget, block_sizes=(1, 2, 3))

    legal = (Allocation(tuple(plan)) for plan in plans(5, (1, 2, 3)))
    least = min(error(coefficients, plan) for plan in legal if plan.used_bits <= budget)
    assert found.used_bits <= budget
    assert error(coefficients, found) == pytest.approx(least, rel=1e-5, abs=1e-6)


def block_error(coefficients: Tensor, start: int, stop: int, kind: BlockType) -> float:
    """Change of the summed squared error when these coefficients become one block."""
    values = coefficients[:, start:stop].contiguous()
    coded = dequantize(quantize(values, kind), kind)
    return float((values - coded).double().square().sum() - values.double().square().sum())


def literal_program(coefficients: Tensor, budget: int, sizes: tuple[int, ...]) -> float:
    """Least error by the published recurrence as it is printed: B.17, bit by bit.

    The budget axis is not divided, and every transition quantizes its block anew.
    """
    num_coefficients = coefficients.shape[1]
    energy = float(coefficients.double().square().sum())
    best = [[energy] * (budget + 1) for _ in range(num_coefficients + 1)]
    for end in range(1, num_coefficients + 1):
        for bits in range(budget + 1):
            least = best[end - 1][bits]
            if bits:
                least = min(least, best[end][bits - 1])
            for size in sizes:
                for kind in CODED_TYPES:
                    cost = size * kind.bits + 16 + 16
                    if size <= end and cost <= bits:
                        change = block_error(coefficients, end - size, end, kind)
                        least = min(least, best[end - size][bits - cost] + change)
            best[end][bits] = least
    return best[num_coefficients][budget]


def undivided_program(coefficients: Tensor, budget: int, sizes: tuple[int, ...]) -> float:
    """The same least error, with blocks simulated once but still bit by bit."""
    changes: dict[tuple[int, int, BlockType], float] = {}

    @functools.cache
    def least(end: int, bits: int) -> float:
        if end == 0:
            return 0.0
        found = least(end - 1, bits)
        for size in sizes:
            for kind in CODED_TYPES:
                cost = size * kind.bits + 32
                if size <= end and cost <= bits:
                    key = (end - size, end, kind)
                    if key not in changes:
                        changes[key] = block_error(coefficients, *key)
                    found = min(found, least(end - size, bits - cost) + changes[key])
        return found

    energy = float(coefficients.double().square().sum())
    return energy + least(coefficients.shape[1], budget)


@settings(max_examples=7, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(0, 400),
    sizes=st.sampled_from([(1,), (2,), (4,), (1, 4), (2, 4), (1, 2, 5), (3, 5)]),
)
def test_no_other_plan_of_other_sizes_has_less_error(
    seed: int, budget: int, sizes: tuple[int, ...]
) -> None:
    """Every cut and every type, with and without blocks of one, odd and even sizes."""
    coefficients = rows(4, 5, seed)

    found = allocate(coefficients, budget=budget, block_sizes=sizes)

    legal = (Allocation(tuple(plan)) for plan in plans(5, sizes))
    least = min(error(coefficients, plan) for plan in legal if plan.used_bits <= budget)
    assert {block.size for block in found.blocks} <= set(sizes)
    assert found.used_bits <= budget
    assert error(coefficients, found) == pytest.approx(least, rel=1e-5, abs=1e-6)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(34, 90))
def test_it_is_the_program_as_printed(seed: int, budget: int) -> None:
    """Simulating ahead, dividing the budget and the ring of rows change nothing."""
    coefficients = rows(3, 4, seed)

    found = allocate(coefficients, budget=budget, block_sizes=(1, 2, 4))

    least = literal_program(coefficients, budget, (1, 2, 4))
    assert error(coefficients, found) == pytest.approx(least, rel=1e-5, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(0, 700),
    sizes=st.sampled_from([(1, 4), (1, 16), (4,), (4, 8), (8, 16), (16,), (3, 7)]),
)
def test_dividing_the_budget_by_the_common_divisor_is_exact(
    seed: int, budget: int, sizes: tuple[int, ...]
) -> None:
    """Divisors 2, 8, 16, 32 and 1; budgets that they do and do not divide."""
    coefficients = rows(5, 18, seed)

    found = allocate(coefficients, budget=budget, block_sizes=sizes)

    least = undivided_program(coefficients, budget, sizes)
    assert error(coefficients, found) == pytest.approx(least, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("values_at_once", [1, 50, 1000])
def test_simulating_in_small_batches_gives_the_same_plan(
    values_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound on scratch memory is no setting of the plan."""
    coefficients = rows(8, 70, 3)
    whole = allocate(coefficients, budget=600, block_sizes=(1, 4, 16, 64))

    monkeypatch.setattr(allocation, "SIMULATED_VALUES", values_at_once)

    assert allocate(coefficients, budget=600, block_sizes=(1, 4, 16, 64)) == whole


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 900))
def test_a_stride_can_only_cost(seed: int, budget: int) -> None:
    """Plans on the stride are legal without it; where all blocks end on it they are equal."""
    coefficients = rows(5, 40, seed)

    exact = allocate(coefficients, budget=budget, block_sizes=(1, 8, 16))
    strided = allocate(coefficients, budget=budget, block_sizes=(1, 8, 16), stride=8)

    if all(block.size == 1 or block.stop % 8 == 0 for block in exact.blocks):
        assert error(coefficients, strided) == pytest.approx(error(coefficients, exact))
    else:
        assert error(coefficients, exact) <= error(coefficients, strided) * (1 + 1e-6)


@pytest.mark.parametrize("budget", [40, 41, 100, 135, 136, 1000])
def test_of_plans_with_equal_error_the_cheapest_is_chosen(budget: int) -> None:
    """Four equal numbers fit one block of 40 bits or four of 34; both leave nothing."""
    coefficients = torch.tensor([[1.0] * 4, [2.0] * 4])

    found = allocate(coefficients, budget=budget, block_sizes=(1, 2, 4))

    assert found.blocks == (Block(0, 4, BlockType.INT2),)


def test_dropped_coefficients_behind_the_last_block_cost_no_rank() -> None:
    """The basis is cut to the rank, so a plan must not reach past what it codes."""
    coefficients = rows(8, 64, 4)
    coefficients[:, 24:] = 0

    assert allocate(coefficients, budget=4000, block_sizes=(1, 8, 64), stride=1).rank == 24


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(0, 2000))
def test_more_budget_never_hurts(seed: int, budget: int) -> None:
    """The optimum within a budget is legal within a larger one."""
    coefficients = rows(6, 40, seed)

    less = allocate(coefficients, budget=budget, block_sizes=(1, 4, 16))
    more = allocate(coefficients, budget=budget + 64, block_sizes=(1, 4, 16))

    assert error(coefficients, more) <= error(coefficients, less) * (1 + 1e-6)
    assert less.used_bits <= budget


def test_dead_coefficients_get_nothing_even_between_live_ones() -> None:
    """The table is general: a dropped run may lie inside."""
    coefficients = rows(8, 12, 0)
    coefficients[:, 4:8] = 0

    found = allocate(coefficients, budget=400, block_sizes=(1, 4))

    covered = {c for block in found.blocks for c in range(block.start, block.stop)}
    assert covered == {0, 1, 2, 3, 8, 9, 10, 11}


def test_large_blocks_end_on_the_stride() -> None:
    """The restriction that makes simulation cheaper applies to them and not to single ones."""
    found = allocate(rows(8, 45, 1), budget=500, block_sizes=(1, 16), stride=8)

    assert {block.stop % 8 for block in found.blocks if block.size > 1} == {0}
    assert any(block.size > 1 for block in found.blocks)


def test_equal_input_gives_an_equal_plan() -> None:
    """A calibration digest depends on it."""
    coefficients = rows(16, 64, 2)

    first = allocate(coefficients, budget=300)

    assert allocate(coefficients.clone(), budget=300) == first


def test_too_small_a_budget_drops_everything() -> None:
    """34 bits is the cheapest block there is."""
    assert allocate(rows(4, 8, 0), budget=33).blocks == ()
    assert allocate(rows(4, 0, 0), budget=1000).blocks == ()


def test_progress_rises_to_one() -> None:
    """A progress bar can be fed from it."""
    seen: list[float] = []

    allocate(rows(4, 600, 0), budget=900, stride=8, on_progress=seen.append)

    assert seen == sorted(seen)
    assert seen[-1] == 1.0


@pytest.mark.parametrize(
    ("coefficients", "options"),
    [
        (torch.tensor([[1.0, float("nan")]]), {}),
        (torch.zeros(3), {}),
        (torch.zeros(1, 1), {"budget": -1}),
        (torch.zeros(1, 1), {"stride": 0}),
        (torch.zeros(1, 1), {"block_sizes": (0, 4)}),
    ],
)
def test_bad_input_is_refused(coefficients: Tensor, options: dict[str, int]) -> None:
    """Each would otherwise give a plausible wrong plan."""
    with pytest.raises(ValueError, match=r"need budget|finite matrix"):
        allocate(coefficients, **{"budget": 10, **options})


def test_a_table_comes_back() -> None:
    """What the calibration file keeps."""
    plan = Allocation((Block(0, 16, BlockType.FP8), Block(20, 1, BlockType.INT2)))

    assert Allocation.from_table(plan.to_table()) == plan
    assert Allocation.from_table(Allocation(()).to_table()) == Allocation(())
    assert plan.rank == 21


@pytest.mark.parametrize(
    "table",
    [[[0, 4, 1], [3, 4, 1]], [[4, 4, 1], [0, 4, 1]], [[0, 0, 1]], [[0, 4, 0]], [[0, 4, 9]]],
)
def test_overlapping_empty_or_unknown_blocks_are_refused(table: list[list[int]]) -> None:
    """A damaged table cannot become an allocation."""
    with pytest.raises(ValueError, match=r"blocks must|dropped|not a valid"):
        Allocation.from_table(np.array(table, dtype=np.int32))


@pytest.mark.parametrize(
    ("width", "target", "bits"), [(5760, 8, 11520), (100, 3, 533), (7, 1, 112)]
)
def test_budget_is_the_published_one(width: int, target: float, bits: int) -> None:
    """16 bits per element of the original width over the target, floored."""
    assert budget_bits(width, target) == bits


def test_a_target_below_one_is_refused() -> None:
    """It would ask for more bits than raw has."""
    with pytest.raises(ValueError, match="at least 1"):
        budget_bits(100, 0.5)
