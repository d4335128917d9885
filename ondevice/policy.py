"""What to draft, what to verify and when to wait: pure decisions over a tree.

`plain` never speculates. `sequential` lets the drafter build its tree, then the verifier judge it,
in turn. `pipelined` keeps both at work: the drafter grows the tree while the verifier is busy with
a part of it. `lookup`, `lookahead` and `jacobi` need no drafter, `weightless` is the three at once.
`auto` chooses between plain, drafting and doing without a drafter by the rates that it measures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import deepcopy
from typing import Protocol

from ondevice.acceptance import Acceptance, ClaimKind
from ondevice.arbiter import DRAFTING, Active, Arbiter
from ondevice.costs import CostModel
from ondevice.lookahead import DEFAULT as DEFAULT_WINDOW
from ondevice.planning import MOST_ROWS, Block, Growth, Pace, Worth, best_round, best_step
from ondevice.proposers import HitRates
from ondevice.records import StepRecord, Window
from ondevice.schedule import WEIGHTLESS, Schedule, Sizes
from ondevice.tree import Node
from ondevice.view import Selection, View
from ondevice.windows import Windows

LEAST_BLOCK = 3
"""Guesses of a block of Jacobi's: fewer have no time to become right before they are reached."""
TREE_NODES = 256
"""A tree this large is not grown: what lies so far out is rarely reached. With a quick drafter and
cheap rows (0.1 and 0.01 of a one-row forward, a = 0.9) 5.23 times plain with 128 nodes, 5.85 with
256, no more with 400."""
GAIN_SHARE = 0.4
"""Of what a step beside the verifier seems to bring: most of it is dropped at the next re-rooting
or never verified. Where the drafter slows the verifier by 16 %, 0.4 is 1 to 3 % faster than 1 and
than 0.25."""
REST_ROUNDS = 32
"""Rounds after which a drafter that was not worth a wait is heard again: what it is worth is known
from its answers alone, and a step in so many rounds costs less than a hundredth."""
PACE_PRIOR_ROUNDS = 4.0
"""A pace starts as plain decoding's, which counts as this many rounds."""


class Experience:
    """What has been learned about a pair on this machine, from answer to answer."""

    def __init__(self, costs: CostModel | None = None) -> None:
        self.costs = costs or CostModel()
        self.acceptances: defaultdict[ClaimKind, Acceptance] = defaultdict(Acceptance)
        self.rates: defaultdict[str, HitRates] = defaultdict(HitRates)
        """Of the guesses of proposers without a model, by name."""
        self.arbiter = Arbiter()
        self.windows = Windows()
        self.paces: dict[Active, Pace] = {}

    def copy(self) -> Experience:
        """The same knowledge, which learns on its own from here."""
        return deepcopy(self)


class Policy(Protocol):
    """The decisions of one answer."""

    @property
    def strategy(self) -> Active:
        """What is in force."""

    def to_expand(self, view: View) -> list[Node]:
        """Nodes for the next drafter step, likeliest first; empty when none is worth it."""

    def shall_wait(self, view: View) -> bool:
        """Whether the idle verifier should wait: for the step under way, or for the next one."""

    def to_verify(self, view: View) -> Selection:
        """The next forward."""

    def shall_run(self, view: View) -> bool:
        """Whether to decode the next token plainly, with its forward queued ahead."""

    @property
    def block(self) -> int:
        """Tokens of Jacobi's next block, whatever their chances; 0 leaves it to those."""

    def run_tokens(self, left: int) -> int:
        """How many of the `left` tokens to decode plainly, under `plain`."""

    def learn(self, record: StepRecord, elapsed_ms: float) -> None:
        """A round is over; elapsed_ms: since the last one was."""

    @property
    def reason(self) -> str:
        """Why this strategy is in force, for people."""


