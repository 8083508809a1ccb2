"""Calibrate a model: run text through it, capture its cache, fit one codec per stage."""

from fabric.calibrate.corpus import CorpusConfig, default_corpus, default_prompt
from fabric.calibrate.profiles import AnyCalibration, AnyConfig
from fabric.calibrate.progress import Progress
from fabric.calibrate.run import calibrate, calibrate_all

__all__ = [
    "AnyCalibration",
    "AnyConfig",
    "CorpusConfig",
    "Progress",
    "calibrate",
    "calibrate_all",
    "default_corpus",
    "default_prompt",
]
