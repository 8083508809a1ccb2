"""What the calibration's text, its size, and a split into stages cost the entropy profile.

Three questions, each answered on natural text with the curves of all ways side by side:

    .venv/bin/python benchmarks/bench_codec_shift.py domain   # calibrated on prose, on code, on both
    .venv/bin/python benchmarks/bench_codec_shift.py size     # on 6,000 to 48,000 tokens
    .venv/bin/python benchmarks/bench_codec_shift.py stages   # PP = 1, 2, 4

``--model`` takes a directory or a GGUF file, ``--windows`` the samples of each set, and ``--record``
the name of the file in ``results/``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fabric.calibrate import CorpusConfig, default_corpus
from fabric.codec_bench.report import machine, versions
from fabric.codec_bench.run import FULL
from fabric.codec_bench.variants import POOLED, Variant, costs, curves, measure_variants
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine

RESULTS = Path(__file__).parent / "results"
TARGETS = (4.0, 8.0, 16.0, 32.0, 64.0)
COMPARED = (8.0, 16.0, 32.0)
PROSE = ("alice.txt", "inaugural.txt")
CODE = ("python_code.txt",)
DOMAIN_TOKENS = 16_000
"""About as much as the smaller domain has, so that ways differ in their text alone."""
SIZES = (6_000, 12_000, 24_000, 48_000)
STAGES = (1, 2, 4)


def domain_variants() -> list[Variant]:
    """Everything first, then one domain alone."""
    every = {path.name: path for path in default_corpus()}
    config = CorpusConfig(num_tokens=DOMAIN_TOKENS)
    return [
        Variant(name=name, corpus=tuple(every[file] for file in names), corpus_config=config)
        for name, names in (("mixed", sorted(every)), ("prose", PROSE), ("code", CODE))
    ]


def size_variants() -> list[Variant]:
    """The most text first; the windows for gradients shrink with the rest."""
    whole = CorpusConfig()
    return [
        Variant(
            name=f"{size // 1000}k",
            corpus_config=CorpusConfig(
                num_tokens=size,
                gradient_windows=max(2, whole.gradient_windows * size // whole.num_tokens),
            ),
        )
        for size in sorted(SIZES, reverse=True)
    ]


def stage_variants() -> list[Variant]:
    """One basis for the whole model first."""
    return [
        Variant(name=f"PP={number}", corpus_config=CorpusConfig(), num_stages=number)
        for number in STAGES
    ]


QUESTIONS = {"domain": domain_variants, "size": size_variants, "stages": stage_variants}


def table(rows: list[dict[str, Any]], first: str) -> Table:
    """Ratios over the first way's at equal KL."""
    found = Table(title=f"ratio over {first}'s at the KL of its targets")
    for name in ("set", "way", *(f"{target:g}x" for target in COMPARED)):
        found.add_column(name)
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        ends = "" if row["interval"] is None else " ({:.2f}..{:.2f})".format(*row["interval"])
        ratio = row["relative_ratio"]
        cell = row["why"] if ratio is None else f"{ratio:.3f}{ends}"
        lines.setdefault((row["set"], row["variant"]), []).append(cell)
    for (set_name, name), cells in lines.items():
        if name != first:
            found.add_row(set_name, name, *cells, end_section=set_name == POOLED)
    return found


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--model")
    parser.add_argument("--windows", type=int, default=FULL.evaluation.windows)
    parser.add_argument("--record")
    options = parser.parse_args()
    name = options.record or f"codec_{options.question}_{datetime.now(UTC):%Y%m}"
    path = RESULTS / f"{name}.json"
    if not RESULTS.is_dir() or path.is_dir():
        parser.error(f"cannot write {path.name} into {RESULTS.name}")
    variants = QUESTIONS[options.question]()
    evaluation = replace(FULL.evaluation, windows=options.windows)
    loaded = load_model(options.model, progress=lambda text: print(text, file=sys.stderr))
    engine = TransformersEngine(loaded)
    shown: dict[str, int] = {}

    def on_progress(what: str, fraction: float) -> None:
        if (tenth := int(10 * fraction)) != shown.get(what):
            shown[what] = tenth
            print(f"{what} {tenth * 10} %", file=sys.stderr, flush=True)

    measured = measure_variants(
        engine, loaded, variants, TARGETS, evaluation, on_progress=on_progress
    )
    rows = costs(measured, variants[0].name, COMPARED)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["benchmarks/bench_codec_shift.py", *sys.argv[1:]]),
        "model": loaded.name,
        "machine": machine(),
        "versions": versions(),
        "windows": options.windows,
        "curves": curves(measured),
        "costs": rows,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console().print(table(rows, variants[0].name))
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
