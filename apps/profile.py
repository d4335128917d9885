"""`ondevice profile`: latency, acceptance and energy of a pair, by strategy and kind of text."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ondevice.apps.bench import Load, checked_strategies, make_tasks
from ondevice.apps.chrometrace import chrome_trace
from ondevice.apps.counting import counting
from ondevice.apps.drift import Drift, drift, drift_lines
from ondevice.apps.failures import INTERRUPTED
from ondevice.apps.figures import EVERY, REFERENCE, profile_figures
from ondevice.apps.loads import LoadFigures, answers_at, measure_loads, read_sessions
from ondevice.apps.opening import open_engine, placement
from ondevice.apps.page import page
from ondevice.apps.profiletable import print_report
from ondevice.apps.published import published_questions
from ondevice.apps.questions import Question, own_questions, read_questions, spread
from ondevice.apps.race import Measured, Task, racing
from ondevice.apps.report import Identity, Report, now, read_report
from ondevice.apps.sides import OurSide, our_sides
from ondevice.apps.terminal import note, results
from ondevice.conditions import conditions_now, worst
from ondevice.engine import Engine
from ondevice.errors import BadRequest, OnDeviceError
from ondevice.schedule import Strategy
from ondevice.traces import require_file_name, write_lines

DEFAULT_STRATEGIES = ("plain", "auto", "sequential", "pipelined", "weightless")
QUICK_STRATEGIES = ("plain", "auto", "pipelined", "weightless")
QUICK_PROMPTS, QUICK_TOKENS, QUICK_SECONDS = 6, 32, 165.0
"""Of `--quick`, which is to be over in 3 minutes: no turn of all strategies begins that would take
longer, were it as slow as the slowest before it."""
QUICK_OVER = "the time of --quick was over"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write beside what is printed."""

    save: Path | None = None
    html: Path | None = None
    trace: Path | None = None

    @property
    def paths(self) -> list[Path]:
        """Those that were asked for."""
        return [path for path in (self.save, self.html, self.trace) if path is not None]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    prompts: a file of `read_questions`, None for our own; published: those of others too. domains:
    of the prompts, none for all. limit: of the prompts, None for all. sessions: numbers of them as
    typed, None for no concurrency profile. compare: a saved profile.
    """

    pair: str
    prompts: Path | None = None
    published: bool = False
    domains: tuple[str, ...] = ()
    limit: int | None = None
    max_tokens: int = 64
    repeats: int = 1
    strategies: tuple[str, ...] = ()
    quick: bool = False
    sessions: str | None = None
    compare: Path | None = None
    outputs: Outputs = Outputs()
    as_json: bool = False


@dataclass(frozen=True, slots=True)
class Collected:
    """The answers that were measured, and why they are not all; trouble: what ended it."""

    measured: list[Measured]
    planned: int
    stopped: str = ""
    trouble: BaseException | None = None


def run(request: Request) -> int:
    """Measure, print and write; returns the exit status.

    0; 1 when the drafter got worse than in the profile that it is compared with; 130 when it was
    interrupted. The finished part is always shown and written. Raises UserError for what is wrong
    with the request, before anything is measured.
    """
    began = time.monotonic()
    plan = _plan(request)
    with open_engine(request.pair) as engine:
        tasks = make_tasks(engine, plan.load)
        sides, left_out = our_sides(engine, plan.strategies)
        deadline = began + QUICK_SECONDS if request.quick else None
        collected = collect(sides, tasks, plan.load, deadline)
        loads: list[LoadFigures] = []
        if plan.sessions and collected.trouble is None:
            loads, collected = _loads(sides, tasks, plan, collected, deadline)
        report = make_report(engine, request.pair, plan.load, collected, plan.absent | left_out)
        report = report.model_copy(update={"loads": tuple(loads)})
    drifted = drift(plan.old, report) if plan.old is not None else None
    # Files first: stdout may be closed or full, and then nothing below it would run.
    failures = _write(request.outputs, report, collected.measured, drifted)
    _print(report, drifted, as_json=request.as_json)
    if failures:
        raise failures[0]
    return _status(collected, drifted)


def _print(report: Report, drifted: Drift | None, *, as_json: bool) -> None:
    if as_json:
        content = report.as_json()
        if drifted is not None:
            content["drift"] = drifted.as_json()
        print(json.dumps(content), flush=True)
        return
    console = results()
    print_report(report, console)
    for line in drift_lines(drifted) if drifted is not None else []:
        console.print(line, soft_wrap=not console.is_terminal)


def _status(collected: Collected, drifted: Drift | None) -> int:
    """Raises what ended the measurement, unless that was Ctrl-C."""
    if isinstance(collected.trouble, KeyboardInterrupt):
        return INTERRUPTED
    if collected.trouble is not None:
        raise collected.trouble
    return 1 if drifted is not None and drifted.fell else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was found to be sound, as far as that is known without the pair."""

    load: Load
    strategies: list[Strategy]
    sessions: tuple[int, ...]
    absent: dict[str, str]
    old: Report | None


