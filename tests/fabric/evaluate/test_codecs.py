"""Arms by name: what a caller may write, and what comes of it before anything is run."""

from __future__ import annotations

from typing import Any

import pytest

from codec.errors import BackendUnavailable, ConfigError
from codec.raw import RawCodec
from fabric.calibrate.profiles import profile_of
from fabric.evaluate import codecs
from fabric.evaluate.arms import CodecArm, FullPrecision
from fabric.evaluate.codecs import (
    PROFILES,
    arm_names,
    chosen_names,
    load_codecs,
    make_arms,
    parse_targets,
)
from tests.fabric.evaluate.small import small_engine


@pytest.mark.parametrize(
    ("text", "targets"),
    [("8", (8.0,)), ("32,8, 16", (8.0, 16.0, 32.0)), ("8,8.0,", (8.0,)), ("1,256", (1.0, 256.0))],
)
def test_targets_are_read_rising(text: str, targets: tuple[float, ...]) -> None:
    """Once each."""
    assert parse_targets(text) == targets


@pytest.mark.parametrize("text", ["", ",", "x", "8,x", "0.5", "257", "-8", "nan", "inf"])
def test_bad_targets_are_refused_with_an_example(text: str) -> None:
    """Whatever is wrong with them."""
    with pytest.raises(ConfigError, match="8,16,32"):
        parse_targets(text)


def test_by_default_a_profile_stands_beside_the_controls() -> None:
    """And all means all."""
    assert chosen_names(None, "paper") == ("full", "raw", "paper")
    assert chosen_names("all", "paper") == arm_names()
    assert chosen_names("fp8,all", "paper") == arm_names()


def test_named_arms_come_in_the_order_of_tables() -> None:
    """Once each, whatever the order they are asked in."""
    assert chosen_names("kivi-int4, full,kivi-int4", "paper") == ("full", "kivi-int4")


def test_names_are_all_different() -> None:
    """The comparators' own control is not there twice."""
    names = arm_names()

    assert len(set(names)) == len(names)
    assert {"full", "raw", "fp8", "kivi-int2", *PROFILES} <= set(names)


@pytest.mark.parametrize("arms", ["", " , ", "full,nonsense", "paper@8"])
def test_unknown_arms_are_refused_with_the_known(arms: str) -> None:
    """All of those."""
    with pytest.raises(ConfigError, match="choose from full, raw"):
        chosen_names(arms, "paper")


def test_an_unknown_profile_is_refused() -> None:
    """With those there are."""
    with pytest.raises(ConfigError, match="no profile 'best': choose from entropy, paper"):
        chosen_names(None, "best")


def test_arms_are_made_in_order_with_one_per_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs come from one function."""
    engine, loaded = small_engine()
    asked: list[tuple[str, float]] = []

    def fake_codecs(
        _engine: Any, _loaded: Any, profile: str, target: float, _: Any, beside: Any
    ) -> Any:
        asked.append((profile, target))
        assert beside == [("paper", 8.0), ("paper", 16.5)]
        return (RawCodec(engine.geometry.whole, engine.geometry, "float32"),)

    monkeypatch.setattr(codecs, "load_codecs", fake_codecs)

    made = make_arms(engine, loaded, ["full", "raw", "paper", "fp8"], [8.0, 16.5])

    assert [(arm.name, arm.target) for arm in made] == [
        ("full", None),
        ("raw", None),
        ("paper@8", 8.0),
        ("paper@16.5", 16.5),
        ("fp8", None),
    ]
    assert asked == [("paper", 8.0), ("paper", 16.5)]
    assert isinstance(made[0], FullPrecision)
    assert isinstance(made[1], CodecArm)


def test_a_missing_package_is_told_before_any_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes minutes."""

    class Needy:
        name = "needy"

        def restore(self, *_: Any) -> Any:
            raise BackendUnavailable("needed", "install it")

    monkeypatch.setattr(codecs, "comparators", lambda: {"needy": Needy()})
    monkeypatch.setattr(codecs, "load_codecs", lambda *_: pytest.fail("calibrated"))

    with pytest.raises(BackendUnavailable, match="install it"):
        make_arms(*small_engine(), ["paper", "needy"], [8.0])


def test_every_comparator_of_the_table_can_be_made() -> None:
    """Those whose package is here."""
    engine, loaded = small_engine()
    names = [name for name in arm_names() if name not in PROFILES]

    made = make_arms(engine, loaded, names, [8.0])

    assert [arm.name for arm in made] == names


@pytest.mark.parametrize("profile", ["paper", "entropy"])
def test_codecs_are_of_the_engines_model(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From calibrations of the profile for the target, each stage's; others are made beside."""
    engine, loaded = small_engine()
    seen: list[Any] = []

    def fake_calibrate_all(*_: Any, configs: Any, on_progress: Any) -> list[list[str]]:
        seen.extend(configs)
        on_progress("fit", 0.5)
        return [["first", "second"], ["of another target"]]

    monkeypatch.setattr(codecs, "calibrate_all", fake_calibrate_all)
    monkeypatch.setattr(codecs, "codec_of", lambda *both: both)
    said: list[str] = []

    found = load_codecs(
        engine, loaded, profile, 12.0, lambda what, _: said.append(what), [("paper", 3.0)]
    )

    namespace = engine.namespace().digest()
    assert found == (("first", namespace), ("second", namespace))
    assert [(profile_of(config), config.target) for config in seen] == [
        (profile, 12.0),
        ("paper", 3.0),
    ]
    assert said == ["fit"]
