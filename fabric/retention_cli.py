"""The commands of the retention compiler: ``kvfabric plan`` and ``kvfabric bench retention``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from codec.errors import ConfigError
from fabric.output import writable, write_json
from policies.retention.figures import figures
from policies.retention.plot import draw
from policies.retention.plot_png import encode
from policies.retention.report import PlanOptions, parse_bytes, parse_config, plan_report


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--context", default=32_768, show_default=True, help="Tokens of one request.")
@click.option("--budget", default="20GiB", show_default=True, help="Memory for the cache.")
@click.option("--page", default=16, show_default=True, help="Tokens per page.")
@click.option("--step", default=1, show_default=True, help="Most tokens of one step.")
@click.option("--requests", default=1, show_default=True, help="Requests at once.")
@click.option("--dtype", help="Data type of the cache.  [default: the config's]")
@click.option("--target", type=float, help="Compression of what is stored.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw it: .svg or .png.")
def plan(
    *,
    config: Path,
    context: int,
    budget: str,
    page: int,
    step: int,
    requests: int,
    dtype: str | None,
    target: float | None,
    plot: Path | None,
) -> None:
    """Say what a model's attention lets be forgotten, and what its cache needs."""
    path = config / "config.json" if config.is_dir() else config
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    options = PlanOptions(
        context_tokens=context,
        budget_bytes=parse_bytes(budget),
        page_tokens=page,
        step_tokens=step,
        requests=requests,
        dtype=dtype,
        codec_target=target,
    )
    report = plan_report(parse_config(text), options)
    image = encode(draw(report.plan, context, path.parent.name), plot.suffix) if plot else None
    click.echo(report.text())
    if plot is not None and image is not None:
        plot.write_bytes(image)


@click.group()
def bench() -> None:
    """Measure parts of the fabric on this machine."""


@bench.command()
@click.option("--quick", is_flag=True, help="Under a minute.")
@click.option(
    "--json", "path", type=click.Path(path_type=Path), callback=writable, help="Write the figures."
)
def retention(*, quick: bool, path: Path | None) -> None:
    """Time the retention compiler, and compare it with brute force on random relations."""
    found = {"figures": figures(quick=quick, clock=time.perf_counter)}
    click.echo(write_json(path, found))
