"""`Engine`: what implements it is checked by name here, and by type in mypy."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from fabric.engines.protocol import Engine
from fabric.engines.transformers import TransformersEngine

MEMBERS = sorted(name for name in vars(Engine) if not name.startswith("_"))


def test_the_protocol_is_what_callers_were_told() -> None:
    """Adding a method is a decision for every engine."""
    assert MEMBERS == [
        "cached_tokens",
        "capture",
        "generate",
        "geometry",
        "namespace",
        "prefill",
        "restore",
        "rotary",
        "score",
        "window_tokens",
    ]


@pytest.mark.parametrize("member", MEMBERS)
def test_the_embedded_engine_takes_the_same_arguments(member: str) -> None:
    """By position and by name."""
    asked, given = getattr(Engine, member), getattr(TransformersEngine, member)

    assert isinstance(given, property) == isinstance(asked, property)
    if not isinstance(asked, property):
        wanted, found = (list(inspect.signature(f).parameters.values()) for f in (asked, given))
        assert [(p.name, p.kind, p.default) for p in found] == [
            (p.name, p.kind, p.default) for p in wanted
        ]


def as_engine(engine: TransformersEngine) -> Engine[Any]:
    """Fails to type-check if the embedded engine is none."""
    return engine
