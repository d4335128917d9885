"""`ondevice bench`: mlx-lm and our schedules on the same prompts, in turn, in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ondevice.apps.benchtable import Outcome, as_json, print_outcome
from ondevice.apps.chat import check_options
from ondevice.apps.counting import counting
from ondevice.apps.opening import open_engine, placement
from ondevice.apps.questions import Question, own_questions, read_questions, spread
from ondevice.apps.race import Measured, Task, race, standings
from ondevice.apps.sides import Side, our_sides, why_no_drafter
from ondevice.apps.terminal import note, results, waiting
from ondevice.artifact import PAIR_FILE, PairManifest
from ondevice.engine import Engine
from ondevice.errors import BadRequest, ContextOverflow, UnsupportedModel
from ondevice.prompt import PromptReader
from ondevice.schedule import STRATEGIES, Strategy
from ondevice.session import Options
from ondevice.traces import TraceRound, new_header, require_file_name, write_trace


@dataclass(frozen=True, slots=True)
class Load:
    """What every side answers. limit: of prompts, None for all; max_tokens: of an answer."""

    questions: Sequence[Question]
    max_tokens: int
    repeats: int = 1

    def checked(self) -> Load:
        """The same load; raises BadRequest for a value out of range."""
        check_options(Options(max_tokens=self.max_tokens))
        if self.max_tokens < 2:
            raise BadRequest(f"max tokens must be 2 or more to have a speed, got {self.max_tokens}")
        if self.repeats < 1:
            raise BadRequest(f"repeats must be 1 or more, got {self.repeats}")
        return self


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    prompts: a file of `read_questions`, None for our own; limit: how many of them, None for all.
    strategies: of `STRATEGIES`, none for all. records: where to write the rounds of our answers.
    draft_tokens: a round of mlx-lm's speculative decoding, a side for each; none for its default.
    """

    pair: str
    prompts: Path | None = None
    limit: int | None = None
    max_tokens: int = 64
    repeats: int = 1
    strategies: tuple[str, ...] = ()
    as_json: bool = False
    records: Path | None = None
    draft_tokens: tuple[int, ...] = ()


def run(request: Request) -> bool:
    """Measure and print; False when a text is not mlx-lm's and it is no near-tie."""
    strategies = checked_strategies(request.strategies)
    questions = read_questions(request.prompts) if request.prompts else own_questions()
    load = Load(spread(questions, request.limit), request.max_tokens, request.repeats).checked()
    if any(count < 1 for count in request.draft_tokens):
        raise BadRequest(f"draft tokens must be 1 or more, got {list(request.draft_tokens)}")
    if request.records is not None:
        require_file_name(request.records)
    with open_engine(request.pair) as engine:
        outcome = bench_pair(engine, request.pair, strategies, load, request.draft_tokens)
        if request.records is not None:
            write_records(request.records, engine, outcome)
    if request.as_json:
        print(json.dumps(as_json(outcome)), flush=True)
    else:
        print_outcome(outcome, results())
    return outcome.passed


def write_records(path: Path, engine: Engine, outcome: Outcome) -> None:
    """Write the rounds of our answers, side by side, for `simulate --trace`. Raises BadRequest."""
    measured = [run for standing in outcome.standings for run in standing.runs if run.run.records]
    costs = None if engine.cost_record is None else engine.costs.table
    write_trace(path, new_header(outcome.pair, costs), _trace_rounds(measured))
    note(f"records of {len(measured)} answers are in {path}")


def _trace_rounds(measured: Sequence[Measured]) -> Iterator[TraceRound]:
    for number, each in enumerate(measured):
        for record in each.run.records:
            yield TraceRound(answer=number, schedule=each.side, record=record)


def checked_strategies(names: Sequence[str]) -> list[Strategy]:
    """`names` without repetitions, or all; raises BadRequest for one that is unknown."""
    for name in names:
        Options(strategy=cast(Strategy, name)).checked()
    return [cast(Strategy, name) for name in dict.fromkeys(names or STRATEGIES)]


def bench_pair(
    engine: Engine,
    pair: str,
    strategies: Sequence[Strategy],
    load: Load,
    draft_tokens: Sequence[int] = (),
) -> Outcome:
    """mlx-lm plain, its speculative decoding, and `strategies`, as far as the pair has them."""
    from ondevice.apps.baselines import DRAFT_TOKENS, MlxLmPlain, MlxLmSpeculative
    from ondevice.converters.pair import prepare_pair

    folder = prepare_pair(pair, quiet=True)
    manifest = PairManifest.read(folder / PAIR_FILE)
    verifier_folder = folder / manifest.verifier
    why_plain = why_no_drafter(engine)
    left_out: dict[str, str] = {}
    with waiting("loading mlx-lm's models"):
        plain = MlxLmPlain(verifier_folder, engine.model.end_tokens)
        sides: list[Side] = [plain]
        if why_plain or manifest.drafter is None:
            left_out[MlxLmSpeculative.name] = why_plain
        else:
            from ondevice.apps.twin import mlx_twin

            try:
                twin = mlx_twin(folder / manifest.drafter, verifier_folder)
                for count in dict.fromkeys(draft_tokens or (DRAFT_TOKENS,)):
                    sides.append(MlxLmSpeculative(plain, twin, count))
            except UnsupportedModel as error:
                left_out[MlxLmSpeculative.name] = str(error)
    ours, ours_left_out = our_sides(engine, strategies)
    return bench(engine, pair, [*sides, *ours], load, left_out | ours_left_out)


def bench(
    engine: Engine,
    pair: str,
    sides: Sequence[Side],
    load: Load,
    left_out: dict[str, str] | None = None,
) -> Outcome:
    """Measure `sides`, the first of which is the one that the others are compared with.

    Raises ContextOverflow, before anything runs, for a prompt that leaves too little room.
    """
    tasks = make_tasks(engine, load)
    with counting("bench", len(sides) * len(tasks) * load.repeats) as count:
        measured = race(sides, tasks, load.max_tokens, load.repeats, count)
    with waiting("comparing the texts"):
        found = standings(engine, measured)
    return Outcome(
        pair=pair,
        questions=len(tasks),
        max_tokens=load.max_tokens,
        repeats=load.repeats,
        standings=tuple(found),
        left_out=left_out or {},
        placement=tuple(placement(engine)),
    )


def make_tasks(engine: Engine, load: Load) -> list[Task]:
    """The questions of `load` in the engine's tokens. Raises ContextOverflow."""
    return [_task(engine, question, load.max_tokens) for question in load.questions]


def _task(engine: Engine, question: Question, max_tokens: int) -> Task:
    model = engine.model
    _, prompt = PromptReader(model.tokenizer, model.vocab_size).read(question.text, [])
    if len(prompt) + max_tokens > model.context:
        raise ContextOverflow(
            f"prompt {question.id} has {len(prompt)} tokens, with an answer of {max_tokens} that "
            f"is more than the verifier's context of {model.context}; leave it out, or lower "
            "--max-tokens"
        )
    return Task(question, tuple(prompt))
