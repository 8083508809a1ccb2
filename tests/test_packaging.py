"""What ships is what is described: files in package pages, versions pinned, commands in the README."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("codec", "policies", "actors", "fabric")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_page_lists_every_file(package: str) -> None:
    """One line per module, none of a module that is gone."""
    folder = ROOT / package
    page = (folder / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+\.py)` \|", page, flags=re.MULTILINE))

    modules = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py"
    }

    assert listed == modules


def test_ci_runs_the_versions_that_are_pinned() -> None:
    """The environment of this very run is the one the constraints file describes."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)

    found = {name: version(name).split("+")[0] for name in pinned}

    assert found == pinned


def test_the_distribution_is_named_and_scripted_as_promised() -> None:
    """`kvfabric`, four packages, one console script, the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    assert project["project"]["name"] == "kvfabric"
    assert project["project"]["scripts"] == {"kvfabric": "fabric.__main__:main"}
    extras = {"hf", "cuda", "vllm", "zstd", "plots", "dev"}
    assert set(project["project"]["optional-dependencies"]) == extras
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)


def test_no_path_of_a_machine_is_in_the_tree() -> None:
    """What is written here must hold anywhere."""
    suffixes = {".py", ".md", ".toml", ".txt", ".json", ""}
    files = [
        path
        for folder in (*PACKAGES, "tests", "docs", "examples", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes
    ]

    assert files
    pattern = re.compile(r"/(?:work|home/\w+)/(?:main|shared)\b")
    offenders = [str(p) for p in files if pattern.search(p.read_text("utf-8", errors="ignore"))]
    assert [p for p in offenders if not p.endswith("test_packaging.py")] == []
