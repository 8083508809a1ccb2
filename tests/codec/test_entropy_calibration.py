"""Calibrations of the entropy profile: what they hold, and bad ones that cannot exist."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codec.calibration import Calibration
from codec.calibration_file import CalibrationFile
from codec.entropy.models import SymbolModels
from codec.entropy_calibration import NUM_BANDS, EntropyCalibration, EntropyConfig, EntropyKind
from codec.errors import ConfigError, CorruptBlobError
from codec.geometry import KVGeometry, Stage
from codec.importance import Importance
from codec.rope import RotarySpec
from codec.sensitivity import Metric
from tests.codec import synthetic
from tests.codec.entropy_samples import GEOMETRY, calibrated, dense, plain_rows


@pytest.mark.parametrize("target", [4.0, 8.0])
def test_a_file_comes_back(target: float, tmp_path: Path) -> None:
    """Everything, and by the same digest."""
    made = calibrated(target)
    path = tmp_path / "deep" / "c.safetensors"

    made.save(path)
    again = EntropyCalibration.load(path)

    assert again.digest == made.digest
    assert again.nbytes == made.nbytes
    for name in ("stage", "geometry", "rotary", "config", "step", "provenance"):
        assert getattr(again, name) == getattr(made, name)
    assert again.max_token_error == made.max_token_error
    assert again.held_out_ratio == made.held_out_ratio
    assert np.array_equal(again.classes.models.freq_KA, made.classes.models.freq_KA)
    for part, whole in ((again.keys, made.keys), (again.values, made.values)):
        for one, other in zip(dense(part), dense(whole), strict=True):
            assert torch.equal(one, other)
        assert np.array_equal(part.layout.level_C, whole.layout.level_C)
        assert np.array_equal(part.layout.low_bits_C, whole.layout.low_bits_C)
    assert list(path.parent.iterdir()) == [path]


def other_kind(kind: EntropyKind, name: str) -> EntropyKind:
    """The same but for one thing."""
    if name == "outside_energy":
        return dataclasses.replace(kind, outside_energy=kind.outside_energy + 1)
    if name == "metric":
        root = kind.metric.root_BDD.clone()
        root[0, 0, 0] += 0.5
        return dataclasses.replace(kind, metric=Metric(root_BDD=root))
    changed = getattr(kind, name).clone()
    if name == "directions_GC":
        changed[0, 0] -= 1
    elif name == "group_C":
        changed[changed.argmax()] -= 1
    else:
        changed.view(-1)[-1] -= 1
    return dataclasses.replace(kind, **{name: changed})


SAME_WIDTHS = KVGeometry(num_layers=4, num_kv_heads=1, key_head_dim=32, value_head_dim=24)
"""Other heads, rows as wide."""


def others() -> dict[str, EntropyCalibration]:
    """Calibrations that differ from `calibrated` in one thing each."""
    made, classes = calibrated(), calibrated().classes
    swapped_KA = np.array(classes.models.freq_KA)
    swapped_KA[-1, 0] -= 1
    swapped_KA[-1, 1] += 1
    changes: dict[str, dict[str, Any]] = {
        "step": {"step": made.step * 1.001},
        "stage": {"stage": Stage(1, 5, 0, 2)},
        "geometry": {"geometry": SAME_WIDTHS},
        "rotary": {"rotary": RotarySpec.uniform([1.0] * 8, num_layers=4)},
        "config": {"config": EntropyConfig(target=made.config.target, sink_tokens=5)},
        "error": {"max_token_error": made.max_token_error + 1},
        "rank": {"held_out_rank": made.held_out_rank + 1},
        "bits": {"held_out_bits": made.held_out_bits + 1},
        "provenance": {"provenance": {"model": "synthetic", "tokens": 1025}},
        "importance offset": {
            "importance": dataclasses.replace(made.importance, offset=made.importance.offset + 1)
        },
        "importance": {"importance": Importance.none(GEOMETRY.key_width)},
        "frequencies": {"classes": dataclasses.replace(classes, models=SymbolModels(swapped_KA))},
    }
    for name in ("offset_K", "bias1_K", "bias2_K"):
        changed = getattr(classes, name).copy()
        changed[3] = 0.125
        changes[name] = {"classes": dataclasses.replace(classes, **{name: changed})}
    for kind in ("keys", "values"):
        for name in ("mean_W", "metric", "directions_GC", "group_C", "level_C", "outside_energy"):
            changes[f"{kind} {name}"] = {kind: other_kind(getattr(made, kind), name)}
    return {name: dataclasses.replace(made, **change) for name, change in changes.items()}


def test_the_digest_changes_with_every_part() -> None:
    """Nothing that decides what a blob decodes to is left out of its name."""
    digests = {name: made.digest for name, made in others().items()}

    assert calibrated().digest not in digests.values()
    assert len(set(digests.values())) == len(digests) == 27


@pytest.mark.parametrize(
    "change",
    [
        {"geometry": dataclasses.replace(GEOMETRY, value_head_dim=13)},
        {"rotary": RotarySpec.uniform([1.0] * 8, num_layers=3)},
        {"importance": Importance.none(5)},
        {"step": 0.0},
        {"step": float("nan")},
        {"step": -1.0},
        {"step": 1e30},
        {"max_token_error": float("inf")},
        {"held_out_bits": float("nan")},
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    """However sound each is: a file may be sealed and still lie."""
    with pytest.raises(ValueError, match=r"must be|need"):
        dataclasses.replace(calibrated(), **change)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kind: {"mean_W": torch.full_like(kind.mean_W, torch.nan)},
        lambda kind: {"directions_GC": torch.full_like(kind.directions_GC, torch.inf)},
        lambda kind: {"directions_GC": torch.ones_like(kind.directions_GC)},
        lambda kind: {"directions_GC": kind.directions_GC.float()},
        lambda kind: {"directions_GC": kind.directions_GC[:-1]},
        lambda kind: {"directions_GC": kind.directions_GC[:0]},
        lambda kind: {"directions_GC": kind.directions_GC.repeat(2, 1)},
        lambda kind: {"group_C": kind.group_C + 1},
        lambda kind: {"group_C": kind.group_C - 1},
        lambda kind: {"group_C": torch.full_like(kind.group_C, 1 << 26)},
        lambda kind: {"group_C": kind.group_C.long()},
        lambda kind: {"level_C": kind.level_C.long()},
        lambda kind: {"level_C": kind.level_C - 1000},
        lambda kind: {"level_C": kind.level_C + 1000},
        lambda _kind: {"outside_energy": float("nan")},
    ],
)
def test_a_kind_with_impossible_numbers_is_refused(spoil: Callable[[Any], dict[str, Any]]) -> None:
    """They would come back in every token that it decodes."""
    kind = calibrated().keys

    with pytest.raises(ValueError, match=r"must be|is not whole|past its end|coordinates in"):
        dataclasses.replace(kind, **spoil(kind))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0])
def test_a_metric_that_has_no_inverse_is_refused(value: float) -> None:
    """Rows could not come back from its space."""
    root = calibrated().keys.metric.root_BDD.clone()
    root[0] = value

    with pytest.raises(ValueError, match="metric"):
        Metric(root_BDD=root)


def test_a_profile_is_not_taken_for_the_other(tmp_path: Path) -> None:
    """Both are files of the same kind, and each loader says which it needs."""
    entropy, paper = tmp_path / "e.safetensors", tmp_path / "p.safetensors"
    calibrated().save(entropy)
    synthetic.calibrated().save(paper)

    assert EntropyCalibration.load(entropy).profile == "entropy"
    with pytest.raises(CorruptBlobError, match="calibration"):
        EntropyCalibration.load(paper)
    with pytest.raises(CorruptBlobError, match="calibration"):
        Calibration.load(entropy)


def fields_and_tensors() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The content of a sound file, to be spoiled."""
    content = calibrated().file
    fields = content.fields
    del fields["format"]
    return fields, dict(content.tensors)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profile", "paper"),
        ("stage", "l4-0.h0-2"),
        ("stage", None),
        ("rotary", {}),
        ("key_head_dim", 0),
        ("config", {"target": 0.5}),
        ("config", {"no_such": 1}),
        ("outside_energy", 3),
        ("provenance", ...),
    ],
)
def test_a_file_whose_fields_are_wrong_is_refused(name: str, value: Any) -> None:
    """As a typed error, although its digest is right."""
    fields, tensors = fields_and_tensors()
    fields[name] = value
    if value is ...:
        del fields[name]

    with pytest.raises(CorruptBlobError, match="calibration"):
        EntropyCalibration.from_file(CalibrationFile.of(fields, tensors))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys.mean", lambda old: old[:-1]),
        ("keys.metric", lambda old: old[:-1]),
        ("values.directions", lambda old: old[:, :-1]),
        ("values.levels", lambda old: old[:-1]),
        ("classes.frequencies", lambda old: old + 1),
        ("classes.frequencies", lambda old: old[:-1]),
        ("classes.offset", lambda old: old * 0),
        ("classes.bias1", lambda old: old.double()),
        ("importance.direction", None),
    ],
)
def test_a_file_whose_tensors_disagree_is_refused(name: str, change: Any) -> None:
    """A codec believes the shapes of its calibration."""
    fields, tensors = fields_and_tensors()
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()

    with pytest.raises(CorruptBlobError, match="calibration"):
        EntropyCalibration.from_file(CalibrationFile.of(fields, tensors))


