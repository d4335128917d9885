"""A world without models: a language made of hashes, scripted units, events in any order.

It shares with the runtime only `ondevice.sampling`, the records and the coordinator under test.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ondevice.coordinator import Coordinator
from ondevice.records import (
    AnswerLimits,
    Command,
    DraftResult,
    Emit,
    EndRun,
    FloatArray,
    NodeToken,
    Prefill,
    Proposal,
    StartDraft,
    StartRun,
    StartVerify,
    StepRecord,
    Stop,
    Truncate,
    Verdict,
)
from ondevice.sampling import (
    DRAFT_STREAM,
    Law,
    SamplingParams,
    history_with_path,
    walk_coupled,
    walk_rejection,
)
from ondevice.schedule import Schedule
from ondevice.weightless import Weightless

VOCAB = 8
END = 0


@lru_cache(maxsize=100_000)
def _logits(tail: tuple[int, ...]) -> FloatArray:
    seed = int.from_bytes(bytes(tail), "little") + 1
    row = np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)
    row[END] -= 2
    return row


def logits(history: Sequence[int]) -> FloatArray:
    """The verifier's logits after `history`, shape (VOCAB,)."""
    return _logits(tuple(history[-3:]))


def plain_text(prompt: Sequence[int], law: Law, max_tokens: int) -> list[int]:
    """What the verifier alone would write."""
    history = list(prompt)
    while len(history) < len(prompt) + max_tokens:
        history.append(law.choose(logits(history), history))
        if history[-1] == END:
            break
    return history[len(prompt) :]


ProposerScript = Callable[[random.Random, Law, Sequence[int]], list[tuple[int, float]]]


def perfect(_: random.Random, law: Law, history: Sequence[int]) -> list[tuple[int, float]]:
    """Knows the next token."""
    return [(law.choose(logits(history), history), -0.01)]


def guessing(rng: random.Random, _: Law, __: Sequence[int]) -> list[tuple[int, float]]:
    """Three tokens at random."""
    return [(token, rng.uniform(-4, 0)) for token in rng.sample(range(VOCAB), 3)]


def adversarial(rng: random.Random, law: Law, history: Sequence[int]) -> list[tuple[int, float]]:
    """Sure of everything but the truth, with repetitions and positive log-probabilities."""
    truth = law.choose(logits(history), history)
    wrong = [token for token in range(VOCAB) if token != truth]
    return [(rng.choice(wrong), rng.choice([0.0, 5.0, -0.001])) for _ in range(4)]


SCRIPTS: dict[str, ProposerScript] = {
    "perfect": perfect,
    "guessing": guessing,
    "adversarial": adversarial,
}


class Fault(Exception):
    """What a scripted unit raises."""


class ScriptedVerifier:
    """Holds a cache of tokens and checks that every command fits it."""

    def __init__(self) -> None:
        self.cache: list[int] = []
        self.run: StartRun | None = None
        self.run_ends = False
        self.run_tokens = 0

    def prefill(self, command: Prefill, part: float) -> int:
        taken = round(len(command.tokens) * part)
        self.cache.extend(command.tokens[:taken])
        return len(self.cache)

    def verify(self, command: StartVerify, law: Law) -> Verdict:
        rows, every = command.rows, [*command.rows, *command.riders]
        histories = [history_with_path(self.cache, every, at) for at in range(len(every))]

        def log_p(at: int) -> FloatArray:
            return law.log_p(logits(histories[at]), histories[at])

        def choose(at: int) -> int:
            return law.choose(logits(histories[at]), histories[at])

        if command.rule == "rejection":
            accepted, tokens = walk_rejection(rows, log_p, law, len(self.cache) + 1)
        else:
            accepted, tokens = walk_coupled(rows, choose)
        self.cache.extend([rows[0].token, *tokens[:-1]])
        nodes = tuple(rows[at].node for at in accepted)
        chosen = tuple(choose(at) for at in range(len(rows)))
        riding = tuple(int(np.argmax(logits(each))) for each in histories[len(rows) :])
        scores = (0.0,) * len(tokens)
        verdict = Verdict(command.step, nodes, tuple(tokens), scores, 0, 1)
        return replace(verdict, row_tokens=chosen, rider_tokens=riding)

    def run_one(self, law: Law, ended: bool) -> Verdict:
        run = self.run
        assert run is not None
        if ended:
            self.run = None
            return Verdict(run.step, (), (), (), 0, 1)
        if self.run_tokens == 0:
            self.cache.append(run.root.token)
        token = law.choose(logits(self.cache), self.cache)
        self.cache.append(token)  # the forward of the next token is already under way
        self.run_tokens += 1
        more = self.run_tokens < run.limit and not self.run_ends
        if not more:
            self.run = None
            self.cache.pop()
        return Verdict(run.step, (), (token,), (0.0,), 0, 1, more=more)


