"""The demo's own decisions; the whole job is in tests/cluster/test_demo.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from actors.codecs import Qualification
from codec.errors import UnqualifiedCodecError
from codec.identity import CodecId
from codec.quality import Agreement
from fabric import demo
from fabric.demo import DemoConfig, prepare
from fabric.engine_actor import Continuation, Reference

CODECS = (CodecId(b"\x0a" * 16), CodecId(b"\x0b" * 16))


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_codec_is_measured_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, is_allowed: bool
) -> None:
    """With the permission, if there is one; a refusal ends it there."""
    asked: dict[str, Any] = {}

    def qualify(*_args: object, **options: Any) -> list[object]:
        asked.update(options)
        if not options["allow_unqualified"]:
            raise UnqualifiedCodecError("00", "model m", "there is no receipt for it")
        return []

    monkeypatch.setattr(demo, "load_model", lambda *_args, **_options: "a model")
    monkeypatch.setattr(demo, "read_prompt", lambda *_args: [1, 2, 3])
    monkeypatch.setattr(demo, "TransformersEngine", lambda *_args, **_options: "an engine")
    monkeypatch.setattr(demo, "calibrate", lambda *_args, **_options: ["a calibration"])
    monkeypatch.setattr(demo, "qualify_codecs", qualify)
    config = DemoConfig(allow_unqualified=is_allowed)
    job = (config, lambda _what, _fraction: None, lambda _text: None)

    if is_allowed:
        assert prepare(*job) == ("a model", ["a calibration"], [1, 2, 3])
    else:
        with pytest.raises(UnqualifiedCodecError):
            prepare(*job)

    assert asked["tokens_per_chunk"] == config.fabric.tokens_per_chunk


class FakeFabric:
    """What the receipt asks of a fabric."""

    def __init__(self, qualification: Qualification) -> None:
        profile = SimpleNamespace(
            namespace=b"\x01" * 16, codec_sets=(SimpleNamespace(codecs=CODECS),)
        )
        self.client = SimpleNamespace(profile=lambda _name: profile, refresh=lambda: None)
        self._qualification = qualification

    def qualification(self, codecs: tuple[CodecId, ...], *, at: str) -> Qualification:
        """Of the codecs of all stages, where the prompt was restored."""
        assert codecs == CODECS
        assert at == demo.TARGET
        return self._qualification

    def stats(self) -> dict[str, Any]:
        """No faults."""
        return {}


@pytest.mark.parametrize(
    "qualification", [Qualification(False, None), Qualification(True, "0c" * 16)]
)
def test_the_receipt_says_whether_the_codec_is_qualified(qualification: Qualification) -> None:
    """As the worker that restored knows it, not as the command line had it."""
    plan: Any = SimpleNamespace(predicted_restore_s=1.0, predicted_recompute_s=2.0)
    loaded: Any = SimpleNamespace(name="m", tokenizer=SimpleNamespace(decode=str))
    fabric: Any = FakeFabric(qualification)
    job = demo._Job(DemoConfig(), loaded, [], [1, 2, 3], fabric, lambda _text: None)
    continued = Continuation(
        plan=plan,
        tokens=(4,),
        tokens_restored=2,
        reason="r",
        explanation="e",
        bytes_moved=9,
        transport="local",
        first_token_s=0.5,
    )
    reference = Reference(tokens=(4,), prefill_s=1.0, agreement=Agreement(1, 0.0, 1.0))
    moved: Any = SimpleNamespace(connect_s=0.1, transfer_s=0.2, bytes_moved=30)

    receipt = json.loads(job._receipt(continued, reference, 10, 80, moved).to_json())

    assert receipt["qualified"] is qualification.is_qualified
    assert receipt["quality_receipt"] == qualification.receipt
    assert receipt["identity"]["codec"] == [codec.hex() for codec in CODECS]
