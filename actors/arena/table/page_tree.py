"""The pages of a snapshot: an immutable tree from ordinals to pages, shared with others.

An update copies the nodes on the way to what it changes and shares all others, so that it
costs the same for a prompt of any length, and a fork costs nothing.  Every node and page
counts the nodes above it and, for a root, its holders; what nobody holds falls away at
once and says which pages went with it.  `Work` counts what was done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

FANOUT_BITS = 4
FANOUT = 1 << FANOUT_BITS


@dataclass(slots=True, eq=False)
class Leaf:
    """What hangs on a tree: counts the nodes that lead to it."""

    #: Never below 0.
    refs: int = field(default=0, init=False)


class Node(Leaf):
    """``FANOUT`` places for nodes or leaves; never changes but for its count."""

    __slots__ = ("children", "height")

    def __init__(self, height: int, children: tuple[Leaf | None, ...]) -> None:
        self.refs = 0
        self.height = height
        self.children = children


Root: TypeAlias = Node | None
"""A tree; None is the empty one, which needs no holding."""


@dataclass(slots=True)
class Work:
    """What a forest has done; none of it ever falls."""

    nodes_made: int = 0
    nodes_dropped: int = 0
    leaves_counted: int = 0
    """Counts of leaves that were raised or lowered."""


class Forest:
    """Trees that share nodes.  A root that `update` returns belongs to who holds it."""

    def __init__(self) -> None:
        self.work = Work()

    def hold(self, root: Root) -> None:
        """Keep ``root`` until `drop`."""
        if root is not None:
            root.refs += 1

    def drop(self, root: Root) -> list[Leaf]:
        """Undo one `hold`; the leaves that nothing leads to any more."""
        gone: list[Leaf] = []
        if root is not None:
            self._lower(root, gone)
        return gone

    def update(self, root: Root, changes: Mapping[int, Leaf | None]) -> Root:
        """The tree with ``changes``, where None takes away; ``root`` itself stays as it is.

        Someone holds ``root``.  The result has no holder yet: `hold` it before anything
        else is dropped.
        """
        if not changes:
            return root
        highest = max(changes)
        height = 0 if root is None else root.height
        top, lifted = root, list[Node]()
        while highest >> (height + 1) * FANOUT_BITS:
            height += 1
            if top is not None:
                top = self._made(height, (top,))
                lifted.append(top)
        updated = self._updated(() if top is None else top.children, height, changes)
        for node in reversed(lifted):
            self._forget(node)
        return updated

    def get(self, root: Root, ordinal: int) -> Leaf | None:
        """The leaf at ``ordinal``, if there is one."""
        if root is None or ordinal < 0 or ordinal >> (root.height + 1) * FANOUT_BITS:
            return None
        found: Leaf | None = root
        while isinstance(found, Node):
            found = found.children[ordinal >> found.height * FANOUT_BITS & FANOUT - 1]
        return found

    def items(self, root: Root) -> Iterator[tuple[int, Leaf]]:
        """Ordinals and their leaves, rising."""
        if root is not None:
            yield from _walk(root, 0)

    def _updated(
        self, children: Sequence[Leaf | None], height: int, changes: Mapping[int, Leaf | None]
    ) -> Root:
        row = [*children, *[None] * (FANOUT - len(children))]
        if height == 0:
            for ordinal, leaf in changes.items():
                row[ordinal] = leaf
        else:
            shift = height * FANOUT_BITS
            parts: dict[int, dict[int, Leaf | None]] = {}
            for ordinal, leaf in changes.items():
                parts.setdefault(ordinal >> shift, {})[ordinal & (1 << shift) - 1] = leaf
            for place, part in parts.items():
                below = row[place]
                known = below.children if isinstance(below, Node) else ()
                row[place] = self._updated(known, height - 1, part)
        return self._made(height, row) if any(child is not None for child in row) else None

    def _made(self, height: int, children: Sequence[Leaf | None]) -> Node:
        node = Node(height, (*children, *[None] * (FANOUT - len(children))))
        for child in node.children:
            if child is not None:
                child.refs += 1
                self.work.leaves_counted += not isinstance(child, Node)
        self.work.nodes_made += 1
        return node

    def _forget(self, node: Node) -> None:
        """Undo `_made` of a node that in the end nothing leads to."""
        if not node.refs:
            self.work.nodes_dropped += 1
            for child in node.children:
                if child is not None:
                    child.refs -= 1

    def _lower(self, leaf: Leaf, gone: list[Leaf]) -> None:
        leaf.refs -= 1
        if not isinstance(leaf, Node):
            self.work.leaves_counted += 1
            if not leaf.refs:
                gone.append(leaf)
        elif not leaf.refs:
            self.work.nodes_dropped += 1
            for child in leaf.children:
                if child is not None:
                    self._lower(child, gone)


def _walk(node: Node, base: int) -> Iterator[tuple[int, Leaf]]:
    shift = node.height * FANOUT_BITS
    for place, child in enumerate(node.children):
        first = base + (place << shift)
        if isinstance(child, Node):
            yield from _walk(child, first)
        elif child is not None:
            yield first, child
