"""Small problems for the fused kernels: rows, a basis, quantizers, and what should come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codec.allocation import Allocation, Block
from codec.entropy.models import TOTAL, SymbolModels
from codec.entropy_calibration import EntropyKind
from codec.kernels.step_tables import DeviceCodes, StepTables, TokenSteps
from codec.packing import pack
from codec.projection import ranks_of
from codec.quantizer import CODED_TYPES, BlockType, dequantize, quantize
from codec.rope import RotarySpec
from codec.sensitivity import Metric
from codec.step_quantizer import Ints, Layout, StepCodes, dequantize_steps, quantize_steps
from codec.symbol_classes import LAST_LEVEL, MAX_SHIFT, NUM_CLASSES, SymbolClasses, class_of
from tests.codec.entropy_samples import dense

#: Tokens, layers, heads, head dimension, rotary pairs, style, coefficients, type of the rows.
#: Tiles are 64 tokens, 32 pairs, 64 (or, decoding, 32) coefficients.
CASES: dict[str, tuple[int, int, int, int, int, str, int, torch.dtype]] = {
    "one token": (1, 1, 1, 2, 1, "half", 1, torch.float32),
    "half": (67, 3, 2, 12, 6, "half", 35, torch.bfloat16),
    "interleaved": (33, 3, 1, 6, 3, "interleaved", 18, torch.float16),
    "partly rotary, odd heads": (5, 2, 3, 7, 2, "interleaved", 42, torch.float32),
    "partly rotary, half": (6, 2, 2, 10, 3, "half", 17, torch.bfloat16),
    "values": (9, 2, 3, 11, 0, "half", 66, torch.float32),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything on the host; methods move what a kernel takes."""

    rows_TLHD: Tensor
    positions_T: Tensor
    rotary: RotarySpec | None
    kind: EntropyKind
    classes: SymbolClasses
    step: float
    shift_T: Ints

    @property
    def unrotated_TW(self) -> Tensor:  # noqa: N802
        """Rows as the basis sees them, float64."""
        rows = self.rows_TLHD.float()
        if self.rotary is not None:
            rows = self.rotary.unrotate(rows, self.positions_T)
        return rows.flatten(1).double()

    @property
    def projected_TC(self) -> Tensor:  # noqa: N802
        """What projecting on all directions should give, float64."""
        return (self.unrotated_TW - self.kind.mean_W.double()) @ dense(self.kind)[0].double()

    @property
    def rank_T(self) -> Any:  # noqa: N802
        """With how many coefficients each token is coded."""
        return ranks_of(self.kind.level_C.numpy(), self.classes.first_class, self.shift_T)

    @property
    def coefficients_TC(self) -> Tensor:  # noqa: N802
        """What projecting each token on its directions should give, float64."""
        is_coded_TC = torch.arange(self.kind.rank) < torch.from_numpy(self.rank_T)[:, None]
        return torch.where(is_coded_TC, self.projected_TC, 0.0)

    def rows_of(self, coefficients_TC: Tensor) -> Tensor:
        """Rows ``(T, L, H, D)`` that coefficients stand for, at their positions, float64."""
        rows_TW = coefficients_TC.double() @ dense(self.kind)[1].double()
        rows_TLHD = (rows_TW + self.kind.mean_W).view(self.rows_TLHD.shape)
        if self.rotary is None:
            return rows_TLHD
        return self.rotary.rotate(rows_TLHD, self.positions_T).double()

    def steps(self, device: str) -> tuple[StepTables, TokenSteps]:
        """How coefficients and tokens are quantized, on a device."""
        tables = StepTables.of(self.kind.layout, self.classes, self.step, device=device)
        return tables, tables.tokens(self.shift_T, self.rank_T)

    def quantized(self, coefficients_TC: Tensor) -> DeviceCodes:
        """Codes of coefficients as the processor makes them."""
        values = coefficients_TC.float().numpy()
        return on_host(
            quantize_steps(values, self.step, self.shift_T, self.kind.layout, self.classes)
        )

    def dequantized(self, codes: DeviceCodes) -> Tensor:
        """Coefficients as the processor makes them of codes, float32."""
        arrays = StepCodes(*(array.cpu().numpy() for array in codes))
        return torch.from_numpy(
            dequantize_steps(arrays, self.step, self.shift_T, self.kind.layout, self.classes)
        )


def problem(case: str, *, seed: int = 0, least_alphabet: int = 2, alphabet: int = 24) -> Problem:
    """The problem of one of `CASES`; layers rotate unlike one another."""
    num_tokens, num_layers, num_heads, head_dim, pairs, style, rank, dtype = CASES[case]
    draw = torch.Generator().manual_seed(seed)
    width = num_layers * num_heads * head_dim
    shape = (num_tokens, num_layers, num_heads, head_dim)
    directions_WC = torch.randn(width, rank, generator=draw) / width**0.5
    skew_BDD = torch.randn(num_layers * num_heads, head_dim, head_dim, generator=draw) / head_dim
    # From the foot of the ladder to the last level that low bits bring down to it.
    level_C = torch.randint(0, 49, (rank,), generator=draw, dtype=torch.int32)
    level_C[::17] = LAST_LEVEL
    level_C = level_C.sort(descending=True).values
    return Problem(
        rows_TLHD=(2 * torch.randn(shape, generator=draw) + 1).to(dtype),
        positions_T=torch.randperm(1000, generator=draw)[:num_tokens],
        rotary=_rotary(num_layers, pairs, style, draw) if pairs else None,
        kind=EntropyKind(
            mean_W=torch.randn(width, generator=draw),
            metric=Metric(root_BDD=torch.eye(head_dim) + (skew_BDD + skew_BDD.mT) / 4),
            directions_GC=directions_WC.half(),
            group_C=torch.zeros(rank, dtype=torch.int32),
            level_C=level_C,
            outside_energy=0.0,
        ),
        classes=some_classes(seed, least_alphabet, alphabet),
        step=0.2,
        shift_T=torch.randint(
            -MAX_SHIFT, MAX_SHIFT + 1, (num_tokens,), generator=draw, dtype=torch.int32
        ).numpy(),
    )


