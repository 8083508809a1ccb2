"""The arms that a caller may name, made ready before the first sample is run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from codec.codec import Codec
from codec.comparators.arm import Arm as Comparator
from codec.comparators.registry import arms as comparators
from codec.errors import ConfigError
from codec.raw import RawCodec
from fabric.calibrate import Progress, calibrate_all
from fabric.calibrate.profiles import PROFILES, codec_of, config_of
from fabric.calibrate.progress import say_nothing
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm, CodecArm, ComparatorArm, FullPrecision

__all__ = [
    "PROFILES",
    "arm_names",
    "chosen_names",
    "load_codecs",
    "make_arms",
    "parse_targets",
]

FULL_PRECISION: Final = "full"
RAW: Final = "raw"
ALL: Final = "all"


MAX_TARGET: Final = 256.0


def load_codecs(  # noqa: PLR0917 - its doubles in tests are called by position
    engine: Engine[Any],
    loaded: LoadedModel,
    profile: str,
    target: float,
    on_progress: Progress = say_nothing,
    beside: Sequence[tuple[str, float]] = (),
) -> tuple[Codec, ...]:
    """Codecs of the whole model, one per stage, from calibrations kept or fitted now.

    Parameters
    ----------
    beside
        Profiles and targets that are wanted too: text is run once for all.
    """
    configs = [config_of(*setting) for setting in [(profile, target), *beside]]
    calibrations, *_ = calibrate_all(engine, loaded, configs=configs, on_progress=on_progress)
    namespace = engine.namespace().digest()
    return tuple(codec_of(calibration, namespace) for calibration in calibrations)


def arm_names() -> tuple[str, ...]:
    """Every name that `make_arms` knows, in the order of tables."""
    rivals = [name for name in comparators() if name != RAW]
    return (FULL_PRECISION, RAW, *PROFILES, *rivals)


def chosen_names(arms: str | None, profile: str) -> tuple[str, ...]:
    """Names of arms from a list with commas; by default the profile beside both controls.

    Raises
    ------
    ConfigError
        If the profile or one of the names is not known.
    """
    if profile not in PROFILES:
        raise ConfigError(f"no profile {profile!r}: choose from {', '.join(PROFILES)}")
    if arms is None:
        return (FULL_PRECISION, RAW, profile)
    known = arm_names()
    asked = [name.strip() for name in arms.split(",") if name.strip()]
    unknown = [name for name in asked if name not in (*known, ALL)]
    if unknown or not asked:
        found = ", ".join(map(repr, unknown)) or "no name"
        raise ConfigError(f"--arms has {found}: choose from {', '.join(known)}, or {ALL}")
    return known if ALL in asked else tuple(name for name in known if name in asked)


def parse_targets(text: str) -> tuple[float, ...]:
    """Compression targets from a list with commas, rising, none twice.

    Raises
    ------
    ConfigError
        If one is not a number in 1..256, or there is none.
    """
    try:
        targets = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        targets = []
    if not targets or not all(1 <= target <= MAX_TARGET for target in targets):
        raise ConfigError(
            f"--targets needs numbers in 1..{MAX_TARGET:g} such as 8,16,32, got {text!r}"
        )
    return tuple(targets)


def make_arms(
    engine: Engine[Any],
    loaded: LoadedModel,
    names: Sequence[str],
    targets: Sequence[float],
    on_progress: Progress = say_nothing,
) -> list[Arm]:
    """Arms of these names; a profile gives one per target.

    Raises
    ------
    BackendUnavailable
        If an arm needs a package that is missing.
    """
    # Rivals first: one that lacks its package should say so before minutes of calibration.
    rivals = comparators()
    for name in names:
        if name in rivals and name != RAW:
            _try(rivals[name])
    settings = [(name, target) for name in names if name in PROFILES for target in targets]
    made: list[Arm] = []
    for name in names:
        if name == FULL_PRECISION:
            made.append(FullPrecision(engine.geometry))
        elif name == RAW:
            made.append(CodecArm(RAW, [_raw(engine)], engine))
        elif name in PROFILES:
            for target in targets:
                codecs = load_codecs(engine, loaded, name, target, on_progress, settings)
                made.append(CodecArm(f"{name}@{target:g}", codecs, engine, target=target))
        else:
            made.append(ComparatorArm(rivals[name]))
    return made


def _raw(engine: Engine[Any]) -> Codec:
    namespace = engine.namespace()
    return RawCodec(
        engine.geometry.whole, engine.geometry, namespace.dtype, namespace=namespace.digest()
    )


def _try(rival: Comparator) -> None:
    """Let it fail now on a few elements rather than later on many."""
    rows = torch.arange(2 * 8, dtype=torch.float32).view(2, 1, 1, 8) / math.pi
    rival.restore(rows, rows)
