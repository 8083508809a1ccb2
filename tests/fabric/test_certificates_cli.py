"""``kvfabric verify-certificates``: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fabric.cli import main
from policies.certificate_lines import MAX_LINE_BYTES
from policies.certificates import verify
from tests.suites.certificate_logs import chained, everything

LINES = chained(everything())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log that holds."""
    path = tmp_path / "[b]arena.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


def run(*arguments: str | Path) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, ["verify-certificates", *map(str, arguments)])


def test_the_command_explains_itself() -> None:
    """And is listed."""
    result = run("--help")

    assert result.exit_code == 0
    assert "Usage:" in result.stdout
    assert "verify-certificates" in CliRunner().invoke(main, ["--help"]).stdout


def test_a_log_that_holds_is_summed_up(log: Path) -> None:
    """In a table, and a last line to look for."""
    result = run(log)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "22 certificates hold"
    for part in ("[b]arena.jsonl", "released 14", "a 2, b 3", "nothing", "56"):
        assert part in result.stdout
    assert result.stderr == ""


def test_what_is_still_held_is_said(log: Path) -> None:
    """Of a log that goes on."""
    log.write_bytes(b"".join(LINES[:10]))

    result = run(log)

    assert result.exit_code == 0
    assert "work running 3" in result.stdout
    assert "0 certificates hold" in result.stdout


def test_the_findings_are_written_as_json(log: Path, tmp_path: Path) -> None:
    """All of the report, digest and all."""
    result = run(log, "--json", tmp_path / "found.json")

    found = json.loads((tmp_path / "found.json").read_text())
    assert result.exit_code == 0
    assert found["holds"] is True
    assert found["digest"] == verify(LINES).digest
    assert found["reasons"]["recovered"] == 3


def test_a_violation_is_named_by_its_line(log: Path, tmp_path: Path) -> None:
    """Exit code 1; the same in the JSON."""
    log.write_bytes(b"".join(chained(everything()[:48] + everything()[47:48])))

    result = run(log, "--json", tmp_path / "found.json")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Error: line 49: reuse: page [0, 0, 1] is not in use" in result.stderr
    assert json.loads((tmp_path / "found.json").read_text()) == {
        "holds": False,
        "line": 49,
        "why": "reuse: page [0, 0, 1] is not in use",
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "line 1: the log is empty"),
        (LINES[0][:-1], "line 1: the line is torn"),
        (b"\x00" * 100, "line 1: the line is torn"),
        (b"[" * (MAX_LINE_BYTES + 100), "line 1: the line is longer than"),
        (LINES[0] + LINES[2], "line 2: need n=1, got 2"),
    ],
)
def test_what_is_no_log_is_refused(log: Path, content: bytes, why: str) -> None:
    """Without a traceback, whatever is in the file."""
    log.write_bytes(content)

    result = run(log)

    assert result.exit_code == 1
    assert why in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_missing_file_is_a_wrong_use(tmp_path: Path) -> None:
    """Exit code 2, so that scripts can tell it from a violation."""
    for path in (tmp_path / "none", tmp_path):
        result = run(path)

        assert result.exit_code == 2
        assert str(path.name) in result.stderr


def test_a_file_that_cannot_be_read_is_a_wrong_use(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there, but does not open."""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)

    result = run(log)

    assert result.exit_code == 2
    assert "cannot read" in result.stderr
    assert "Permission denied" in result.stderr


def test_findings_that_cannot_be_written_are_a_wrong_use(log: Path, tmp_path: Path) -> None:
    """Said before anything else is."""
    result = run(log, "--json", tmp_path / "none" / "found.json")

    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert result.stdout == ""
