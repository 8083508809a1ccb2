"""The command ``kvfabric evaluate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from actors.codecs import is_lossless
from fabric.calibrate import Progress as OnProgress
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate import FULL, QUICK, Evaluation, evaluate
from fabric.evaluate.arms import Arm, CodecArm
from fabric.evaluate.codecs import PROFILES, arm_names, chosen_names, make_arms, parse_targets
from fabric.evaluate.receipts import make_receipt
from fabric.evaluate.report import tables
from fabric.evaluate.run import choose_set
from fabric.evaluate.vocabulary import Vocabulary
from fabric.output import writable, write_json
from fabric.quality_store import save_receipt
from policies.quality_gate import QualityLimits, judged

_DEFAULT_PROFILE: Final = next(iter(PROFILES))
_STEPS: Final = {
    "capture": "running text through the model",
    "fit": "fitting the codec",
    "evaluate": "evaluating",
}


@click.command(name="evaluate")
@click.option("--model", help="Directory or GGUF file.  [default: packaged SmolLM2-135M]")
@click.option(
    "--profile", default=_DEFAULT_PROFILE, show_default=True, help="Of the codec to judge."
)
@click.option("--targets", default="8,16,32", show_default=True, help="Compression aimed for.")
@click.option(
    "--arms",
    help=f"all, or some of: {', '.join(arm_names())}.  [default: full, raw and the profile]",
)
@click.option(
    "--corpus",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Text, UTF-8, in place of the pre-registered set; give it more than once.",
)
@click.option("--quick", is_flag=True, help="Shorter and fewer samples: a minute for one arm.")
@click.option("--windows", type=int, help="Samples of each set.  [default: 8, quick 2]")
@click.option(
    "--context", type=int, help="Tokens before what is scored.  [default: 1024, quick 320]"
)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=writable, help="Write the results."
)
def evaluate_command(
    *,
    model: str | None,
    profile: str,
    targets: str,
    arms: str | None,
    corpus: tuple[Path, ...],
    quick: bool,
    windows: int | None,
    context: int | None,
    path: Path | None,
) -> None:
    """Judge codecs by what the model says after its cache was coded and restored.

    On the pre-registered set, full or quick, lossy codecs get their quality receipts.
    """
    config = QUICK if quick else FULL
    if windows is not None:
        config = replace(config, windows=windows)
    if context is not None:
        config = replace(config, context_tokens=context)
    names, wanted = chosen_names(arms, profile), parse_targets(targets)
    console = Console(stderr=True)
    loaded = load_model(model, progress=lambda text: console.print(text, style="dim"))
    engine = TransformersEngine(loaded)
    # Before calibrations, which may take minutes.
    choose_set(Vocabulary.of(engine, loaded), loaded, config, corpus)
    with _bars(console) as on_progress:
        made = make_arms(engine, loaded, names, wanted, on_progress)
        found = evaluate(
            engine, loaded, made, config=config, corpus=corpus, on_progress=on_progress
        )
    for table in tables(found):
        Console().print(table)
    if found.is_registered and config in {QUICK, FULL}:
        for line in _kept_receipts(made, found):
            Console().print(line)
    if path is not None:
        write_json(path, found.to_json())


def _kept_receipts(arms: Sequence[Arm], found: Evaluation) -> Iterator[str]:
    """Keep a receipt for every lossy codec, where starting a fabric looks for it."""
    limits = QualityLimits()
    for arm, result in zip(arms, found.arms, strict=True):
        if isinstance(arm, CodecArm) and not all(map(is_lossless, arm.codecs)):
            receipt = judged(make_receipt(arm.codecs, result, found), limits)
            path = save_receipt(receipt)
            reasons = "; ".join(receipt.verdict.reasons)
            said = f"does not pass: {reasons}" if reasons else "passes"
            yield f"{arm.name} {said} (receipt {receipt.digest()} in {path})"


@contextmanager
def _bars(console: Console) -> Iterator[OnProgress]:
    """One bar per kind of work, as it begins."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(what: str, fraction: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(_STEPS.get(what, what), total=1.0)
            bars.update(tasks[what], completed=fraction)

        yield on_progress