def policy_for(schedule: Schedule, experience: Experience, kind: ClaimKind, context: int) -> Policy:
    """The policy of an answer that starts after `context` tokens."""
    sizes, window = schedule.sizes, schedule.window
    if sizes is None and window is not None and schedule.strategy == "lookahead":
        # As published: all n-grams of a key go before the verifier, whatever that costs.
        sizes = Sizes(1 + window.guesses * (window.ngram - 1), window.ngram - 1)
    if sizes is not None:
        return FixedPolicy(schedule, sizes)
    return RatePolicy(schedule, experience, experience.acceptances[kind], context)


class FixedPolicy:
    """Every round alike: what a schedule is compared with."""

    def __init__(self, schedule: Schedule, sizes: Sizes) -> None:
        if schedule.strategy == "auto":
            raise ValueError("`auto` chooses its sizes; a fixed schedule needs a strategy")
        self.strategy: Active = schedule.strategy
        self._sizes = sizes
        self._window = None
        if "lookahead" in schedule.use.names:
            self._window = schedule.window or DEFAULT_WINDOW

    def to_expand(self, view: View) -> list[Node]:
        """The likeliest, down to the fixed depth."""
        if self.strategy not in DRAFTING:
            return []
        root_depth = view.tree[view.tree.root].depth
        sequential = self.strategy == "sequential"
        return [
            node
            for node in view.unexpanded()
            if sequential or node.depth - root_depth < self._sizes.depth
        ][: self._sizes.draft_rows]

    def shall_wait(self, view: View) -> bool:
        """Sequential: until all steps are done. Pipelined: for a first child of the root."""
        if self.strategy == "sequential":
            more = view.steps < self._sizes.depth and bool(view.unexpanded())
            return view.expanding is not None or more
        if self.strategy != "pipelined":
            return False
        return view.expanding is not None and not view.tree[view.tree.root].children

    def to_verify(self, view: View) -> Selection:
        """The likeliest nodes that fit, and the window."""
        nodes = view.useful()[: self._sizes.verify_rows - 1]
        return Selection(nodes, len(nodes) + 1, self._window)

    def shall_run(self, view: View) -> bool:
        """Never."""
        return False

    @property
    def block(self) -> int:
        """As many as fit."""
        return self._sizes.verify_rows - 1 if self.strategy == "jacobi" else 0

    def run_tokens(self, left: int) -> int:
        """All."""
        return left

    def learn(self, record: StepRecord, elapsed_ms: float) -> None:
        """Nothing."""

    @property
    def reason(self) -> str:
        """The sizes."""
        return f"{self.strategy}, {self._sizes.verify_rows} rows, depth {self._sizes.depth}"


