"""The fit: bits hit the target, prices and weights act, equal rows give equal calibrations."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from codec.basis import Moments
from codec.drift import DriftWarning
from codec.entropy_calibration import EntropyCalibration, EntropyConfig
from codec.entropy_codec import EntropyCodec
from codec.entropy_fit import EntropyFitter
from codec.errors import ConfigError
from codec.sensitivity import Metric
from codec.step_quantizer import count_classes
from codec.symbol_classes import MAX_FIRST_CLASS, NUM_CLASSES, levels_of
from tests.codec.entropy_samples import (
    GEOMETRY,
    ROTARY,
    calibrated,
    dense,
    encoded,
    fitter,
    fitter_of,
    plain_rows,
    plain_sensitivity,
    rotated,
    sensitivity,
)


def round_trip_error(made: EntropyCalibration) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squared error of each coordinate of unrotated keys and values, sinks left out."""
    codec = EntropyCodec(made)
    rows = plain_rows(256, seed=55)
    decoded = codec.decode(encoded(codec, rotated(rows, start=8), start=8))
    keys = ROTARY.unrotate(decoded[0], torch.arange(8, 264)).flatten(1)
    return (keys - rows[0]).square().mean(0), (decoded[1].flatten(1) - rows[1]).square().mean(0)


@pytest.mark.parametrize("target", [4.0, 8.0, 16.0])
@pytest.mark.parametrize("time_price", [0.0, 0.5])
def test_held_out_rows_take_the_bits_of_the_target(target: float, time_price: float) -> None:
    """Judged on rows that the step was not searched with, hence not exactly."""
    ratio = calibrated(target, time_price).held_out_ratio

    assert ratio == pytest.approx(target, rel=0.06)


def test_a_smaller_target_has_a_smaller_error() -> None:
    """The step follows the target, and the error the step."""
    made = [calibrated(target) for target in (4.0, 8.0, 16.0)]

    errors = [float(sum(part.sum() for part in round_trip_error(one))) for one in made]

    assert errors == sorted(errors)
    assert errors[2] > 2 * errors[0]
    assert [one.step for one in made] == sorted(one.step for one in made)


def test_fewer_coefficients_are_coded_as_time_costs_more() -> None:
    """At the same bits: what is saved on narrow coefficients makes the step finer."""
    made = [calibrated(8.0, price) for price in (0.0, 0.1, 0.5, 2.0)]

    ranks = [one.held_out_rank for one in made]
    classes = [one.classes.first_class for one in made]

    assert ranks == sorted(ranks, reverse=True)
    assert ranks[-1] < 0.8 * ranks[0]
    assert classes == sorted(classes)
    assert classes[-1] <= MAX_FIRST_CLASS


def test_equal_rows_give_an_equal_calibration() -> None:
    """By digest, from a fitter of its own; another row gives another."""
    config = EntropyConfig(target=8.0, time_price=0.0)
    facts = {"model": "synthetic", "tokens": 1024}

    again = fitter_of(sensitivity()).fit(config, facts)

    assert again.digest == calibrated(8.0).digest
    assert calibrated(4.0).digest != again.digest


def test_one_fitter_serves_many_targets() -> None:
    """In any order: a fit leaves nothing behind."""
    config = EntropyConfig(target=8.0, time_price=0.0)
    fitter().fit(EntropyConfig(target=30.0), {})

    again = fitter().fit(config, {"model": "synthetic", "tokens": 1024})

    assert again.digest == calibrated(8.0).digest


def test_what_the_metric_ignores_is_coded_worse() -> None:
    """And the rest better, at the same bits: this is what sensitivity is for."""
    ignoring = torch.eye(16).repeat(8, 1, 1)
    ignoring[:, 8:, 8:] *= 1e-4
    measured = dataclasses.replace(
        plain_sensitivity(), key_metric=Metric.of_blocks(ignoring, shrinkage=1e-3)
    )
    config = EntropyConfig(target=8.0, time_price=0.0)

    plain = round_trip_error(fitter_of(plain_sensitivity()).fit(config, {}))
    weighted = round_trip_error(fitter_of(measured).fit(config, {}))

    ratio = (weighted[0] / plain[0]).view(8, 16)
    assert float(ratio[:, :8].mean()) < 0.8
    assert float(ratio[:, 8:].mean()) > 2
    assert float(weighted[1].sum()) < float(plain[1].sum())


