"""Trees of pages: a mapping each, shared, counted, and cheap to change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.arena.table.page_tree import FANOUT, Forest, Leaf, Node, Root
from tests.suites.quiet import QUIET, QUIET_STATEFUL

ORDINALS = st.one_of(st.integers(0, 40), st.integers(0, 5000))


def grown(forest: Forest, num_leaves: int) -> Root:
    """A held tree with leaves at 0, 1, ..."""
    root = forest.update(None, {ordinal: Leaf() for ordinal in range(num_leaves)})
    forest.hold(root)
    return root


@given(st.dictionaries(ORDINALS, st.booleans(), max_size=30), st.integers(0, 6000))
@QUIET
def test_a_tree_is_the_mapping_that_it_was_made_from(wanted: dict[int, bool], ordinal: int) -> None:
    """Found one by one and walked in order."""
    forest = Forest()
    leaves = {key: Leaf() for key, is_there in wanted.items() if is_there}

    root = forest.update(None, {**dict.fromkeys(wanted), **leaves})

    assert list(forest.items(root)) == sorted(leaves.items())
    assert forest.get(root, ordinal) is leaves.get(ordinal)


def test_one_page_more_costs_one_path_whatever_the_length() -> None:
    """Counted in nodes, not in time: 8,192 pages are as cheap to extend as 64."""
    for num_leaves, height in ((64, 2), (8191, 4)):
        forest = Forest()
        root = grown(forest, num_leaves)
        before = forest.work.nodes_made

        forest.update(root, {num_leaves: Leaf()})

        assert forest.work.nodes_made - before == height
        assert forest.work.leaves_counted <= num_leaves + FANOUT


def test_a_fork_costs_nothing() -> None:
    """Holding a root once more makes no node and counts no page."""
    forest = Forest()
    root = grown(forest, 8192)
    work = (forest.work.nodes_made, forest.work.leaves_counted)

    forest.hold(root)

    assert (forest.work.nodes_made, forest.work.leaves_counted) == work
    assert forest.drop(root) == []


def test_dropping_the_last_holder_gives_up_every_leaf_once() -> None:
    """What another tree shares stays."""
    forest = Forest()
    root = grown(forest, 100)
    leaves = dict(forest.items(root))
    other = forest.update(root, dict.fromkeys(range(90)))
    forest.hold(other)

    gone = forest.drop(root)

    assert {id(leaf) for leaf in gone} == {id(leaves[ordinal]) for ordinal in range(90)}
    assert len(gone) == 90
    assert len(forest.drop(other)) == 10
    assert forest.work.nodes_made == forest.work.nodes_dropped


def test_no_change_is_the_same_tree() -> None:
    """And taking away all that is there leaves the empty tree."""
    forest = Forest()
    root = grown(forest, 3)

    assert forest.update(root, {}) is root
    assert forest.update(root, dict.fromkeys(range(3))) is None
    assert forest.update(None, {7: None}) is None


class ForestMachine(RuleBasedStateMachine):
    """Many trees made from each other, each beside the mapping it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.forest = Forest()
        self.trees: list[tuple[Root, dict[int, Leaf]]] = []

    @rule(changes=st.dictionaries(ORDINALS, st.booleans(), min_size=1, max_size=5), data=st.data())
    def update(self, changes: dict[int, bool], data: st.DataObject) -> None:
        """Make a tree from any other, or from nothing."""
        root, mapping = data.draw(st.sampled_from([(None, {}), *self.trees]), "from")
        leaves = {key: Leaf() if is_there else None for key, is_there in changes.items()}
        updated = self.forest.update(root, leaves)
        self.forest.hold(updated)
        merged = {**mapping, **leaves}
        kept = {key: leaf for key, leaf in merged.items() if leaf is not None}
        self.trees.append((updated, kept))

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Hold a tree once more."""
        root, mapping = data.draw(st.sampled_from(self.trees), "tree")
        self.forest.hold(root)
        self.trees.append((root, mapping))

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Drop a tree: exactly the leaves that no other tree has go."""
        at = data.draw(st.integers(0, len(self.trees) - 1), "tree")
        root, mapping = self.trees.pop(at)
        kept = {id(leaf) for _, other in self.trees for leaf in other.values()}
        gone = self.forest.drop(root)
        wanted = {id(leaf) for leaf in mapping.values()} - kept
        assert {id(leaf) for leaf in gone} == wanted
        assert len(gone) == len(wanted)

    @invariant()
    def every_tree_is_its_mapping(self) -> None:
        """Whatever was made from it since."""
        for root, mapping in self.trees:
            assert dict(self.forest.items(root)) == mapping

    @invariant()
    def counts_are_true(self) -> None:
        """Each node and leaf counts exactly the nodes and holders above it."""
        wanted: dict[int, int] = {}
        seen: dict[int, Leaf] = {}
        for root, _ in self.trees:
            if root is not None:
                wanted[id(root)] = wanted.get(id(root), 0) + 1
                self.count(root, wanted, seen)
        assert {key: leaf.refs for key, leaf in seen.items()} == wanted
        nodes = sum(isinstance(leaf, Node) for leaf in seen.values())
        assert nodes == self.forest.work.nodes_made - self.forest.work.nodes_dropped

    def count(self, leaf: Leaf, wanted: dict[int, int], seen: dict[int, Leaf]) -> None:
        """Count what is below a node, once."""
        if id(leaf) in seen:
            return
        seen[id(leaf)] = leaf
        for child in leaf.children if isinstance(leaf, Node) else ():
            if child is not None:
                wanted[id(child)] = wanted.get(id(child), 0) + 1
                self.count(child, wanted, seen)


TestForest = ForestMachine.TestCase
TestForest.settings = QUIET_STATEFUL
