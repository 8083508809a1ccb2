"""The command ``kvfabric bench codec``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fabric.calibrate import Progress as OnProgress
from fabric.codec_bench.report import record, tables
from fabric.codec_bench.run import FULL, QUICK, run
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine
from fabric.output import writable, write_json

_STEPS: Final = {
    "capture": "running text through the model",
    "sensitivity": "asking the model what matters",
    "fit": "fitting the codecs",
    "race": "racing against prefill",
    "evaluate": "running all arms",
}


@click.command(name="codec")
@click.option("--model", help="Directory or GGUF file.  [default: packaged SmolLM2-135M]")
@click.option(
    "--quick", is_flag=True, help="Fewer arms and windows, one turn; calibrations that are kept."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=FULL.speed.num_threads,
    show_default=True,
    help="Of the race against prefill.",
)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=writable, help="Write the figures."
)
def codec_command(*, model: str | None, quick: bool, threads: int, path: Path | None) -> None:
    """Compare the entropy profile with the paper's and others, and race it against prefill.

    Calibrations are found again where they were kept, and fitted where there are none.
    """
    config = QUICK if quick else FULL
    config = replace(config, speed=replace(config.speed, num_threads=threads))
    console = Console(stderr=True)
    loaded = load_model(model, progress=lambda text: console.print(text, style="dim"))
    engine = TransformersEngine(loaded)
    with _bars(console) as on_progress:
        found = run(engine, loaded, config, on_progress)
    for table in tables(found):
        console.print(table)
    click.echo(write_json(path, record(found, is_quick=quick)))


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
