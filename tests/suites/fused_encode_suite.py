"""What encoding kernels owe: the codes of the processor, on whatever device they run."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codec.allocation import Allocation, Block
from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import split_codes
from codec.quantizer import BlockType
from codec.symbol_classes import MAX_LEVEL, MAX_SHIFT, class_of, step_factor
from tests.codec.entropy_samples import dense
from tests.suites.fused import (
    CASES,
    Problem,
    allocation,
    problem,
    reference_blocks,
    whole_codes,
)

#: How near to a border between codes, in steps, another order of summing may change a code.
BORDER = 1e-4


def rule_of(given: Problem) -> tuple[Tensor, Tensor]:
    """Step of each token, shape ``(T, 1)``, and rounding offset of each code, ``(T, C)``."""
    step_T = np.float32(given.step) * step_factor(given.shift_T)
    class_TC = class_of(given.kind.layout.level_C[None, :], given.shift_T[:, None])
    return torch.from_numpy(step_T)[:, None], torch.from_numpy(given.classes.offset_K[class_TC])


def tokens_as(arguments: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Arguments with other steps of tokens."""
    return {"tokens": arguments["tokens"]._replace(**change)}


class FusedEncodeSuite:
    """The contract of `codec.kernels.triton_encode`; a subclass says on which device."""

    device = "cpu"

    @pytest.fixture
    def kernels(self) -> Any:
        """The module, imported when whoever runs this has said how kernels are to run."""
        return importlib.import_module("codec.kernels.triton_encode")

    def rows(self, of: Problem) -> dict[str, Any]:
        """Arguments that say what to project."""
        rows = importlib.import_module("codec.kernels.triton_rows")
        positions_T = of.positions_T.to(self.device)
        return {
            "rows_TLHD": of.rows_TLHD.to(self.device),
            "mean_W": of.kind.mean_W.to(self.device),
            "forward_WC": dense(of.kind)[0].to(self.device),
            "rotary": of.rotary and rows.RotaryTables.of(of.rotary, positions_T),
        }

    def assert_blocks(self, result: Any, coefficients_TC: Tensor, of: Allocation) -> None:
        """Bytes, shifts and scales are the quantizer's for these coefficients."""
        planes, shift_TB, scale_TB, _ = reference_blocks(coefficients_TC, of)
        layout = BlockLayout.of(of, num_tokens=len(coefficients_TC))
        found = result.packed.cpu()
        assert torch.equal(result.shift_TB.cpu(), shift_TB)
        assert torch.equal(result.scale_TB.cpu(), scale_TB)
        assert {k: layout.plane(found, k).numpy().tobytes() for k in planes} == planes
        assert len(found) == sum(map(len, planes.values()))

    @pytest.mark.parametrize("case", CASES)
    def test_rows_become_their_coefficients(self, kernels: Any, case: str) -> None:
        """Turned back, less the mean, times the directions; within what summing costs."""
        given = problem(case)

        found = kernels.project(**self.rows(given)).cpu().double()

        size_TW = given.unrotated_TW.abs() + given.kind.mean_W.abs()
        size_TC = size_TW @ dense(given.kind)[0].abs().double()
        assert ((found - given.projected_TC).abs() <= 1e-6 * size_TC).all()

    @pytest.mark.parametrize("case", CASES)
    def test_coefficients_past_the_rank_of_a_token_are_zero(self, kernels: Any, case: str) -> None:
        """And the others are what they are without ranks."""
        given = problem(case)
        rank_T = given.steps(self.device)[1].rank_T

        found = kernels.project(**self.rows(given), rank_T=rank_T)

        whole = kernels.project(**self.rows(given))
        is_coded_TC = torch.arange(given.kind.rank, device=self.device) < rank_T[:, None]
        assert torch.equal(found, torch.where(is_coded_TC, whole, 0.0))

    # The interpreter divides with NumPy, which warns of what is then cut to the greatest code.
    @pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning")
    @pytest.mark.parametrize("case", CASES)
    def test_symbols_of_coefficients_are_the_processors(self, kernels: Any, case: str) -> None:
        """Bit for bit, on borders and next to them, at zero, and past any alphabet."""
        given = problem(case)
        coefficients_TC = given.projected_TC.float()
        step_T1, offset_TC = rule_of(given)
        edge_TC = ((coefficients_TC / step_T1).round() - offset_TC) * step_T1
        extremes = torch.tensor([0.0, -0.0, 1e-42, -3e38, 3e38, -1e9])
        coefficients_TC[::2] = edge_TC[::2]
        coefficients_TC[1::3] = edge_TC[1::3].nextafter(torch.tensor(0.0))
        coefficients_TC.view(-1)[: len(extremes)] = extremes[: coefficients_TC.numel()]
        tables, tokens = given.steps(self.device)

        coded = kernels.quantize_steps(coefficients_TC.to(self.device), tables, tokens)

        found = split_codes(coded, tables, tokens)
        for array, wanted in zip(found, given.quantized(coefficients_TC), strict=True):
            assert array.dtype is wanted.dtype
            assert torch.equal(array.cpu(), wanted)

    def test_problems_have_every_part_of_the_rule(self) -> None:
        """Escapes, low bits, both ends of the ladder, and tokens of many ranks."""
        given = problem("half")
        codes = given.quantized(given.coefficients_TC)
        level_CT = given.kind.layout.level_C[:, None] + given.shift_T

        assert len(codes.escapes_N) > 20
        assert len(codes.low_PT) > 20
        assert level_CT.min() < 0
        assert level_CT.max() == MAX_LEVEL + MAX_SHIFT
        assert len(set(given.rank_T.tolist())) > 5

    @pytest.mark.parametrize("case", CASES)
    def test_fused_codes_differ_only_at_borders(self, kernels: Any, case: str) -> None:
        """And there by one."""
        given = problem(case)
        tables, tokens = given.steps(self.device)

        coded = kernels.encode_steps(tables=tables, tokens=tokens, **self.rows(given))

        step_T1, offset_TC = rule_of(given)
        units_TC = given.coefficients_TC.abs() / step_T1.double() + offset_TC
        wanted_TC = (units_TC.floor() * given.coefficients_TC.sign()).long()
        rule = (given.kind.layout, given.shift_T, given.classes)
        difference = whole_codes(split_codes(coded, tables, tokens), *rule).T - wanted_TC
        is_near_TC = (units_TC - units_TC.round()).abs() < BORDER
        assert (difference[~is_near_TC] == 0).all()
        assert (difference.abs() <= 1).all()
        assert is_near_TC.double().mean() < 0.01

    def test_directions_may_lie_either_way(self, kernels: Any) -> None:
        """A transposed view is read in place, and gives the same."""
        arguments = self.rows(problem("half"))
        turned = arguments | {"forward_WC": arguments["forward_WC"].T.contiguous().T}

        assert torch.equal(kernels.project(**turned), kernels.project(**arguments))

    def test_directions_may_have_16_bits(self, kernels: Any) -> None:
        """They are read as they are, and multiplied in 32."""
        arguments = self.rows(problem("half"))
        halves = arguments | {"forward_WC": arguments["forward_WC"].half()}
        widened = arguments | {"forward_WC": halves["forward_WC"].float()}

        assert torch.equal(kernels.project(**halves), kernels.project(**widened))

    @pytest.mark.parametrize("case", ["one token", "half", "values"])
    def test_blocks_of_coefficients_are_the_quantizers(self, kernels: Any, case: str) -> None:
        """Bit for bit, and for constant, tiny and saturating blocks."""
        given = problem(case)
        coefficients_TC = given.projected_TC.float()
        plan = allocation(coefficients_TC.shape[1])
        for row, factor in enumerate((0.0, 1e-6, -0.0, 1e6, 1e-9)):
            coefficients_TC[row + 1 : row + 2] *= factor
        coefficients_TC[-1] = 2.25
        layout = BlockLayout.of(plan, num_tokens=len(coefficients_TC), device=self.device)

        found = kernels.quantize_blocks(coefficients_TC.to(self.device), layout)

        self.assert_blocks(found, coefficients_TC, plan)

    def test_e4m3_rounds_to_even_everywhere(self, kernels: Any) -> None:
        """Every code, the middle between neighbors, and the floats next to it, of both signs."""
        codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        middles = (codes[1:] + codes[:-1]) / 2
        values = torch.cat(
            [codes, middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])]
        )
        coefficients_TC = torch.cat([values, -values])[None, :]
        plan = Allocation((Block(0, coefficients_TC.shape[1], BlockType.FP8),))
        layout = BlockLayout.of(plan, num_tokens=1, device=self.device)

        found = kernels.quantize_blocks(coefficients_TC.to(self.device), layout)

        assert found.scale_TB.item() == 1
        self.assert_blocks(found, coefficients_TC, plan)

    @pytest.mark.parametrize("case", ["interleaved", "partly rotary, odd heads"])
    def test_fused_blocks_are_those_of_their_coefficients(self, kernels: Any, case: str) -> None:
        """Projecting and coding in one call is the two, one after the other."""
        given = problem(case)
        plan = allocation(given.kind.rank)
        layout = BlockLayout.of(plan, num_tokens=len(given.rows_TLHD), device=self.device)

        found = kernels.encode_blocks(**self.rows(given), layout=layout)

        self.assert_blocks(found, kernels.project(**self.rows(given)).cpu(), plan)

    # The interpreter multiplies with NumPy, which warns of infinity times zero.
    @pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
    def test_what_is_not_finite_is_refused(self, kernels: Any, bad: float) -> None:
        """A cache that holds it must not be kept."""
        given = problem("values")
        given.rows_TLHD[-1, -1, -1, -1] = bad
        coefficients_TC = given.projected_TC.float()
        tables, tokens = given.steps(self.device)

        with pytest.raises(ValueError, match="finite"):
            kernels.project(**self.rows(given))
        with pytest.raises(ValueError, match="finite"):
            kernels.quantize_steps(coefficients_TC.to(self.device), tables, tokens)

    def test_nothing_becomes_nothing(self, kernels: Any) -> None:
        """No tokens, or no coefficients: empty arrays of the right shape."""
        given = problem("values")
        arguments, (tables, _) = self.rows(given), given.steps(self.device)
        no_rows = arguments | {"rows_TLHD": arguments["rows_TLHD"][:0]}
        layout = BlockLayout.of(allocation(66), num_tokens=0, device=self.device)

        none = kernels.encode_steps(tables=tables, tokens=tables.tokens([]), **no_rows)
        packed = kernels.encode_blocks(**no_rows, layout=layout)
        empty = BlockLayout.of(Allocation(()), num_tokens=9, device=self.device)

        assert none.symbols_CT.shape == none.plane_CT.shape == (66, 0)
        assert packed.packed.numel() == packed.shift_TB.numel() == 0
        assert kernels.encode_blocks(**arguments, layout=empty).packed.numel() == 0

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("rows", lambda a: {"rows_TLHD": a["rows_TLHD"].flatten(2)}),
            ("rows_TLHD", lambda a: {"rows_TLHD": a["rows_TLHD"].double()}),
            ("rows_TLHD", lambda a: {"rows_TLHD": a["rows_TLHD"].mT.contiguous().mT}),
            ("mean_W", lambda a: {"mean_W": a["mean_W"][1:]}),
            ("forward_WC", lambda a: {"forward_WC": a["forward_WC"][1:]}),
            ("forward_WC", lambda a: {"forward_WC": a["forward_WC"].to("meta")}),
            ("9 tokens", lambda a: {"tokens": a["tables"].tokens([0] * 8)}),
            ("65 coefficients", lambda a: {"forward_WC": a["forward_WC"][:, 1:]}),
            ("shift_T", lambda a: tokens_as(a, shift_T=a["tokens"].shift_T.long())),
            ("step_T", lambda a: tokens_as(a, step_T=a["tokens"].step_T[1:])),
            ("rank_T", lambda a: tokens_as(a, rank_T=a["tokens"].rank_T[1:])),
            ("step_T", lambda a: tokens_as(a, step_T=a["tokens"].step_T.to("meta"))),
            (
                "tables",
                lambda a: {"tables": replace(a["tables"], level_C=torch.empty(66, device="meta"))},
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, kernels: Any, name: str, change: Any) -> None:
        """By name, before any kernel runs."""
        given = problem("values")
        arguments = self.rows(given)
        arguments["tables"], arguments["tokens"] = given.steps(self.device)

        with pytest.raises(ValueError, match=name):
            kernels.encode_steps(**arguments | change(arguments))

    def test_tables_of_other_rows_are_refused(self, kernels: Any) -> None:
        """Tokens, layers and heads of tables must be those of the rows."""
        arguments = self.rows(problem("interleaved"))
        rows_TLHD = arguments["rows_TLHD"]

        for part in (rows_TLHD[:-1], rows_TLHD[:, :-1], rows_TLHD[..., :-1]):
            with pytest.raises(ValueError, match="tables"):
                kernels.project(**arguments | {"rows_TLHD": part.contiguous()})

    def test_a_layout_of_other_rows_is_refused(self, kernels: Any) -> None:
        """It says where every byte goes."""
        coefficients_TC = torch.zeros(4, 9, device=self.device)

        for plan, num_tokens in ((allocation(9), 5), (allocation(10), 4)):
            layout = BlockLayout.of(plan, num_tokens=num_tokens, device=self.device)
            with pytest.raises(ValueError, match="need coefficients"):
                kernels.quantize_blocks(coefficients_TC, layout)
