"""The profiles that a model can be calibrated for, by name: the one place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypeAlias

from codec.calibration import PROFILE as PAPER
from codec.calibration import Calibration, CalibrationConfig
from codec.calibration_file import read_file
from codec.codec import Codec
from codec.entropy_calibration import PROFILE as ENTROPY
from codec.entropy_calibration import EntropyCalibration, EntropyConfig
from codec.entropy_codec import EntropyCodec
from codec.errors import ConfigError, CorruptBlobError
from codec.kvtc import KvtcCodec

AnyConfig: TypeAlias = CalibrationConfig | EntropyConfig
AnyCalibration: TypeAlias = Calibration | EntropyCalibration

PROFILES: Final[Mapping[str, type[CalibrationConfig | EntropyConfig]]] = {
    ENTROPY: EntropyConfig,
    PAPER: CalibrationConfig,
}
"""Settings by the name of the profile; the first is the default."""

DEFAULT_PROFILE: Final = ENTROPY


def config_of(profile: str = DEFAULT_PROFILE, target: float | None = None) -> AnyConfig:
    """Settings of a profile with a target, or its own default one.

    Raises
    ------
    ConfigError
        If there is no such profile, or the target is out of range.
    """
    if profile not in PROFILES:
        raise ConfigError(f"no profile {profile!r}: choose from {', '.join(PROFILES)}")
    make = PROFILES[profile]
    return make() if target is None else make(target=target)


def profile_of(part: AnyConfig | AnyCalibration) -> str:
    """Name of the profile that settings or a calibration belong to."""
    return ENTROPY if isinstance(part, EntropyConfig | EntropyCalibration) else PAPER


def settings_of(config: AnyConfig) -> dict[str, float]:
    """Every field by name, for digests."""
    return asdict(config)


def load_calibration(path: Path) -> AnyCalibration:
    """The calibration in a file, of whichever profile it is.

    Raises
    ------
    CorruptBlobError
        If the file is damaged, or of no profile that is known here.
    """
    content = read_file(path)
    try:
        profile = content.fields["profile"]
    except (KeyError, ValueError) as error:
        raise CorruptBlobError(f"calibration {path.name}", f"names no profile: {error}") from error
    if profile == ENTROPY:
        return EntropyCalibration.from_file(content)
    return Calibration.from_file(content)


def codec_of(calibration: AnyCalibration, namespace: bytes) -> Codec:
    """The codec that a calibration is for."""
    if isinstance(calibration, EntropyCalibration):
        return EntropyCodec(calibration, namespace=namespace)
    return KvtcCodec(calibration, namespace=namespace)
