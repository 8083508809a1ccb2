"""The command line: help for everything, one line and a remedy for every error."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner, Result

from actors.worker import WorkerStat
from codec.errors import ConfigError, UnqualifiedCodecError
from fabric import cli, local_ray
from fabric.cli import main
from fabric.config import FabricConfig
from fabric.demo import DemoConfig
from policies.vmm_gate import UnitCosts


def run(*arguments: str) -> Result:
    """Run ``kvfabric`` in this process."""
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "down",
        "status",
        "calibrate",
        "query",
        "demo",
        "plan",
        "bench",
        "verify-certificates",
        "drift",
        "evaluate",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    """And is listed."""
    result = run(command, "--help")

    assert result.exit_code == 0
    assert "Usage:" in result.output
    assert command in run("--help").output


def test_the_version_is_the_packages() -> None:
    """As installed."""
    assert "0.1.0" in run("--version").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("calibrate", "--target", "0"), "target must be between 1 and 256"),
        (("calibrate", "--window", "8"), "window_tokens"),
        (("demo", "--prompt", "/nowhere/prompt.txt"), "cannot read the prompt"),
        (("demo", "--max-prompt-tokens", "100"), "max_prompt_tokens must be over 384"),
        (("demo", "--config", "/nowhere/fabric.toml"), "cannot read settings"),
        (("demo", "--model", "/nowhere"), "/nowhere"),
        (("status", "--config", "/nowhere/fabric.toml"), "cannot read settings"),
    ],
)
def test_errors_are_one_line_with_what_was_wrong(arguments: tuple[str, ...], message: str) -> None:
    """No traceback, exit code 1."""
    result = run(*arguments)

    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_an_unknown_fault_is_a_usage_error() -> None:
    """Click names the choices."""
    result = run("demo", "--fault", "meteor")

    assert result.exit_code == 2
    assert "kill-source" in result.output


def test_status_without_a_ray_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is in the message."""

    def refuse(address: str | None) -> None:
        raise ConfigError(f"no Ray answers at {address}; start one with `kvfabric up`")

    monkeypatch.setattr(local_ray, "connect", refuse)

    result = run("status")

    assert result.exit_code == 1
    assert "kvfabric up" in result.output


def test_up_on_a_named_cluster_never_starts_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that was named and does not answer is an error."""

    def refuse(address: str | None) -> None:
        raise ConfigError("no Ray answers")

    monkeypatch.setattr(local_ray, "connect", refuse)
    monkeypatch.setattr(local_ray, "start", lambda: pytest.fail("started a local Ray"))

    assert run("up", "--address", "10.77.0.9:6379").exit_code == 1


def test_up_starts_no_second_ray_beside_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray whose token is another's runs, and is not ours to double."""

    def refuse(address: str | None) -> None:
        raise ConfigError("the Ray refuses this driver")

    monkeypatch.setattr(local_ray, "is_running", lambda _address: True)
    monkeypatch.setattr(local_ray, "connect", refuse)
    monkeypatch.setattr(local_ray, "start", lambda: pytest.fail("started a second Ray"))

    assert "refuses this driver" in run("up").output


def test_down_leaves_processes_alone_that_it_did_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The id in the state file may be somebody else's by now."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    state = local_ray._state_file()
    state.parent.mkdir(parents=True)
    state.write_text('{"pid": 1}')

    assert local_ray.stop() is False
    assert not state.exists()
    assert local_ray.stop() is False


def test_a_plan_is_printed_and_drawn(tmp_path: Path) -> None:
    """From a model's own configuration file."""
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "mistral", "num_hidden_layers": 4, "num_attention_heads": 8, '
        '"num_key_value_heads": 2, "hidden_size": 512, "head_dim": 64, "sliding_window": 1024, '
        '"torch_dtype": "bfloat16"}'
    )
    picture = tmp_path / "plan.svg"

    result = run("plan", str(config), "--context", "8192", "--plot", str(picture))

    assert result.exit_code == 0, result.output
    assert "65" in result.output
    assert picture.read_bytes()


