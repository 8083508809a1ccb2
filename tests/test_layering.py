"""The rules of structure, read from the source with ``ast``."""

from __future__ import annotations

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Each package may import those before it, and itself.
LAYERS = ("codec", "policies", "actors", "fabric")
#: Packages that may be imported only from files that match.
CONFINED = {
    "ray": ("fabric/*", "*_actor.py", "*_ray.py"),
    "ucxx": ("*_ucx.py",),
    "cupy": ("*_cuda.py", "*_cupy.py"),
    "cuda": ("*_cuda.py",),
    "nvidia": ("*/nvcomp.py",),
    "triton": ("codec/kernels/triton_*.py",),
    "transformers": ("fabric/engines/*.py",),
    "vllm": ("fabric/engines/vllm.py",),
    "torch": ("codec/*", "actors/*", "fabric/*"),
}
MAX_LINES = 400
MODULES = sorted(
    str(path.relative_to(ROOT)) for layer in LAYERS for path in (ROOT / layer).rglob("*.py")
)


def imports(source: str) -> set[str]:
    """Modules that ``source`` imports anywhere, even inside functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module}


def top_levels(source: str) -> set[str]:
    """Top-level names of what ``source`` imports."""
    return {name.split(".")[0] for name in imports(source)}


def complaints(module: str, source: str) -> list[str]:
    """What ``module``, a path such as ``codec/blob.py``, does against the rules."""
    layer, _, _ = module.partition("/")
    above = LAYERS[LAYERS.index(layer) + 1 :]
    names = top_levels(source)
    found = [f"imports {name}, which is above it" for name in above if name in names]
    for name, patterns in CONFINED.items():
        if name in names and not any(fnmatch(module, p) for p in patterns):
            found.append(f"imports {name}, which belongs in {' or '.join(patterns)}")
    if (lines := source.count("\n")) > MAX_LINES:
        found.append(f"has {lines} lines, over {MAX_LINES}")
    return found


def import_graph() -> dict[str, set[str]]:
    """For every module of ours, the modules of ours that it imports at its top level."""
    dotted = {module[:-3].replace("/", ".").removesuffix(".__init__"): module for module in MODULES}
    graph: dict[str, set[str]] = {}
    for name, module in dotted.items():
        tree = ast.parse((ROOT / module).read_text())
        body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        source = "\n".join(ast.unparse(node) for node in body)
        graph[name] = {other for other in imports(source) if other in dotted and other != name}
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names of one import cycle, or nothing."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if cycle := walk(other, [*trail, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := walk(name, []))), [])


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_the_rules(module: str) -> None:
    """No import points up, heavy packages stay in their files, no module outgrows a sitting."""
    assert complaints(module, (ROOT / module).read_text()) == []


def test_there_are_no_import_cycles() -> None:
    """Modules can be read, and loaded, in an order."""
    assert find_cycle(import_graph()) == []


def test_a_cycle_is_seen() -> None:
    """The test above can fail."""
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("codec/blob.py", "from policies.extent import Extent\n"),
        ("actors/arena.py", "def f():\n    import ray\n"),
        ("policies/planner.py", "import torch\n"),
        ("actors/transport/session.py", "import ucxx\n"),
        ("policies/cost.py", "x = 1\n" * (MAX_LINES + 1)),
    ],
)
def test_a_breach_is_seen(module: str, source: str) -> None:
    """The rules above are not satisfied by looking away."""
    assert len(complaints(module, source)) == 1
