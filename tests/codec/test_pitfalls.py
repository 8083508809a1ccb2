"""One test per row of the published list of KVTC pitfalls, and per fault of other ports.

The numbers in the names are the rows; number 5, recoding, is in tests/actors/test_coding.py.
"""

from __future__ import annotations

import dataclasses

import deflate
import pytest
import torch

from codec.allocation import Allocation, Block
from codec.blob import read_blob
from codec.calibration import Calibration, quantized
from codec.codec import geometry_of
from codec.geometry import KVGeometry
from codec.kvtc import KvtcCodec
from codec.packing import pack, pack_halves
from codec.quantizer import BlockType, dequantize, quantize
from tests.codec.synthetic import GEOMETRY, ROTARY, cache, calibrated, header


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    """Shared: it is immutable."""
    return calibrated()


def test_1_shift_and_scale_are_per_token_and_block_and_in_the_budget() -> None:
    """Two tokens of very different size do not share a scale; 32 bits each are counted."""
    values = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 100.0, 200.0, 300.0]])

    coded = quantize(values, BlockType.INT2)

    assert coded.scale_T.tolist() == [1.0, 100.0]
    assert torch.equal(dequantize(coded, BlockType.INT2), values)
    assert Allocation((Block(0, 4, BlockType.INT2),)).used_bits == 4 * 2 + 32


def test_2_tokens_of_one_coefficient_share_a_byte_and_that_deflates_better() -> None:
    """Coefficients have their own statistics; token-major bytes mix them."""
    draw = torch.Generator().manual_seed(0)
    middle = torch.randint(2, 14, (64,), generator=draw)
    codes = (torch.randn(256, 64, generator=draw) + middle).round().clamp(0, 15).to(torch.uint8)

    ours = len(deflate.deflate_compress(pack(codes, 4), 6))
    token_major = len(deflate.deflate_compress(pack(codes.T.contiguous(), 4), 6))

    assert ours < 0.95 * token_major


def test_2_metadata_lies_in_planes_of_its_own() -> None:
    """High bytes first to last repeat; interleaved with low bytes they would not."""
    values = torch.linspace(1.0, 1.9, 512).to(torch.float16).view(256, 2)

    data = pack_halves(values)

    assert len(set(data[512:])) <= 4
    assert len(set(data[:512])) > 64


def test_3_fp8_blocks_are_scaled() -> None:
    """Unscaled E4M3 would end at 448."""
    values = torch.tensor([[-3000.0, 10.0, 3000.0]])

    again = dequantize(quantize(values, BlockType.FP8), BlockType.FP8)

    assert torch.allclose(again, values, rtol=0.07, atol=10)


def test_4_codes_are_made_with_the_rounded_metadata() -> None:
    """The shift 1000.3 rounds to 1000.5; codes made for 1000.3 would all be 0.2 off."""
    values = torch.tensor([[1000.3, 1000.8, 1001.4, 1002.1]])

    coded = quantize(values, BlockType.INT4)
    shift, scale = float(coded.shift_T[0]), float(coded.scale_T[0])
    expected = ((values - shift) / scale).round().clamp(0, 15)

    assert shift == 1000.5
    assert torch.equal(coded.codes_TB.float(), expected)
    error = (dequantize(coded, BlockType.INT4) - values).abs()
    assert (error[values >= shift] <= scale / 2 + 1e-3).all()


def test_6_position_is_part_of_a_blob_and_undone_with_the_models_own_frequencies(
    calibration: Calibration,
) -> None:
    """The same text further on has the same coefficients, and its keys come back rotated there."""
    codec = KvtcCodec(calibration)
    near, values = cache(32, seed=2, start=256)
    far, _ = cache(32, seed=2, start=2048)

    blobs = [
        codec.encode(keys, values, header=header(codec.codec_id, 32, start=start))
        for keys, start in ((near, 256), (far, 2048))
    ]

    decoded = [codec.decode(blob)[0] for blob in blobs]
    assert torch.allclose(
        decoded[1],
        ROTARY.rotate(
            ROTARY.unrotate(decoded[0], torch.arange(256, 288)), torch.arange(2048, 2080)
        ),
        atol=0.2,
    )
    assert read_blob(blobs[1]).header.start_position == 2048


def test_7_a_block_of_one_keeps_its_value_to_sixteen_bits() -> None:
    """34 bits for what 16 would hold: the price is counted, and the value is in the shift.

    The published types stay as they are in this profile, the control for all others; on
    SmolLM2 at 8x the program picks no such block (docs/codec.md).
    """
    values = torch.tensor([[3.14159]])

    coded = quantize(values, BlockType.INT2)

    assert BlockType.INT2.used_bits(1) == 34
    error = abs(float(dequantize(coded, BlockType.INT2)) - float(values))
    assert error <= abs(float(values.half()) - float(values))