def _plan(request: Request) -> Plan:
    """Raises BadRequest."""
    names = request.strategies or (QUICK_STRATEGIES if request.quick else DEFAULT_STRATEGIES)
    strategies = checked_strategies([REFERENCE, *names])
    questions, absent = _questions(request)
    questions = of_domains(questions, request.domains)
    limit, max_tokens = request.limit, request.max_tokens
    if request.quick:
        limit = QUICK_PROMPTS if limit is None else min(limit, QUICK_PROMPTS)
        max_tokens = min(max_tokens, QUICK_TOKENS)
    load = Load(spread(questions, limit), max_tokens, request.repeats).checked()
    sessions = read_sessions(request.sessions) if request.sessions is not None else ()
    _check_paths(request)
    old = read_report(request.compare) if request.compare is not None else None
    return Plan(load, strategies, sessions, absent, old)


def _check_paths(request: Request) -> None:
    """Raises BadRequest for files that cannot be written, or of which one would replace another."""
    inputs = ((request.prompts, "the prompts"), (request.compare, "the profile to compare with"))
    taken = {os.path.realpath(path): what for path, what in inputs if path is not None}
    for path in request.outputs.paths:
        require_file_name(path)
        place = os.path.realpath(path)
        if place in taken:
            raise BadRequest(
                f"cannot write {path}: it is the file of {taken[place]}; name another file"
            )
        taken[place] = "another output"


def _questions(request: Request) -> tuple[list[Question], dict[str, str]]:
    questions = read_questions(request.prompts) if request.prompts else own_questions()
    if not request.published:
        return questions, {}
    published, absent = published_questions()
    return [*questions, *published], absent


def of_domains(questions: Sequence[Question], domains: Sequence[str]) -> list[Question]:
    """Those of `domains`, all for none.

    Raises BadRequest for a domain that no prompt is of, and for one that would be confused.
    """
    known = sorted({question.category for question in questions if question.category})
    if EVERY in known:
        raise BadRequest(
            f"a category is named {EVERY!r}, as all prompts together are here; name it otherwise"
        )
    for domain in domains:
        if domain not in known:
            have = ", ".join(known) or "none: only .jsonl files name them"
            raise BadRequest(f"unknown domain {domain!r}; the prompts have {have}")
    return [each for each in questions if not domains or each.category in domains]


