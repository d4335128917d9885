"""Interleaved measurement, and what it says: rates, ratios and whether the texts are the same."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from ondevice.apps.comparison import Difference, difference
from ondevice.apps.questions import Question
from ondevice.apps.sides import Drafting, Run, Side
from ondevice.conditions import Conditions, conditions_now
from ondevice.engine import Engine
from ondevice.sampling import SamplingParams

Entry = TypeVar("Entry")

GREEDY = SamplingParams()
WARM_UP_TOKENS = 8
"""Tokens that every side decodes unmeasured: what MLX compiles and allocates comes first."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question as the token ids that every side is given."""

    question: Question
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer of one side. conditions: the machine's when it ended."""

    task: Task
    repeat: int
    side: str
    run: Run
    conditions: Conditions = field(default_factory=Conditions)


def race(
    sides: Sequence[Side],
    tasks: Sequence[Task],
    max_tokens: int,
    repeats: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """All of `racing`; `on_answer` is called after each measured answer."""
    measured = []
    for each in racing(sides, tasks, max_tokens, repeats):
        measured.append(each)
        on_answer()
    return measured


def racing(
    sides: Sequence[Side], tasks: Sequence[Task], max_tokens: int, repeats: int
) -> Iterator[Measured]:
    """Every task by every side, `repeats` times, in turn, so that drift of the machine hits all.

    A side's warm-up comes first, and is not measured. Raises what a side raises.
    """
    for side in sides:
        side.answer(tasks[0].prompt, min(max_tokens, WARM_UP_TOKENS))
    turns = ((repeat, task) for repeat in range(repeats) for task in tasks)
    for turn, (repeat, task) in enumerate(turns):
        for side in rotated(sides, turn):
            run = side.answer(task.prompt, max_tokens)
            yield Measured(task, repeat, side.name, run, conditions_now())


def rotated(sides: Sequence[Entry], turn: int) -> list[Entry]:
    """The order of a turn: each side comes at each place, and after every other turn reversed.

    So no side always follows the same one, nor always starts.
    """
    cycle, start = divmod(turn, len(sides))
    order = [*sides[start:], *sides[:start]]
    return order[::-1] if cycle % 2 else order


Rate = Callable[[Measured], float | None]
"""Tokens a second of an answer; None when it was too short for one, or was interrupted."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Of `values`; None when there are none."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def as_json(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Standing:
    """One side over all tasks. differences: to the first side's texts, one a text at most."""

    side: str
    runs: tuple[Measured, ...]
    differences: tuple[Difference, ...]

    @property
    def decode_tok_s(self) -> Spread | None:
        """Of the questions' rates."""
        return Spread.of(list(rates(self.runs, answer_tok_s).values()))

    @property
    def ttft_ms(self) -> Spread | None:
        """Time to the first token, of all answers."""
        return Spread.of([each.run.ttft_ms for each in self.runs if each.run.ttft_ms is not None])

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(len(each.run.tokens) for each in self.runs)

    @property
    def drafting(self) -> Drafting:
        """Summed over all answers."""
        parts = [each.run.drafting for each in self.runs]
        return Drafting(
            steps=sum(part.steps for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=sum(part.accepted for part in parts),
        )

    @property
    def near_ties(self) -> int:
        """Texts that part from the first side's at a near-tie."""
        return sum(each.near_tie for each in self.differences)

    @property
    def faults(self) -> int:
        """Texts that part where they must not."""
        return len(self.differences) - self.near_ties

    @property
    def reasons(self) -> dict[str, int]:
        """What our answers said of their strategy, and how many of them, most often first."""
        answers = (each.run.answer for each in self.runs)
        return dict(Counter(a.stats.reason for a in answers if a is not None).most_common())

    def ratio_to(self, other: Standing) -> Spread | None:
        """Rate over that of `other`, question by question and repeat by repeat."""
        return Spread.of(list(self.ratios_to(other).values()))

    def ratios_to(self, other: Standing) -> dict[str, float]:
        """By question id, see `speed_ups`."""
        return speed_ups(self.runs, other.runs, answer_tok_s)


def answer_tok_s(measured: Measured) -> float | None:
    """What the answer's side reports."""
    return measured.run.decode_tok_s


def rates(runs: Iterable[Measured], rate_tok_s: Rate) -> dict[str, float]:
    """By question id: the median of its repeats; questions without a rate are missing."""
    found: dict[str, list[float]] = {}
    for each in runs:
        rate = rate_tok_s(each)
        if rate is not None:
            found.setdefault(each.task.question.id, []).append(rate)
    return {question: statistics.median(several) for question, several in found.items()}


def speed_ups(
    runs: Iterable[Measured], plain: Iterable[Measured], rate_tok_s: Rate
) -> dict[str, float]:
    """By question id: the median over repeats of the rate over that of `plain` in the same repeat.

    Questions that one of both has no rate for are missing.
    """
    base = {(each.task.question.id, each.repeat): rate_tok_s(each) for each in plain}
    found: dict[str, list[float]] = {}
    for each in runs:
        rate, other = rate_tok_s(each), base.get((each.task.question.id, each.repeat))
        if rate is not None and other is not None:
            found.setdefault(each.task.question.id, []).append(rate / other)
    return {question: statistics.median(ratios) for question, ratios in found.items()}


def standings(engine: Engine, measured: Sequence[Measured]) -> list[Standing]:
    """One for each side; the first side that was measured is the one that texts are compared with.

    A margin takes some forwards of `engine`, so this comes after the race.
    """
    names = list(dict.fromkeys(each.side for each in measured))
    reference = {
        (each.task.question.id, each.repeat): each.run.tokens
        for each in measured
        if each.side == names[0]
    }

    def differences(runs: Iterable[Measured]) -> Iterator[Difference]:
        for each in runs:
            question = each.task.question
            plain = reference[question.id, each.repeat]
            found = difference(engine, question.text, GREEDY, each.side, plain, each.run.tokens)
            if found is not None:
                yield found

    def standing(name: str) -> Standing:
        runs = tuple(each for each in measured if each.side == name)
        return Standing(name, runs, tuple(differences(runs)))

    return [standing(name) for name in names]
