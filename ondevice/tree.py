"""The speculation tree: tokens that may follow the last committed one, and how likely they are.

The root is the last committed token. Chances are of acceptance, given by whoever adds a node; a
node's reach is the product of the chances from the root down to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ondevice.records import (
    ROOT_ROW,
    FloatArray,
    NodeToken,
    Outcome,
    Proposal,
    VerifyRow,
)

NOWHERE = -1
"""A node id that no tree ever holds."""
Expansion = Literal["none", "running", "done"]


@dataclass(slots=True, eq=False)
class Node:
    """A token that may follow its parent.

    depth: that of its position in the session's text; only differences mean something. expansion:
    whether the drafter has its children. offered: the tokens that the drafter gave as children,
    by rank, also those that were not worth a node; claims: the chances that it claimed for them.
    trail: this node and those above it, down from below some earlier root.
    """

    id: int
    token: int
    parent: int
    depth: int
    chance: float
    reach: float
    proposer: str | None
    trail: tuple[NodeToken, ...] = ()
    q: FloatArray | None = None
    expansion: Expansion = "none"
    offered: tuple[int, ...] = ()
    claims: tuple[float, ...] = ()
    children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rerooted:
    """What a commit did: the committed nodes in order, the last one the new root, and the rest.

    known: how many of the committed tokens the tree held. dropped: ids that left the tree.
    outcomes: one per committed token, what became of the children of the node before it. offered:
    by proposer, how many nodes were added since the commit before. lived_on: nodes below the new
    root.
    """

    committed: tuple[NodeToken, ...]
    known: int
    dropped: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    offered: tuple[tuple[str, int], ...] = ()
    lived_on: int = 0


class SpeculationTree:
    """Nodes by id; ids are never reused, also not after `reset`."""

    def __init__(self) -> None:
        self._next_id = 0
        self._nodes: dict[int, Node] = {}
        self._sorted: list[Node] | None = None
        self._offered: Counter[str] = Counter()
        self._unsettled = False
        self.root = self.reset(token=0).id

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self._nodes)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def __getitem__(self, node: int) -> Node:
        return self._nodes[node]

    def ids(self) -> set[int]:
        """All nodes, the root included."""
        return set(self._nodes)

    def _new(self, token: int, parent: Node | None, chance: float, proposer: str | None) -> Node:
        if parent is None:
            node = Node(self._next_id, token, -1, 0, chance, chance, proposer)
        else:
            levels = parent.depth - self._nodes[self.root].depth
            above = parent.trail[-levels:] if levels else ()
            trail = (*above, NodeToken(self._next_id, token))
            reach = parent.reach * chance
            node = Node(
                self._next_id, token, parent.id, parent.depth + 1, chance, reach, proposer, trail
            )
        self._next_id += 1
        self._nodes[node.id] = node
        self._sorted = None
        return node

    def reset(self, token: int) -> Node:
        """Drop everything and start again from a root with `token`."""
        self._nodes.clear()
        self._offered.clear()
        node = self._new(token, None, 1.0, proposer=None)
        self.root = node.id
        return node

    def add(self, proposal: Proposal, chance: float) -> int | None:
        """Add a node, or raise the chance of the one that is there.

        chance: probability in [0, 1] that the verifier takes it once its parent was taken.
        Returns the id, or None when the parent has left the tree.
        """
        parent = self._nodes.get(proposal.parent)
        if parent is None:
            return None
        is_new = proposal.token not in parent.children
        node = self.put(parent, proposal.token, chance, proposal.proposer)
        if is_new:
            node.q = proposal.q
        self.settle()
        return node.id

    def put(self, parent: Node, token: int, chance: float, proposer: str) -> Node:
        """As `add`, but what is below a node whose chance was raised waits for `settle`."""
        known = parent.children.get(token)
        if known is None:
            node = self._new(token, parent, chance, proposer)
            parent.children[token] = node.id
            self._offered[proposer] += 1
            return node
        node = self._nodes[known]
        if chance > node.chance:
            node.chance, node.reach = chance, parent.reach * chance
            self._sorted = None
            self._unsettled = self._unsettled or bool(node.children)
        return node

    def settle(self) -> None:
        """Compute all reaches again, if a chance was raised."""
        if self._unsettled:
            self._unsettled = False
            self._below(self._nodes[self.root])

    def _below(self, root: Node) -> dict[int, Node]:
        """`root` and all below it, by id, with their reaches computed again."""
        found, stack = {root.id: root}, [root]
        while stack:
            node = stack.pop()
            for each in node.children.values():
                child = found[each] = self._nodes[each]
                child.reach = node.reach * child.chance
                stack.append(child)
        return found

    def proposers(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Whose each node is; "" for one of nobody's, and for one that has left the tree."""
        return tuple([self._nodes[n].proposer or "" if n in self._nodes else "" for n in nodes])

    def path(self, node: int) -> tuple[NodeToken, ...]:
        """The nodes from below the root down to `node`; empty for the root."""
        at = self._nodes[node]
        levels = at.depth - self._nodes[self.root].depth
        return at.trail[-levels:] if levels else ()

    def commit(self, tokens: Sequence[int]) -> Rerooted:
        """Make the last of `tokens`, read down from the root, the new root.

        What the tree does not hold is added. The new root's subtree lives on, all else is dropped.
        """
        committed: list[NodeToken] = []
        outcomes: list[Outcome] = []
        known = 0
        at = self._nodes[self.root]
        for token in tokens:
            taken = at.offered.index(token) if token in at.offered else -1
            outcomes.append(Outcome(at.claims, taken))
            child = at.children.get(token)
            if child is None:
                at.children[token] = child = self._new(token, at, 1.0, None).id
            else:
                known += 1
            committed.append(NodeToken(child, token))
            at = self._nodes[child]
        passed = {self.root, *(entry.node for entry in committed)}
        dropped = self._keep_below(at, passed)
        self.root = at.id
        offered = tuple(sorted(self._offered.items()))
        self._offered.clear()
        lived_on = len(self._nodes) - 1
        return Rerooted(tuple(committed), known, dropped, tuple(outcomes), offered, lived_on)

    def _keep_below(self, root: Node, passed: set[int]) -> tuple[int, ...]:
        """Make `root` the top; returns what was neither below it nor among `passed`."""
        nodes = self._nodes
        root.parent, root.chance, root.reach = -1, 1.0, 1.0
        kept = self._below(root)
        self._nodes, self._sorted, self._unsettled = kept, None, False
        return tuple([node for node in nodes if node not in kept and node not in passed])

    def likeliest(self) -> Sequence[Node]:
        """All nodes, the root first, then by falling reach.

        A parent always comes before its children, so any prefix is a subtree.
        """
        if self._sorted is None:
            self._sorted = sorted(self._nodes.values(), key=_falling_reach)
        return self._sorted

    def rows(self, nodes: Sequence[Node]) -> tuple[VerifyRow, ...]:
        """The root and `nodes`, parents first, as rows."""
        root = self._nodes[self.root]
        index = {root.id: 0}
        rows = [VerifyRow(root.id, root.token, ROOT_ROW)]
        for node in nodes:
            index[node.id] = len(rows)
            rows.append(VerifyRow(node.id, node.token, index[node.parent], node.q))
        return tuple(rows)


def riders_of(
    rows: Sequence[VerifyRow], riders: Sequence[VerifyRow], count: int
) -> tuple[VerifyRow, ...]:
    """`riders` as they ride with `rows`, and fill up to `count` rows in all.

    riders: a parent is ROOT_ROW for the root, or the index of another rider. Fill hangs below the
    last row, so that a chain stays one.
    """
    above = len(rows)
    riding = [
        VerifyRow(rider.node, rider.token, 0 if rider.parent == ROOT_ROW else above + rider.parent)
        for rider in riders
    ]
    token = rows[-1].token
    fill = [VerifyRow(NOWHERE, token, at - 1) for at in range(above + len(riding), count)]
    return (*riding, *fill)


def _falling_reach(node: Node) -> tuple[float, int]:
    return -node.reach, node.id  # a child of chance 1 has its parent's reach and a larger id
