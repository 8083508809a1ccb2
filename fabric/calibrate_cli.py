"""The commands ``kvfabric calibrate`` and ``kvfabric drift``, and what others share with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from codec.entropy_calibration import EntropyCalibration, EntropyConfig
from codec.errors import ConfigError
from fabric.calibrate import AnyCalibration, CorpusConfig, calibrate, calibrate_all
from fabric.calibrate import Progress as OnProgress
from fabric.calibrate.domains import Domain
from fabric.calibrate.profiles import DEFAULT_PROFILE, PROFILES, config_of
from fabric.calibrate.run import StageFit
from fabric.calibration_drift import FileDrift, measure_drift
from fabric.calibration_report import CalibrationReport
from fabric.engines.loading import LoadedModel, load_model
from fabric.engines.transformers import TransformersEngine

_console = Console(stderr=True)
_STEPS: Final = {
    "capture": "running text through the model",
    "sensitivity": "running text with gradients",
    "fit": "fitting the codec",
    "report": "drawing the curve",
    "drift": "running files through the model",
}
_SHOWN_POSITIONS: Final = 6

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


_profile_option = click.option(
    "--profile",
    type=click.Choice(tuple(PROFILES)),
    default=DEFAULT_PROFILE,
    show_default=True,
    help="Ours, or the published one.",
)
_model_option = click.option(
    "--model", help="Directory or GGUF file.  [default: packaged SmolLM2-135M]"
)
_corpus_option = click.option(
    "--corpus",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Text, UTF-8; each file is a domain of its own.  [default: the files shipped]",
)
_tokens_option = click.option("--tokens", default=CorpusConfig().num_tokens, show_default=True)
_window_option = click.option("--window", default=CorpusConfig().window_tokens, show_default=True)


def codec_options(command: CommandT) -> CommandT:
    """The options that say how a model's cache is kept."""
    for option in (
        click.option("--stages", default=1, show_default=True, help="Pipeline stages."),
        click.option(
            "--target", type=float, help="Compression aimed for.  [default: entropy 16, paper 8]"
        ),
        _profile_option,
    ):
        command = option(command)
    return command


@click.command(name="calibrate")
@click.argument("path", metavar="[MODEL]", required=False)
@_model_option
@_corpus_option
@click.option(
    "--targets",
    "--target",
    "targets",
    help="Compression aimed for, such as 8,16,32.  [default: entropy 16, paper 8]",
)
@click.option("--stages", default=1, show_default=True, help="Pipeline stages.")
@_profile_option
@_tokens_option
@_window_option
@click.option(
    "--gradient-windows",
    default=CorpusConfig().gradient_windows,
    show_default=True,
    help="Windows run with gradients; the published profile needs none.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Also write the file(s) here.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write report.json and plots to this folder."
)
def calibrate_command(
    *,
    path: str | None,
    model: str | None,
    corpus: tuple[Path, ...],
    targets: str | None,
    stages: int,
    profile: str,
    tokens: int,
    window: int,
    gradient_windows: int,
    out: Path | None,
    report: Path | None,
) -> None:
    """Fit a model's codec to its own cache; found again by digest the next time.

    A calibration that is interrupted goes on from where it stopped.
    """
    corpus_config = CorpusConfig(
        num_tokens=tokens, window_tokens=window, gradient_windows=gradient_windows
    )
    configs = [config_of(profile, target) for target in _parsed(targets)]
    writer = CalibrationReport(report) if report is not None else None
    loaded = load_model(chosen_model(path, model), progress=_say)
    with progress_bars(_console) as on_progress:

        def examine(fit: StageFit) -> None:
            assert writer is not None
            writer.add(fit, on_progress)

        found = calibrate_all(
            TransformersEngine(loaded),
            loaded,
            configs=configs,
            corpus=corpus,
            corpus_config=corpus_config,
            num_stages=stages,
            on_progress=on_progress,
            examine=examine if writer is not None else None,
        )
    for calibration in (part for parts in found for part in parts):
        if out is not None:
            calibration.save(out / f"{calibration.digest.hex()}.safetensors")
        click.echo(_line(calibration))
    if writer is not None:
        for domain in writer.domains:
            click.echo(domain_line(domain, configs[0].sink_tokens))
        for written in writer.write(loaded.name):
            _say(f"written: {written}")


