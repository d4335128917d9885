"""Machines, pairs and texts that `simulate` knows: DESIGN's rows, a user's, predicted, recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ondevice.apps.sweep import KINDS, Kind, World
from ondevice.costs import CostTable, table_from
from ondevice.errors import BadRequest
from ondevice.modelled import BetaText, RecordedText
from ondevice.planning import MOST_ROWS
from ondevice.records import StepRecord
from ondevice.traces import Trace, read_trace

MOST_DRAFT_ROWS = 64


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. name: a few words; detail: a line.

    published: the figures of DESIGN section 1. notes: what must be known of the row's costs.
    prediction: they were not measured on any machine.
    """

    name: str
    detail: str
    world: World
    published: Mapping[Kind, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prediction: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Costs as a user states them.

    row_cost: of every further row of a forward, over the first one. draft_rows: that a step covers.
    slowdown: of the verifier while the drafter works. Raises BadRequest for what makes no sense.
    """

    verify_ms: float
    draft_ms: float
    row_cost: float = 0.03
    draft_rows: int = 8
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        _require("--verify-ms", self.verify_ms, 1e-3, 1e6, "milliseconds")
        _require("--draft-ms", self.draft_ms, 1e-3, 1e6, "milliseconds")
        _require("--row-cost", 100 * self.row_cost, 0, 1000, "percent of one row")
        _require("--draft-rows", self.draft_rows, 1, MOST_DRAFT_ROWS, "rows a step")
        _require("--slowdown", self.slowdown, 1, 100, "times as long")

    @property
    def table(self) -> CostTable:
        """The costs of up to MOST_ROWS rows."""
        return _table(
            self.verify_ms, self.row_cost, [(self.draft_rows, self.draft_ms)], self.slowdown
        )

    def __str__(self) -> str:
        slowed = f"; verifier x{self.slowdown:g} beside it" if self.slowdown > 1 else ""
        return (
            f"verifier {self.verify_ms:g} ms, +{100 * self.row_cost:g} % a row; drafter "
            f"{self.draft_ms:g} ms up to {self.draft_rows} row{'s' * (self.draft_rows > 1)}{slowed}"
        )


def _require(name: str, value: float, least: float, most: float, what: str) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name} must be {least:g} to {most:g} {what}, got {value:g}")


def require_acceptance(a: float) -> float:
    """`a`; raises BadRequest where the model has no meaning."""
    _require("--acceptance", a, 0.01, 0.99, "(the probability that the first choice is right)")
    return a


def _table(
    verify_ms: float, row_cost: float, drafter_ms: Sequence[tuple[int, float]], slowdown: float
) -> CostTable:
    rows_ms = [verify_ms * (1 + row_cost * rows) for rows in range(MOST_ROWS)]
    return table_from(rows_ms, drafter_ms, verifier_slowdown=slowdown)


def design_cases(seed: int) -> list[Case]:
    """The six rows of DESIGN section 1."""
    beside_ms = [(rows, 6 + 1.1 * rows) for rows in range(1, 9)]
    beside = _table(62, 0.03, beside_ms, 1.16)
    beside_detail = (
        "verifier 62 ms, +3 % a row; drafter 6 ms + 1.1 a row up to 8; verifier x1.16 beside it"
    )
    rows = (
        _row("8B 4-bit", Machine(20, 4), 0.7, 1.51, 1.77, 1.65, 2.47),
        _row("8B 4-bit", Machine(20, 4), 0.8, 1.77, 1.99, 2.14, 2.99),
        _row("12B bf16", Machine(105, 5.4, 0.01), 0.7, 2.28, 3.04, 1.91, 3.24),
        _row("3B 4-bit", Machine(14, 5, 0.10), 0.7, 1.18, 1.19, 1.39, 1.82),
        _row("SmolLM2", Machine(62, 10), 0.7, 1.62, 1.90, 1.76, 2.72),
        ("SmolLM2, 2 cores", beside_detail, beside, 0.7, (1.85, 1.92, 1.55, 2.13)),
    )
    return [
        Case(
            f"{name}, a {a:.2f}",
            detail,
            World(table, partial(BetaText, a, seed)),
            dict(zip(KINDS, figures, strict=True)),
        )
        for name, detail, table, a, figures in rows
    ]


def _row(
    name: str, machine: Machine, a: float, *figures: float
) -> tuple[str, str, CostTable, float, tuple[float, ...]]:
    return name, str(machine), machine.table, a, figures


def stated_cases(machine: Machine, acceptances: Sequence[float], seed: int) -> list[Case]:
    """A user's machine, one row for each drafter."""
    return [
        Case(
            f"as stated, a {a:.2f}",
            str(machine),
            World(machine.table, partial(BetaText, require_acceptance(a), seed)),
        )
        for a in acceptances
    ]


def predicted_cases(
    device: str, workload: str, acceptances: Sequence[float], context: int, seed: int
) -> list[Case]:
    """A known pair on a Mac that is not here. Raises BadRequest for unknown names."""
    from ondevice.models.devices import known_device, known_workload
    from ondevice.models.predictions import pair_bytes, predict

    chip, load = known_device(device), known_workload(workload)
    costs = predict(chip, pair_bytes(workload), busy_context=context)
    table = table_from(
        [costs.verify_ms(rows, context) for rows in range(1, MOST_ROWS + 1)],
        [(rows, costs.draft_ms(rows)) for rows in costs.row_counts],
        verifier_slowdown=costs.verify_slowdown,
        drafter_slowdown=costs.draft_slowdown,
    )
    detail = (
        f"PREDICTION, not measured: {load.description}; on {chip.name} at {context} tokens: "
        f"verifier {costs.verify_ms(1, context):.1f} ms, 8 rows {costs.verify_ms(8, context):.1f}; "
        f"drafter {costs.draft_ms(8):.1f} ms for 8; beside each other x{costs.verify_slowdown:.2f} "
        f"and x{costs.draft_slowdown:.2f}"
    )
    estimated = ", ".join(costs.estimated)
    notes = (f"estimated figures of {chip.name}: {estimated}",) if estimated else ()
    return [
        Case(
            f"{device}, a {a:.2f}",
            detail,
            World(table, partial(BetaText, require_acceptance(a), seed)),
            notes=notes,
            prediction=True,
        )
        for a in acceptances
    ]


def recorded_case(path: Path, seed: int) -> Case:
    """The drafter, the text and the machine of a recorded run. Raises BadRequest."""
    trace = read_trace(path)
    outcomes = trace.outcomes()
    known = [outcome for outcome in outcomes if outcome.claims]
    right = sum(outcome.taken == 0 for outcome in known) / len(known)
    origin = "measured beforehand" if trace.header.costs is not None else "of the recorded steps"
    detail = (
        f"recorded from {trace.header.pair}: {len(outcomes)} tokens, the drafter's first choice "
        f"right {right:.2f} of the time; costs {origin}"
    )
    borrowed = f"{len(outcomes) - len(known)} tokens that the drafter had not reached borrow claims"
    return Case(
        f"recorded, a {right:.2f}",
        detail,
        World(trace.costs(), partial(RecordedText, outcomes, seed)),
        notes=(borrowed, *_recorded_rates(trace)),
    )


def _recorded_rates(trace: Trace) -> list[str]:
    """What the schedules of the run itself reached, to be compared with the simulated figures."""
    answers: dict[str, list[list[StepRecord]]] = {}
    for schedule, records in trace.answers():
        answers.setdefault(schedule, []).append(records)
    rates = {schedule: _tok_s(group) for schedule, group in answers.items()}
    shown = [f"{schedule} {rate:.1f} tok/s" for schedule, rate in rates.items() if rate]
    return [f"the run itself: {', '.join(shown)}"] if shown else []


def _tok_s(answers: Sequence[Sequence[StepRecord]]) -> float:
    """Tokens after each answer's first round, over the time since; 0 where there are none."""
    tokens = sum(record.committed for records in answers for record in records[1:])
    elapsed_ns = sum(records[-1].end_ns - records[0].end_ns for records in answers)
    return tokens / (elapsed_ns / 1e9) if elapsed_ns > 0 else 0.0
