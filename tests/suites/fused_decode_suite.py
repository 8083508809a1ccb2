"""What decoding kernels owe: the rows of the processor, on whatever device they run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from codec.allocation import Allocation, Block
from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import CodePlane, DeviceCodes, TokenSteps, join_codes
from codec.quantizer import BlockType
from codec.symbol_classes import MAX_LEVEL
from tests.codec.entropy_samples import dense
from tests.suites.fused import CASES, Problem, allocation, plain, problem, reference_blocks

#: Half a unit in the last place, relative: what rounding to the wanted type costs.
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def codes_of(given: Problem) -> DeviceCodes:
    """Codes of a problem's coefficients."""
    return given.quantized(given.coefficients_TC)


def coded_as(arguments: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Arguments with other codes."""
    return {"coded": arguments["coded"]._replace(**change)}


class FusedDecodeSuite:
    """The contract of `codec.kernels.triton_decode`; a subclass says on which device."""

    device = "cpu"
    #: Whether conversion to bfloat16 is to the nearest, rather than toward zero.
    rounds_bfloat16 = True

    @pytest.fixture
    def kernels(self) -> Any:
        """The module, imported when whoever runs this has said how kernels are to run."""
        return importlib.import_module("codec.kernels.triton_decode")

    def rows(
        self,
        of: Problem,
        *,
        layers: slice = slice(None),
        num_tokens: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Any]:
        """Arguments that say which rows to write, and how; unset elements are NaN."""
        rows = importlib.import_module("codec.kernels.triton_rows")
        shape = of.rows_TLHD[:num_tokens, layers].shape
        per_layer = shape[2] * shape[3]
        first = (layers.start or 0) * per_layer
        columns = slice(first, first + shape[1] * per_layer)
        rotary = of.rotary
        if rotary is not None:
            rotary = rotary.of_layers(range(rotary.num_layers)[layers])
        positions_T = of.positions_T[:num_tokens].to(self.device)
        return {
            "mean_W": of.kind.mean_W[columns].to(self.device),
            "inverse_CW": dense(of.kind)[1].to(self.device)[:, columns],
            "rotary": rotary and rows.RotaryTables.of(rotary, positions_T),
            "out_TLHD": torch.full(shape, torch.nan, dtype=dtype, device=self.device),
        }

    def assert_rows(self, found: Tensor, of: Problem, coefficients_TC: Tensor) -> None:
        """Within what summing in 32 bits, and rounding at the end, may cost."""
        size_TW = coefficients_TC.double().abs() @ dense(of.kind)[1].double().abs()
        size_TW += of.kind.mean_W.abs()
        # A rotation mixes the elements of a head, and scales by at most 1.25 here.
        size = size_TW.view(of.rows_TLHD.shape).sum(dim=3, keepdim=True) * 1.25
        wanted = of.rows_of(coefficients_TC)
        error = (found.cpu().double() - wanted).abs()
        rounding = EPSILON[found.dtype] * wanted.abs()
        if found.dtype is torch.bfloat16 and not self.rounds_bfloat16:
            rounding *= 2
        assert (error <= 2e-6 * size + rounding + 1e-7).all()

    def decode_steps(self, kernels: Any, given: Problem, rows: dict[str, Any]) -> Tensor:
        """Rows of a problem's codes."""
        tables, tokens = given.steps(self.device)
        codes = DeviceCodes(*(array.to(self.device) for array in codes_of(given)))
        kernels.decode_steps(join_codes(codes, tables, tokens), tables, tokens, **rows)
        found: Tensor = rows["out_TLHD"]
        return found

    def decode_blocks(
        self, kernels: Any, coefficients_TC: Tensor, plan: Allocation, rows: dict[str, Any]
    ) -> Tensor:
        """Rows of coefficients, coded as the quantizer and the packer do."""
        planes, shift_TB, scale_TB, _ = reference_blocks(coefficients_TC, plan)
        layout = BlockLayout.of(plan, num_tokens=len(coefficients_TC), device=self.device)
        packed = np.frombuffer(b"".join(planes.values()), dtype=np.uint8).copy()
        kernels.decode_blocks(
            torch.from_numpy(packed).to(self.device),
            shift_TB.to(self.device),
            scale_TB.to(self.device),
            layout=layout,
            **rows,
        )
        found: Tensor = rows["out_TLHD"]
        return found

    @pytest.mark.parametrize("case", CASES)
    def test_codes_become_rows(self, kernels: Any, case: str) -> None:
        """At their positions, in the type the rows came in."""
        given = problem(case)

        found = self.decode_steps(kernels, given, self.rows(given, dtype=CASES[case][-1]))

        self.assert_rows(found, given, given.dequantized(codes_of(given)))

    @pytest.mark.parametrize("case", CASES)
    def test_blocks_become_rows(self, kernels: Any, case: str) -> None:
        """At their positions, in the type the rows came in; coefficients of no block are zero."""
        given = problem(case)
        coefficients_TC = given.projected_TC.float()
        plan = allocation(coefficients_TC.shape[1])
        rows = self.rows(given, dtype=CASES[case][-1])

        found = self.decode_blocks(kernels, coefficients_TC, plan, rows)

        self.assert_rows(found, given, reference_blocks(coefficients_TC, plan)[-1])

    def test_codes_are_dequantized_as_the_processor_does(self, kernels: Any) -> None:
        """Bit for bit, low bits and escapes included, where no sum can hide a difference."""
        given = problem("values")
        given = replace(given, **plain(given))
        codes = codes_of(given)
        assert len(codes.low_PT) > 16
        assert len(codes.escapes_N) > 9

        found = self.decode_steps(kernels, given, self.rows(given))

        assert torch.equal(found.cpu().flatten(1), given.dequantized(codes))

    def test_where_symbols_say_all_no_plane_is_needed(self, kernels: Any) -> None:
        """A chunk without escapes, of coefficients that keep nothing apart."""
        given = problem("values", least_alphabet=200, alphabet=256)
        given = replace(given, **plain(given, level_C=given.kind.level_C.clamp(max=MAX_LEVEL)))
        tables, tokens = given.steps("cpu")
        assert join_codes(codes_of(given), tables, tokens).plane_CT is None

        found = self.decode_steps(kernels, given, self.rows(given))

        assert torch.equal(found.cpu().flatten(1), given.dequantized(codes_of(given)))

    def test_codes_of_both_directions_agree(self, kernels: Any) -> None:
        """What the encoder wrote is read as it is, without a way through a blob."""
        given = problem("values")
        given = replace(given, **plain(given))
        encode = importlib.import_module("codec.kernels.triton_encode")
        tables, tokens = given.steps(self.device)
        rows = self.rows(given)

        coded = encode.quantize_steps(given.coefficients_TC.float().to(self.device), tables, tokens)
        kernels.decode_steps(coded, tables, tokens, **rows)

        found = rows["out_TLHD"].cpu().flatten(1)
        assert torch.equal(found, given.dequantized(codes_of(given)))

    def test_blocks_are_dequantized_as_the_processor_does(self, kernels: Any) -> None:
        """Up to fusing the last product and sum, which a device may do."""
        given = problem("values")
        given = replace(given, **plain(given))
        coefficients_TC = given.projected_TC.float()
        coefficients_TC[0], coefficients_TC[1] = 0, coefficients_TC[1] * 1e6
        plan = Allocation(
            (*(Block(i, 1, BlockType.FP8) for i in range(3)), *allocation(66).blocks[3:])
        )

        found = self.decode_blocks(kernels, coefficients_TC, plan, self.rows(given))

        wanted = reference_blocks(coefficients_TC, plan)[-1]
        size = coefficients_TC.abs().amax(dim=1, keepdim=True)
        assert ((found.cpu().flatten(1) - wanted).abs() <= 2e-7 * size).all()

    def test_every_e4m3_code_is_read(self, kernels: Any) -> None:
        """All 254 finite codes give their value; the other two give rows that are not numbers."""
        given = problem("values")
        given = replace(given, **plain(given))
        codes = torch.arange(256, dtype=torch.uint8)
        packed_CT = torch.zeros(66, 9, dtype=torch.uint8)
        packed_CT.view(-1)[:256] = codes
        plan = Allocation((Block(0, 66, BlockType.FP8),))
        halves = torch.ones(9, 1, dtype=torch.float16, device=self.device)
        rows = self.rows(given)

        kernels.decode_blocks(
            packed_CT.view(-1).to(self.device),
            0 * halves,
            halves,
            layout=BlockLayout.of(plan, num_tokens=9, device=self.device),
            **rows,
        )

        wanted = packed_CT.view(torch.float8_e4m3fn).float().T
        is_bad_T = wanted.isnan().any(dim=1)
        found = rows["out_TLHD"].cpu().flatten(1)
        assert int(is_bad_T.sum()) == 2
        assert torch.equal(found[~is_bad_T], wanted[~is_bad_T])
        assert found[is_bad_T].isnan().any(dim=1).all()

    @pytest.mark.parametrize("num_tokens", [1, 64, 65])
    def test_first_tokens_alone_are_those_of_all(self, kernels: Any, num_tokens: int) -> None:
        """A part of a chunk is read in place."""
        given = problem("half")
        coefficients_TC = given.projected_TC.float()
        plan = allocation(coefficients_TC.shape[1])
        part = replace(
            given,
            rows_TLHD=given.rows_TLHD[:num_tokens],
            positions_T=given.positions_T[:num_tokens],
        )

        steps = self.decode_steps(kernels, given, self.rows(given, num_tokens=num_tokens))
        rows = self.rows(given, num_tokens=num_tokens)
        blocks = self.decode_blocks(kernels, coefficients_TC, plan, rows)

        whole = given.dequantized(codes_of(given))
        self.assert_rows(steps, part, whole[:num_tokens])
        whole = reference_blocks(coefficients_TC, plan)[-1]
        self.assert_rows(blocks, part, whole[:num_tokens])

    @pytest.mark.parametrize("layers", [slice(0, 1), slice(1, 3), slice(2, 3)])
    def test_some_layers_alone_are_those_of_all(self, kernels: Any, layers: slice) -> None:
        """A stage's layers are a run of the directions, and have tables of their own."""
        given = problem("interleaved")

        found = self.decode_steps(kernels, given, self.rows(given, layers=layers))

        whole = self.decode_steps(kernels, given, self.rows(given))
        assert torch.allclose(found, whole[:, layers], rtol=1e-5, atol=1e-5)

    def test_nothing_becomes_nothing(self, kernels: Any) -> None:
        """No tokens: nothing is written; no coefficients: the mean is."""
        given = problem("values")
        none = self.rows(given, num_tokens=0)
        self.decode_steps(kernels, given, none)
        empty = self.rows(given) | {"inverse_CW": torch.empty(0, 66, device=self.device)}

        kernels.decode_blocks(
            torch.empty(0, dtype=torch.uint8, device=self.device),
            torch.empty(9, 0, dtype=torch.float16, device=self.device),
            torch.empty(9, 0, dtype=torch.float16, device=self.device),
            layout=BlockLayout.of(Allocation(()), num_tokens=9, device=self.device),
            **empty,
        )

        assert torch.equal(
            empty["out_TLHD"].cpu(), given.kind.mean_W.expand(9, -1).reshape(given.rows_TLHD.shape)
        )

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("symbols_CT", lambda a: coded_as(a, symbols_CT=a["coded"][0].int())),
            ("symbols_CT", lambda a: coded_as(a, symbols_CT=a["coded"][0].T.contiguous().T)),
            ("at most 8 tokens", lambda a: coded_as(a, symbols_CT=a["coded"][0][:, 1:])),
            ("plane_CT", lambda a: coded_as(a, plane_CT=a["coded"][1][:, 1:])),
            ("plane_CT", lambda a: coded_as(a, plane_CT=a["coded"][1].long())),
            ("plane_CT", lambda a: coded_as(a, plane_CT=a["coded"][1].to("meta"))),
            ("need plane_CT", lambda a: coded_as(a, plane_CT=None)),
            ("inverse_CW", lambda a: {"inverse_CW": a["inverse_CW"][:, 1:]}),
            ("mean_W", lambda a: {"mean_W": a["mean_W"].double()}),
            ("out_TLHD", lambda a: {"out_TLHD": a["out_TLHD"].double()}),
            ("out_TLHD", lambda a: {"out_TLHD": a["out_TLHD"].mT.contiguous().mT}),
            ("9 tokens", lambda a: {"tokens": a["tables"].tokens([0] * 8)}),
            ("shift_T", lambda a: {"tokens": TokenSteps(*(x.to("meta") for x in a["tokens"]))}),
        ],
    )
    def test_what_does_not_fit_is_refused(self, kernels: Any, name: str, change: Any) -> None:
        """By name, before the kernel runs."""
        given = problem("values")
        arguments = self.rows(given)
        arguments["tables"], arguments["tokens"] = given.steps(self.device)
        symbols_CT = codes_of(given).symbols_CT.to(self.device)
        arguments["coded"] = CodePlane(symbols_CT, symbols_CT.int())

        with pytest.raises(ValueError, match=name):
            kernels.decode_steps(**arguments | change(arguments))

    @pytest.mark.parametrize("name", ["packed", "shift_TB", "scale_TB", "directions", "tokens"])
    def test_blocks_that_do_not_fit_are_refused(self, kernels: Any, name: str) -> None:
        """By name, before the kernel runs."""
        given = problem("values")
        plan = allocation(67 if name == "directions" else 66)
        layout = BlockLayout.of(plan, num_tokens=8 if name == "tokens" else 9, device=self.device)
        halves = torch.zeros(9, len(plan.blocks), dtype=torch.float16, device=self.device)
        arguments = {
            "packed": torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device),
            "shift_TB": halves,
            "scale_TB": halves,
        }
        if name in arguments:
            arguments[name] = arguments[name][1:]

        with pytest.raises(ValueError, match=name):
            kernels.decode_blocks(**arguments, layout=layout, **self.rows(given))
