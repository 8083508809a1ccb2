"""A picture of what a plan keeps at a boundary: layers down, tokens across.

A cell's color names its class and its strength how much of it is alive: full where every
token can still be read, faint where a page is held whose tokens are dead, none where
nothing is kept.  Head ranges share the height of their layer.  State that is not per token
(recurrent, cross-attention) stands in a column of its own on the right.

`draw` makes a scene of rectangles and texts; `to_svg` writes it, and
`policies.retention.plot_png` paints it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.sax.saxutils import escape

from policies.retention.plan import Plan, PlannedClass

COLORS: Final = (
    (38, 84, 146),
    (214, 110, 28),
    (56, 132, 70),
    (144, 62, 140),
    (170, 44, 50),
    (20, 140, 150),
    (110, 96, 30),
    (90, 90, 90),
)
COLUMNS: Final = 480
"""Steps of the token axis."""

LEFT: Final = 60
TOP: Final = 56
CELL_WIDTH: Final = 2
STATE_WIDTH: Final = 36
MAX_HEIGHT: Final = 720
DEAD_STRENGTH: Final = 0.18
"""How strong a held page is drawn whose tokens are all dead."""


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle."""

    x: int
    y: int
    width: int
    height: int
    color: tuple[int, int, int]
    strength: float = 1.0


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text that starts at (or, right-aligned, ends at) a point."""

    x: int
    y: int
    text: str
    is_right: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """What is drawn, back to front."""

    width: int
    height: int
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]


def draw(plan: Plan, boundary: int, title: str) -> Scene:
    """The scene of ``plan`` at ``boundary``, which must be at least 1."""
    if boundary < 1:
        raise ValueError(f"need a boundary from 1 up, got {boundary}")
    num_layers = plan.program.num_layers
    row = max(2, min(24, MAX_HEIGHT // num_layers))
    boxes: list[Box] = []
    columns = min(COLUMNS, boundary)
    cell = COLUMNS * CELL_WIDTH // columns
    for index, found in enumerate(plan.classes):
        color = COLORS[index % len(COLORS)]
        strengths = _strengths(found, boundary, columns)
        for layer in found.layers:
            y, height = _band(found, layer, row, plan)
            if found.kind == "attention":
                for start, stop, strength in _runs(strengths):
                    x, width = LEFT + start * cell, (stop - start) * cell
                    boxes.append(Box(x, y, width, height, color, strength))
            else:
                x = LEFT + columns * cell + 12
                boxes.append(Box(x, y, STATE_WIDTH - 12, height, color))
    bottom = TOP + num_layers * row
    labels = [Label(LEFT, 20, title), *_axis(boundary, columns * cell, bottom, num_layers, row)]
    legend = _legend(plan, bottom + 34)
    boxes += [item for item in legend if isinstance(item, Box)]
    labels += [item for item in legend if isinstance(item, Label)]
    width = LEFT + COLUMNS * CELL_WIDTH + STATE_WIDTH + 24
    return Scene(width, bottom + 50 + 18 * len(plan.classes), tuple(boxes), tuple(labels))


def _band(found: PlannedClass, layer: int, row: int, plan: Plan) -> tuple[int, int]:
    """Top and height of a class within its layer's row; head ranges share it."""
    top = TOP + layer * row
    height = row - 1 if row > 3 else row
    if found.heads is None:
        return top, height
    stripes = [other for other in plan.classes if other.heads and layer in other.layers]
    num_heads = max(other.heads.stop for other in stripes if other.heads)
    first = top + height * found.heads.start // num_heads
    last = top + height * found.heads.stop // num_heads
    return first, max(1, last - first)


def _strengths(found: PlannedClass, boundary: int, columns: int) -> list[float]:
    """Per column, the share of its tokens that is alive; at least `DEAD_STRENGTH` if held."""
    if found.kind != "attention":
        return []
    live = found.live_claims(boundary)
    edges = [boundary * column // columns for column in range(columns + 1)]
    first, stop = found.continuation(boundary)
    cells = found.address.cells
    held = found.held_pages(boundary)
    start = max(found.pages_at(boundary)[0], stop - held) if cells is not None else first
    span = (start * found.page_tokens, stop * found.page_tokens)
    strengths = []
    for low, high in pairwise(edges):
        alive = sum(keys.between(low, high) for keys in live) / (high - low)
        is_held = not found.region.is_ranked and low < span[1] and high > span[0]
        strengths.append(max(alive, DEAD_STRENGTH if is_held else 0.0))
    return strengths


def _runs(strengths: list[float]) -> Iterator[tuple[int, int, float]]:
    """Columns ``[start, stop)`` of equal strength, without the empty ones."""
    start = 0
    for stop in range(1, len(strengths) + 1):
        if stop == len(strengths) or strengths[stop] != strengths[start]:
            if strengths[start] > 0:
                yield start, stop, strengths[start]
            start = stop


def _axis(boundary: int, width: int, bottom: int, num_layers: int, row: int) -> Iterator[Label]:
    for part in range(5):
        x = LEFT + width * part // 4
        yield Label(x, bottom + 16, f"{boundary * part // 4:,}", is_right=part == 4)
    yield Label(LEFT, TOP - 12, "tokens across, layers down")
    every = max(1, -(-14 * max(1, num_layers // 24) // row))
    for layer in range(0, num_layers, every):
        yield Label(LEFT - 8, TOP + layer * row + min(row, 12), str(layer), is_right=True)


def _legend(plan: Plan, top: int) -> list[Box | Label]:
    items: list[Box | Label] = []
    for index, found in enumerate(plan.classes):
        y = top + 18 * index
        items.append(Box(LEFT, y, 12, 12, COLORS[index % len(COLORS)]))
        items.append(Box(LEFT + 14, y, 12, 12, COLORS[index % len(COLORS)], DEAD_STRENGTH))
        said = f"{found.name}: {found.address}, dies {found.retirement}"
        items.append(Label(LEFT + 34, y + 11, f"{said} (strong: live, faint: held, dead)"))
    return items


def to_svg(scene: Scene) -> str:
    """The scene as an SVG document."""
    size = f'width="{scene.width}" height="{scene.height}"'
    view = f'viewBox="0 0 {scene.width} {scene.height}"'
    font = 'font-family="sans-serif" font-size="12"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {font}>',
        f'<rect {size} fill="white"/>',
    ]
    lines += [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" '
        f'fill="rgb{box.color}" fill-opacity="{box.strength:.3g}"/>'
        for box in scene.boxes
    ]
    for label in scene.labels:
        anchor = ' text-anchor="end"' if label.is_right else ""
        lines.append(f'<text x="{label.x}" y="{label.y}"{anchor}>{escape(label.text)}</text>')
    return "\n".join([*lines, "</svg>", ""])