def test_a_plan_of_nothing_is_an_error(tmp_path: Path) -> None:
    """With the path in it."""
    result = run("plan", str(tmp_path / "absent.json"))

    assert result.exit_code == 1
    assert "absent.json" in result.output.replace("\n", "")


def a_fabric(node: str) -> SimpleNamespace:
    """What `status` asks of a fabric, with one worker at work."""
    counters = dict.fromkeys((field.name for field in fields(WorkerStat)), 0)
    held = {
        "node": node,
        "stored_bytes": 12_300_000,
        "reserved_bytes": 1 << 30,
        "committed_bytes": 16_800_000,
        "quarantined_bytes": 2_500_000,
        "peak_bytes": 20_900_000,
    }
    costs = UnitCosts(
        kind="host",
        extent_bytes=4096,
        create_us=5,
        release_us=4,
        map_us=3,
        unmap_us=2,
        access_us=1,
    )
    client = SimpleNamespace(
        refresh=lambda: None,
        workers=lambda: {node: SimpleNamespace(transports=("self", "tcp"))},
        models=lambda: ["tiny"],
    )
    return SimpleNamespace(
        client=client,
        config=FabricConfig(),
        stats=lambda: {node: WorkerStat(**counters | held)},
        unit_costs=lambda: {node: costs},
    )


def test_status_can_be_read_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every name and every number whole, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    cli._print_status(a_fabric("gpu-host-17.rack4.gpu0"), as_json=False)

    shown = capsys.readouterr().out
    assert "…" not in shown
    for word in ("gpu-host-17.rack4.gpu0", "12.3", "1073.7", "16.8", "2.5", "20.9", "self,tcp"):
        assert word in shown
    for column in ("reserved", "committed", "heap", "hot", "quarantined", "peak"):
        assert column in shown


def test_status_as_json_has_what_the_memory_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """The evidence for when idle memory is given back."""
    cli._print_status(a_fabric("a"), as_json=True)

    worker = json.loads(capsys.readouterr().out)["workers"]["a"]
    assert worker["unit_costs"]["create_us"] == 5
    assert worker["peak_bytes"] == 20_900_000


@pytest.mark.parametrize("flags", [(), ("--allow-unqualified",)])
def test_up_passes_receipts_and_the_permission_on(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Measured where nothing is allowed; the fabric hears of both."""
    asked: dict[str, Any] = {}
    told: dict[str, Any] = {}
    fabric = MagicMock()
    fabric.__enter__.return_value = fabric
    fabric.add_model.side_effect = lambda *_args, **options: told.update(options) or fabric
    monkeypatch.setattr(local_ray, "connect", lambda _address: None)
    monkeypatch.setattr(local_ray, "is_running", lambda _address: True)
    monkeypatch.setattr(cli, "place_on_cluster", dict)
    monkeypatch.setattr(cli, "Fabric", SimpleNamespace(start=lambda *_args: fabric))
    monkeypatch.setattr(
        cli, "load_calibrated", lambda *_args: (SimpleNamespace(name="m"), ["a calibration"])
    )
    monkeypatch.setattr(cli, "TransformersEngine", lambda *_args, **_options: "an engine")
    monkeypatch.setattr(cli, "_print_status", lambda *_args, **_options: None)
    monkeypatch.setattr(
        cli, "qualify_codecs", lambda *_args, **options: asked.update(options) or ["a receipt"]
    )

    result = run("up", *flags)

    assert result.exit_code == 0, result.output
    assert asked["allow_unqualified"] is told["allow_unqualified"] is bool(flags)
    assert told["receipts"] == ["a receipt"]


@pytest.mark.parametrize("flags", [(), ("--allow-unqualified",)])
def test_the_demo_is_told_of_the_permission(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """And the error of a codec that does not pass says how to give it."""

    def refuse(config: DemoConfig, *_args: object) -> None:
        assert config.allow_unqualified is bool(flags)
        raise UnqualifiedCodecError("00", "model m", "mean KL 0.5 is over 0.02")

    monkeypatch.setattr(cli, "prepare", refuse)

    result = run("demo", *flags)

    assert result.exit_code == 1
    assert "--allow-unqualified" in result.output.replace("\n", " ")
