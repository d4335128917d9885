"""The protocol without the I/O: events go in, commands come out; no threads, clocks or devices.

One coordinator a session. It knows what each unit's cache holds, what each unit is doing, and the
tree. Every event method takes the time and returns the commands to carry out, in order.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from ondevice.errors import UnitFailed, UnitLost
from ondevice.lane import Lane
from ondevice.policy import Policy, Schedule, acceptances
from ondevice.records import (
    ROOT_ROW,
    AnswerLimits,
    Command,
    DraftRecord,
    DraftResult,
    DraftRow,
    Emit,
    EmittedToken,
    FinishReason,
    NodeToken,
    Proposal,
    RoundRecord,
    StartDraft,
    StartRun,
    StartVerify,
    Stop,
    UnitName,
    Verdict,
    VerifyRow,
)
from ondevice.tree import SpeculationTree

Phase = Literal["idle", "prefill", "answering", "failed"]


class HostProposer(Protocol):
    """Proposes on the host at every commit, in bounded time (prompt lookup, n-gram pool)."""

    def propose(self, committed: Sequence[int], root: int) -> Sequence[Proposal]:
        """Proposals below node `root`, whose token is the last of `committed`.

        A proposal's parent is `root`, or -(i + 1) for the i-th of the same list. Its log_q is the
        proposer's confidence that the verifier takes it.
        """


@dataclass(slots=True)
class Turn:
    """One turn: what was asked for and what has come of it."""

    schedule: Schedule
    greedy: bool
    limits: AnswerLimits
    prompt_tokens: int
    started_ns: int
    first_token_ns: int | None = None
    ended_ns: int | None = None
    count: int = 0
    rounds: list[RoundRecord] = field(default_factory=list)
    drafts: list[DraftRecord] = field(default_factory=list)


class Coordinator:
    """Overlaps drafting and verification for one session, and says what the text is."""

    def __init__(self, *, drafter: bool, host_proposers: Sequence[HostProposer] = ()) -> None:
        """drafter: whether there is one to command."""
        self.committed: list[int] = []
        self.tree = SpeculationTree()
        self.turn: Turn | None = None
        self.phase: Phase = "idle"
        self.drafter_error: BaseException | None = None
        self._out: list[Command] = []
        self._steps = itertools.count()
        self._verifier = Lane("verifier", True, self._out, self._steps)
        self._drafter = Lane("drafter", drafter, self._out, self._steps)
        self._host_proposers = tuple(host_proposers)
        self._policy = Policy(Schedule())
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
        if self.phase == "failed":
            raise UnitFailed("the verifier failed earlier; open a new session")
        if self.phase != "idle":
            raise RuntimeError("an answer is under way")
        self._policy = Policy(schedule)
        self.turn = Turn(schedule, greedy, limits, len(tokens), now_ns)
        common = _common_prefix(self.committed, tokens)
        self.committed = list(tokens)
        root = self.tree.reset(tokens[-1])
        self._untold, self._dropped = [NodeToken(root.id, root.token)], []
        self.phase = "prefill"
        self._verifier.load(self.committed, common, prefill=True)
        self._drafter.load(self.committed, common, prefill=schedule.speculates)
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
            rows = running.rows if isinstance(running, StartVerify) else ()
            waited_ns = max(0, verdict.start_ns - verifier.idle_since_ns)
            if verdict.more:
                verifier.idle_since_ns = now_ns
            else:
                verifier.rest(now_ns)
            if not stale and verdict.tokens:
                self._commit(now_ns, verdict, rows, waited_ns)
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
        if self.phase in ("prefill", "answering"):
            self._start_draft()
        if self.phase == "answering":
            self._start_verify()
        out = list(self._out)
        self._out.clear()
        return out

    def _start_draft(self) -> None:
        schedule = self._policy.schedule
        if not schedule.speculates or not self._drafter.free:
            return
        if schedule.strategy == "sequential" and not self._verifier.free:
            return
        nodes = self._policy.nodes_to_expand(self.tree)
        if not nodes:
            return
        for node in nodes:
            self.tree[node].expansion = "running"
        rows = tuple(DraftRow(node, self.tree.path(node)) for node in nodes)
        untold, dropped = tuple(self._untold), tuple(self._dropped)
        self._untold, self._dropped = [], []
        self._drafter.held += len(untold)
        self._drafter.send(StartDraft(next(self._steps), rows, untold, dropped))

    def _start_verify(self) -> None:
        if not self._verifier.free:
            return
        root = NodeToken(self.tree.root, self.tree[self.tree.root].token)
        proposers = self._drafter.alive or bool(self._host_proposers)
        if not (self._policy.schedule.speculates and proposers) and len(self.tree) == 1:
            self._verifier.send(StartRun(next(self._steps), root, self._tokens_left))
            return
        drafting = isinstance(self._drafter.running, StartDraft) and not self._drafter.stale
        if drafting and self._policy.shall_wait(self.tree):
            return
        # The last token of an answer is always the verifier's own, so a deeper row is wasted.
        nodes = self._policy.nodes_to_verify(self.tree, depth=self._tokens_left - 1)
        command = StartVerify(next(self._steps), self._rows(nodes), self._policy.schedule.rule)
        self._verifier.send(command)

    def _rows(self, nodes: Sequence[int]) -> tuple[VerifyRow, ...]:
        root = self.tree.root
        index = {root: 0}
        rows = [VerifyRow(root, self.tree[root].token, ROOT_ROW)]
        for node in nodes:
            at = self.tree[node]
            index[node] = len(rows)
            rows.append(VerifyRow(node, at.token, index[at.parent], at.q))
        return tuple(rows)

    def _grow(self, result: DraftResult, rows: Sequence[DraftRow]) -> None:
        assert self.turn is not None
        for row in rows:
            if row.node in self.tree:
                self.tree[row.node].expansion = "done"
        before = len(self.tree)
        families: dict[int, list[Proposal]] = defaultdict(list)
        for proposal in result.proposals:
            if proposal.parent in self.tree:
                families[proposal.parent].append(proposal)
        for parent, children in families.items():
            if self._policy.schedule.rule == "rejection" and self.tree[parent].children:
                continue
            children.sort(key=lambda child: child.rank)
            chances = acceptances(children, self.turn.greedy)
            for child, chance in zip(children, chances, strict=True):
                self.tree.add(child, chance)
        kept = len(self.tree) - before
        self.turn.drafts.append(
            DraftRecord(len(rows), kept, result.start_ns, result.end_ns, result.window)
        )

    def _propose_on_host(self) -> None:
        if not self._policy.schedule.speculates:
            return
        for proposer in self._host_proposers:
            ids: list[int] = []
            for proposal in proposer.propose(self.committed, self.tree.root):
                if proposal.parent < 0:
                    proposal = replace(proposal, parent=ids[-proposal.parent - 1])
                added = self.tree.add(proposal, math.exp(min(proposal.log_q, 0.0)))
                ids.append(NOWHERE if added is None else added)

    @property
    def _prompt_tokens(self) -> int:
        assert self.turn is not None
        return self.turn.prompt_tokens

    @property
    def _tokens_left(self) -> int:
        assert self.turn is not None
        return self.turn.limits.max_tokens - self.turn.count

    def _commit(
        self, now_ns: int, verdict: Verdict, rows: Sequence[VerifyRow], waited_ns: int
    ) -> None:
        turn = self.turn
        assert turn is not None
        tokens, reason = self._cut(verdict.tokens)
        accepted = verdict.accepted[: len(tokens)]
        proposers = tuple(self.tree[node].proposer or "" for node in accepted)
        rerooted = self.tree.commit(tokens)
        self.committed.extend(tokens)
        self._untold.extend(rerooted.committed)
        self._dropped.extend(rerooted.dropped)
        self._verifier.held = len(self.committed) - 1
        turn.count += len(tokens)
        if turn.first_token_ns is None:
            turn.first_token_ns = now_ns
        turn.rounds.append(
            RoundRecord(
                drafted=_rows_within(rows, depth=len(tokens)),
                accepted=len(proposers),
                committed=len(tokens),
                start_ns=verdict.start_ns,
                end_ns=verdict.end_ns,
                waited_ns=waited_ns,
                root_was_known=rerooted.known == len(tokens),
                accepted_by=proposers,
            )
        )
        self._out.append(Emit(_emitted(tokens, verdict, proposers)))
        if reason is not None:
            self._end(now_ns, reason)
        else:
            self._propose_on_host()

    def _cut(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The tokens up to the answer's end, if it is among them."""
        assert self.turn is not None
        limits = self.turn.limits
        for count, token in enumerate(tokens, start=1):
            if limits.ends_at(token):
                return tuple(tokens[:count]), "stop"
            if count >= self._tokens_left:
                return tuple(tokens[:count]), "length"
        return tuple(tokens), None

    def _end(self, now_ns: int, reason: FinishReason, error: BaseException | None = None) -> None:
        """Close the answer: both caches go back to the committed tokens, all nodes are dropped."""
        assert self.turn is not None
        self.turn.ended_ns = now_ns
        self.phase = "idle"
        self._verifier.roll_back()
        self._drafter.roll_back()
        self._out.append(Stop(reason, error))


NOWHERE = -1
"""A node id that no tree ever holds."""


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _rows_within(rows: Sequence[VerifyRow], depth: int) -> int:
    """How many rows lie 1 to `depth` levels below row 0."""
    depths = [0]
    for row in rows[1:]:
        depths.append(depths[row.parent] + 1)
    return sum(1 for level in depths if 1 <= level <= depth)


def _emitted(
    tokens: Sequence[int], verdict: Verdict, proposers: Sequence[str]
) -> tuple[EmittedToken, ...]:
    return tuple(
        EmittedToken(
            token,
            verdict.logprobs[i],
            verdict.top_logprobs[i] if verdict.top_logprobs else (),
            proposers[i] if i < len(proposers) else None,
        )
        for i, token in enumerate(tokens)
    )
