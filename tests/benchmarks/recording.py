"""What recording costs: decoding with every round's record kept, against dropping each at once.

    uv run python tests/benchmarks/recording.py [PAIR] [--prompts 6] [--max-tokens 24] [--repeats 8]

Demand of `ondevice profile`: under 1 % of the time of decoding. Rounds are of fixed size and in
turn, so that every side does the same work, and what is measured is CPU time, which other programs
disturb less than the clock: of the coordinator's thread, which makes and keeps the records, and of
the whole process, in case something else became slower. The coordinator makes a record of every
round in any case, since costs and policy learn from it: a side that books each round twice tells
what that takes. Another one does 1 % more work than "off": where the thread's time does not show
that, the other figures say nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

from ondevice import blas

blas.prepare()  # before MLX is imported

from ondevice.apps.bench import Load, make_tasks  # noqa: E402
from ondevice.apps.counting import counting  # noqa: E402
from ondevice.apps.opening import open_engine  # noqa: E402
from ondevice.apps.questions import own_questions, spread  # noqa: E402
from ondevice.apps.race import Spread, Task, rotated  # noqa: E402
from ondevice.apps.sides import settle  # noqa: E402
from ondevice.engine import Engine  # noqa: E402
from ondevice.ledger import Ledger  # noqa: E402
from ondevice.models.pairs import default_pair  # noqa: E402
from ondevice.records import StepRecord  # noqa: E402
from ondevice.schedule import Sizes  # noqa: E402
from ondevice.session import Options  # noqa: E402

DEMAND = 0.01
SIZES = Sizes(verify_rows=8, depth=3)
OFF, ON, TWICE, PLANTED = "off", "on", "booked twice", "off, and 1 % more work"
SIDES = (OFF, ON, TWICE, PLANTED)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of `rounds`: of the process, and of the reader's thread, the coordinator's."""

    process_ms: float
    thread_ms: float
    rounds: int


class Meter:
    """Decodes, and keeps the records of every answer or drops each as it comes."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._options = Options(max_tokens=max_tokens, strategy="sequential", sizes=SIZES)
        self.kept: list[StepRecord] = []

    def answer(self, task: Task, each_round: Callable[[StepRecord], object]) -> Cost:
        """Decode; `each_round` is called with every record. What follows the first is measured."""
        rounds, began = 0, (0, 0)
        with self._engine.session() as session:
            for piece in session.stream(task.prompt, self._options):
                if piece.record is None:
                    continue
                each_round(piece.record)
                if not rounds:
                    began = _clocks()
                rounds += 1
            process_ns, thread_ns = _clocks()
        settle(self._engine)
        return Cost((process_ns - began[0]) / 1e6, (thread_ns - began[1]) / 1e6, rounds - 1)

    def side(self, name: str, task: Task, extra_ms: float) -> Cost:
        """The answer of one side. extra_ms: of work a round that is planted."""
        if name == ON:
            return self.answer(task, self.kept.append)
        if name == TWICE:
            with booked_twice():
                return self.answer(task, lambda _: None)
        return self.answer(task, lambda _: work(extra_ms) if name == PLANTED else None)


def _clocks() -> tuple[int, int]:
    return time.process_time_ns(), time.thread_time_ns()


def work(took_ms: float) -> None:
    """Keep this thread at work for so much of its time."""
    until_ns = time.thread_time_ns() + took_ms * 1e6
    while time.thread_time_ns() < until_ns:
        pass


@contextmanager
def booked_twice() -> Iterator[None]:
    """Every round is booked, and booked once more."""
    book = Ledger.close_round

    def twice(ledger: Ledger, *given: Any) -> StepRecord:
        drafts = [*ledger.left_over()]
        book(ledger, *given)
        ledger._drafts = drafts
        return book(ledger, *given)

    Ledger.close_round = twice  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Ledger.close_round = book  # type: ignore[method-assign]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median, by order statistics."""
    ordered, half = sorted(values), 0.98 * sqrt(len(values))
    low, high = (len(values) - 1) / 2 - half, (len(values) - 1) / 2 + half
    return ordered[max(0, int(low))], ordered[min(len(values) - 1, int(high + 0.999))]


def measure(engine: Engine, load: Load) -> dict[str, list[Cost]]:
    """Every prompt by every side, in turn, so that a turn is a matter of seconds."""
    tasks, meter = make_tasks(engine, load), Meter(engine, load.max_tokens)
    warm = [meter.side(OFF, task, 0.0) for task in tasks]
    extra_ms = DEMAND * sum(c.process_ms for c in warm) / sum(c.rounds for c in warm)
    found: dict[str, list[Cost]] = {name: [] for name in SIDES}
    with counting("recording", len(SIDES) * len(tasks) * load.repeats, left=True) as count:
        for turn in range(len(tasks) * load.repeats):
            for name in rotated(SIDES, turn):
                found[name].append(meter.side(name, tasks[turn % len(tasks)], extra_ms))
                count()
    return found


def main() -> int:
    """Print what each side cost; 1 when the demand is not met, or could not be judged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", nargs="?", default=default_pair())
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=8)
    args = parser.parse_args()
    load = Load(spread(own_questions(), args.prompts), args.max_tokens, args.repeats)
    with open_engine(args.pair) as engine:
        found = measure(engine, load)
    off = found[OFF]
    rounds = sum(cost.rounds for cost in off)
    # Of this process: the drafter's, and waiting, would only make the shares smaller.
    round_ms = sum(cost.process_ms for cost in off) / rounds
    print(
        f"{len(off)} turns of {rounds / len(off):.1f} rounds; a round takes {round_ms:.1f} ms of "
        "CPU time"
    )
    highest: dict[str, float] = {}
    for name in SIDES[1:]:
        pairs = list(zip(found[name], off, strict=True))
        more = [
            (ours.thread_ms / ours.rounds - base.thread_ms / base.rounds) / round_ms
            for ours, base in pairs
        ]
        ratios = [ours.process_ms / base.process_ms for ours, base in pairs]
        print(f"{name}: coordinator's thread {told(more, '+.3%')} of a round")
        print(f"    the whole process {told(ratios, '.4f')} of off's")
        highest[name] = median_interval(more)[1]
        if name == PLANTED and median_interval(more)[0] < DEMAND / 2:
            print("1 % of planted work was not seen; more repeats")
            return 1
    return 0 if max(highest[ON], highest[TWICE]) < DEMAND else 1


def told(values: Sequence[float], form: str) -> str:
    """Median, its confidence interval and quartiles."""
    quartiles, (low, high) = Spread.of(values), median_interval(values)
    assert quartiles is not None
    return (
        f"{quartiles.median:{form}} (95 %: {low:{form}} to {high:{form}}; quartiles "
        f"{quartiles.low:{form}} to {quartiles.high:{form}})"
    )


if __name__ == "__main__":
    sys.exit(main())
