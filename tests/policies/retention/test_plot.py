"""The picture: what is drawn where, and how strongly."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from policies.retention.plan import Plan, compile_program
from policies.retention.plot import (
    CELL_WIDTH,
    COLORS,
    COLUMNS,
    DEAD_STRENGTH,
    LEFT,
    TOP,
    Box,
    Scene,
    draw,
    to_svg,
)
from policies.retention.program import (
    AttentionState,
    HeadRange,
    Program,
    RecurrentState,
)
from tests.policies.retention.samples import rel

WIDTH = COLUMNS * CELL_WIDTH


def plan_of(*texts: str, page_tokens: int = 16) -> Plan:
    """One layer for each relation."""
    states = tuple(
        AttentionState(name=f"s{n}", layers=(n,), reads=rel(text), bytes_per_token_layer=8)
        for n, text in enumerate(texts)
    )
    return compile_program(Program(page_tokens=page_tokens, states=states))


def in_layers(scene: Scene, num_layers: int) -> list[Box]:
    """The boxes of the layers, without those of the legend."""
    return [box for box in scene.boxes if box.y < TOP + 24 * num_layers]


def test_a_full_layer_is_one_strong_bar() -> None:
    """Over all tokens."""
    (box,) = in_layers(draw(plan_of("true"), 4800, "t"), 1)

    assert (box.x, box.width, box.strength) == (LEFT, WIDTH, 1.0)


def test_a_window_is_drawn_at_the_end() -> None:
    """Its live part strongly, the rounding of its pages faintly, the dead not at all."""
    boxes = in_layers(draw(plan_of("q - k < 481"), 960, "t"), 1)
    strong = [box for box in boxes if box.strength == 1.0]

    assert min(box.x for box in boxes) >= LEFT + WIDTH // 2 - 16 * CELL_WIDTH
    assert max(box.x + box.width for box in boxes) == LEFT + WIDTH
    assert sum(box.width for box in strong) == WIDTH // 2
    assert min(box.strength for box in boxes) == DEAD_STRENGTH


def test_sparse_keys_are_faint() -> None:
    """One key in sixteen alive."""
    boxes = in_layers(draw(plan_of("k % 16 == 0"), 7680, "t"), 1)

    assert {round(box.strength, 4) for box in boxes} == {1 / 16}


def test_classes_have_colors_of_their_own() -> None:
    """Also more of them than there are colors."""
    plan = plan_of(*(f"q - k < {16 * n}" for n in range(2, 12)))
    colors = [box.color for box in in_layers(draw(plan, 100, "t"), 10) if box.strength == 1.0]

    assert len(set(colors)) == len(COLORS)


def test_head_ranges_share_their_layer() -> None:
    """In proportion, without overlapping."""
    states = tuple(
        AttentionState(
            name=f"h{start}",
            layers=(0,),
            reads=rel("true"),
            bytes_per_token_layer=8,
            heads=HeadRange(start, stop),
        )
        for start, stop in ((0, 2), (2, 8))
    )
    plan = compile_program(Program(page_tokens=16, states=states))
    first, second = in_layers(draw(plan, 100, "t"), 1)

    assert first.y + first.height == second.y
    assert second.height > 2 * first.height


def test_state_that_is_not_per_token_stands_beside() -> None:
    """Right of the tokens."""
    program = Program(
        page_tokens=16, states=(RecurrentState(name="r", layers=(0,), bytes_per_layer=8),)
    )
    (box,) = in_layers(draw(compile_program(program), 4800, "t"), 1)

    assert box.x >= LEFT + WIDTH


@pytest.mark.parametrize(("boundary", "num_layers"), [(1, 1), (3, 2), (131_072, 100), (479, 7)])
def test_everything_lies_within_the_picture(boundary: int, num_layers: int) -> None:
    """For short and long contexts, few and many layers."""
    plan = plan_of(*["q - k < 64"] * num_layers)
    scene = draw(plan, boundary, "t")

    for box in scene.boxes:
        assert box.width > 0
        assert box.height > 0
        assert 0 <= box.x <= box.x + box.width <= scene.width
        assert 0 <= box.y <= box.y + box.height <= scene.height
        assert 0 < box.strength <= 1
    assert all(0 < label.y <= scene.height for label in scene.labels)


def test_nothing_can_be_drawn_at_the_beginning() -> None:
    """There are no tokens yet."""
    with pytest.raises(ValueError, match="boundary"):
        draw(plan_of("true"), 0, "t")


def test_svg_is_well_formed_and_names_the_classes() -> None:
    """With a title that may hold any text."""
    scene = draw(plan_of("true", "k < 16 or q - k < 64"), 4800, "a <b> & c")
    root = ET.fromstring(to_svg(scene))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]

    assert texts[0] == "a <b> & c"
    for name in ("s0: append", "s1::sink: pinned(1)", "s1::local: periodic(5)"):
        assert any(text.startswith(name) for text in texts)
    assert any("faint: held, dead" in text for text in texts)