@click.command(name="drift")
@_model_option
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@_corpus_option
@codec_options
@_tokens_option
@_window_option
@click.option("--limit", default=4096, show_default=True, help="Tokens to look at in each file.")
def drift_command(
    *,
    model: str | None,
    files: tuple[Path, ...],
    corpus: tuple[Path, ...],
    profile: str,
    target: float | None,
    stages: int,
    tokens: int,
    window: int,
    limit: int,
) -> None:
    """Say of text files whether a calibration fits them, or they need one of their own."""
    config = config_of(profile, target)
    if not isinstance(config, EntropyConfig):
        raise ConfigError("drift is measured for the entropy profile only")
    loaded = load_model(model, progress=_say)
    engine = TransformersEngine(loaded)
    corpus_config = CorpusConfig(num_tokens=tokens, window_tokens=window)
    with progress_bars(_console) as on_progress:
        found = calibrate(
            engine,
            loaded,
            config=config,
            corpus=corpus,
            corpus_config=corpus_config,
            num_stages=stages,
            on_progress=on_progress,
        )
        calibrations = [part for part in found if isinstance(part, EntropyCalibration)]
        drifts = measure_drift(
            engine, loaded, calibrations, files, max_tokens=limit, on_progress=on_progress
        )
    Console().print(_drift_table(drifts))


def load_calibrated(
    model: str | None,
    profile: str,
    target: float | None,
    stages: int,
    say: Callable[[str], None],
) -> tuple[LoadedModel, list[AnyCalibration]]:
    """A model and its calibrations on the default corpus, fitted now if there are none."""
    config = config_of(profile, target)
    loaded = load_model(model, progress=say)
    with progress_bars(_console) as on_progress:
        calibrations = calibrate(
            TransformersEngine(loaded),
            loaded,
            config=config,
            num_stages=stages,
            on_progress=on_progress,
        )
    return loaded, calibrations


def chosen_model(path: str | None, model: str | None) -> str | None:
    """The model that was named, as an argument or as an option.

    Raises
    ------
    ConfigError
        If two were.
    """
    if path is not None and model is not None and path != model:
        raise ConfigError(f"two models are named, {path} and {model}: leave one out")
    return model if path is None else path


@contextmanager
def progress_bars(console: Console) -> Iterator[OnProgress]:
    """Bars on the terminal, one per kind of work, as it begins."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def on_progress(what: str, fraction: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(_STEPS.get(what, what), total=1.0)
            bars.update(tasks[what], completed=fraction)

        yield on_progress


def domain_line(domain: Domain, sink_tokens: int) -> str:
    """What was run of a file, and its tokens that are like no other beyond the sinks."""
    text = f"{domain.name}: {domain.num_tokens} tokens in {domain.num_windows} windows"
    for outliers in domain.outliers:
        beyond = {at: n for at, n in outliers.count_by_position.items() if at >= sink_tokens}
        if beyond:
            places = ", ".join(map(str, sorted(beyond)[:_SHOWN_POSITIONS]))
            more = ", ..." if len(beyond) > _SHOWN_POSITIONS else ""
            text += (
                f"; {sum(beyond.values())} outlying {outliers.kind} beyond the sinks, "
                f"at {places}{more}"
            )
    return text


def _parsed(targets: str | None) -> Sequence[float | None]:
    """Targets of a list with commas, as given; ``None`` for the profile's own."""
    if targets is None:
        return [None]
    try:
        parsed = sorted({float(part) for part in targets.split(",") if part.strip()})
    except ValueError:
        parsed = []
    if not parsed:
        raise ConfigError(f"--targets needs numbers such as 8,16,32, got {targets!r}")
    return parsed


def _line(calibration: AnyCalibration) -> str:
    start = f"{calibration.digest.hex()}  stage {calibration.stage}  "
    start += f"target {calibration.config.target:g}  "
    size = f"{calibration.nbytes / 1e6:.1f} MB"
    if isinstance(calibration, EntropyCalibration):
        return (
            f"{start}rank K {calibration.keys.rank} V {calibration.values.rank}  "
            f"held-out ratio {calibration.held_out_ratio:.2f}  {size}"
        )
    return (
        f"{start}rank K {calibration.keys.basis.rank} V {calibration.values.basis.rank}  "
        f"held-out error K {calibration.keys.held_out_error:.4f} "
        f"V {calibration.values.held_out_error:.4f}  {size}"
    )


def _drift_table(drifts: Sequence[FileDrift]) -> Table:
    table = Table(title="energy outside the basis, times that of the calibration's own text")
    for name in ("file", "tokens", "keys", "values", "verdict"):
        is_text = name in ("file", "verdict")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for drift in drifts:
        table.add_row(
            drift.name,
            str(drift.num_tokens),
            f"{drift.keys:.2f}",
            f"{drift.values:.2f}",
            drift.verdict,
        )
    return table


def _say(text: str) -> None:
    _console.print(text, style="dim")
