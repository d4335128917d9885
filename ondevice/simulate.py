"""The coordinator in virtual time: modelled units, no threads, no waiting, the same decisions."""

from __future__ import annotations

from dataclasses import dataclass, field

from ondevice.coordinator import Coordinator
from ondevice.costs import CostModel, CostTable
from ondevice.modelled import Acceptances, ModelledDrafter, ModelledVerifier
from ondevice.policy import Experience, Schedule
from ondevice.records import (
    AnswerLimits,
    Command,
    Emit,
    Prefill,
    StartDraft,
    StartRun,
    StartVerify,
    StepRecord,
    Stop,
)


@dataclass(slots=True)
class _Job:
    """left_ms: of the work, as if alone."""

    command: StartDraft | StartVerify | StartRun
    left_ms: float
    slow: float
    start_ms: float


class Machine:
    """Two modelled units that slow each other down while both work."""

    def __init__(self, table: CostTable, acceptances: Acceptances, prompt_tokens: int = 1) -> None:
        self.truth = CostModel(table)
        self.acceptances = acceptances
        self.now_ms = 0.0
        self.jobs: dict[str, _Job] = {}
        self.prompt_tokens = prompt_tokens

    def run(
        self, schedule: Schedule, tokens: int, coordinator: Coordinator | None = None, sink=None
    ) -> float:
        """Tokens per millisecond of one answer of `tokens`."""
        co = coordinator or Coordinator(
            drafter=schedule.speculates, experience=Experience(CostModel(self.truth.table))
        )
        self.verifier = ModelledVerifier(self.acceptances, self.prompt_tokens)
        self.drafter = ModelledDrafter(self.acceptances, schedule.children, self.prompt_tokens - 1)
        self.length = self.prompt_tokens
        self.stopped = False
        self.count = 0
        self.sink = sink
        start = self.now_ms
        limits = AnswerLimits(tokens, lambda _: False)
        self._take(
            co.on_prompt(
                int(self.now_ms * 1e6), [9] * self.prompt_tokens, limits, schedule, greedy=True
            )
        )
        while not self.stopped:
            self._step(co)
        self.jobs.clear()
        return self.count / (self.now_ms - start)

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Prefill():
                    raise NotImplementedError
                case StartDraft():
                    n = len(command.rows)
                    c = self.truth.drafter
                    alone, beside = c.ms(n), c.ms(n, 0, 1.0)
                    self.jobs["drafter"] = _Job(
                        command, alone, beside / alone if alone else 1.0, self.now_ms
                    )
                case StartVerify():
                    n = len(command.rows) + len(command.riders)
                    c = self.truth.verifier
                    alone, beside = c.ms(n, self.length), c.ms(n, self.length, 1.0)
                    self.jobs["verifier"] = _Job(command, alone, beside / alone, self.now_ms)
                case StartRun():
                    self.run_left = command.limit
                    self._run_token(command)
                case Emit():
                    self.count += len(command.tokens)
                    self.length += len(command.tokens)
                    if self.sink is not None:
                        self.sink(command.record)
                case Stop():
                    self.stopped = True

    def _run_token(self, command: StartRun) -> None:
        c = self.truth.plain
        alone, beside = c.ms(1, self.length), c.ms(1, self.length, 1.0)
        self.jobs["verifier"] = _Job(command, alone, beside / alone, self.now_ms)

    def _step(self, co: Coordinator) -> None:
        both = len(self.jobs) == 2
        ends = {u: j.left_ms * (j.slow if both else 1.0) for u, j in self.jobs.items()}
        unit = min(ends, key=lambda u: (ends[u], u == "verifier"))
        passed = ends[unit]
        self.now_ms += passed
        for u, j in self.jobs.items():
            j.left_ms -= passed / (j.slow if both else 1.0)
        job = self.jobs.pop(unit)
        now, start = int(self.now_ms * 1e6), int(job.start_ms * 1e6)
        match job.command:
            case StartDraft() as command:
                self._take(co.on_draft(now, self.drafter.draft(command, start, now)))
            case StartVerify() as command:
                self._take(co.on_verdict(now, self.verifier.verify(command, start, now)))
            case StartRun() as command:
                self.run_left -= 1
                if self.run_left:
                    self._run_token(command)
                self._take(
                    co.on_verdict(
                        now, self.verifier.run_one(command.step, start, now, self.run_left > 0)
                    )
                )