class RatePolicy:
    """Every decision by the rate formula of `ondevice.planning`, on measured costs."""

    def __init__(
        self, schedule: Schedule, experience: Experience, acceptance: Acceptance, context: int
    ) -> None:
        self._schedule = schedule
        self._costs, self._acceptance = experience.costs, acceptance
        self._arbiter = experience.arbiter
        self._context = context
        if schedule.strategy == "auto":
            self._arbiter.begin(schedule.ways)
        self._windows = experience.windows
        self._looks_ahead = "lookahead" in schedule.use.names
        self._block = Block()
        self._accepted = 0.0
        self._paces = experience.paces
        self._undrafted_rounds = 0
        token_ms = self._costs.plain.ms(1, context)
        if self._costs.assumed:
            # A plain run may be known to be quick when a forward of one row is not known at all.
            token_ms = max(token_ms, self._costs.verifier.ms(1, context))
        self._prior = (PACE_PRIOR_ROUNDS, PACE_PRIOR_ROUNDS * token_ms)

    @property
    def strategy(self) -> Active:
        """What was set; under `auto` what the arbiter decided."""
        chosen = self._schedule.strategy
        return self._arbiter.strategy if chosen == "auto" else chosen

    @property
    def _pace(self) -> float:
        return self._own_pace.value

    @property
    def _own_pace(self) -> Pace:
        pace = self._paces.get(self.strategy)
        if pace is None:
            pace = self._paces[self.strategy] = Pace(*self._prior)
        return pace

    def to_expand(self, view: View) -> list[Node]:
        """As many of the likeliest as the cheapest step per reach takes.

        While the verifier works, a step must bring more than the time by which it slows that down.
        """
        if self.strategy not in DRAFTING or len(view.tree) > TREE_NODES:
            return []
        nodes = view.unexpanded()
        if not nodes:
            return []
        rows, step_ms = self._best_step([node.reach for node in nodes], view.verifying)
        nodes = nodes[:rows]
        if view.verifying:
            lost_ms = step_ms * (self._costs.slowdown(view.context) - 1)
            reach = sum(node.reach for node in nodes)
            gain = GAIN_SHARE * reach * self._acceptance.first_choice
            if gain < self._pace * lost_ms:
                return []
        return nodes

    def _best_step(self, reaches: Sequence[float], beside: bool) -> tuple[int, float]:
        drafter = self._costs.drafter
        counts = drafter.row_counts
        curve_ms, _ = drafter.curve(counts[-1], 0, float(beside))
        return best_step(reaches, counts, curve_ms)

    def shall_wait(self, view: View) -> bool:
        """Whether a round after the next drafter steps is worth more than one now.

        Or whether the drafter was not heard for REST_ROUNDS.
        """
        if self.strategy not in DRAFTING:
            return False
        if self._undrafted_rounds >= REST_ROUNDS and view.steps == 0:
            return True
        ready = [node.reach for node in view.useful()]
        unexpanded = [node.reach for node in view.unexpanded()]
        rows, step_ms = self._best_step(unexpanded or [1.0], beside=False)
        if view.expanding is not None:
            running = [view.tree[node].reach for node in view.expanding if node in view.tree]
            remaining_ms = view.remaining_ms
        else:
            running, unexpanded = unexpanded[:rows], unexpanded[rows:]
            remaining_ms = step_ms
        growth = Growth(
            ready=ready,
            running=running,
            unexpanded=unexpanded,
            shares=self._acceptance.expected(self._schedule.children),
            step_rows=rows,
            step_ms=step_ms,
            remaining_ms=remaining_ms,
        )
        curve_ms, pace = self._verify_ms(view), self._pace
        return growth.best_wait(curve_ms, pace) > best_round(ready, curve_ms, pace).value

    def to_verify(self, view: View) -> Selection:
        """The number of nodes of the best value, and as many more as cost nothing."""
        nodes = view.useful()
        reaches = [node.reach for node in nodes]
        window = self._window(view, reaches)
        riders = window.riders if window is not None else 0
        least = min(self.block, len(nodes))
        best = max(least, self._best_round(view, reaches, riders).nodes)
        rows = self._costs.verifier.filled(best + 1 + riders, view.context, self._beside(view))
        return Selection(nodes[: rows - riders - 1], rows, window)

    def shall_run(self, view: View) -> bool:
        """Without a drafter: where no guess is worth what a forward costs that is not queued ahead.

        A forward of one row is no substitute: SmolLM2 took 67 ms for it, and 48 for a run's.
        """
        if not self._may_run:
            return False
        reaches = [node.reach for node in view.useful()]
        window = self._window(view, reaches)
        return window is None and self._run_value > self._best_round(view, reaches, 0).value

    @property
    def _may_run(self) -> bool:
        """Jacobi's guesses get better by being verified alone, and a set window rides always."""
        strategy = self.strategy
        return strategy in WEIGHTLESS and strategy != "jacobi" and self._schedule.window is None

    @property
    def _run_value(self) -> float:
        return 1 - self._pace * self._costs.plain.ms(1, self._context)

    def _best_round(self, view: View, reaches: Sequence[float], riders: int) -> Worth:
        """riders: rows that the forward has beside the root and the nodes."""
        verifier = self._costs.verifier
        most = MOST_ROWS + riders
        curve_ms, _ = verifier.curve(most, view.context, self._beside(view))
        return best_round(reaches, curve_ms[riders : most + 1], self._pace)

    def _window(self, view: View, reaches: Sequence[float]) -> Window | None:
        """Of lookahead, if it is used: the one that was set, else what pays."""
        schedule = self._schedule
        if not self._looks_ahead:
            return None
        if schedule.window is not None:
            return schedule.window
        without = max(self._best_round(view, reaches, 0).value, self._run_value)
        return self._windows.choose(
            lambda riders: self._best_round(view, reaches, riders).value - without,
            self._costs.verifier,
        )

    @property
    def block(self) -> int:
        """Under `jacobi` by how far its blocks were right so far."""
        if self.strategy != "jacobi":
            return 0
        verifier = self._costs.verifier
        curve_ms, counts = verifier.curve(MOST_ROWS, self._context)
        best = best_round(self._block.reaches, curve_ms[: MOST_ROWS + 1], self._pace)
        return counts[max(best.nodes, LEAST_BLOCK) + 1] - 1

    def _beside(self, view: View) -> float:
        return 1.0 if self.strategy == "pipelined" else 0.0

    def _verify_ms(self, view: View) -> Sequence[float]:
        verifier = self._costs.verifier
        curve_ms, _ = verifier.curve(MOST_ROWS, view.context, self._beside(view))
        return curve_ms[: MOST_ROWS + 1]

    def run_tokens(self, left: int) -> int:
        """Under `auto` until the next probe, else all."""
        return left if self._schedule.strategy == "plain" else min(left, self._arbiter.run_tokens)

    def learn(self, record: StepRecord, elapsed_ms: float) -> None:
        """Costs, acceptance, the pace, and under `auto` which strategy shall be in force."""
        for outcome in record.outcomes:
            self._acceptance.learn(outcome)
        self._undrafted_rounds = 0 if record.drafts else self._undrafted_rounds + 1
        if record.strategy == "jacobi":
            self._block.learn(record.accepted)
        if record.strategy != "plain":
            self._accepted += 0.05 * (record.accepted - self._accepted)
        if self._looks_ahead and self._schedule.window is None:
            self._windows.learn(record.window, record.accepted_by.count("lookahead"))
        # A run in place of a lost drafter's rounds says nothing of them.
        if record.strategy == self.strategy or self._may_run:
            self._own_pace.learn(record.committed, elapsed_ms)
            if self._schedule.strategy == "auto":
                self._arbitrate(record, elapsed_ms)
        if record.drafted:
            self._arbiter.rows += 0.1 * (record.rows - self._arbiter.rows)
        self._context = record.context

    def _arbitrate(self, record: StepRecord, elapsed_ms: float) -> None:
        self._arbiter.learn(
            record.committed,
            elapsed_ms,
            plain_ms=self._costs.plain.ms(1, record.context),
            slowdown=self._costs.slowdown(record.context),
            drafted=bool(record.drafts),
        )

    @property
    def reason(self) -> str:
        """What was measured: the costs against the acceptance when parked, else the gain."""
        arbiter, costs = self._arbiter, self._costs
        acceptance = "acceptance not known yet"
        if not self._schedule.drafts:
            acceptance = f"{self._accepted:.2f} tokens accepted a forward"
        elif self._acceptance.seen:
            acceptance = f"acceptance {self._acceptance.first_choice:.2f}"
        if self.strategy == "plain":
            rows = max(2, round(arbiter.rows))
            one_ms, rows_ms = (costs.verifier.ms(n, self._context) for n in (1, rows))
            _, draft_ms = self._best_step([1.0] * MOST_ROWS, beside=False)
            return (
                f"parked: {rows} rows cost {rows_ms / one_ms:.1f}x one row, "
                f"a draft step {draft_ms / one_ms:.1f}x, {acceptance}"
            )
        gain = arbiter.rate * costs.plain.ms(1, self._context)
        if gain == 0:
            return f"{self.strategy}: too early to say, {acceptance}"
        return f"{self.strategy}: {gain:.2f}x plain decoding, {acceptance}"
