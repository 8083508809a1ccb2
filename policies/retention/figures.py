"""The figures of ``kvfabric bench retention``: compile time, and what fuzzing found.

The clock is passed in; nothing here reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median
from typing import Final

from policies.retention.digest import plan_digest
from policies.retention.fuzz import FuzzReport, draw, judge
from policies.retention.hf_config import read_config, window_relation
from policies.retention.plan import compile_program
from policies.retention.program import AttentionState, Program

Clock = Callable[[], float]
SEED: Final = 20_260_101
FUZZ_RELATIONS: Final = 20_000
QUICK_SECONDS: Final = 36.0
"""A quick run stops fuzzing after so long, and says how far it came."""


def hybrid_config(num_layers: int) -> dict[str, object]:
    """Config of a model with five window layers to each full one."""
    return {
        "model_type": "gemma3_text",
        "num_hidden_layers": num_layers,
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
    }


def distinct_program(num_layers: int) -> Program:
    """A program whose every layer has a window of its own: nothing can be shared."""
    states = tuple(
        AttentionState(
            name=f"layer{layer}",
            layers=(layer,),
            reads=window_relation(64 + layer),
            bytes_per_token_layer=4096,
        )
        for layer in range(num_layers)
    )
    return Program(page_tokens=16, states=states)


def compile_model_ms(num_layers: int, *, repeats: int, clock: Clock) -> float:
    """Median time from a parsed config to a plan and its digest."""

    def run() -> None:
        plan_digest(compile_program(read_config(hybrid_config(num_layers)).program))

    return _median_ms(run, repeats, clock)


def compile_distinct_ms(num_layers: int, *, repeats: int, clock: Clock) -> float:
    """The same for a model in which no two layers are alike."""
    program = distinct_program(num_layers)
    return _median_ms(lambda: plan_digest(compile_program(program)), repeats, clock)


def _median_ms(run: Callable[[], object], repeats: int, clock: Clock) -> float:
    samples = []
    for _ in range(repeats):
        start = clock()
        run()
        samples.append(1000 * (clock() - start))
    return median(samples)


def fuzz_for(num_relations: int, *, seconds: float, clock: Clock) -> FuzzReport:
    """Fuzz until enough relations were tried, or the time is up."""
    rng, report, end = Random(SEED), FuzzReport(), clock() + seconds
    while report.num_relations < num_relations and clock() < end:
        judge(report, *draw(rng))
    return report


def figures(*, quick: bool, clock: Clock) -> dict[str, float]:
    """All figures by name.

    Parameters
    ----------
    quick
        Stop fuzzing after `QUICK_SECONDS`, and time fewer repeats.
    clock
        Seconds from any origin, never falling; such as ``time.perf_counter``.
    """
    repeats = 5 if quick else 21
    report = fuzz_for(
        FUZZ_RELATIONS if quick else 5 * FUZZ_RELATIONS,
        seconds=QUICK_SECONDS if quick else float("inf"),
        clock=clock,
    )
    return {
        "compile_100_layers_ms": compile_model_ms(100, repeats=repeats, clock=clock),
        "compile_1000_layers_ms": compile_model_ms(1000, repeats=repeats, clock=clock),
        "compile_100_distinct_ms": compile_distinct_ms(100, repeats=repeats, clock=clock),
        "fuzz_relations": report.num_relations,
        "fuzz_unsound": report.num_unsound,
        "fuzz_loose": report.num_loose,
        "fuzz_exact_share": round(report.exact_share, 6),
    }