def test_8_the_program_runs_on_rows_the_basis_has_not_seen(calibration: Calibration) -> None:
    """See also test_calibration.py; here: the error it reports is that of unseen rows."""
    keys, _ = cache(400, seed=900)
    rows = ROTARY.unrotate(keys, torch.arange(400)).flatten(1)[4:]

    part = calibration.keys
    error = (part.code_rows(rows) - rows).square().sum()
    measured = float(error / (rows - part.basis.mean_W).square().sum())

    assert part.held_out_error == pytest.approx(measured, rel=0.5)


def test_9_an_inner_run_may_be_dropped() -> None:
    """Coefficients between coded blocks come back as zero, later ones in their places."""
    plan = Allocation((Block(0, 4, BlockType.FP8), Block(8, 4, BlockType.FP8)))
    coefficients = torch.ones(3, 12)

    again = quantized(coefficients, plan)

    assert again[:, 4:8].abs().sum() == 0
    assert torch.allclose(again[:, 8:], torch.ones(3, 4))


def test_10_outliers_past_the_sinks_are_stored_exactly(calibration: Calibration) -> None:
    """Found by their measured error, not by their position."""
    codec = KvtcCodec(calibration)
    keys, values = cache(64, seed=3)
    draw = torch.Generator().manual_seed(5)
    keys[40] += 40 * torch.randn(keys[40].shape, generator=draw)

    blob = codec.encode(keys, values, header=header(codec.codec_id, 64))
    again, _ = codec.decode(blob)

    assert torch.equal(again[40], keys[40])
    assert list(read_blob(blob).section("exact.rows").data[::4]) == [0, 1, 2, 3, 40]


def test_10_with_every_row_exact_nothing_is_coded(calibration: Calibration) -> None:
    """A chunk that the basis does not fit at all is still right."""
    codec = KvtcCodec(calibration)
    draw = torch.Generator().manual_seed(6)
    keys = 100 * torch.randn(9, 3, 2, 8, generator=draw)
    values = 100 * torch.randn(9, 3, 2, 6, generator=draw)

    again = codec.decode(codec.encode(keys, values, header=header(codec.codec_id, 9, start=77)))

    assert torch.equal(again[0], keys)
    assert torch.equal(again[1], values)


def test_ratios_are_against_sixteen_bits_whatever_the_engine_computes_in() -> None:
    """A float32 engine must not make a ratio look twice as good."""
    geometry = KVGeometry(num_layers=30, num_kv_heads=3, key_head_dim=64, value_head_dim=64)

    assert geometry.raw_bytes_per_token == 2 * 5760 * 2
    for dtype in ("float32", "bfloat16"):
        described = geometry_of(header(b"x" * 16, 4, dtype=dtype))  # type: ignore[arg-type]
        assert described.raw_bytes_per_token == GEOMETRY.raw_bytes_per_token


def test_every_layer_is_decoded_with_its_own_rows_of_the_basis(calibration: Calibration) -> None:
    """A published port coded all layers with the first one's basis."""
    codec = KvtcCodec(calibration)
    keys, values = cache(64, seed=4, start=256)
    blob = codec.encode(keys, values, header=header(codec.codec_id, 64, start=256))

    for layer in range(3):
        again, _ = codec.decode(blob, layers=range(layer, layer + 1))
        wanted = keys[:, layer : layer + 1]
        assert (again - wanted).square().mean() < 0.01 * wanted.var()


@pytest.mark.parametrize("scale", [1e10, 1e19, 1e30])
def test_10_rows_too_large_to_square_are_exact(calibration: Calibration, scale: float) -> None:
    """Their error overflows to not-a-number, which must not pass for a small one."""
    codec = KvtcCodec(calibration)
    keys, values = cache(32, seed=7)
    keys[20] *= scale

    again, _ = codec.decode(codec.encode(keys, values, header=header(codec.codec_id, 32)))

    assert torch.equal(again[20], keys[20])


def test_float16_near_its_limit_comes_back_finite(calibration: Calibration) -> None:
    """An error past the end of the range must not round to an infinity."""
    draw = torch.Generator().manual_seed(8)
    keys, values = (
        (6.5e4 * (2 * torch.rand(24, 3, 2, dim, generator=draw) - 1)).half() for dim in (8, 6)
    )
    loose = dataclasses.replace(
        calibration,
        keys=dataclasses.replace(calibration.keys, max_row_error=1e30),
        values=dataclasses.replace(calibration.values, max_row_error=1e30),
    )
    codec = KvtcCodec(loose)

    again = codec.decode(
        codec.encode(keys, values, header=header(codec.codec_id, 24, start=64, dtype="float16"))
    )

    assert not torch.equal(again[0], keys)
    assert all(torch.isfinite(array).all() for array in again)
