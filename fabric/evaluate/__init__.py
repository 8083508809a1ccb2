"""Judge ways of keeping a cache by what the model says afterwards.

A context is prefilled, part of its cache coded and restored, and what the model says next
compared with what it says from the full-precision cache: on natural text, on text that no
calibration was meant for, and on prompts made to break a codec.  See
`fabric.evaluate.sets` for the prompts and `fabric.evaluate.scoring` for one of them.
"""

from __future__ import annotations

from fabric.evaluate.config import FULL, QUICK, EvaluationConfig
from fabric.evaluate.results import ArmResult, Evaluation
from fabric.evaluate.run import evaluate, qualify

__all__ = [
    "FULL",
    "QUICK",
    "ArmResult",
    "Evaluation",
    "EvaluationConfig",
    "evaluate",
    "qualify",
]
