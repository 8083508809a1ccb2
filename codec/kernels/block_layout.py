"""Where the codes of an allocation lie, as tables that a kernel can index.

The codes of a chunk are one buffer: the planes ``int2``, ``int4`` and ``fp8`` that the
blob has as sections, in that order, each with one row of bytes per coefficient
(`codec.packing`).  `BlockLayout.plane` cuts the buffer into them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codec.allocation import Allocation
from codec.packing import packed_bytes
from codec.quantizer import CODED_TYPES, BlockType


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Tables of an allocation for ``T`` tokens: ``N`` coded coefficients in ``B`` blocks."""

    num_tokens: int
    """Tokens of the chunk that are coded."""

    rank: int
    """One past the last coded coefficient."""

    column_N: Tensor
    """Shape ``(N,)``, int32, rising: coefficient in the basis."""

    block_N: Tensor
    """Shape ``(N,)``, int32: its block."""

    bits_N: Tensor
    """Shape ``(N,)``, int32: 2, 4, or 8, which is E4M3."""

    row_start_N: Tensor
    """Shape ``(N,)``, int64: byte of the buffer at which its codes start."""

    block_B3: Tensor
    """Shape ``(B, 3)``, int32: first coefficient, one past the last, bits of a code."""

    planes: dict[BlockType, slice]
    """Bytes of the buffer that each type has, in order; types without blocks are left out."""

    @classmethod
    def of(
        cls, allocation: Allocation, *, num_tokens: int, device: torch.device | str = "cpu"
    ) -> BlockLayout:
        """Tables of ``allocation`` on ``device``.

        Raises
        ------
        ValueError
            If ``num_tokens`` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"need num_tokens >= 0, got {num_tokens}")
        planes: dict[BlockType, slice] = {}
        next_row: dict[BlockType, int] = {}
        end = 0
        for kind in CODED_TYPES:
            width = sum(b.size for b in allocation.blocks if b.block_type is kind)
            if width:
                num_bytes = packed_bytes(num_tokens, width, kind.bits)
                planes[kind], next_row[kind] = slice(end, end + num_bytes), end
                end += num_bytes
        columns: list[int] = []
        blocks: list[int] = []
        bits: list[int] = []
        rows: list[int] = []
        for number, block in enumerate(allocation.blocks):
            row_bytes = packed_bytes(num_tokens, 1, block.block_type.bits)
            start = next_row[block.block_type]
            next_row[block.block_type] += block.size * row_bytes
            columns += range(block.start, block.stop)
            blocks += [number] * block.size
            bits += [block.block_type.bits] * block.size
            rows += [start + i * row_bytes for i in range(block.size)]
        spans = [(b.start, b.stop, b.block_type.bits) for b in allocation.blocks]
        return cls(
            num_tokens=num_tokens,
            rank=allocation.rank,
            column_N=torch.tensor(columns, dtype=torch.int32, device=device),
            block_N=torch.tensor(blocks, dtype=torch.int32, device=device),
            bits_N=torch.tensor(bits, dtype=torch.int32, device=device),
            row_start_N=torch.tensor(rows, dtype=torch.int64, device=device),
            block_B3=torch.tensor(spans, dtype=torch.int32, device=device).reshape(-1, 3),
            planes=planes,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return max((plane.stop for plane in self.planes.values()), default=0)

    def plane(self, packed: Tensor, block_type: BlockType) -> Tensor:
        """The bytes of one type, a view: what `codec.packing.pack` gives for its blocks."""
        return packed[self.planes.get(block_type, slice(0, 0))]
