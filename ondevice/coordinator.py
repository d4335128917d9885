"""The protocol without the I/O: events go in, commands come out; no threads, clocks or devices.

One coordinator a session. It knows what each unit's cache holds, what each unit is doing, and the
tree. Every event method takes the time and returns the commands to carry out, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from ondevice.acceptance import ClaimKind, claims
from ondevice.errors import UnitFailed, UnitLost
from ondevice.lane import Lane, common_prefix
from ondevice.ledger import Ledger, emitted_tokens, within
from ondevice.policy import Experience, Policy, policy_for
from ondevice.records import (
    AnswerLimits,
    Command,
    DraftResult,
    DraftRow,
    Emit,
    EndRun,
    FinishReason,
    NodeToken,
    Proposal,
    StartDraft,
    StartRun,
    StartVerify,
    Stop,
    UnitName,
    Verdict,
)
from ondevice.schedule import LEAST_REACH, Schedule
from ondevice.tree import Node, SpeculationTree, riders_of
from ondevice.view import View
from ondevice.weightless import Weightless

Phase = Literal["idle", "prefill", "answering", "failed"]


@dataclass(slots=True)
class Turn:
    """One turn: what was asked for and what has come of it."""

    schedule: Schedule
    greedy: bool
    limits: AnswerLimits
    prompt_tokens: int
    started_ns: int
    count: int = 0


class Coordinator:
    """Overlaps drafting and verification for one session, and says what the text is."""

    def __init__(
        self,
        *,
        drafter: bool,
        weightless: Weightless | None = None,
        experience: Experience | None = None,
    ) -> None:
        """drafter: whether there is one to command. weightless: proposers that need no model.

        experience: what is known of the units.
        """
        self.committed: list[int] = []
        self.tree = SpeculationTree()
        self.turn: Turn | None = None
        self.phase: Phase = "idle"
        self.drafter_error: BaseException | None = None
        self._out: list[Command] = []
        self._steps = itertools.count()
        self._verifier = Lane("verifier", True, self._out, self._steps)
        self._drafter = Lane("drafter", drafter, self._out, self._steps)
        self._weightless = weightless or Weightless()
        self._has_weightless = weightless is not None
        self.experience = experience or Experience()
        self._policy: Policy = policy_for(Schedule(), self.experience, "greedy", 0)
        self._ledger = Ledger(self.experience.costs)
        self._draft_steps = 0
        self._draft_began_ns = 0
        self._ended_run = -1
        self._untold: list[NodeToken] = []
        self._dropped: list[int] = []

    # Events

    def on_prompt(
        self,
        now_ns: int,
        tokens: Sequence[int],
        limits: AnswerLimits,
        schedule: Schedule,
        *,
        greedy: bool,
    ) -> list[Command]:
        """A new answer to the whole text `tokens` (at least one); what is known is reused.

        Raises UnitFailed when the verifier is lost, RuntimeError while an answer is under way.
        """
        if self.phase != "idle":
            if self.phase == "failed":
                raise UnitFailed("the verifier failed earlier; open a new session")
            raise RuntimeError("an answer is under way")
        schedule = schedule.having(self._drafter.alive, self._has_weightless)
        kind = schedule.claim_kind(greedy)
        self._policy = policy_for(schedule, self.experience, kind, len(tokens))
        self._ledger, self._draft_steps = Ledger(self.experience.costs), 0
        self.turn = Turn(schedule, greedy, limits, len(tokens), now_ns)
        common = common_prefix(self.committed, tokens)
        self.committed = list(tokens)
        root = self.tree.reset(tokens[-1])
        self._untold, self._dropped = [NodeToken(root.id, root.token)], []
        self.phase = "prefill"
        self._verifier.load(self.committed, common, prefill=True)
        self._drafter.load(self.committed, common, prefill=schedule.drafts)
        self._weightless.begin(schedule.use, self.experience.rates)
        self._propose_on_host()
        return self._proceed(now_ns)

    def on_prefill(self, now_ns: int, unit: UnitName, step: int, length: int) -> list[Command]:
        """The unit's cache now holds `length` tokens; fewer than asked for after a cancel."""
        lane = self._lane(unit)
        if lane.runs(step):
            if not lane.stale and length != self._prompt_tokens - 1:
                held = f"expected {self._prompt_tokens - 1} tokens after its prefill, got {length}"
                return self.on_failure(now_ns, unit, UnitLost(f"the {unit}'s cache: {held}"))
            lane.loaded(now_ns, length)
        return self._proceed(now_ns)

    def on_draft(self, now_ns: int, result: DraftResult) -> list[Command]:
        """A drafter step is done. Children of nodes that left the tree are ignored."""
        drafter = self._drafter
        if drafter.runs(result.step):
            stale = drafter.stale
            running = drafter.running
            drafter.rest(now_ns)
            if not stale and isinstance(running, StartDraft):
                self._grow(result, running.rows)
        return self._proceed(now_ns)

    def on_verdict(self, now_ns: int, verdict: Verdict) -> list[Command]:
        """A verifier forward is done, or one token of a run."""
        verifier = self._verifier
        if verifier.runs(verdict.step):
            stale, running = verifier.stale, verifier.running
            verify = running if isinstance(running, StartVerify) else None
            waited_ns = max(0, verdict.start_ns - verifier.idle_since_ns)
            if verdict.more:
                verifier.idle_since_ns = now_ns
            else:
                verifier.rest(now_ns)
            if not stale and verdict.tokens:
                self._commit(now_ns, verdict, verify, waited_ns)
        return self._proceed(now_ns)

    def on_failure(self, now_ns: int, unit: UnitName, error: BaseException) -> list[Command]:
        """A unit raised or was lost. An answer can go on without a drafter only.

        A verifier that raised UnitFailed, and not UnitLost, has its caches as they were: its answer
        ends with the error, and the session can have others.
        """
        lane = self._lane(unit)
        if unit == "drafter":
            lane.lose()
            self.drafter_error = error
        elif isinstance(error, UnitFailed) and not isinstance(error, UnitLost):
            stale = lane.stale
            lane.rest(now_ns)
            if not stale and self.phase in ("prefill", "answering"):
                self._end(now_ns, "error", error)
        else:
            lane.lose()
            if self.phase in ("prefill", "answering"):
                self._end(now_ns, "error", error)
            self.phase = "failed"
        return self._proceed(now_ns)

    def on_recovery(self, unit: UnitName) -> None:
        """A lost unit was replaced, between two answers; its cache is empty."""
        self._lane(unit).regain()
        if unit == "drafter":
            self.drafter_error = None

    def on_cancel(self, now_ns: int) -> list[Command]:
        """End the answer here; what was emitted stays. A forward under way is let run out."""
        if self.phase in ("prefill", "answering"):
            self._end(now_ns, "cancelled")
        return self._proceed(now_ns)

    @property
    def reason(self) -> str:
        """Why the strategy in force is in force, for people."""
        return self._policy.reason

    @property
    def at_rest(self) -> bool:
        """Whether no unit has anything to do."""
        return all(not lane.alive or lane.free for lane in (self._drafter, self._verifier))

    def _lane(self, name: UnitName) -> Lane:
        return self._drafter if name == "drafter" else self._verifier

    # The answer

    def _proceed(self, now_ns: int) -> list[Command]:
        """Start what can start; return everything decided since the event came in."""
        if self.phase == "prefill" and self._verifier.free:
            self.phase = "answering"
            self._verifier.idle_since_ns = now_ns
            self._ledger.begin(now_ns)
        if self.phase in ("prefill", "answering"):
            self._start_draft(now_ns)
        if self.phase == "answering":
            self._start_verify(now_ns)
        out = list(self._out)
        self._out.clear()
        return out

    def _start_draft(self, now_ns: int) -> None:
        if not self._speculates or not self._drafter.free:
            return
        view = self._view(now_ns)
        in_turn = self._policy.strategy == "sequential"
        if in_turn and (view.verifying or not self._policy.shall_wait(view)):
            return
        nodes = self._policy.to_expand(view)
        if not nodes:
            return
        for node in nodes:
            node.expansion = "running"
        rows = tuple(DraftRow(node.id, self.tree.path(node.id)) for node in nodes)
        untold, dropped = tuple(self._untold), tuple(self._dropped)
        self._untold, self._dropped = [], []
        self._drafter.held += len(untold)
        self._draft_began_ns = now_ns
        self._drafter.send(StartDraft(next(self._steps), rows, untold, dropped))

    def _start_verify(self, now_ns: int) -> None:
        if not self._verifier.free:
            self._end_run(now_ns)
            return
        left = self._tokens_left
        if not self._speculates:
            limit = self._policy.run_tokens(left) if self._policy.strategy == "plain" else left
            self._verifier.send(self._run(limit, watched=False))
            return
        view = self._view(now_ns)
        if self._policy.shall_run(view):
            self._verifier.send(self._run(left, watched=True))
            return
        if view.expanding is not None and self._policy.shall_wait(view):
            return
        selection = self._policy.to_verify(view)
        rows = self.tree.rows(selection.nodes)
        window = selection.window
        riders = riders_of(rows, self._weightless.riders(window, self.committed), selection.rows)
        self._draft_steps = 0
        assert self.turn is not None
        rule = self.turn.schedule.rule
        self._verifier.send(StartVerify(next(self._steps), rows, rule, riders, window=window))

    def _run(self, limit: int, *, watched: bool) -> StartRun:
        root = NodeToken(self.tree.root, self.tree[self.tree.root].token)
        return StartRun(next(self._steps), root, limit, watched)

    def _end_run(self, now_ns: int) -> None:
        """When a guess has come up that is worth more than plain decoding."""
        run = self._verifier.running
        if not isinstance(run, StartRun) or not run.watched or run.step == self._ended_run:
            return
        if not self._verifier.stale and not self._policy.shall_run(self._view(now_ns)):
            self._ended_run = run.step
            self._out.append(EndRun(run.step))

    @property
    def _speculates(self) -> bool:
        able = self._drafter.alive or self._weightless.active
        return able and self._policy.strategy != "plain"

    @property
    def _drafting(self) -> StartDraft | None:
        """The drafter's step for this answer."""
        running = self._drafter.running
        return running if isinstance(running, StartDraft) and not self._drafter.stale else None

    def _view(self, now_ns: int) -> View:
        step = self._drafting
        remaining_ms = 0.0
        if step is not None:
            expected_ms = self._expected_ms(step)
            passed_ms = (now_ns - self._draft_began_ns) / 1e6
            remaining_ms = max(LEAST_LEFT * expected_ms, expected_ms - passed_ms)
        return View(
            tree=self.tree,
            context=len(self.committed) - 1,
            # The last token of an answer is always the verifier's own, so a deeper row is wasted.
            levels=self._tokens_left - 1,
            verifying=self._verifier.running is not None,
            expanding=None if step is None else [row.node for row in step.rows],
            remaining_ms=remaining_ms,
            steps=self._draft_steps,
        )

    def _expected_ms(self, step: StartDraft) -> float:
        """Text that was decoded plainly goes through the drafter's widest function first."""
        costs = self.experience.costs.drafter
        widest = costs.row_counts[-1]
        return costs.ms(len(step.rows)) + len(step.committed) // widest * costs.ms(widest)

    def _grow(self, result: DraftResult, rows: Sequence[DraftRow]) -> None:
        assert self.turn is not None
        before = len(self.tree)
        families: dict[int, list[Proposal]] = {}
        for row in rows:
            if row.node in self.tree:
                self.tree[row.node].expansion = "done"
        for proposal in result.proposals:
            if proposal.parent in self.tree:
                families.setdefault(proposal.parent, []).append(proposal)
        kind = self.turn.schedule.claim_kind(self.turn.greedy)
        for parent, children in families.items():
            self._add_children(self.tree[parent], children, kind)
        self._draft_steps += 1
        self._ledger.drafted(result, len(rows), len(self.tree) - before)

    def _add_children(self, parent: Node, children: list[Proposal], kind: ClaimKind) -> None:
        if kind == "sampled" and parent.children:
            return
        children.sort(key=attrgetter("rank"))
        parent.claims = tuple(claims(children, kind))
        parent.offered = tuple([child.token for child in children])
        chances = self.experience.acceptances[kind].chances(parent.claims)
        # Under rejection a token must not decide whether it is tested: that would bias the text.
        least = 0.0 if kind == "sampled" else LEAST_REACH / max(parent.reach, LEAST_REACH)
        for child, chance in zip(children, chances, strict=True):
            if chance >= least:
                self.tree.add(child, chance)

    def _propose_on_host(self) -> None:
        """Also while parked: how often guesses are right is then learned at no cost."""
        self._weightless.propose(self.tree, self.committed, self._policy.block)

    @property
    def _prompt_tokens(self) -> int:
        assert self.turn is not None
        return self.turn.prompt_tokens

    @property
    def _tokens_left(self) -> int:
        assert self.turn is not None
        return self.turn.limits.max_tokens - self.turn.count

    def _commit(
        self, now_ns: int, verdict: Verdict, command: StartVerify | None, waited_ns: int
    ) -> None:
        turn = self.turn
        assert turn is not None
        tokens, reason = within(turn.limits, verdict.tokens, self._tokens_left)
        accepted = verdict.accepted[: len(tokens)]
        proposers = self.tree.proposers(accepted)
        by_row: tuple[str, ...] = ()
        if command is not None:
            by_row = self.tree.proposers([row.node for row in command.rows])
            self._weightless.observe(command, verdict)
        rerooted = self.tree.commit(tokens)
        self.committed.extend(tokens)
        if turn.schedule.drafts and self._drafter.alive:
            self._untold.extend(rerooted.committed)
            self._dropped.extend(rerooted.dropped)
        self._verifier.held = len(self.committed) - 1
        turn.count += len(tokens)
        context = len(self.committed) - len(tokens) - 1
        record = self._ledger.close_round(
            self._policy.strategy, verdict, command, rerooted, context, waited_ns, proposers, by_row
        )
        drafting_since_ns = None if self._drafting is None else self._draft_began_ns
        self._policy.learn(record, self._ledger.learn(record, drafting_since_ns, now_ns))
        self._out.append(Emit(emitted_tokens(tokens, verdict, proposers), record))
        if reason is not None:
            self._end(now_ns, reason)
        else:
            self._propose_on_host()

    def _end(self, now_ns: int, reason: FinishReason, error: BaseException | None = None) -> None:
        """Close the answer: both caches go back to the committed tokens, all nodes are dropped."""
        assert self.turn is not None
        self.phase = "idle"
        self._verifier.roll_back()
        self._drafter.roll_back()
        self._out.append(Stop(reason, error, self._ledger.left_over()))


LEAST_LEFT = 0.1
"""A drafter step that is overdue is expected to take this part of its usual time yet."""
