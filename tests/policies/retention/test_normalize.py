"""Classes: one per way to die, nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.retention.claims import Claim, Forever, Keys, Rule, Unread, Until
from policies.retention.ir import Relation
from policies.retention.lifetime import Lifetime, infer
from policies.retention.normalize import Region, claim_reach, normalize, part_regions
from policies.retention.program import AttentionState, HeadRange, Program
from tests.policies.retention.samples import claims_of, key_sets, rel, relaxed, rules


def roles(text: str, page_tokens: int = 4) -> dict[str, tuple[int, int | None]]:
    """Role and pages of each region."""
    regions = part_regions(claims_of(text), page_tokens)
    return {region.role: (region.first_page, region.stop_page) for region in regions}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("true", {"whole": (0, None)}),
        ("q - k < 8", {"whole": (0, None)}),
        ("k < 16", {"sink": (0, 4)}),
        ("k < 3 or q - k < 8", {"sink": (0, 1), "local": (1, None)}),
        ("k < 8 or q - k < 8", {"sink": (0, 2), "local": (2, None)}),
        ("k % 64 == 0", {"global": (0, None)}),
        ("k % 64 == 0 or q - k < 8", {"local": (0, None), "global": (0, None)}),
        (
            "k < 3 or k % 64 == 0 or q - k < 8",
            {"sink": (0, 1), "local": (1, None), "global": (0, None)},
        ),
        ("q + k < 128", {"whole": (0, 16)}),
        ("q + k < 128 or q - k < 8", {"early": (0, 16), "local": (16, None)}),
        ("q + k < 8 or q - k < 128", {"whole": (0, None)}),
        ("8 <= k and k < 10 or q - k < 8", {"sink": (2, 3), "local": (0, None)}),
    ],
)
def test_regions_of_known_shapes(text: str, wanted: dict[str, tuple[int, int | None]]) -> None:
    """With their pages, at 4 tokens a page."""
    assert roles(text) == wanted


@relaxed
@given(st.integers(1, 20), st.integers(1, 20), st.integers(2, 9), st.sampled_from([1, 3, 4, 8]))
def test_every_read_key_is_in_one_region(sink: int, window: int, every: int, page: int) -> None:
    """Sinks, windows and global keys together."""
    claims = claims_of(f"k < {sink} or q - k < {window} or k % {every} == 0")
    regions = part_regions(claims, page)

    for key in range(120):
        found = [claim for region in regions for claim in region.claims if key in claim.keys]
        assert len(found) == 1
        wanted = next(claim for claim in claims if key in claim.keys).last_read(key)
        assert found[0].last_read(key) == wanted


def test_a_key_that_nothing_reads_is_in_no_region() -> None:
    """It takes no room."""
    regions = part_regions(claims_of("k < 16"), 4)

    assert not any(16 in claim.keys for region in regions for claim in region.claims)


@relaxed
@given(key_sets(), rules())
def test_reach_is_never_too_short(keys: Keys, rule: Rule) -> None:
    """The number of cells rests on it."""
    claim = Claim(keys, rule)
    reach = claim_reach(claim)
    if reach is None:
        return

    for key in keys.walk(0, 200):
        last = claim.last_read(key)
        assert last is not None
        assert last - key <= max(reach, 0)


@pytest.mark.parametrize(
    ("keys", "rule", "wanted"),
    [
        (Keys(), Until(1, 1, 7), 7),
        (Keys(), Until(16, 16, 15), 15),
        (Keys(0, None, 16, (3, 5)), Until(16, 16, 15), 12),
        (Keys(), Until(16, 16, 31), 31),
        (Keys(), Until(16, 16, 12, 3), 15),
        (Keys(0, 64), Until(1, -1, 127), 127),
        (Keys(4, 64), Until(1, -1, 127), 119),
        (Keys(), Until(1, 0, 90), 90),
        (Keys(), Until(1, 2, 0), None),
        (Keys(0, 10), Until(1, 2, 0), 9),
        (Keys(6, 20), Until(8, 5, 30), 27),
        (Keys(0, 20), Until(8, 5, 30), 30),
        (Keys(5, 16), Until(4, 9, 0, 3), 23),
        (Keys(), Forever(), None),
        (Keys(), Unread(), 0),
    ],
)
def test_reach_of_known_rules_is_exact(keys: Keys, rule: Rule, wanted: int | None) -> None:
    """A longer one would waste cells."""
    assert claim_reach(Claim(keys, rule)) == wanted


def test_a_region_reaches_as_far_as_its_furthest_claim() -> None:
    """Nothing bounds it if nothing bounds one of them."""
    near, far = Claim(Keys(0, 9), Until(1, 1, 7)), Claim(Keys(9), Until(1, 1, 20))

    assert Region(role="local", claims=(near, far)).reach == 20
    assert Region(role="local", claims=(near, Claim(Keys(9), Forever()))).reach is None


def state(name: str, layers: tuple[int, ...], text: str, **fields: object) -> AttentionState:
    """An attention state."""
    return AttentionState(
        name=name, layers=layers, reads=rel(text), **{"bytes_per_token_layer": 64, **fields}
    )


def test_states_that_die_alike_become_one_class() -> None:
    """However they say it; another width or other heads keep them apart."""
    program = Program(
        page_tokens=16,
        states=(
            state("a", (0, 3), "q - k < 128"),
            state("b", (1,), "q - k <= 127"),
            state("c", (2,), "q - k < 128", bytes_per_token_layer=32),
            state("d", (4,), "q - k < 128", heads=HeadRange(0, 4)),
            state("e", (4,), "q - k < 128", heads=HeadRange(4, 8)),
        ),
    )

    classes, lifetimes = normalize(program)

    found = {(found.name, found.sources, found.layers) for found in classes}
    assert found == {
        ("a", ("a", "b"), (0, 1, 3)),
        ("c", ("c",), (2,)),
        ("d", ("d",), (4,)),
        ("e", ("e",), (4,)),
    }
    assert set(lifetimes) == {"a", "b", "c", "d", "e"}


def test_regions_of_one_state_share_its_layers() -> None:
    """And are named after it."""
    program = Program(page_tokens=4, states=(state("s", (0, 1), "k < 4 or q - k < 8"),))

    classes, _ = normalize(program)

    assert [(found.name, found.layers) for found in classes] == [
        ("s::sink", (0, 1)),
        ("s::local", (0, 1)),
    ]


def test_each_relation_is_inferred_once() -> None:
    """Compile time does not grow with states that read alike."""
    asked: list[Relation] = []

    def counting(relation: Relation) -> Lifetime:
        asked.append(relation)
        return infer(relation)

    states = tuple(state(f"s{n}", (n,), "q - k < 8", heads=None) for n in range(50))
    normalize(Program(page_tokens=4, states=states), counting)

    assert len(asked) == 1
