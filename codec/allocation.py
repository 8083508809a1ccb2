"""Rate allocation: the paper's dynamic program over block sizes and types.

Each token's coefficients are cut into blocks; a block has a size, a type and a cost in
bits.  With ``best[i, b]`` the least squared error of the first ``i`` coefficients in at
most ``b`` bits, the others zero,

    best[i, b] = min over (size, type) of best[i - size, b - cost] + error - energy

where *error* is what coding really leaves on rows the basis has not seen.  Two exact
speed-ups: a (block end, size, type) is simulated once, outside the loop over the budget;
and the budget axis is divided by the greatest common divisor of all costs.

Source: KVTC (arXiv 2511.01815v2) section 3.2 and B.17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from codec.quantizer import CODED_TYPES, BlockType, squared_error

PAPER_BLOCK_SIZES = (1, 16, 64, 256, 1024)
SIMULATED_VALUES = 1 << 24
"""Values quantized at once while simulating: bounds the scratch memory to some 256 MiB."""


@dataclass(frozen=True, slots=True)
class Block:
    """Coefficients ``[start, start + size)`` and how they are coded."""

    start: int
    size: int
    block_type: BlockType

    @property
    def stop(self) -> int:
        """One past the last coefficient."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Allocation:
    """Disjoint blocks in rising order; coefficients under no block are dropped.

    The table is general: a dropped run may lie between coded blocks, not only behind
    the last one.
    """

    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        end = 0
        for block in self.blocks:
            if block.start < end or block.size < 1:
                raise ValueError(f"blocks must be disjoint and rising, got {block} after {end}")
            if block.block_type is BlockType.NONE:
                raise ValueError("dropped coefficients are those without a block")
            end = block.stop

    @property
    def rank(self) -> int:
        """Coefficients needed: one past the last coded one."""
        return self.blocks[-1].stop if self.blocks else 0

    @property
    def used_bits(self) -> int:
        """Bits per token before the entropy stage, shift and scale included."""
        return sum(block.block_type.used_bits(block.size) for block in self.blocks)

    def to_table(self) -> npt.NDArray[np.int32]:
        """Shape ``(blocks, 3)``: start, size, type."""
        rows = [(block.start, block.size, int(block.block_type)) for block in self.blocks]
        return np.array(rows, dtype=np.int32).reshape(-1, 3)

    @classmethod
    def from_table(cls, table: npt.NDArray[np.int32]) -> Allocation:
        """Undo `to_table`; the same checks hold as for construction."""
        return cls(tuple(Block(int(a), int(n), BlockType(int(t))) for a, n, t in table))


def budget_bits(width: int, target: float) -> int:
    """Bits per token for ``target`` times compression of ``width`` 16-bit elements."""
    if not target >= 1:
        raise ValueError(f"target must be at least 1, got {target}")
    return math.floor(16 * width / target)


