"""The command line: ``kvfabric up | down | status | calibrate | query | demo | ...``.

It parses, shows progress and prints; what is done is in the other modules.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
import ray
from rich.console import Console
from rich.table import Table

from codec.errors import FabricError
from fabric import local_ray
from fabric.arena_cli import arena
from fabric.calibrate.profiles import config_of
from fabric.calibrate_cli import (
    calibrate_command,
    codec_options,
    drift_command,
    load_calibrated,
    progress_bars,
)
from fabric.certificates_cli import verify_certificates
from fabric.cluster import Fabric
from fabric.codec_bench_cli import codec_command
from fabric.config import FabricConfig, load_config
from fabric.demo import DemoConfig, Fault, prepare, read_prompt
from fabric.demo import run as run_demo
from fabric.engines.loading import load_model
from fabric.engines.transformers import TransformersEngine
from fabric.evaluate_cli import evaluate_command
from fabric.launch import num_fabrics, place_on_cluster, stop_actors
from fabric.qualification import qualify_codecs
from fabric.retention_cli import bench, plan

_console = Console(stderr=True)
CommandT = TypeVar("CommandT", bound=Callable[..., Any])


class _Group(click.Group):
    """Turns our own errors into one line and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - click's own signature
        try:
            return super().invoke(ctx)
        except FabricError as error:
            raise click.ClickException(str(error)) from error
        except ray.exceptions.RayError as error:
            raise click.ClickException(f"Ray: {str(error).strip().splitlines()[-1]}") from error


def _model_options(command: CommandT) -> CommandT:
    """The options that name a model and how it is kept."""
    named = click.option(
        "--model", help="Directory or GGUF file.  [default: packaged SmolLM2-135M]"
    )
    return named(codec_options(command))


_config_option = click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings, TOML."
)
_unqualified_option = click.option(
    "--allow-unqualified",
    is_flag=True,
    help="Use a lossy codec that no quality receipt speaks for.  Every receipt says so.",
)
_address_option = click.option("--address", help="Ray cluster.  [default: the one on this machine]")


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvfabric")
def main() -> None:
    """Keep KV caches compressed on a Ray cluster, and restore them where they are needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@main.command()
@_model_options
@_config_option
@_address_option
@_unqualified_option
@click.option("--no-model", is_flag=True, help="Start without a model.")
def up(
    *,
    model: str | None,
    profile: str,
    target: float | None,
    stages: int,
    config_path: Path | None,
    address: str | None,
    allow_unqualified: bool,
    no_model: bool,
) -> None:
    """Start the fabric on a running Ray, or on one started here; add a model to it."""
    config = load_config(config_path, os.environ)
    if address is None and not local_ray.is_running(None):
        _say("no Ray runs on this machine: starting one")
        local_ray.start()
    local_ray.connect(address)
    placing = place_on_cluster()
    _say(f"starting the router and {len(placing)} worker(s)")
    with Fabric.start(config, placing) as fabric:
        if not no_model:
            loaded, calibrations = load_calibrated(model, profile, target, stages, _say)
            engine = TransformersEngine(loaded, window_tokens=config.window_tokens)
            with progress_bars(_console) as on_progress:
                receipts = qualify_codecs(
                    engine,
                    loaded,
                    calibrations,
                    tokens_per_chunk=config.tokens_per_chunk,
                    allow_unqualified=allow_unqualified,
                    on_progress=on_progress,
                    say=_say,
                )
            added = fabric.add_model(
                engine,
                calibrations,
                name=loaded.name,
                receipts=receipts,
                allow_unqualified=allow_unqualified,
            )
            _say(f"model {added.name} is registered")
        _print_status(fabric, as_json=False)


@main.command()
@_config_option
@_address_option
def down(*, config_path: Path | None, address: str | None) -> None:
    """Stop the fabric, and the Ray that `up` started if it did."""
    config = load_config(config_path, os.environ)
    num_stopped, others = 0, 0
    try:
        local_ray.connect(address)
        num_stopped = stop_actors(config)
        others = num_fabrics()
    finally:
        ray.shutdown()
        stopped_ray = address is None and not others and local_ray.stop()
    click.echo(f"stopped {num_stopped} actor(s)" + (" and the local Ray" if stopped_ray else ""))


@main.command()
@_config_option
@_address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(*, config_path: Path | None, address: str | None, as_json: bool) -> None:
    """Show workers, what they hold, and the models served."""
    with _connected(config_path, address) as fabric:
        _print_status(fabric, as_json=as_json)


@main.command()
@click.argument("prompt", type=click.Path(path_type=Path))
@click.option("--model", help="As for `up`.")
@click.option("--at", "node", help="Worker to plan a restore for.  [default: the first]")
@_config_option
@_address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def query(
    *,
    prompt: Path,
    model: str | None,
    node: str | None,
    config_path: Path | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Say where a prompt's prefix lives and what a restore would cost."""
    with _connected(config_path, address) as fabric:
        loaded = load_model(model, progress=_say)
        tokens = read_prompt(
            loaded, DemoConfig(prompt=prompt, max_prompt_tokens=1 << 20, fabric=fabric.config)
        )
        residency = fabric.client.residency(tokens, model=loaded.name)
        node = node or min(fabric.client.workers())
        plan = fabric.client.plan(tokens, at=node, model=loaded.name)
    holders = sorted({p.node for places in residency.placements() for p in places})
    answer = {
        "tokens_prompt": len(tokens),
        "tokens_resident": residency.prefix_tokens,
        "stored_bytes": residency.stored_bytes,
        "nodes": holders,
        "as_of": residency.as_of.version,
        "ready": residency.ready,
        "gap": residency.gap,
        "at": node,
        "choice": plan.choice,
        "reason": plan.reason.value,
        "predicted_restore_s": plan.predicted_restore_s,
        "predicted_recompute_s": plan.predicted_recompute_s,
        "steps": dict(plan.steps),
    }
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    table = Table(title=str(prompt))
    table.add_column("what")
    table.add_column("value")
    for name, value in answer.items():
        table.add_row(name, ", ".join(value) if isinstance(value, list) else str(value))
    Console().print(table, plan.sentence)


