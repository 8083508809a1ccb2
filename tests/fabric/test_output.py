"""Files to write are refused before the work, by name."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fabric.cli import main
from fabric.output import FileError, writable, write_json


@pytest.mark.parametrize("command", ["arena", "retention"])
def test_a_bench_says_at_once_that_its_file_cannot_be_written(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not after minutes of work, with a traceback."""
    monkeypatch.setattr(f"fabric.{command}_cli.write_json", lambda *_: pytest.fail("it ran"))
    path = tmp_path / "absent" / "figures.json"

    result = CliRunner().invoke(main, ["bench", command, "--quick", "--json", str(path)])

    assert result.exit_code == 2
    assert f"cannot write {path}" in result.output


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """Neither one that is there, nor one under a file."""
    file = tmp_path / "file"
    file.touch()
    option = click.Option(["--json"])
    context = click.Context(click.Command("bench"))
    for path in (tmp_path, file / "figures.json"):
        with pytest.raises(click.BadParameter, match="cannot write"):
            writable(context, option, path)
    assert writable(context, option, file) == file
    assert writable(context, option, None) is None


def test_what_is_written_is_what_is_shown(tmp_path: Path) -> None:
    """With a newline at its end."""
    path = tmp_path / "figures.json"

    text = write_json(path, {"a": 1})

    assert path.read_text() == text + "\n"
    assert json.loads(text) == {"a": 1}
    assert write_json(None, {"a": 1}) == text
    with pytest.raises(FileError, match="cannot write"):
        write_json(tmp_path, {})
