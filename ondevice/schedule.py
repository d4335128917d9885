"""What may be asked for: a strategy, its shape, and the proposers that it uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ondevice.acceptance import ClaimKind
from ondevice.arbiter import DRAFTING, Active
from ondevice.records import AcceptanceRule, Window
from ondevice.weightless import ALL, ProposerName, Use

Strategy = Literal[
    "auto", "plain", "sequential", "pipelined", "weightless", "lookup", "lookahead", "jacobi"
]
STRATEGIES: tuple[Strategy, ...] = (
    "auto",
    "plain",
    "sequential",
    "pipelined",
    "weightless",
    "lookup",
    "lookahead",
    "jacobi",
)
WEIGHTLESS: dict[Strategy, tuple[ProposerName, ...]] = {
    "weightless": ALL,
    "lookup": ("lookup",),
    "lookahead": ("lookahead",),
    "jacobi": ("jacobi",),
}
"""Strategies without a drafter, and whose guesses they use."""

DEFAULT_CHILDREN = 4
"""Proposals per node of a tree: the fourth is right about once in 20 positions (a = 0.7), and a
node that is never drafted further costs microseconds."""
LEAST_REACH = 0.001
"""Nodes less likely than this are not kept (on the 8B row of DESIGN section 1 2.41 times plain at
0.005, 2.28 at 0.01; where a drafter step and another row take 0.1 and 0.01 of a one-row forward and
a = 0.9, 5.98 at 0.001, 5.85 at 0.002, no more below)."""

LEAST_GUESS_REACH = 0.01
"""The same for guesses without a model, which are made anew every round. Where a row costs 1 % of a
forward, a node less likely than this earns its row at no pace above one token a forward."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """A round of fixed size, for experiments.

    verify_rows: rows of a forward, root included. depth: drafter steps a round under `sequential`;
    the deepest level drafted under `pipelined`. draft_rows: nodes expanded a step.
    """

    verify_rows: int
    depth: int
    draft_rows: int = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """A strategy and its shape.

    children: proposals per node; 1 makes chains. sizes: None chooses them from the measured costs.
    drafter, weightless: whether there is one, and whether there are proposers that need none.
    window: of lookahead, None chooses it by what pays.
    """

    strategy: Strategy = "auto"
    children: int = DEFAULT_CHILDREN
    rule: AcceptanceRule = "coupled"
    sizes: Sizes | None = None
    drafter: bool = True
    weightless: bool = True
    window: Window | None = None

    def having(self, drafter: bool, weightless: bool) -> Schedule:
        """The same, as far as these are there."""
        have = self.drafter and drafter, self.weightless and weightless
        return replace(self, drafter=have[0], weightless=have[1])

    @property
    def drafts(self) -> bool:
        """Whether a drafter is of any use to it."""
        return self.drafter and (self.strategy == "auto" or self.strategy in DRAFTING)

    @property
    def ways(self) -> tuple[Active, ...]:
        """Of `auto`: how to speculate, the most promising first."""
        drafting = DRAFTING if self.drafts else ()
        return (*drafting, "weightless") if self.use.names else drafting

    @property
    def use(self) -> Use:
        """Which proposers beside the drafter it has, or instead of it.

        None beside a drafter that makes chains, nor where its sizes are set: there the drafter
        alone is looked at. None under `rejection`, which accepts by the drafter's distribution.
        """
        chain = self.children == 1
        names = WEIGHTLESS.get(self.strategy, ())
        if self.strategy == "pipelined" or self.strategy == "auto":
            names = () if (chain and self.drafter) or self.sizes is not None else ALL
        if self.rule == "rejection" or not self.weightless:
            names = ()
        if chain:
            names = tuple(name for name in names if name != "lookahead")
        published = self.strategy == "lookahead" and self.window is not None
        whole = self.strategy == "jacobi" or self.sizes is not None or published
        return Use(names, chain, 0.0 if whole else LEAST_GUESS_REACH)

    def claim_kind(self, greedy: bool) -> ClaimKind:
        """What its drafter's confidence is made of."""
        if greedy:
            return "greedy"
        return "sampled" if self.rule == "rejection" else "noisy"
