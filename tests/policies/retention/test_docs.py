"""The page about lifetimes says what the code does: tables are recomputed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from policies.retention.hf_config import read_config
from policies.retention.lifetime import infer
from policies.retention.plan import compile_program
from policies.retention.witness import check_witness
from tests.policies.retention.samples import rel

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "retention.md").read_text()
CONFIGS = json.loads((ROOT / "tests" / "data" / "retention" / "model_configs.json").read_text())


def rows_under(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading or a column's name."""
    lines = PAGE[PAGE.index(heading) :].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("|---"))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


RELATIONS = [row[-1].strip("`") for row in rows_under("| attention | relation |")]
LOOSE = [re.findall(r"`([^`]+)`", row[-1])[0] for row in rows_under("### Loose shapes")]


@pytest.mark.parametrize("text", RELATIONS)
def test_relations_of_the_page_are_exact(text: str) -> None:
    """And printed as they are written."""
    assert str(rel(text)) == text
    assert infer(rel(text)).is_exact


@pytest.mark.parametrize("text", LOOSE)
def test_loose_shapes_of_the_page_are_loose_and_sound(text: str) -> None:
    """With the default limits; the checker finds nothing read too late."""
    lifetime = infer(rel(text))

    assert not lifetime.is_exact
    assert check_witness(rel(text), lifetime.witness).accepted


def test_the_table_of_models_is_right() -> None:
    """Bytes all full, bytes by lifetime and their ratio, at 8K and 128K."""
    wanted = []
    for entry in CONFIGS:
        plan = compile_program(read_config(entry["config"]).program)
        row = [entry["name"]]
        for boundary in (8192, 131_072):
            full, held = plan.all_full_bytes(boundary), plan.held_bytes(boundary)
            row += [f"{full:,}", f"{held:,}", f"{full / held:.2f}"]
        wanted.append(row)

    assert rows_under("| model | all full, 8K |") == wanted
    assert len(wanted) >= 10


def test_every_module_is_on_the_page() -> None:
    """In the table of files."""
    named = {name.strip() for row in rows_under("## Files") for name in row[0].split(",")}
    modules = {path.stem for path in (ROOT / "policies" / "retention").glob("[!_]*.py")}

    assert named == modules