class ScriptedDrafter:
    """Remembers what it was told and checks that every path begins at the last token of that."""

    def __init__(self, script: ProposerScript, rng: random.Random) -> None:
        self.told: list[int] = []
        self.nodes: dict[int, int] = {}
        self.dropped: set[int] = set()
        self._script, self._rng = script, rng

    def prefill(self, command: Prefill, part: float) -> int:
        taken = round(len(command.tokens) * part)
        self.told.extend(command.tokens[:taken])
        return len(self.told)

    def draft(self, command: StartDraft, law: Law, schedule: Schedule) -> DraftResult:
        self.told.extend(entry.token for entry in command.committed)
        for entry in command.committed:
            self.nodes.pop(entry.node, None)
        for node in command.dropped:
            self.nodes.pop(node, None)
            assert node not in self.dropped, "a node was dropped twice"
            self.dropped.add(node)
        proposals: list[Proposal] = []
        for row in command.rows:
            self._check_path(row.path)
            history = [*self.told, *(entry.token for entry in row.path)]
            proposals += self._children(row.node, history, law, schedule)
        return DraftResult(command.step, tuple(proposals), 0, 1)

    def _check_path(self, path: tuple[NodeToken, ...]) -> None:
        for entry in path:
            assert entry.node not in self.dropped, "a dropped node came back"
            assert self.nodes.setdefault(entry.node, entry.token) == entry.token

    def _children(
        self, parent: int, history: list[int], law: Law, schedule: Schedule
    ) -> list[Proposal]:
        if schedule.rule == "rejection":
            return [self._sampled(parent, history, law)]
        found = self._script(self._rng, law, history)
        proposals = [
            Proposal(parent, token, log_q, rank, self._rng.uniform(0, 3), "script")
            for rank, (token, log_q) in enumerate(found)
        ]
        if self._rng.random() < 0.2:  # an echo for a node that is long gone
            proposals.append(Proposal(999_999, 1, 0.0, 0, 1.0, "script"))
        return proposals

    def _sampled(self, parent: int, history: list[int], law: Law) -> Proposal:
        rng = np.random.default_rng(sum(history) + len(history))
        q = rng.dirichlet(np.full(VOCAB, 0.7)).astype(np.float32)
        noise = law.noise(len(history), DRAFT_STREAM)
        with np.errstate(divide="ignore"):
            token = int(np.argmax(np.log(q) + noise))
        return Proposal(parent, token, float(np.log(q[token])), 0, 1.0, "script", q)


