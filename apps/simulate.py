"""`ondevice simulate`: the coordinator in virtual time, on stated, predicted or recorded units."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ondevice.apps.bench import checked_strategies
from ondevice.apps.cases import (
    Case,
    Machine,
    design_cases,
    predicted_cases,
    recorded_case,
    stated_cases,
)
from ondevice.apps.columns import Plan, measured
from ondevice.apps.counting import counting
from ondevice.apps.pool import mapped
from ondevice.apps.regret import GRID, QUICK_GRID, Regret, Trial, tried
from ondevice.apps.regrettable import print_regret
from ondevice.apps.simtable import as_json, print_rows
from ondevice.apps.terminal import results
from ondevice.errors import BadRequest
from ondevice.machine import this_machine

TABLE_TOKENS = 4000
"""Of a run by default: two texts of so many tokens differ by some 2 % in speed."""
REGRET_TOKENS, QUICK_TOKENS = 3000, 1500
LEAST_TOKENS, MOST_TOKENS = 50, 1_000_000
DEFAULT_ACCEPTANCE = 0.7


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    acceptances: of stated and predicted rows. only: without the rows of DESIGN. tokens, jobs: None
    for the default. regret: the grid in place of the table; quick: a few of its cells.
    """

    machine: Machine | None = None
    acceptances: tuple[float, ...] = ()
    device: str | None = None
    workload: str | None = None
    context: int = 512
    trace: Path | None = None
    only: bool = False
    strategies: tuple[str, ...] = ()
    tokens: int | None = None
    seed: int = 0
    jobs: int | None = None
    regret: bool = False
    quick: bool = False
    as_json: bool = False

    def checked(self) -> Request:
        """The same request; raises BadRequest for what is out of range or does not go together."""
        if self.tokens is not None and not LEAST_TOKENS <= self.tokens <= MOST_TOKENS:
            raise BadRequest(f"--tokens must be {LEAST_TOKENS} to {MOST_TOKENS}, got {self.tokens}")
        if self.seed < 0:
            raise BadRequest(f"--seed must be 0 or more, got {self.seed}")
        if self.jobs is not None and self.jobs < 1:
            raise BadRequest(f"--jobs must be 1 or more, got {self.jobs}")
        if self.context < 0:
            raise BadRequest(f"--context must be 0 or more tokens, got {self.context}")
        if (self.device is None) != (self.workload is None):
            given = "--device" if self.workload is None else "--workload"
            raise BadRequest(f"--device and --workload go together, got {given} alone")
        rows = self.machine is not None or self.device is not None
        if self.acceptances and not rows:
            raise BadRequest("--acceptance is that of a row: give --verify-ms or --device too")
        if self.only and not (rows or self.trace):
            raise BadRequest("--only leaves no row: give --verify-ms, --device or --trace too")
        if self.quick and not self.regret:
            raise BadRequest("--quick is part of --regret; for a quicker table lower --tokens")
        if self.regret and (rows or self.trace or self.strategies):
            raise BadRequest("--regret has a grid of its own; leave out rows and strategies")
        return self


def run(request: Request) -> bool:
    """Simulate and print; False when the regret is more than is demanded."""
    request = request.checked()
    return _regret(request) if request.regret else _table(request)


def stated_machine(
    verify_ms: float | None,
    draft_ms: float | None,
    row_cost: float,
    draft_rows: int,
    slowdown: float,
) -> Machine | None:
    """The machine of the options, row_cost in percent; None when none of them was given.

    Raises BadRequest.
    """
    if verify_ms is None and draft_ms is None:
        usual = Machine(1.0, 1.0)
        if (row_cost / 100, draft_rows, slowdown) == (
            usual.row_cost,
            usual.draft_rows,
            usual.slowdown,
        ):
            return None
    if verify_ms is None or draft_ms is None:
        missing = "--verify-ms" if verify_ms is None else "--draft-ms"
        raise BadRequest(f"a machine needs --verify-ms and --draft-ms, {missing} is missing")
    return Machine(verify_ms, draft_ms, row_cost / 100, draft_rows, slowdown)


def cases_of(request: Request) -> list[Case]:
    """The rows of the table, in order. Raises BadRequest."""
    seed, acceptances = request.seed, request.acceptances or (DEFAULT_ACCEPTANCE,)
    cases = [] if request.only else design_cases(seed)
    if request.machine is not None:
        cases += stated_cases(request.machine, acceptances, seed)
    if request.device is not None and request.workload is not None:
        cases += predicted_cases(
            request.device, request.workload, acceptances, request.context, seed
        )
    if request.trace is not None:
        cases.append(recorded_case(request.trace, seed))
    return cases


def _table(request: Request) -> bool:
    strategies = checked_strategies(request.strategies)
    plan = Plan(request.tokens or TABLE_TOKENS, tuple(strategies))
    cases = cases_of(request)
    rows = []
    with counting("simulate", len(cases), "rows") as count:
        for row in mapped(partial(measured, plan=plan), cases, _jobs(request)):
            rows.append(row)
            count()
    if request.as_json:
        print(json.dumps(as_json(rows, plan, request.seed)), flush=True)
    else:
        print_rows(rows, plan, request.seed, results())
    return True


def _regret(request: Request) -> bool:
    tokens = request.tokens or (QUICK_TOKENS if request.quick else REGRET_TOKENS)
    grid = QUICK_GRID if request.quick else GRID
    trials = [Trial(cell, tokens, request.seed) for cell in grid]
    cells = []
    with counting("simulate", len(trials), "cells") as count:
        for cell in mapped(tried, trials, _jobs(request)):
            cells.append(cell)
            count()
    found = Regret(cells, tokens, request.seed)
    if request.as_json:
        print(json.dumps(found.as_json()), flush=True)
    else:
        print_regret(found, results())
    return found.passed


def _jobs(request: Request) -> int:
    return request.jobs or this_machine().usable_cores
