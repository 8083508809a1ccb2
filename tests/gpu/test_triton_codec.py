"""The fused kernels on a device: the contracts that the interpreter is held to, and real sizes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from codec.entropy.rans import encode_symbols
from codec.kernels.block_layout import BlockLayout
from codec.kernels.step_tables import DeviceCodes, StepTables, join_codes, split_codes
from codec.step_quantizer import Layout
from codec.symbol_classes import NUM_CLASSES, SymbolClasses, levels_of, split_levels
from tests.codec.entropy_samples import dense
from tests.gpu.devices import has_library
from tests.suites.fused import allocation, plain, problem, some_classes
from tests.suites.fused_decode_suite import FusedDecodeSuite
from tests.suites.fused_encode_suite import FusedEncodeSuite

pytestmark = pytest.mark.gpu
if not has_library():
    pytest.skip("no NVIDIA driver here: nothing was tested on a device", allow_module_level=True)


@pytest.fixture(autouse=True)
def need_compiled_kernels() -> None:
    """Skip where kernels cannot be compiled and run, and say why."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} reaches no CUDA device")
    rows = importlib.import_module("codec.kernels.triton_rows")
    if type(rows.pair_elements).__name__ != "JITFunction":
        pytest.skip("kernels are interpreted in this process: run tests/gpu by itself")


class TestGpuEncode(FusedEncodeSuite):
    """The contract."""

    device = "cuda"


class TestGpuDecode(FusedDecodeSuite):
    """The contract."""

    device = "cuda"


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
def test_a_chunk_of_real_size_comes_back(precision: Any) -> None:
    """Both profiles, 256 tokens of eight layers of 8 x 128, orthonormal directions."""
    encode = importlib.import_module("codec.kernels.triton_encode")
    decode = importlib.import_module("codec.kernels.triton_decode")
    shape, width, rank = (256, 8, 8, 128), 8192, 512
    draw = torch.Generator(device="cuda").manual_seed(0)
    start = torch.randn(width, rank, device="cuda", generator=draw)
    directions_WC = torch.linalg.qr(start).Q.half()
    mean_W = torch.randn(width, device="cuda", generator=draw)
    scale_C = torch.linspace(30, 3, rank, device="cuda")
    drawn_TC = torch.randn(256, rank, device="cuda", generator=draw) * scale_C
    rows = (drawn_TC @ directions_WC.float().T + mean_W).view(shape)
    basis = {"mean_W": mean_W, "precision": precision}
    classes = SymbolClasses(
        models=some_classes(0, 40, 40).models,
        offset_K=np.full(NUM_CLASSES, 0.5, np.float32),
        bias1_K=np.zeros(NUM_CLASSES, np.float32),
        bias2_K=np.zeros(NUM_CLASSES, np.float32),
    )
    low_bits_C, level_C = split_levels(levels_of(scale_C.cpu().double().numpy(), 1.0))
    tables = StepTables.of(Layout(level_C, low_bits_C), classes, 1.0, device="cuda")
    tokens = tables.tokens([0] * 256)
    plan = allocation(rank)
    layout = BlockLayout.of(plan, num_tokens=256, device="cuda")

    coded = encode.encode_steps(rows, tables, tokens, forward_WC=directions_WC, **basis)
    codes = split_codes(coded, tables, tokens)
    steps = torch.empty_like(rows)
    decode.decode_steps(
        join_codes(codes, tables, tokens),
        tables,
        tokens,
        inverse_CW=directions_WC.T,
        out_TLHD=steps,
        **basis,
    )
    packed = encode.encode_blocks(rows, forward_WC=directions_WC, layout=layout, **basis)
    blocks = torch.empty_like(rows)
    decode.decode_blocks(
        packed.packed,
        packed.shift_TB,
        packed.scale_TB,
        layout=layout,
        inverse_CW=directions_WC.T,
        out_TLHD=blocks,
        **basis,
    )

    # Steps of 1 rounded to nearest leave a twelfth per coefficient, some of 8192 elements.
    assert len(codes.low_PT) > 0
    mean_square = (steps - rows).square().sum().item() / (256 * rank)
    assert abs(mean_square - 1 / 12) < 0.005
    assert (blocks - rows).square().sum() < 0.1 * drawn_TC.square().sum()


def test_kernels_and_coders_meet_on_the_device() -> None:
    """Rows to streams and back, in three bands, shifted: the processor's to the bit."""
    encode = importlib.import_module("codec.kernels.triton_encode")
    decode = importlib.import_module("codec.kernels.triton_decode")
    coder = importlib.import_module("codec.kernels.triton_rans")
    given = problem("values", least_alphabet=2)
    given = replace(given, **plain(given))
    tables, tokens = given.steps("cuda")
    models = coder.DeviceModels.of(given.classes.models, torch.device("cuda"))
    bands = given.kind.bands
    levels = [given.kind.layout.level_C[band] for band in bands]
    shifts = [given.shift_T] * len(bands)

    coded = encode.quantize_steps(given.coefficients_TC.float().cuda(), tables, tokens)
    parts = [split_codes(coded, tables, tokens, band) for band in bands]
    streams = coder.encode_streams([part.symbols_CT for part in parts], levels, models, shifts)
    symbols = coder.decode_streams(streams, levels, models, [9] * len(bands), shifts)
    whole = DeviceCodes(
        torch.cat(symbols),
        torch.cat([part.low_PT for part in parts]),
        torch.cat([part.escapes_N for part in parts]),
    )
    rows = torch.empty(given.rows_TLHD.shape, device="cuda")
    decode.decode_steps(
        join_codes(whole, tables, tokens),
        tables,
        tokens,
        mean_W=given.kind.mean_W.cuda(),
        inverse_CW=dense(given.kind)[1].cuda(),
        out_TLHD=rows,
    )

    codes = given.quantized(given.coefficients_TC)
    assert streams == [
        encode_symbols(codes.symbols_CT[band].numpy(), level_C, given.classes.models, given.shift_T)
        for band, level_C in zip(bands, levels, strict=True)
    ]
    assert torch.equal(rows.cpu().flatten(1), given.dequantized(codes))


def test_zero_strides_read_one_row_of_directions() -> None:
    """Strides are taken as given, even those of an expanded view."""
    encode = importlib.import_module("codec.kernels.triton_encode")
    given = problem("values")
    expanded_WC = dense(given.kind)[0].cuda()[:, :1].expand(-1, 66)

    found = encode.project(
        given.rows_TLHD.cuda(), mean_W=given.kind.mean_W.cuda(), forward_WC=expanded_WC
    )

    assert torch.allclose(found, found[:, :1].expand(-1, 66))