def test_important_tokens_are_coded_finer() -> None:
    """Their step is smaller by the root of their importance, others' larger."""
    rows = plain_rows(256, seed=56)
    made = calibrated(8.0)
    codec = EntropyCodec(made)
    values = codec.decode(encoded(codec, rotated(rows, start=8), start=8))[1].flatten(1)
    shift_T = made.importance.shifts(rows[0])

    error_T = made.values.metric.scale(values - rows[1]).square().mean(1)

    high, low = error_T[shift_T >= 3], error_T[shift_T <= -3]
    assert min(len(high), len(low)) > 20
    assert float(high.mean()) < 0.6 * float(low.mean())


@pytest.mark.parametrize("num_rows", [0, 1])
def test_too_few_held_out_rows_are_refused(num_rows: int) -> None:
    """There would be nothing to judge on."""
    rows = plain_rows(64, seed=1)
    moments = tuple(Moments(part.shape[1]) for part in rows)
    for part, found in zip(moments, rows, strict=True):
        part.add(found)

    with pytest.raises(ConfigError, match=f"at least 2 held-out rows, got {num_rows}"):
        EntropyFitter(
            GEOMETRY.whole,
            GEOMETRY,
            ROTARY,
            moments=(moments[0], moments[1]),
            held_out=(rows[0][:num_rows], rows[1][:num_rows]),
            sensitivity=plain_sensitivity(),
        )


@pytest.mark.parametrize("num_rows", [2, 3, 5])
def test_very_few_rows_still_give_a_calibration(num_rows: int) -> None:
    """A poor one, and of low rank, but one that codes."""
    rows = plain_rows(5, seed=1)
    moments = tuple(Moments(part.shape[1]) for part in rows)
    for part, found in zip(moments, rows, strict=True):
        part.add(found)
    made = EntropyFitter(
        GEOMETRY.whole,
        GEOMETRY,
        ROTARY,
        moments=(moments[0], moments[1]),
        held_out=(rows[0][:num_rows], rows[1][:num_rows]),
        sensitivity=plain_sensitivity(),
    ).fit(EntropyConfig(target=8.0), {})

    codec = EntropyCodec(made)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DriftWarning)
        decoded = codec.decode(encoded(codec, rotated(rows)))
    assert made.keys.rank <= 4
    assert torch.isfinite(decoded[0]).all()


def test_levels_and_models_are_those_of_the_stored_directions() -> None:
    """Spreads of the fitted rows in the basis of the file, rounded as it is."""
    made, source = calibrated(8.0), fitter()
    symbols_KA = np.zeros((NUM_CLASSES, 256))
    for part, kind in zip((made.keys, made.values), source._kinds, strict=True):
        whole, mine = (dense(one)[0].T for one in (kind.directions, part))
        kept = [int((whole - column).square().sum(1).argmin()) for column in mine]
        assert torch.equal(kind.directions.directions_GC[:, kept], part.directions_GC)
        assert torch.equal(kind.directions.group_C[kept], part.group_C)
        assert np.array_equal(levels_of(kind.spread_C[kept], made.step), part.level_C.numpy())
        fit_TC = np.ascontiguousarray(kind.fit_TC[:, kept])
        counts = count_classes(
            *(fit_TC, made.step, source._shift_fit_T, part.layout),
            offset_K=made.classes.offset_K,
            num_symbols=256,
        )
        symbols_KA += counts.symbols_KA

    # Every symbol that the fitted rows have can be coded, or is an escape.
    alphabet_K = made.classes.alphabet_K
    for k in range(made.classes.first_class, NUM_CLASSES):
        seen = np.flatnonzero(symbols_KA[k, :-1])
        assert seen.max(initial=0) < alphabet_K[k]
        # The commonest of 4 symbols or more costs less than any alphabet's share would.
        if symbols_KA[k].sum() > 1000:
            best = int(symbols_KA[k].argmax())
            freq = made.classes.models.freq_KA[k, best]
            share = symbols_KA[k, best] / symbols_KA[k].sum()
            assert freq / 4096 == pytest.approx(share, abs=0.03)


def test_a_number_and_its_negative_are_as_likely() -> None:
    """Models do not learn the sign of a few rows."""
    freq_KA = calibrated(8.0).classes.models.freq_KA.astype(int)
    alphabet_K = calibrated(8.0).classes.alphabet_K

    for k in range(calibrated(8.0).classes.first_class, NUM_CLASSES):
        pairs = freq_KA[k, 1 : (alphabet_K[k] - 1) // 2 * 2 + 1].reshape(-1, 2)
        assert (np.abs(np.diff(pairs, axis=1)) <= 1).all()


def test_progress_rises_to_one() -> None:
    """Of the fitter, and of each fit."""
    seen: list[float] = []

    fitter().fit(EntropyConfig(target=8.0), {}, on_progress=seen.append)

    assert seen == sorted(seen)
    assert seen[-1] == 1.0