def allocate(
    coefficients_NC: Tensor,
    *,
    budget: int,
    block_sizes: Sequence[int] = PAPER_BLOCK_SIZES,
    stride: int = 1,
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> Allocation:
    """Choose blocks of least squared error within ``budget`` bits per token.

    Parameters
    ----------
    coefficients_NC
        Shape ``(N, C)``, float32: rows not used to fit the basis, in its coordinates,
        most important first.
    budget
        Bits per token, metadata included; not negative.
    block_sizes
        Legal block sizes.
    stride
        Blocks larger than one end at multiples of this.  1 is the exact program; 8
        costs an eighth of the simulation.
    on_progress
        Called with the fraction done, rising to 1.

    Returns
    -------
    allocation
        Exact optimum over the legal blocks for these rows.  Equal errors go to the
        cheaper plan, then to the smaller block, so the result is the same everywhere.

    Raises
    ------
    ValueError
        If the budget or a size is out of range, or a coefficient is not finite.
    """
    _check(coefficients_NC, budget, block_sizes, stride)
    num_coefficients = coefficients_NC.shape[1]
    sizes = sorted(size for size in set(block_sizes) if size <= num_coefficients)
    options = [(size, kind) for size in sizes for kind in CODED_TYPES]
    if not options:
        return Allocation(())
    unit = math.gcd(*(kind.used_bits(size) for size, kind in options))
    costs = [kind.used_bits(size) // unit for size, kind in options]
    gains = _simulate(coefficients_NC, options, stride, lambda part: on_progress(0.7 * part))

    units = budget // unit
    reach = max(sizes) + 1
    best = np.zeros((reach, units + 1))  # ring over i; relative to the energy of all rows
    choice = np.zeros((num_coefficients + 1, units + 1), dtype=np.uint8)
    for end in range(1, num_coefficients + 1):
        row = best[end % reach]
        row[:] = best[(end - 1) % reach]
        for number, (size, _) in enumerate(options):
            gain, cost = gains[number, end], costs[number]
            if not gain < 0 or cost > units:
                continue
            candidate = best[(end - size) % reach, : units + 1 - cost] + gain
            better = candidate < row[cost:]
            np.copyto(row[cost:], candidate, where=better)
            np.copyto(choice[end, cost:], np.uint8(number + 1), where=better)
        if end % 256 == 0:
            on_progress(0.7 + 0.3 * end / num_coefficients)
    on_progress(1.0)
    # Several budgets may reach the least error: the smallest of them has the cheapest plan.
    least = best[num_coefficients % reach]
    units = int(np.argmax(least == least[-1]))
    return Allocation(tuple(_trace(choice, options, costs, units)))


def _check(coefficients_NC: Tensor, budget: int, block_sizes: Sequence[int], stride: int) -> None:
    if budget < 0 or stride < 1 or not block_sizes or min(block_sizes) < 1:
        raise ValueError(
            f"need budget >= 0, stride and sizes >= 1, got {budget, stride, block_sizes}"
        )
    if coefficients_NC.ndim != 2 or not torch.isfinite(coefficients_NC).all():
        raise ValueError("coefficients must be a finite matrix of rows by coefficients")


def _simulate(
    coefficients_NC: Tensor,
    options: Sequence[tuple[int, BlockType]],
    stride: int,
    on_progress: Callable[[float], None],
) -> npt.NDArray[np.float64]:
    """Error change of every option at every block end; +inf where it may not end there."""
    num_rows, num_coefficients = coefficients_NC.shape
    gains = np.full((len(options), num_coefficients + 1), np.inf)
    # Exact differences of one prefix sum: energies of a block and of its parts agree.
    energy = np.zeros(num_coefficients + 1)
    energy[1:] = coefficients_NC.double().square().sum(dim=0).cumsum(dim=0).numpy()
    total = sum(size for size, _ in options)
    done = 0
    for number, (size, kind) in enumerate(options):
        first = -(-size // stride) * stride if size > 1 else 1
        ends = np.arange(first, num_coefficients + 1, stride if size > 1 else 1)
        windows = coefficients_NC.unfold(1, size, 1)
        per_batch = max(1, SIMULATED_VALUES // (num_rows * size))
        for batch in (ends[i : i + per_batch] for i in range(0, len(ends), per_batch)):
            block = windows[:, torch.from_numpy(batch - size)]
            error = squared_error(block, kind).double().sum(dim=0).numpy()
            gains[number, batch] = error - (energy[batch] - energy[batch - size])
        done += size
        on_progress(done / total)
    return gains


def _trace(
    choice: npt.NDArray[np.uint8],
    options: Sequence[tuple[int, BlockType]],
    costs: Sequence[int],
    units: int,
) -> Iterator[Block]:
    """Follow the choices back from the end, then yield blocks in rising order."""
    blocks: list[Block] = []
    end = choice.shape[0] - 1
    while end > 0:
        number = int(choice[end, units])
        if number == 0:
            end -= 1
            continue
        size, kind = options[number - 1]
        blocks.append(Block(end - size, size, kind))
        end -= size
        units -= costs[number - 1]
    yield from reversed(blocks)
