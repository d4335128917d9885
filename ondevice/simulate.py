"""The coordinator in virtual time: modelled units, no threads, no waiting, the same decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ondevice.coordinator import Coordinator
from ondevice.costs import CostModel, CostTable
from ondevice.modelled import ModelledDrafter, ModelledVerifier, Text
from ondevice.policy import Experience
from ondevice.records import (
    AnswerLimits,
    Command,
    Emit,
    EndRun,
    StartDraft,
    StartRun,
    StartVerify,
    StepRecord,
    Stop,
    UnitName,
)
from ondevice.schedule import Schedule
from ondevice.statistics import Statistics, Tally

ROOT_TOKEN = 2_000
"""The prompt: no modelled unit says it."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """One simulated answer. speed: times the plain decoding of the same machine."""

    tokens: int
    elapsed_ms: float
    speed: float
    stats: Statistics


def simulate(
    table: CostTable,
    text: Text,
    schedule: Schedule,
    tokens: int,
    *,
    experience: Experience | None = None,
    on_record: Callable[[StepRecord], None] = lambda _: None,
) -> Simulated:
    """One answer of `tokens` on a machine whose steps take what `table` says.

    A step's time does not depend on the context. experience: what the policy knows beforehand, by
    default the table itself and nothing of the drafter; it learns on.
    """
    machine = _Machine(table, text, schedule, on_record)
    experience = experience or Experience(CostModel(table))
    coordinator = Coordinator(drafter=schedule.drafts, experience=experience)
    machine.run(coordinator, schedule, tokens)
    return Simulated(
        tokens=machine.tally.tokens,
        elapsed_ms=machine.now_ms,
        speed=machine.tally.tokens * machine.costs.plain.ms(1) / machine.now_ms,
        stats=machine.tally.summary(coordinator.reason, seed=0),
    )


@dataclass(slots=True)
class _Job:
    """What a unit is at. left_ms: of the work if it were alone; slowdown: while both work."""

    command: StartDraft | StartVerify | StartRun
    rows: int
    left_ms: float
    slowdown: float
    start_ns: int


class _Machine:
    """Two modelled units that slow each other down while both work."""

    def __init__(
        self,
        table: CostTable,
        text: Text,
        schedule: Schedule,
        on_record: Callable[[StepRecord], None],
    ) -> None:
        self.costs = CostModel(table)
        self.now_ms = 0.0
        self.tally = Tally(schedule.strategy, prompt_tokens=1, asked_ns=0)
        self._on_record = on_record
        self._verifier = ModelledVerifier(text, length=1)
        self._drafter = ModelledDrafter(text, schedule.children, length=0)
        self._jobs: dict[UnitName, _Job] = {}
        self._run_left = 0
        self._stopped = False

    @property
    def _now_ns(self) -> int:
        return round(self.now_ms * 1e6)

    def run(self, coordinator: Coordinator, schedule: Schedule, tokens: int) -> None:
        """From the prompt to the answer's end."""
        limits = AnswerLimits(tokens, lambda _: False)
        self._take(coordinator.on_prompt(0, [ROOT_TOKEN], limits, schedule, greedy=True))
        while not self._stopped:
            self._take(self._next_event(coordinator))

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case StartDraft():
                    self._start("drafter", command, len(command.rows))
                case StartVerify():
                    self._start("verifier", command, len(command.rows) + len(command.riders))
                case StartRun():
                    self._run_left = command.limit
                    self._start("verifier", command, 1)
                case EndRun():
                    self._run_left = 1
                case Emit() | Stop():
                    self.tally.take(command, self._now_ns)
                    if isinstance(command, Emit):
                        self._on_record(command.record)
                    else:
                        self._stopped = True

    def _start(
        self, unit: UnitName, command: StartDraft | StartVerify | StartRun, rows: int
    ) -> None:
        if isinstance(command, StartDraft):
            costs = self.costs.drafter
            rows = next((count for count in costs.row_counts if count >= rows), rows)
        else:
            costs = self.costs.plain if isinstance(command, StartRun) else self.costs.verifier
        alone_ms, beside_ms = costs.exactly(rows), costs.exactly(rows, 0, 1.0)
        slowdown = beside_ms / alone_ms
        self._jobs[unit] = _Job(command, rows, alone_ms, slowdown, self._now_ns)

    def _next_event(self, coordinator: Coordinator) -> list[Command]:
        """Let time pass until a unit is done, and tell the coordinator."""
        both = len(self._jobs) == 2

        def due_ms(unit: UnitName) -> float:
            job = self._jobs[unit]
            return job.left_ms * (job.slowdown if both else 1.0)

        # At one moment the drafter comes first: the verifier's next rows shall see its nodes.
        unit = min(sorted(self._jobs), key=due_ms)
        passed_ms = due_ms(unit)
        for job in self._jobs.values():
            job.left_ms -= passed_ms / (job.slowdown if both else 1.0)
        self.now_ms += passed_ms
        return self._finish(coordinator, self._jobs.pop(unit))

    def _finish(self, coordinator: Coordinator, job: _Job) -> list[Command]:
        now_ns = self._now_ns
        match job.command:
            case StartDraft() as command:
                result = self._drafter.draft(command, job.start_ns, now_ns, job.rows)
                return coordinator.on_draft(now_ns, result)
            case StartVerify() as command:
                verdict = self._verifier.verify(command, job.start_ns, now_ns)
                return coordinator.on_verdict(now_ns, verdict)
            case StartRun() as command:
                self._run_left -= 1
                more = self._run_left > 0
                if more:
                    self._start("verifier", command, 1)
                verdict = self._verifier.run_one(command.step, job.start_ns, now_ns, more)
                return coordinator.on_verdict(now_ns, verdict)