@pytest.mark.parametrize(
    "change",
    [
        {"target": 0.5},
        {"target": float("nan")},
        {"sink_tokens": -1},
        {"holdout_every": 1},
        {"time_price": -0.1},
        {"time_price": float("inf")},
        {"time_price": float("nan")},
        {"exact_factor": 0.0},
        {"chunk_tokens": 0},
    ],
)
def test_bad_settings_are_refused_by_name(change: dict[str, float]) -> None:
    """The message names the setting."""
    with pytest.raises(ConfigError, match=next(iter(change))):
        EntropyConfig(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1, 5, 15, 16, 17, 63, 64, 100])
def test_bands_are_all_coefficients_once(rank: int) -> None:
    """In rising order, whatever the rank; early ones may be empty."""
    kind = calibrated().keys
    cut = dataclasses.replace(
        kind,
        directions_GC=kind.directions_GC[:, :rank],
        group_C=kind.group_C[:rank],
        level_C=kind.level_C[:rank],
    )

    covered = [c for band in cut.bands for c in range(band.start, band.stop)]

    assert covered == list(range(cut.rank))
    assert len(cut.bands) == NUM_BANDS
    assert [band.stop for band in cut.bands] == sorted(band.stop for band in cut.bands)


@pytest.mark.parametrize("name", ["keys", "values"])
def test_forward_and_backward_are_inverse_within_the_basis(name: str) -> None:
    """With every direction kept, rows come back; energies are those of coefficients."""
    kind = getattr(calibrated(4.0), name)
    rows = plain_rows(20, seed=5)[name == "values"]
    assert kind.rank == len(kind.mean_W) > len(kind.directions_GC)

    coefficients = kind.coefficients(rows)

    again = kind.rows(coefficients)
    torch.testing.assert_close(again, rows, rtol=0.02, atol=0.02)
    torch.testing.assert_close(
        kind.energy(rows), coefficients.square().sum(1), rtol=5e-3, atol=1e-3
    )


def test_an_error_in_a_coefficient_costs_its_square_in_the_metric() -> None:
    """The backward matrix is orthonormal in the metric: one step serves all coefficients."""
    kind = calibrated().keys

    scaled_CW = kind.metric.scale(dense(kind)[1])

    gram = scaled_CW @ scaled_CW.T
    torch.testing.assert_close(gram, torch.eye(kind.rank), rtol=0.0, atol=2e-3)


def test_parts_of_another_shape_are_refused() -> None:
    """Mean, metric and levels all belong to the directions."""
    kind = calibrated().keys

    with pytest.raises(ValueError, match="coordinates in the metric's blocks"):
        dataclasses.replace(kind, mean_W=kind.mean_W[:-1])
    with pytest.raises(ValueError, match="shapes disagree"):
        dataclasses.replace(kind, group_C=kind.group_C[:-1])
    with pytest.raises(ValueError, match="shapes disagree"):
        dataclasses.replace(kind, level_C=kind.level_C[:-1])
    with pytest.raises(ValueError, match="coordinates in the metric's blocks"):
        dataclasses.replace(kind, metric=Metric.plain(3, 16))