@main.command()
@_model_options
@click.option("--prompt", type=click.Path(path_type=Path), help="Text file of your own.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the receipt.")
@click.option("--max-prompt-tokens", default=2304, show_default=True)
@click.option("--fault", type=click.Choice(get_args(Fault)), default="none", show_default=True)
@_unqualified_option
@_config_option
def demo(
    *,
    model: str | None,
    profile: str,
    target: float | None,
    stages: int,
    prompt: Path | None,
    json_path: Path | None,
    max_prompt_tokens: int,
    fault: Fault,
    allow_unqualified: bool,
    config_path: Path | None,
) -> None:
    """Prefill, compress, move, restore elsewhere and go on: the whole job, once."""
    options: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    config = DemoConfig(
        model=model,
        max_prompt_tokens=max_prompt_tokens,
        num_stages=stages,
        calibration=config_of(profile, target),
        fabric=load_config(config_path, os.environ),
        fault=fault,
        allow_unqualified=allow_unqualified,
        **options,
    )
    with progress_bars(_console) as on_progress:
        loaded, calibrations, tokens = prepare(config, on_progress, _say)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        object_store_memory=local_ray.OBJECT_STORE_BYTES,
    )
    try:
        receipt = run_demo(config, loaded, calibrations, tokens, _say)
    finally:
        ray.shutdown()
    Console().print(receipt.render())
    if json_path is not None:
        receipt.write(json_path)
        _say(f"receipt written to {json_path}")


@contextmanager
def _connected(config_path: Path | None, address: str | None) -> Iterator[Fabric]:
    config: FabricConfig = load_config(config_path, os.environ)
    local_ray.connect(address)
    with Fabric(config) as fabric:
        yield fabric


_MEMORY = ("reserved", "committed", "heap", "hot", "quarantined", "peak")


def _print_status(fabric: Fabric, *, as_json: bool) -> None:
    fabric.client.refresh()
    stats, costs = fabric.stats(), fabric.unit_costs()
    workers = fabric.client.workers()
    models = sorted(fabric.client.models())
    if as_json:
        answer = {
            "models": models,
            "workers": {
                node: {
                    **asdict(stat),
                    "transports": workers[node].transports,
                    "unit_costs": asdict(costs[node]),
                }
                for node, stat in stats.items()
            },
        }
        click.echo(json.dumps(answer, indent=2))
        return
    title = f"fabric {fabric.config.ray_namespace}: {', '.join(models) or 'no model'}"
    held = _table(title, "worker", "components", "stored MB", "faults", "UCX")
    memory = _table("memory, MB", "worker", *_MEMORY)
    for node, stat in stats.items():
        faults = stat.rejected_corrupt + stat.quarantined
        stored = f"{stat.stored_bytes / 1e6:.1f}"
        transports = ",".join(workers[node].transports)
        held.add_row(node, str(stat.num_components), stored, str(faults), transports)
        sizes = (getattr(stat, f"{name}_bytes") / 1e6 for name in _MEMORY)
        memory.add_row(node, *(f"{size:.1f}" for size in sizes))
    console = Console()
    console.print(held)
    console.print(memory)


def _table(title: str, *columns: str) -> Table:
    """A table of workers, whose names are folded rather than cut."""
    table = Table(title=title)
    for column in columns:
        is_text = column in ("worker", "UCX")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _say(text: str) -> None:
    _console.print(text, style="dim")


main.add_command(calibrate_command)
main.add_command(drift_command)
main.add_command(evaluate_command)
main.add_command(plan)
bench.add_command(arena)
bench.add_command(codec_command)
main.add_command(bench)
main.add_command(verify_certificates)
