"""Answers in virtual time; engines of the tiny pair whose drafter is as good as a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from faulty import open_tiny
from givenquality import GivenQualityDrafter, Quality

from ondevice.apps.bench import Load, make_tasks
from ondevice.apps.figures import profile_figures
from ondevice.apps.loads import LoadFigures
from ondevice.apps.questions import Question, own_questions, spread
from ondevice.apps.race import Measured, Spread, Task
from ondevice.apps.report import Identity, Report
from ondevice.apps.sides import Arrival, Run
from ondevice.costs import CostPoint, CostTable, table_from
from ondevice.engine import Engine
from ondevice.modelled import BetaText
from ondevice.records import StepRecord
from ondevice.schedule import Schedule
from ondevice.session import Answer, Options
from ondevice.simulate import simulate
from ondevice.units import UnitMemory

ONE = Question("1", "code", "x")
TABLE = table_from([20.0] * 32, [(8, 4.0)])
"""A forward takes 20 ms whatever its rows, a drafter step 4 ms; neither disturbs the other."""


class Periodic:
    """The drafter's first choice is right but at every `period`-th position, where none is."""

    def __init__(self, period: int) -> None:
        self._period = period

    def claims(self, position: int) -> tuple[float, ...]:
        return (0.9, 0.05)

    def token(self, position: int) -> int:
        return 1_000 if position % self._period == 0 else 0

    def stray_claims(self, node: int) -> tuple[float, ...]:
        return (0.9, 0.05)


def answered(
    strategy: str,
    schedule: Schedule,
    tokens: int = 40,
    question: Question = ONE,
    table: CostTable = TABLE,
    text: object = None,
) -> Measured:
    records: list[StepRecord] = []
    found = simulate(
        table,
        text or Periodic(4),  # type: ignore[arg-type]
        schedule,
        tokens,
        on_record=records.append,
    )
    answer = Answer("", (0,) * found.tokens, "length", (), found.stats)
    arrivals = tuple(Arrival(record.end_ns, record.committed) for record in records)
    memory = {"verifier": UnitMemory(100, 20, 150)}
    run = Run(
        (0,) * found.tokens, 0, arrivals, answer=answer, records=tuple(records), memory=memory
    )
    return Measured(Task(question, (1,)), 0, strategy, run)


PROMPTS, TOKENS = 12, 24
"""How many of the own prompts, and of their answers, the drafter knows."""


def open_given(pair: Path, a: float, prompts: int = PROMPTS, tokens: int = TOKENS) -> Engine:
    """a: how often the drafter's first choice is right."""
    with open_tiny(pair) as sound:
        vocab_size = sound.model.vocab_size
    double = GivenQualityDrafter(Quality(a, step_ms=0.2), vocab_size)
    engine = open_tiny(pair, drafter=lambda: double)
    for task in make_tasks(engine, Load(spread(own_questions(), prompts), tokens)):
        plain = engine.generate(task.prompt, Options(max_tokens=tokens, strategy="plain"))
        double.learn(task.prompt, plain.token_ids)
    return engine


STRATEGIES = ("plain", "auto", "sequential", "pipelined")


def virtual_answers(domains: tuple[str, ...] = ("code", "chat", "maths")) -> list[Measured]:
    """Of a good drafter, two prompts a domain, with energies on two rails."""
    found = []
    for number, domain in enumerate(domains * 2):
        for strategy in STRATEGIES:
            each = answered(
                strategy,
                Schedule(strategy),  # type: ignore[arg-type]
                60,
                Question(str(number), domain, "x"),
                text=BetaText(0.55 + 0.05 * number, seed=number),
            )
            answer = each.run.answer
            assert answer is not None
            energy = {"gpu": 900.0, "ane": 80.0}
            stats = replace(answer.stats, energy_mj=energy, energy_reason="dram: no such counter")
            run = replace(each.run, answer=replace(answer, stats=stats))
            found.append(replace(each, run=run))
    return found


def virtual_report(measured: Sequence[Measured]) -> Report:
    """A profile of `measured`, complete in every part."""
    spread = Spread(0.9, 1.2, 1.4)
    costs = tuple(
        CostPoint(rows, context, 20 + rows + context / 100, 22 + rows + context / 80)
        for context in (64, 1024)
        for rows in (1, 2, 4, 8, 16)
    )
    return Report(
        identity=Identity(
            ondevice="0.1.0",
            pair="virtual",
            verifier_sha256="a" * 64,
            drafter_sha256=None,
            cpu="no CPU",
            system="virtual time",
        ),
        measured_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
        prompts=6,
        max_tokens=60,
        repeats=1,
        planned=len(measured),
        answers=len(measured),
        stopped="",
        placement=["drafter: modelled", "verifier: modelled"],
        left_out={"lookahead": "not asked for"},
        costs=CostTable(costs, costs[:1], (CostPoint(8, 0, 4.0, 4.0),)),
        figures=profile_figures(measured),
        loads=(LoadFigures(1, "plain", 1, spread, spread, 0.0, []),),
    )