def collect(
    sides: Sequence[OurSide], tasks: Sequence[Task], load: Load, deadline: float | None = None
) -> Collected:
    """Measure; Ctrl-C, a failure and the deadline leave what is there by then.

    deadline: on `time.monotonic`; no turn of all sides begins that would not be over by then, were
    it as slow as the slowest so far. The first one is measured in any case. Raises what ended it
    before the first answer.
    """
    planned = len(sides) * len(tasks) * load.repeats
    measured: list[Measured] = []
    turn_began, slowest = time.monotonic(), 0.0
    answers = racing(sides, tasks, load.max_tokens, load.repeats)
    try:
        with counting("profile", planned, left=True, deadline=deadline) as count:
            for each in answers:
                measured.append(each)
                count()
                if len(measured) % len(sides):
                    continue
                ended = time.monotonic()
                turn_began, slowest = ended, max(slowest, ended - turn_began)
                if deadline is not None and ended + slowest > deadline:
                    break
    except (KeyboardInterrupt, OnDeviceError) as trouble:
        if not measured:
            raise
        why = "interrupted" if isinstance(trouble, KeyboardInterrupt) else str(trouble)
        whole = len(measured) - len(measured) % len(sides)  # all sides have the same prompts
        return Collected(measured[:whole] or measured, planned, why, trouble)
    stopped = "" if len(measured) == planned else QUICK_OVER
    return Collected(measured, planned, stopped)


def _loads(
    sides: Sequence[OurSide],
    tasks: Sequence[Task],
    plan: Plan,
    collected: Collected,
    deadline: float | None,
) -> tuple[list[LoadFigures], Collected]:
    """The concurrency profile; ended early, the loads that were finished are kept.

    deadline: as `collect` has it, for rounds of all sides.
    """
    load = plan.load
    found: list[LoadFigures] = []
    total = sum(answers_at(count, plan.sessions, load.repeats) for count in plan.sessions)
    try:
        with counting(
            "profile", len(sides) * total, "answers under load", left=True, deadline=deadline
        ) as count:
            for figures in measure_loads(
                *(sides, tasks, plan.sessions, load.max_tokens, load.repeats),
                on_answer=count,
                deadline=deadline,
            ):
                found += figures
    except (KeyboardInterrupt, OnDeviceError) as trouble:
        interrupted = isinstance(trouble, KeyboardInterrupt)
        why = "interrupted in the concurrency profile" if interrupted else str(trouble)
        return found, Collected(collected.measured, collected.planned, why, trouble)
    if len(found) < len(sides) * len(plan.sessions):
        why = f"{QUICK_OVER} before the concurrency profile was"
        return found, Collected(collected.measured, collected.planned, why)
    return found, collected


def make_report(
    engine: Engine, pair: str, load: Load, collected: Collected, left_out: dict[str, str]
) -> Report:
    """The figures of what was measured with `engine`."""
    from ondevice.converters.pair import prepare_pair

    return Report(
        identity=Identity.of(pair, prepare_pair(pair, quiet=True)),
        measured_at=now(),
        prompts=len(load.questions),
        max_tokens=load.max_tokens,
        repeats=load.repeats,
        planned=collected.planned,
        answers=len(collected.measured),
        stopped=collected.stopped,
        placement=placement(engine),
        left_out=left_out,
        costs=None if engine.cost_record is None else engine.costs.table,
        figures=profile_figures(collected.measured),
        conditions=worst([*(each.conditions for each in collected.measured), conditions_now()]),
    )


def _write(
    outputs: Outputs, report: Report, measured: Sequence[Measured], drifted: Drift | None
) -> list[BadRequest]:
    """Every file that can be written; returns why others cannot."""

    def saved() -> str:
        return json.dumps(report.as_json(), indent=1)

    def shown() -> str:
        return page(report, measured, drift_lines(drifted) if drifted is not None else [])

    def traced() -> str:
        return json.dumps(chrome_trace(report.identity.pair, measured))

    failures = []
    made: list[tuple[Path | None, str, Callable[[], str]]] = [
        (outputs.save, "the profile is in", saved),
        (outputs.html, "the page is", shown),
        (outputs.trace, "the trace, for ui.perfetto.dev, is", traced),
    ]
    for path, what, content in made:
        if path is None:
            continue
        try:
            write_lines(path, [content()])
        except BadRequest as error:
            failures.append(error)
        else:
            note(f"{what} {path}")
    return failures
