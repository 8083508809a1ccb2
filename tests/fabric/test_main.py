"""The entry point: authentication is settled before Ray is imported, and nothing is forced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fabric.__main__ import MODE, settle_authentication


def test_a_token_turns_authentication_on(tmp_path: Path) -> None:
    """Ray ignores the file without the variable."""
    token = tmp_path / "auth_token"
    token.write_text("secret")
    environment: dict[str, str] = {}

    settle_authentication(["status"], environment, token)

    assert environment == {MODE: "token"}


@pytest.mark.parametrize("name", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_may_come_by_variable(tmp_path: Path, name: str) -> None:
    """The other two ways that Ray knows."""
    environment = {name: "x"}

    settle_authentication(["status"], environment, tmp_path / "absent")

    assert environment[MODE] == "token"


def test_a_mode_that_is_set_stays(tmp_path: Path) -> None:
    """Whoever turned it off meant it."""
    token = tmp_path / "auth_token"
    token.write_text("secret")
    environment = {MODE: "disabled"}

    settle_authentication(["up"], environment, token)

    assert environment == {MODE: "disabled"}


def test_without_a_token_nothing_is_made_but_for_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for help must not change how Ray starts from then on."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: calls.append(command))
    environment: dict[str, str] = {}

    settle_authentication(["status"], environment, tmp_path / "absent")
    assert (environment, calls) == ({}, [])

    settle_authentication(["up"], environment, tmp_path / "absent")
    assert environment == {MODE: "token"}
    assert calls[0][-2:] == ["get-auth-token", "--generate"]


def test_importing_the_entry_does_not_import_ray() -> None:
    """Nor does the package: its names come when they are used."""
    code = "import fabric.__main__, sys; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_a_decision() -> None:
    """And each resolves; another does not."""
    code = (
        "import fabric\n"
        "assert fabric.__all__ == ['Fabric', 'FabricClient', 'FabricConfig', 'FabricError', "
        "'RestoreOutcome', 'load_config']\n"
        "for name in fabric.__all__: getattr(fabric, name)\n"
        "try: fabric.nothing\n"
        "except AttributeError: pass\n"
        "else: raise SystemExit(1)\n"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