def plain(of: Problem, *, level_C: Tensor | None = None) -> dict[str, Any]:
    """Changes after which rows *are* the coefficients: no rotation, no mean, no metric."""
    width = of.kind.mean_W.shape[0]
    num_blocks, head_dim, _ = of.kind.metric.root_BDD.shape
    kind = EntropyKind(
        mean_W=torch.zeros(width),
        metric=Metric.plain(num_blocks, head_dim),
        directions_GC=torch.eye(width).half(),
        group_C=torch.zeros(width, dtype=torch.int32),
        level_C=of.kind.level_C if level_C is None else level_C,
        outside_energy=0.0,
    )
    return {"rotary": None, "kind": kind}


def some_classes(
    seed: int, least_alphabet: int, alphabet: int, first_class: int = 7
) -> SymbolClasses:
    """Classes whose every offset, bias and alphabet is another; sizes are within these."""
    rng = np.random.default_rng(seed)
    freq_KA = np.zeros((NUM_CLASSES, alphabet), np.int64)
    for k, freq_A in enumerate(freq_KA):
        size = rng.integers(least_alphabet, alphabet + 1) if k >= first_class else 1
        freq_A[:size] = 1
        freq_A[0] += TOTAL - size
    return SymbolClasses(
        models=SymbolModels(freq_KA),
        offset_K=(0.5 - rng.random(NUM_CLASSES) / 3).astype(np.float32),
        bias1_K=(rng.random(NUM_CLASSES) / 5).astype(np.float32),
        bias2_K=(rng.random(NUM_CLASSES) / 9).astype(np.float32),
    )


def _rotary(num_layers: int, pairs: int, style: Any, draw: torch.Generator) -> RotarySpec:
    rows = [tuple(torch.rand(pairs, generator=draw).tolist()) for _ in range(2)]
    return RotarySpec(
        inv_freq_LF=tuple(rows[layer % 2] for layer in range(num_layers)),
        attention_scaling_L=tuple(1.0 + 0.25 * (layer % 2) for layer in range(num_layers)),
        style=style,
        table_dtype="bfloat16",
    )


def on_host(codes: StepCodes) -> DeviceCodes:
    """The processor's codes as tensors."""
    return DeviceCodes(*(torch.from_numpy(array) for array in codes))


def whole_codes(
    codes: DeviceCodes, layout: Layout, shift_T: Ints, classes: SymbolClasses
) -> Tensor:
    """The codes that symbols, planes and escapes stand for, shape ``(C, T)``, one by one."""
    planes = iter(codes.low_PT.cpu().long())
    escapes = iter(codes.escapes_N.tolist())
    codes_CT = torch.zeros(codes.symbols_CT.shape, dtype=torch.int64)
    for c, (level, low_bits) in enumerate(zip(*layout, strict=True)):
        class_T = class_of(np.full_like(shift_T, level), shift_T)
        for t, symbol in enumerate(codes.symbols_CT[c].tolist()):
            high = -((symbol + 1) // 2) if symbol % 2 else symbol // 2
            if symbol == classes.alphabet_K[class_T[t]] - 1 > 0:
                high = next(escapes)
            codes_CT[c, t] = high * 2 ** int(low_bits)
        for bit in range(low_bits):
            codes_CT[c] += next(planes) * 2**bit
    assert next(escapes, None) is next(planes, None) is None
    return codes_CT


def allocation(rank: int) -> Allocation:
    """Blocks of every type in turn, of 1, 2, 3, ... coefficients, with gaps between some."""
    blocks: list[Block] = []
    start = 0
    while start < rank:
        size = min(1 + len(blocks), rank - start)
        blocks.append(Block(start, size, CODED_TYPES[len(blocks) % 3]))
        start += size + (len(blocks) % 4 == 0)
    return Allocation(tuple(blocks))


def reference_blocks(
    coefficients_TC: Tensor, of: Allocation
) -> tuple[dict[BlockType, bytes], Tensor, Tensor, Tensor]:
    """Planes, shifts, scales and coefficients as `codec.quantizer` and `codec.packing` do them."""
    coded = [
        (block, quantize(coefficients_TC[:, block.start : block.stop], block.block_type))
        for block in of.blocks
    ]
    planes = {}
    for kind in CODED_TYPES:
        codes = [one.codes_TB for block, one in coded if block.block_type is kind]
        if codes:
            planes[kind] = pack(torch.cat(codes, dim=1), kind.bits)
    values_TC = torch.zeros_like(coefficients_TC)
    for block, one in coded:
        values_TC[:, block.start : block.stop] = dequantize(one, block.block_type)
    shift_TB = torch.stack([one.shift_T for _, one in coded], dim=1)
    scale_TB = torch.stack([one.scale_T for _, one in coded], dim=1)
    return planes, shift_TB, scale_TB, values_TC
