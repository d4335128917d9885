"""The speculation tree: tokens that may follow the last committed one, and how likely they are.

The root is the last committed token. Probabilities are of acceptance, given by whoever adds a
node; a node's path probability is the product down from the root.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ondevice.records import FloatArray, NodeToken, Proposal

Expansion = Literal["none", "running", "done"]


@dataclass(slots=True)
class Node:
    """A token that may follow its parent. `expansion`: whether the drafter has its children."""

    id: int
    token: int
    parent: int
    acceptance: float
    proposer: str | None
    q: FloatArray | None = None
    expansion: Expansion = "none"
    children: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rerooted:
    """What a commit did: the committed nodes in order, the last one the new root, and the rest.

    known: how many of the committed tokens the tree held. dropped: ids that left the tree.
    """

    committed: tuple[NodeToken, ...]
    known: int
    dropped: tuple[int, ...]


class SpeculationTree:
    """Nodes by id; ids are never reused, also not after `reset`."""

    def __init__(self) -> None:
        self._next_id = 0
        self._nodes: dict[int, Node] = {}
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

    def _new(self, token: int, parent: int, acceptance: float, proposer: str | None) -> Node:
        node = Node(self._next_id, token, parent, acceptance, proposer)
        self._next_id += 1
        self._nodes[node.id] = node
        return node

    def reset(self, token: int) -> Node:
        """Drop everything and start again from a root with `token`."""
        self._nodes.clear()
        node = self._new(token, parent=-1, acceptance=1.0, proposer=None)
        self.root = node.id
        return node

    def add(self, proposal: Proposal, acceptance: float) -> int | None:
        """Add a node, or raise the acceptance of the one that is there.

        acceptance: probability in [0, 1] that the verifier takes it once its parent was taken.
        Returns the id, or None when the parent has left the tree.
        """
        parent = self._nodes.get(proposal.parent)
        if parent is None:
            return None
        known = parent.children.get(proposal.token)
        if known is not None:
            node = self._nodes[known]
            node.acceptance = max(node.acceptance, acceptance)
            return known
        node = self._new(proposal.token, parent.id, acceptance, proposal.proposer)
        node.q = proposal.q
        parent.children[node.token] = node.id
        return node.id

    def path(self, node: int) -> tuple[NodeToken, ...]:
        """The nodes from below the root down to `node`; empty for the root."""
        path: list[NodeToken] = []
        while node != self.root:
            at = self._nodes[node]
            path.append(NodeToken(at.id, at.token))
            node = at.parent
        return tuple(reversed(path))

    def commit(self, tokens: Sequence[int]) -> Rerooted:
        """Make the last of `tokens`, read down from the root, the new root.

        What the tree does not hold is added. The new root's subtree lives on, all else is dropped.
        """
        committed: list[NodeToken] = []
        known = 0
        at = self._nodes[self.root]
        for token in tokens:
            child = at.children.get(token)
            if child is None:
                at.children[token] = child = self._new(token, at.id, 1.0, None).id
            else:
                known += 1
            committed.append(NodeToken(child, token))
            at = self._nodes[child]
        kept = {at.id, *self._below(at.id)}
        passed = {self.root, *(entry.node for entry in committed)}
        dropped = tuple(n for n in self._nodes if n not in kept and n not in passed)
        self._nodes = {n: node for n, node in self._nodes.items() if n in kept}
        at.parent, at.acceptance = -1, 1.0
        self.root = at.id
        return Rerooted(tuple(committed), known, dropped)

    def _below(self, node: int) -> Iterator[int]:
        stack = list(self._nodes[node].children.values())
        while stack:
            at = stack.pop()
            yield at
            stack.extend(self._nodes[at].children.values())

    def likeliest(self) -> Iterator[tuple[Node, float, int]]:
        """Nodes below the root with path probability and depth, likeliest first.

        A parent always comes before its children, so any prefix with the root is a subtree.
        """
        heap: list[tuple[float, int, int]] = []

        def push_children(node: int, probability: float, depth: int) -> None:
            for child in self._nodes[node].children.values():
                path_probability = probability * self._nodes[child].acceptance
                heapq.heappush(heap, (-path_probability, child, depth + 1))

        push_children(self.root, 1.0, 0)
        while heap:
            negative, node, depth = heapq.heappop(heap)
            yield self._nodes[node], -negative, depth
            push_children(node, -negative, depth)

    def unexpanded(self, wanted: Callable[[float, int], bool], limit: int) -> list[int]:
        """At most `limit` nodes without children from the drafter, likeliest first.

        wanted(path probability, depth) filters; the root counts with probability 1 and depth 0.
        """
        found = []
        if self._nodes[self.root].expansion == "none" and wanted(1.0, 0):
            found.append(self.root)
        for node, probability, depth in self.likeliest():
            if len(found) >= limit:
                break
            if node.expansion == "none" and wanted(probability, depth):
                found.append(node.id)
        return found
