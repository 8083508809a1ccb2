"""Triton's interpreter for tests: kernels that run on host arrays, without a device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HAS_TRITON = importlib.util.find_spec("triton") is not None


def why_not_interpreted(*modules: str) -> str:
    """Import modules of `codec.kernels` so that their kernels are interpreted; or say why not."""
    if not HAS_TRITON:
        return "triton is not installed"
    with interpreting():
        for module in modules:
            importlib.import_module(f"codec.kernels.{module}")
        kernels = importlib.import_module("codec.kernels.triton_rows")
        standard = importlib.import_module("triton.language.standard")
    for function in (standard.cumsum, kernels.pair_elements):
        if type(function).__name__ != "InterpretedFunction":
            return "triton was imported before without TRITON_INTERPRET=1: run this file by itself"
    return ""


@contextmanager
def interpreting() -> Iterator[None]:
    """Have Triton interpret: it looks when it is imported, at each kernel, and at a launch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
