"""A tiny model with its codecs, and one whole run of it, made once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial

import pytest

from codec.drift import DriftWarning
from fabric.codec_bench import run as run_module
from fabric.codec_bench import speed
from tests.fabric.codec_bench.small import BENCH, CORPUS, RATES, Made, small_codecs
from tests.fabric.evaluate.small import small_engine


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of rates measured on large arrays."""
    monkeypatch.setattr(speed, "measure_rates", lambda: RATES)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Calibrations are kept in a folder of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(speed, "measure_rates", lambda: RATES)
        patch.setattr(
            run_module, "load_codecs", partial(run_module.load_codecs, corpus_config=CORPUS)
        )
        engine, loaded = small_engine()
        codecs = small_codecs(engine, loaded)
        with warnings.catch_warnings():
            # A tiny model has too few rows for its drift to be steady.
            warnings.simplefilter("ignore", DriftWarning)
            found = run_module.run(engine, loaded, BENCH)
        yield Made(engine, loaded, codecs, found)