class World:
    """A coordinator, two scripted units, and a random order of everything that can happen."""

    def __init__(
        self, script: str, seed: int, *, drafter: bool = True, weightless: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.coordinator = Coordinator(
            drafter=drafter, weightless=Weightless(ends={END}) if weightless else None
        )
        self.verifier = ScriptedVerifier()
        self.drafter = ScriptedDrafter(SCRIPTS[script], self.rng)
        self.queues: dict[str, deque[Command]] = {"drafter": deque(), "verifier": deque()}
        self.outstanding: dict[str, Command | None] = {"drafter": None, "verifier": None}
        self.inbox: deque[tuple[str, bool, Callable[[int], list[Command]]]] = deque()
        self.dead: set[str] = set()
        self.live: dict[int, set[int]] = {}  # the tree's nodes when a drafter step was issued
        self.current: set[int] = set()  # steps that belong to the answer under way
        self.text: list[int] = []
        self.stop: Stop | None = None
        self.now_ns = 0

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule,
        max_tokens: int,
        *,
        cancel_after: int | None = None,
        fail: tuple[str, int] | None = None,
    ) -> list[int]:
        """Run one answer to its Stop; the tokens emitted. Times count actions of the world."""
        self.law = Law(params, VOCAB, len(prompt))
        self.schedule = schedule
        self.text, self.stop = [], None
        self.records: list[StepRecord] = []
        self.current.clear()
        limits = AnswerLimits(max_tokens, lambda token: token == END)
        self._take(
            self.coordinator.on_prompt(
                self.now_ns, prompt, limits, schedule, greedy=self.law.greedy
            )
        )
        actions = 0
        while self.stop is None:
            actions += 1
            assert actions < 5_000, "the answer does not end"
            if actions == cancel_after:
                self._take(self.coordinator.on_cancel(self.now_ns))
            elif fail is not None and actions == fail[1] and fail[0] not in self.dead:
                self._fail(fail[0])
            else:
                self.act()
        return self.text

    def settle(self) -> None:
        """Let everything under way run out."""
        while any(self.queues.values()) or self.inbox or self.verifier.run:
            self.act()
        assert self.coordinator.at_rest

    def act(self) -> None:
        """One thing that can happen next, at random."""
        possible: list[Callable[[], None]] = [
            getattr(self, f"_execute_{unit}")
            for unit, queue in self.queues.items()
            if queue or (unit == "verifier" and self.verifier.run)
        ]
        if self.inbox:
            possible.append(self._deliver)
        assert possible, "deadlock: nothing can happen and the answer has not ended"
        self.rng.choice(possible)()

    def _fail(self, unit: str) -> None:
        self.dead.add(unit)
        self.queues[unit].clear()
        self.inbox = deque(entry for entry in self.inbox if entry[0] != unit)
        self.outstanding[unit] = None
        if unit == "verifier":
            self.verifier.run = None
        error = Fault(unit)
        self._take(self.coordinator.on_failure(self.now_ns, unit, error))  # type: ignore[arg-type]

    def _deliver(self) -> None:
        unit, last, event = self.inbox.popleft()
        if last:
            self.outstanding[unit] = None
        self.now_ns += 1
        self._take(event(self.now_ns))

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Emit(tokens=tokens, record=record):
                    assert self.stop is None, "text after the end"
                    assert record.committed == len(record.outcomes) == len(tokens)
                    self.records.append(record)
                    self.text.extend(token.token for token in tokens)
                case Stop():
                    assert self.stop is None, "stopped twice"
                    self.stop = command
                    self.current.clear()
                case Truncate(unit=unit):
                    busy = self.outstanding[unit]
                    assert busy is None or isinstance(busy, StartRun)
                    self._enqueue(unit, command)
                case Prefill(unit=unit):
                    self._start(unit, command)
                case StartDraft():
                    self.live[command.step] = self.coordinator.tree.ids()
                    self._start("drafter", command)
                case StartVerify() | StartRun():
                    self.verifier.run_ends = False
                    self._start("verifier", command)
                case EndRun(step=step):
                    assert getattr(self.outstanding["verifier"], "step", None) == step
                    self.verifier.run_ends = True

    def _start(self, unit: str, command: Prefill | StartDraft | StartVerify | StartRun) -> None:
        assert self.outstanding[unit] is None, f"the {unit} was started twice"
        self.outstanding[unit] = command
        self.current.add(command.step)
        self._enqueue(unit, command)

    def _enqueue(self, unit: str, command: Command) -> None:
        assert unit not in self.dead, f"a command for the dead {unit}"
        self.queues[unit].append(command)

    def _execute_verifier(self) -> None:
        unit, on_verdict = self.verifier, self.coordinator.on_verdict
        if unit.run is not None:
            verdict = unit.run_one(self.law, ended=bool(self.queues["verifier"]))
            self._post("verifier", lambda now: on_verdict(now, verdict), last=not verdict.more)
            return
        match self.queues["verifier"].popleft():
            case Truncate(length=length):
                assert length <= len(unit.cache), "truncated to more than there is"
                del unit.cache[length:]
            case Prefill() as command:
                length = unit.prefill(command, self._part(command.step))
                step = command.step
                self._post(
                    "verifier",
                    lambda now: self.coordinator.on_prefill(now, "verifier", step, length),
                )
            case StartVerify() as command:
                self._check_root(command.step, command.rows[0].token)
                scored = unit.verify(command, self.law)
                self._post("verifier", lambda now: on_verdict(now, scored))
            case StartRun() as command:
                self._check_root(command.step, command.root.token)
                unit.run, unit.run_tokens = command, 0

    def _execute_drafter(self) -> None:
        unit = self.drafter
        match self.queues["drafter"].popleft():
            case Truncate(length=length):
                assert length <= len(unit.told), "truncated to more than it was told"
                del unit.told[length:]
                unit.nodes.clear()
            case Prefill() as command:
                length = unit.prefill(command, self._part(command.step))
                step = command.step
                self._post(
                    "drafter",
                    lambda now: self.coordinator.on_prefill(now, "drafter", step, length),
                )
            case StartDraft() as command:
                result = unit.draft(command, self.law, self.schedule)
                gone = set(unit.nodes) - self.live.pop(command.step)
                assert not gone, "the drafter was not told of nodes that are gone"
                self._post("drafter", lambda now: self.coordinator.on_draft(now, result))

    def _part(self, step: int) -> float:
        """A prefill is cut short only once its answer was cancelled."""
        return 1.0 if step in self.current else self.rng.random()

    def _check_root(self, step: int, root: int) -> None:
        if step in self.current:
            assert [*self.verifier.cache, root] == self.coordinator.committed

    def _post(self, unit: str, event: Callable[[int], list[Command]], *, last: bool = True) -> None:
        self.inbox.append((unit, last, event))
