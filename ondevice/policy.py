"""What to draft, what to verify and when to wait: pure decisions over a tree.

Three schedules. `plain` never speculates. `sequential` lets the drafter build its tree, then the
verifier judge it, in turn. `pipelined` keeps both at work: the drafter grows the tree while the
verifier is busy with a part of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ondevice.records import AcceptanceRule, Proposal
from ondevice.tree import SpeculationTree

Strategy = Literal["plain", "sequential", "pipelined"]
STRATEGIES: tuple[Strategy, ...] = ("plain", "sequential", "pipelined")

SIBLING_SHARE = 0.45
"""Each later child takes this part of the probability left (the model of DESIGN section 1)."""


DEFAULT_CHILDREN = 3
"""Proposals per node of a tree."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A strategy and its sizes.

    children: proposals per node; 1 makes chains. draft_rows: nodes expanded a drafter step; 8
    rows cost the Neural Engine about what 1 costs. verify_rows: rows of a verifier forward, the
    root included. depth: the deepest level drafted. tree_nodes: a tree this large is not grown.
    least_path_probability: nodes below it are not worth a row.
    """

    strategy: Strategy = "pipelined"
    children: int = DEFAULT_CHILDREN
    draft_rows: int = 8
    verify_rows: int = 8
    depth: int = 6
    tree_nodes: int = 32
    least_path_probability: float = 0.02
    rule: AcceptanceRule = "coupled"

    @property
    def speculates(self) -> bool:
        """Whether a drafter is of any use to it."""
        return self.strategy != "plain"


def acceptances(children: Sequence[Proposal], greedy: bool) -> list[float]:
    """Probability that the verifier takes each of one node's children, given in rank order.

    Greedy: the drafter's own probability. With noise the perturbed order decides, so the first
    child's chance is a logistic of its lead (the difference of two Gumbels is logistic), and every
    later child takes SIBLING_SHARE of the rest.
    """
    if greedy:
        return [math.exp(min(child.log_q, 0.0)) for child in children]
    result: list[float] = []
    left = 1.0
    for child in children:
        share = 1 / (1 + math.exp(-min(child.gap, 30.0))) if child.rank == 0 else SIBLING_SHARE
        result.append(left * share)
        left -= result[-1]
    return result


class Policy:
    """Decisions of one schedule. Holds no state: everything is read from the tree."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def nodes_to_expand(self, tree: SpeculationTree) -> list[int]:
        """Nodes for the next drafter step, likeliest first; empty when none is worth it."""
        plan = self.schedule
        if len(tree) > plan.tree_nodes:
            return []

        def wanted(probability: float, depth: int) -> bool:
            return depth < plan.depth and self._worth_a_row(probability)

        return tree.unexpanded(wanted, plan.draft_rows)

    def _worth_a_row(self, path_probability: float) -> bool:
        # Under rejection a token must not decide whether it is tested: that would bias the text.
        if self.schedule.rule == "rejection":
            return True
        return path_probability >= self.schedule.least_path_probability

    def nodes_to_verify(self, tree: SpeculationTree, depth: int) -> list[int]:
        """Nodes below the root for the next forward, parents first, at most `depth` levels."""
        useful = (
            node.id
            for node, probability, level in tree.likeliest()
            if level <= depth and self._worth_a_row(probability)
        )
        return list(itertools.islice(useful, self.schedule.verify_rows - 1))

    def shall_wait(self, tree: SpeculationTree) -> bool:
        """Whether the idle verifier should wait for the drafter step that is running.

        `pipelined` waits only while the root has no child, `sequential` always.
        """
        return self.schedule.strategy == "sequential" or not tree[tree.root].children
