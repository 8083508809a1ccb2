"""The codecs and arms of a run, all targets fitted to one pass over the calibration text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from codec.calibration import PROFILE as PAPER
from codec.codec import Codec
from codec.comparators.registry import arms as comparators
from codec.entropy_calibration import PROFILE as ENTROPY
from codec.entropy_codec import EntropyCodec
from codec.kvtc import KvtcCodec
from codec.raw import RawCodec
from fabric.calibrate import CorpusConfig, Progress, calibrate_all
from fabric.calibrate.profiles import codec_of, config_of
from fabric.engines.loading import LoadedModel
from fabric.engines.protocol import Engine
from fabric.evaluate.arms import Arm, CodecArm, ComparatorArm, FullPrecision

__all__ = [
    "ENTROPY",
    "PAPER",
    "RAW",
    "Codecs",
    "Setting",
    "codec_arms",
    "load_codecs",
    "make_arms",
    "ranks",
    "try_rivals",
]

RAW: Final = "raw"


class Setting(NamedTuple):
    """A profile at a compression target."""

    profile: str
    target: float

    @property
    def name(self) -> str:
        """What tables call its arm."""
        return f"{self.profile}@{self.target:g}"


Codecs = Mapping[Setting, tuple[Codec, ...]]
"""One codec per stage, for each setting."""


def load_codecs(
    engine: Engine[Any],
    loaded: LoadedModel,
    settings: Sequence[Setting],
    *,
    corpus: Sequence[Path] = (),
    corpus_config: CorpusConfig | None = None,
    num_stages: int = 1,
    on_progress: Progress = lambda _what, _fraction: None,
) -> Codecs:
    """Codecs of all settings, from calibrations kept or fitted now to one and the same text.

    Raises
    ------
    ConfigError
        As `fabric.calibrate.calibrate` has it.
    """
    found = calibrate_all(
        engine,
        loaded,
        configs=[config_of(*setting) for setting in settings],
        corpus=corpus,
        corpus_config=corpus_config,
        num_stages=num_stages,
        on_progress=on_progress,
    )
    namespace = engine.namespace().digest()
    return {
        setting: tuple(codec_of(calibration, namespace) for calibration in calibrations)
        for setting, calibrations in zip(settings, found, strict=True)
    }


def make_arms(engine: Engine[Any], codecs: Codecs, rivals: Sequence[str] = ()) -> list[Arm]:
    """Both controls, every setting, then comparators by name."""
    namespace = engine.namespace()
    raw = RawCodec(
        engine.geometry.whole, engine.geometry, namespace.dtype, namespace=namespace.digest()
    )
    known = comparators()
    return [
        FullPrecision(engine.geometry),
        CodecArm(RAW, [raw], engine),
        *codec_arms(engine, codecs),
        *(ComparatorArm(known[name]) for name in rivals),
    ]


def codec_arms(engine: Engine[Any], codecs: Codecs) -> list[Arm]:
    """An arm for each setting, in their order."""
    return [
        CodecArm(setting.name, stages, engine, target=setting.target)
        for setting, stages in codecs.items()
    ]


def try_rivals(names: Sequence[str]) -> None:
    """Have comparators code a few elements now rather than fail on many later.

    Raises
    ------
    BackendUnavailable
        If one needs a package that is missing.
    """
    rows_TLHD = torch.linspace(-1, 1, 2 * 8).view(2, 1, 1, 8)
    known = comparators()
    for name in names:
        known[name].restore(rows_TLHD, rows_TLHD)


def ranks(stages: Sequence[Codec]) -> tuple[int, int] | None:
    """Coefficients of keys, and of values, over all stages; ``None`` without a basis."""
    keys, values = 0, 0
    for codec in stages:
        if isinstance(codec, EntropyCodec):
            keys += codec.calibration.keys.rank
            values += codec.calibration.values.rank
        elif isinstance(codec, KvtcCodec):
            keys += codec.calibration.keys.basis.rank
            values += codec.calibration.values.basis.rank
        else:
            return None
    return keys, values
