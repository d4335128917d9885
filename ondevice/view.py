"""What a policy looks at, and what it picks for the verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ondevice.records import Window
from ondevice.tree import Node, SpeculationTree


@dataclass(frozen=True, slots=True)
class View:
    """What a decision looks at.

    context: tokens before the root. levels: how deep a row may lie to be of use. verifying: the
    verifier is at work. expanding: nodes of the drafter step under way, None when it is at rest;
    remaining_ms: until that step ends. steps: drafter steps since the last forward began.
    """

    tree: SpeculationTree
    context: int
    levels: int
    verifying: bool
    expanding: Sequence[int] | None = None
    remaining_ms: float = 0.0
    steps: int = 0

    def useful(self) -> list[Node]:
        """Nodes below the root that may be verified, likeliest first."""
        deepest = self.tree[self.tree.root].depth + self.levels
        return [node for node in self.tree.likeliest()[1:] if node.depth <= deepest]

    def unexpanded(self) -> list[Node]:
        """Nodes without children from the drafter, likeliest first; those verified last aside."""
        deepest = self.tree[self.tree.root].depth + self.levels
        return [
            node
            for node in self.tree.likeliest()
            if node.expansion == "none" and node.depth < deepest
        ]


@dataclass(frozen=True, slots=True)
class Selection:
    """Nodes for a forward, parents first. rows: that it shall have, root, riders, fill included.

    window: of lookahead, that shall ride along.
    """

    nodes: Sequence[Node]
    rows: int
    window: Window | None = None
