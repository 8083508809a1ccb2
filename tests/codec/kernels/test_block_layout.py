"""Tables of an allocation: every code in one place, where `codec.packing` has it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codec.allocation import Allocation, Block
from codec.kernels.block_layout import BlockLayout
from codec.packing import pack
from codec.quantizer import CODED_TYPES


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    """Up to six blocks of any type, with gaps."""
    blocks: list[Block] = []
    for _ in range(draw(st.integers(0, 6))):
        start = (blocks[-1].stop if blocks else 0) + draw(st.integers(0, 2))
        blocks.append(Block(start, draw(st.integers(1, 5)), draw(st.sampled_from(CODED_TYPES))))
    return Allocation(tuple(blocks))


@given(allocations(), st.integers(0, 9))
def test_rows_of_bytes_are_the_packers(plan: Allocation, num_tokens: int) -> None:
    """Codes found through the tables are those that were packed, type by type."""
    layout = BlockLayout.of(plan, num_tokens=num_tokens)
    num_coded = len(layout.column_N)
    codes_TN = torch.arange(num_tokens * num_coded).reshape(num_tokens, num_coded) * 7 % 251
    codes_TN = (codes_TN % 2**layout.bits_N).to(torch.uint8)
    packed = b"".join(pack(codes_TN[:, layout.bits_N == k.bits], k.bits) for k in CODED_TYPES)
    assert len(packed) == layout.num_bytes

    for n in range(num_coded):
        bits, start = int(layout.bits_N[n]), int(layout.row_start_N[n])
        for t in range(num_tokens):
            byte = packed[start + t * bits // 8]
            assert byte >> (t * bits % 8) & (2**bits - 1) == codes_TN[t, n]


@given(allocations())
def test_coded_coefficients_are_those_of_blocks(plan: Allocation) -> None:
    """In rising order, each with its block, whose span and type are given."""
    layout = BlockLayout.of(plan, num_tokens=3)

    wanted = [(c, n) for n, b in enumerate(plan.blocks) for c in range(b.start, b.stop)]
    assert list(zip(layout.column_N.tolist(), layout.block_N.tolist(), strict=True)) == wanted
    spans = [[b.start, b.stop, b.block_type.bits] for b in plan.blocks]
    assert layout.block_B3.tolist() == spans
    assert layout.bits_N.tolist() == [spans[n][2] for _, n in wanted]
    assert layout.rank == plan.rank


@given(allocations(), st.integers(0, 5))
def test_planes_share_the_buffer_out(plan: Allocation, num_tokens: int) -> None:
    """Whole, in order, without overlap; a type without blocks has none."""
    layout = BlockLayout.of(plan, num_tokens=num_tokens)
    buffer = torch.arange(layout.num_bytes)

    parts = [layout.plane(buffer, kind) for kind in CODED_TYPES]

    assert torch.equal(torch.cat(parts), buffer)


def test_fewer_than_no_tokens_are_refused() -> None:
    """A count below zero is a mistake of the caller's."""
    with pytest.raises(ValueError, match="num_tokens >= 0, got -1"):
        BlockLayout.of(Allocation(()), num_tokens=-1)
