"""`LayeredArm`: each layer like a codec of its own, all bytes counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from codec.calibration import Calibration, CalibrationConfig, Calibrator
from codec.comparators.layered import LayerCalibrators, LayeredArm
from codec.geometry import Stage
from codec.kvtc import KvtcCodec
from tests.codec.comparators.caches import relative_error
from tests.codec.synthetic import GEOMETRY, ROTARY, cache, calibrated, header, of_stage

#: A layer of the synthetic cache has 16 elements of keys: one block of four bits at most.
TARGET = 2.0


@pytest.fixture(scope="module")
def calibrations() -> tuple[Calibration, ...]:
    """Shared: they are immutable."""
    config = CalibrationConfig(target=TARGET, holdout_every=4, block_stride=1)
    calibrators = LayerCalibrators(GEOMETRY, ROTARY, config)
    for window in range(10):
        keys, values = cache(48, seed=100 + window)
        calibrators.add(keys, values)
    return calibrators.fit({"model": "synthetic", "tokens": 480})


def test_each_layer_is_calibrated_as_a_stage_of_its_own(
    calibrations: tuple[Calibration, ...],
) -> None:
    """The same as a calibrator that sees nothing but that layer."""
    alone = [calibrated(stage=Stage(layer, layer + 1, 0, 2), target=TARGET) for layer in range(3)]

    assert [found.digest for found in calibrations] == [wanted.digest for wanted in alone]


def test_each_layer_has_its_own_frequencies_and_windows_start_anywhere() -> None:
    """Layers that rotate differently, windows within a sequence: as one calibrator would do it."""
    rotary = dataclasses.replace(
        ROTARY, inv_freq_LF=((1.0, 0.5, 0.25, 0.125), *ROTARY.inv_freq_LF[1:])
    )
    config = CalibrationConfig(target=TARGET, holdout_every=2, block_stride=1)
    layers = LayerCalibrators(GEOMETRY, rotary, config)
    stage = Stage(1, 2, 0, 2)
    alone = Calibrator(stage, GEOMETRY.of_stage(stage), rotary.of_layers(range(1, 2)), config)
    for window in range(4):
        keys, values = cache(20, seed=window, start=300)
        layers.add(keys, values, start_position=300)
        alone.add(of_stage(keys, stage), of_stage(values, stage), start_position=300)

    found = layers.fit({})

    assert [calibration.rotary for calibration in found] == [
        rotary.of_layers(range(layer, layer + 1)) for layer in range(3)
    ]
    assert found[1].digest == alone.fit({}).digest


def test_a_cache_comes_back_through_one_blob_per_layer(
    calibrations: tuple[Calibration, ...],
) -> None:
    """The rows and the bytes of the layers' own codecs, and close to what went in."""
    keys, values = (array.bfloat16() for array in cache(70, seed=1, start=4))

    restored = LayeredArm(calibrations).restore(keys, values)

    stored_bytes = 0
    for layer, calibration in enumerate(calibrations):
        codec, stage = KvtcCodec(calibration), Stage(layer, layer + 1, 0, 2)
        blob = codec.encode(
            of_stage(keys, stage),
            of_stage(values, stage),
            header=header(codec.codec_id, 70, start=4, dtype="bfloat16", stage=stage),
        )
        stored_bytes += len(blob)
        wanted_keys, wanted_values = codec.decode(blob)
        assert torch.equal(restored.keys_TLHD[:, layer], wanted_keys[:, 0].float())
        assert torch.equal(restored.values_TLHD[:, layer], wanted_values[:, 0].float())
    assert restored.stored_bytes == stored_bytes
    assert relative_error(restored.keys_TLHD, keys.float()) < 0.05
    assert relative_error(restored.values_TLHD, values.float()) < 0.3


def test_keys_are_turned_back_by_where_the_prefix_starts(
    calibrations: tuple[Calibration, ...],
) -> None:
    """Told another position, the basis does not fit, and more rows must be kept exactly.

    The default is the first position that is no sink.
    """
    keys, values = cache(200, seed=1, start=4)

    right = LayeredArm(calibrations).restore(keys, values)
    same = LayeredArm(calibrations, start_position=4).restore(keys, values)
    wrong = LayeredArm(calibrations, start_position=7).restore(keys, values)

    assert torch.equal(right.keys_TLHD, same.keys_TLHD)
    assert wrong.stored_bytes > 1.05 * right.stored_bytes


def test_an_outlying_token_is_kept_in_the_dtype_and_counted(
    calibrations: tuple[Calibration, ...],
) -> None:
    """Exactly, in that layer only; 16 bits an element unless asked otherwise."""
    keys, values = (array.bfloat16().float() for array in cache(40, seed=1, start=4))
    spoilt = values.clone()
    spoilt[9, 1] = 64.0
    size = {}
    for dtype in ("bfloat16", "float32"):
        arm = LayeredArm(calibrations, dtype=dtype)
        plain, with_outlier = arm.restore(keys, values), arm.restore(keys, spoilt)
        assert torch.equal(with_outlier.values_TLHD[9, 1], spoilt[9, 1])
        size[dtype] = with_outlier.stored_bytes - plain.stored_bytes

    assert size["float32"] - size["bfloat16"] == 2 * 2 * (8 + 6)


def test_its_name_has_the_target(calibrations: tuple[Calibration, ...]) -> None:
    """And the parameters, which ratios leave out, can be stated beside it."""
    arm = LayeredArm(calibrations)

    assert arm.name == "layered-2x"
    assert arm.calibration_bytes == sum(calibration.nbytes for calibration in calibrations)
    assert arm.calibration_bytes > 0


def test_calibrations_that_are_not_of_each_layer_are_refused(
    calibrations: tuple[Calibration, ...],
) -> None:
    """None, out of order, one missing at the start, or of the whole model."""
    for wrong in ((), calibrations[::-1], calibrations[1:], (calibrated(),)):
        with pytest.raises(ValueError, match="need a calibration of each layer"):
            LayeredArm(wrong)
    with pytest.raises(ValueError, match="need dtype"):
        LayeredArm(calibrations, dtype="int8")


def test_a_cache_of_other_layers_is_refused(calibrations: tuple[Calibration, ...]) -> None:
    """As is one that is not finite."""
    keys, values = cache(8, seed=1, start=4)
    arm = LayeredArm(calibrations)

    with pytest.raises(ValueError, match="need 3 layers, got 2"):
        arm.restore(keys[:, :2], values[:, :2])
    keys[3, 1, 0, 2] = torch.inf
    with pytest.raises(ValueError, match="finite"):
        arm.restore(keys, values)
